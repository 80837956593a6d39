"""Products with a factor that is known to be zero in places: Comet's SIMM (Protocol 3).

The entries of a column of x that are not zero multiply the matching row of y together (column by row), so each entry of
x and each row of y takes part once (Theorem 2: least masked elements, and no multiply-add for a zero). Columns with
entries in the same rows are one block product. Where x may be other than zero is public, as for `sparse_output`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from private_llm.errors import DomainError
from private_llm.kernels import ops
from private_llm.kernels.forms import Form
from private_llm.kernels.trace_hook import as_array
from private_llm.oblivious.sparse_output import renumbered
from private_llm.tensor.fixed import Fixed


@dataclass(frozen=True, eq=False)
class Strip:
    """Columns of x with entries in the same rows: those rows, rows of y, and where the entries are held, [R, C]."""

    rows: Tensor
    lines: Tensor
    places: Tensor


def strips(active: Tensor) -> list[Strip]:
    """The entries of x that may be other than zero, bool [M, K], as the blocks of a product. Local.

    `places` number the entries in row-major order; columns without any are in no strip.
    """
    held = as_array(active)
    numbers = np.cumsum(held.reshape(-1)).reshape(held.shape) - 1
    patterns, owner = np.unique(held, axis=1, return_inverse=True)
    found = []
    for number, pattern in enumerate(patterns.T):
        rows, lines = np.flatnonzero(pattern), np.flatnonzero(owner.reshape(-1) == number)
        if rows.size:
            found.append(Strip(*map(torch.from_numpy, (rows, lines, numbers[np.ix_(rows, lines)]))))
    return found


@dataclass(frozen=True, eq=False)
class SparseInput(Form):
    """x y of the entries of x [count], in row-major order, and y [K, N]: [height, N]."""

    strips: Sequence[Strip]
    height: int

    tag = "matmul"

    def product(self, x: Tensor, y: Tensor) -> Tensor:
        """x y, strip by strip; the lines of a weight are read in place."""
        return self._each(x, y, lambda s: ops.ring_matmul_lines(x[s.places], y, s.lines))

    def pair(self, x0: Tensor, y0: Tensor, x1: Tensor, y1: Tensor) -> Tensor:
        """x0 y0 + x1 y1, strip by strip."""
        pair = ops.ring_matmul_lines_pair
        return self._each(x0, y0, lambda s: pair(x0[s.places], y0, x1[s.places], y1, s.lines))

    def real(self, x: Tensor, y: Tensor) -> Tensor:
        """x y of floating-point tensors."""
        return self._each(x, y, lambda strip: x[strip.places] @ y[strip.lines])

    def macs(self, x_shape: Sequence[int], y_shape: Sequence[int]) -> int:
        """Entries of x times columns of y."""
        return int(x_shape[0]) * int(y_shape[-1])

    def narrowed(self) -> tuple[Form, Callable[[Tensor], Tensor]]:
        """With the lines that are in a strip only, in order."""
        used, at = renumbered([strip.lines for strip in self.strips])
        found = [replace(strip, lines=lines) for strip, lines in zip(self.strips, at, strict=True)]
        return replace(self, strips=found), lambda y: y[used]

    def _each(self, x: Tensor, y: Tensor, made: Callable[[Strip], Tensor]) -> Tensor:
        out = torch.zeros((self.height, y.shape[-1]), dtype=x.dtype, device=x.device)
        for strip in self.strips:
            out.index_add_(0, strip.rows.to(x.device), made(strip))
        return out


def sparse_input_product(x: Fixed, y: Fixed, active: Tensor, frac: int | None = None) -> Fixed:
    """x y where x is zero outside `active`: x [count], its entries in row-major order, y [K, N], active bool [M, K].

    Result [M, N], truncation included; rows without entries are zero and cost nothing, the others the rounds and bytes
    of one product with their outputs. Under dealer with matmul="remask", each entry of x and each row of y that takes
    part is masked once: (count + rows N) elements each way. Comet, Protocol 3. Raises DomainError for other shapes.
    """
    count = int(active.sum())
    if active.dim() != 2 or tuple(x.shape) != (count,) or y.shape[:1] != active.shape[1:] or len(y.shape) != 2:
        raise DomainError(
            f"sparse_input_product: got {tuple(x.shape)} entries, y {tuple(y.shape)} and active {tuple(active.shape)} "
            f"with {count} set; want [{count}], [K, N] and [M, K]"
        )
    out = x.session.frac if frac is None else frac
    rows = active.any(1).nonzero()[:, 0]
    form = SparseInput(strips(active[rows]), len(rows))
    if not count:
        return y.with_share(y.share.map(lambda part: part.new_zeros((len(active), part.shape[-1]))), out)
    made = x.with_share(x.proto.bilinear(form, x.share, y.share, x.frac + y.frac - out), out)
    if len(rows) == len(active):
        return made

    def placed(part: Tensor) -> Tensor:
        whole = torch.zeros((len(active), part.shape[-1]), dtype=part.dtype, device=part.device)
        whole[rows] = part
        return whole

    return made.view(placed)
