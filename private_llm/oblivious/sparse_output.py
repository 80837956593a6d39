"""Products of which only some outputs are wanted: Comet's SOMM (Protocol 2).

Rows of x and columns of y are the nodes of a bipartite graph, wanted outputs its edges. Each connected component is one
block product, so no row or column takes part twice, and no block holds two components (Theorem 1: least masked
elements, then least multiply-adds). Which outputs are wanted is public; a secret pattern is opened in a secret order
first (`Protocol.open_shuffled`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from private_llm.errors import DomainError
from private_llm.kernels import ops
from private_llm.kernels.forms import Form
from private_llm.kernels.trace_hook import as_array
from private_llm.tensor.fixed import Fixed

Multiply = Callable[[Tensor, Tensor], Tensor]

_STEPS = 8
"""From row to column to row, before the graph is searched."""


@dataclass(frozen=True, eq=False)
class Block:
    """One component: rows of x, columns of y, which of their products are wanted, and where in the result they go."""

    rows: Tensor
    columns: Tensor
    inside: Tensor
    places: Tensor


def components(wanted: Tensor) -> list[Block]:
    """The connected components of wanted outputs, bool [M, N]: the blocks of a product. Local.

    `places` number the wanted outputs in row-major order; rows and columns without any are in no block.
    """
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
    """All wanted outputs as one block, if few steps from the first row reach every other; else None.

    The usual case of many rows: then no graph of millions of edges is made.
    """
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
class SparseOutput(Form):
    """x [M, K] y [K, N] at `count` wanted outputs: [count]."""

    blocks: Sequence[Block]
    count: int

    tag = "matmul"

    def product(self, x: Tensor, y: Tensor) -> Tensor:
        """x y, block by block; of a turned weight, wanted columns are read as its rows, in place."""
        return self._each(x, lambda b: ops.ring_matmul_rows(x[b.rows], y.mT, b.columns))

    def pair(self, x0: Tensor, y0: Tensor, x1: Tensor, y1: Tensor) -> Tensor:
        """x0 y0 + x1 y1, block by block."""
        pair = ops.ring_matmul_rows_pair
        return self._each(x0, lambda b: pair(x0[b.rows], y0.mT, x1[b.rows], y1.mT, b.columns))

    def real(self, x: Tensor, y: Tensor) -> Tensor:
        """x y of floating-point tensors."""
        return self._each(x, lambda block: x[block.rows] @ y[:, block.columns])

    def macs(self, x_shape: Sequence[int], y_shape: Sequence[int]) -> int:
        """Rows times columns of each block, times K."""
        return sum(len(block.rows) * len(block.columns) for block in self.blocks) * int(x_shape[-1])

    def narrowed(self) -> tuple[Form, Callable[[Tensor], Tensor]]:
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
