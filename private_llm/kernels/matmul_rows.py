"""Ring products with listed rows of y on CPU tensors: what is copied, threads, and the check of the list.

Register tiles read the rows in place. Byte tiles (from 16 rows of x on, where the processor has them) and layouts
of y whose rows are not contiguous get a copy of the listed rows, never of y.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from private_llm.errors import DomainError
from private_llm.kernels import matmul, parallel, shapes
from private_llm.kernels.address import addresses
from private_llm.kernels.backends.cpu import amx as cpu_amx
from private_llm.kernels.backends.cpu import matmul_rows as cpu_matmul_rows
from private_llm.kernels.seeded_tensor import SeededTensor

_ZERO = {torch.int64: np.uint64(0), torch.int32: np.uint32(0)}
_CUT = 64
"""Threads take multiples of this many outputs of a row: whole cache lines, and whole panels of columns."""


def check_inside(name: str, listed: Tensor, limit: int) -> None:
    """Raise DomainError unless all numbers lie in 0 .. limit - 1; looks at them where they are."""
    if not listed.numel():
        return
    if listed.is_cpu:
        listed = listed.contiguous()
        fits = cpu_matmul_rows.inside(*addresses(listed), listed.numel(), limit)
    else:
        fits = int(listed.min()) >= 0 and int(listed.max()) < limit
    if not fits:
        raise DomainError(f"{name}: a number of the list lies outside 0 .. {limit - 1}; want rows of y")


def rows_product(x: Tensor, y: Tensor, rows: Tensor, onto: Tensor | None = None) -> Tensor:
    """x y[rows]^T modulo the ring size, added onto `onto` (contiguous, changed in place) if given."""
    shapes.check_listed("ring_matmul_rows", x, y, rows, x.shape[-1:], y.shape[1:])
    check_inside("ring_matmul_rows", rows, len(y))
    if not _in_place(x, y, len(rows), x.shape[1], turned=True):
        return matmul.product(x, y.index_select(0, rows.cpu()).mT, onto)
    out = torch.zeros((len(x), len(rows)), dtype=x.dtype) if onto is None else onto
    return _spread(cpu_matmul_rows.dot_rows, x, y, rows, out)


def lines_product(x: Tensor, y: Tensor, lines: Tensor, onto: Tensor | None = None) -> Tensor:
    """x y[lines] modulo the ring size, added onto `onto` (contiguous, changed in place) if given."""
    shapes.check_listed("ring_matmul_lines", x, y, lines, x.shape[-1:], lines.shape)
    check_inside("ring_matmul_lines", lines, len(y))
    if not _in_place(x, y, y.shape[1], len(lines), turned=False):
        return matmul.product(x, y.index_select(0, lines.cpu()), onto)
    out = torch.zeros((len(x), y.shape[1]), dtype=x.dtype) if onto is None else onto
    return _spread(cpu_matmul_rows.add_lines, x, y, lines, out)


def _in_place(x: Tensor, y: Tensor, columns: int, inner: int, turned: bool) -> bool:
    """Whether register tiles read y where it lies."""
    if isinstance(y, SeededTensor) or y.stride(1) != 1:
        return False
    return not (cpu_amx.usable() and matmul.tiled(len(x), inner, columns, turned))


def _spread(kernel: Callable[..., None], x: Tensor, y: Tensor, listed: Tensor, out: Tensor) -> Tensor:
    """Run on as many threads as are worth it; each makes some columns of the result."""
    (rows, inner), columns = x.shape, out.shape[1]
    if not (out.numel() and inner):
        return out
    x, listed = x.contiguous(), listed.cpu().contiguous()
    left, right, numbers, made = addresses(x, y[0], listed, out)
    sizes, zero = (rows, inner, columns, y.stride(0)), _ZERO[x.dtype]
    macs = out.numel() * inner
    pieces = parallel.threads(max(macs / matmul.RATE, inner * columns * y.element_size() / matmul.BYTES))

    def part(first: int, last: int) -> None:
        kernel(left, right, numbers, made, *sizes, first, last, zero)

    parallel.run_parallel(part, parallel.split_range(columns, pieces, _CUT))
    return out
