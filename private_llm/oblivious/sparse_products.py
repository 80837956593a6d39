"""Products of which only some outputs are wanted, and with a factor that is known to be zero in places (Comet).

Wanted outputs (SOMM, Protocol 2): rows of x and columns of y are the nodes of a bipartite graph, wanted outputs its
edges. Each connected component is one block product, so no row or column takes part twice, and no block holds two
components (Theorem 1: least masked elements, then least multiply-adds).

Zeros (SIMM, Protocol 3): the entries of a column of x that are not zero multiply the matching row of y together, so
each entry of x and each row of y takes part once (Theorem 2: least masked elements, and no multiply-add for a zero).
Columns with entries in the same rows are one block product.

What is wanted, or may be other than zero, is public; a secret one is opened in a secret order first.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from private_llm.errors import DomainError
from private_llm.kernels import ops
from private_llm.kernels.forms import BilinearForm
from private_llm.kernels.trace_hook import as_array
from private_llm.tensor.fixed import Fixed

_STEPS = 8  # from row to column to row, before the graph is searched


@dataclass(frozen=True, eq=False)
class Block:
    """One component: rows of x, columns of y, which of their products are wanted, and where in the result they go."""

    rows: Tensor
    columns: Tensor
    inside: Tensor
    places: Tensor


def components(wanted: Tensor) -> list[Block]:
    """Blocks of a product: connected components of wanted outputs, bool [M, N]; places: row by row. Local."""
    whole = _one_component(wanted)
    if whole is not None:
        return [whole]
    height = wanted.shape[0]
    rows, columns = (as_array(index) for index in wanted.cpu().nonzero(as_tuple=True))
    if not rows.size:
        return []
    size = height + wanted.shape[1]
    graph = coo_array((np.ones(rows.size, np.int8), (rows, columns + height)), shape=(size, size))
    _, label = connected_components(graph, directed=False)
    owner = label[rows]
    order = np.argsort(owner, kind="stable")
    cuts = np.flatnonzero(np.diff(owner[order])) + 1
    return [_block(rows[edges], columns[edges], edges) for edges in np.split(order, cuts)]


def _one_component(wanted: Tensor) -> Block | None:
    """All outputs as one block if few steps join all rows, else None: quick for many rows, without a large graph."""
    wanted = wanted.cpu()
    used = wanted.any(1)
    if not bool(used.any()):
        return None
    columns = wanted[used.nonzero()[0, 0]]
    for _ in range(_STEPS):
        reached = (wanted & columns).any(1)
        columns = wanted[reached].any(0)
        if torch.equal(reached, used):
            rows, beside = reached.nonzero()[:, 0], columns.nonzero()[:, 0]
            inside = wanted[rows][:, beside].reshape(-1).nonzero()[:, 0]
            return Block(rows, beside, inside, torch.arange(len(inside)))
    return None


def _block(rows: np.ndarray, columns: np.ndarray, edges: np.ndarray) -> Block:
    above, row_of = np.unique(rows, return_inverse=True)
    beside, column_of = np.unique(columns, return_inverse=True)
    inside = row_of * beside.size + column_of
    return Block(*map(torch.from_numpy, (above, beside, inside, edges)))


@dataclass(frozen=True, eq=False)
class SparseOutput(BilinearForm):
    """x [M, K] y [K, N] at `count` wanted outputs: [count]."""

    blocks: Sequence[Block]
    count: int

    tag = "matmul"

    def product(self, x: Tensor, y: Tensor) -> Tensor:
        """x y, block by block; of a turned weight, wanted columns are read as its rows, in place."""
        return self._each(x, lambda b: ops.ring_matmul_rows(x[b.rows], y.mT, b.columns))

    def pair(self, x0: Tensor, y0: Tensor, x1: Tensor, y1: Tensor) -> Tensor:
        """x0 y0 + x1 y1, block by block."""
        rows = ops.ring_matmul_rows
        return self._each(x0, lambda b: ops.pair_of(rows, x0[b.rows], y0.mT, x1[b.rows], y1.mT, b.columns))

    def real(self, x: Tensor, y: Tensor) -> Tensor:
        """x y of floating-point tensors."""
        return self._each(x, lambda block: x[block.rows] @ y[:, block.columns])

    def macs(self, x_shape: Sequence[int], y_shape: Sequence[int]) -> int:
        """Rows times columns of each block, times K."""
        return sum(len(block.rows) * len(block.columns) for block in self.blocks) * int(x_shape[-1])

    def narrowed(self) -> tuple[BilinearForm, Callable[[Tensor], Tensor]]:
        """With the columns that are in a block only, in order."""
        used, at = renumbered([block.columns for block in self.blocks])
        blocks = [replace(block, columns=columns) for block, columns in zip(self.blocks, at, strict=True)]
        return replace(self, blocks=blocks), lambda y: y.mT[used].mT

    def _each(self, like: Tensor, made: Callable[[Block], Tensor]) -> Tensor:
        out = torch.empty(self.count, dtype=like.dtype, device=like.device)
        for block in self.blocks:
            out[block.places] = made(block).reshape(-1)[block.inside]
        return out


def renumbered(lists: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
    """The numbers that are in some list, in order, and each list with their places there instead."""
    used, at = torch.cat([torch.zeros(0, dtype=torch.int64), *lists]).unique(return_inverse=True)
    return used, at.split([len(each) for each in lists])


def sparse_output_product(x: Fixed, y: Fixed, wanted: Tensor, frac: int | None = None) -> Fixed:
    """The wanted entries of x y, in row-major order: x [M, K], y [K, N], wanted bool [M, N], public; 1-D.

    Truncation included; rounds and bytes of one product with as many outputs as are wanted, whatever K is. Under dealer
    with matmul="remask", each row and column that takes part is masked once: (rows + columns) K elements each way.
    Nothing is sent if nothing is wanted. Comet, Protocol 2. Raises DomainError for another shape.
    """
    if x.shape[-1:] != y.shape[:1] or tuple(wanted.shape) != (*x.shape[:-1], *y.shape[1:]) or wanted.dim() != 2:
        raise DomainError(
            f"sparse_output_product: got x {tuple(x.shape)}, y {tuple(y.shape)} and wanted {tuple(wanted.shape)}; want "
            "[M, K], [K, N] and [M, N]"
        )
    out = x.session.frac if frac is None else frac
    rows = wanted.any(1).nonzero()[:, 0]
    form = SparseOutput(components(wanted[rows]), int(wanted.sum()))
    left = x.view(lambda part: part[rows])
    if not form.count:
        return x.with_share(left.share.map(lambda part: part.reshape(-1)[:0]), out)
    made = x.proto.bilinear(form, left.share, y.share, x.frac + y.frac - out)
    return x.with_share(made, out)


@dataclass(frozen=True, eq=False)
class Strip:
    """Columns of x with entries in the same rows: those rows, rows of y, and where the entries are held, [R, C]."""

    rows: Tensor
    lines: Tensor
    places: Tensor


def strips(active: Tensor) -> list[Strip]:
    """Blocks of a product of entries that may be other than zero, bool [M, K]; places: row by row. Local."""
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
class SparseInput(BilinearForm):
    """x y of the entries of x [count], in row-major order, and y [K, N]: [height, N]."""

    strips: Sequence[Strip]
    height: int

    tag = "matmul"

    def product(self, x: Tensor, y: Tensor) -> Tensor:
        """x y, strip by strip; the lines of a weight are read in place."""
        return self._each(x, y, lambda s: ops.ring_matmul_lines(x[s.places], y, s.lines))

    def pair(self, x0: Tensor, y0: Tensor, x1: Tensor, y1: Tensor) -> Tensor:
        """x0 y0 + x1 y1, strip by strip."""
        lines = ops.ring_matmul_lines
        return self._each(x0, y0, lambda s: ops.pair_of(lines, x0[s.places], y0, x1[s.places], y1, s.lines))

    def real(self, x: Tensor, y: Tensor) -> Tensor:
        """x y of floating-point tensors."""
        return self._each(x, y, lambda strip: x[strip.places] @ y[strip.lines])

    def macs(self, x_shape: Sequence[int], y_shape: Sequence[int]) -> int:
        """Entries of x times columns of y."""
        return int(x_shape[0]) * int(y_shape[-1])

    def narrowed(self) -> tuple[BilinearForm, Callable[[Tensor], Tensor]]:
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
