"""Ring matrix products on GPUs (Triton): which kernel makes one, by its size.

Few rows meet a matrix in integer multiplications, as fast as it is read (`few_rows`); more of them are multiplied on
the tensor cores, digit by digit (`planes`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from private_llm.kernels import shapes
from private_llm.kernels.backends.triton import few_rows, planes

MOST_STACKED = 65535
"""Matrices that one call of a kernel takes."""


def product(x: Tensor, y: Tensor, onto: Tensor | None = None) -> Tensor:
    """x y modulo the ring size for x [..., M, K], y [..., K, N], added onto `onto` (contiguous) if given."""
    out = shapes.ring_matmul(x, y).zero_() if onto is None else onto
    rows, inner = x.shape[-2:]
    batch = out.shape[:-2]
    if not (out.numel() and inner):
        return out
    if y.dim() == 2:
        left, right = x.reshape(1, batch.numel() * rows, inner), y.unsqueeze(0)
    else:
        left, right = _stack(x, batch), _stack(y, batch)
    made = out.view(left.shape[0], left.shape[1], out.shape[-1])
    for some in range(0, len(made), MOST_STACKED):
        part = slice(some, some + MOST_STACKED)
        if left.shape[1] <= few_rows.MOST:
            few_rows.add_product(left[part], right[part], made[part])
        else:
            planes.add_product(left[part], right[part], made[part], onto is not None)
    return out


def rows_product(x: Tensor, y: Tensor, rows: Tensor, onto: Tensor | None = None) -> Tensor:
    """x y[rows]^T for x [M, K], y [N, K], added onto `onto` if given; the numbers were checked, and lie on the GPU."""
    out = shapes.ring_matmul_rows(x, y, rows).zero_() if onto is None else onto
    if not (out.numel() and x.shape[1]):
        return out
    if len(x) > few_rows.MOST:
        return product(x, y.index_select(0, rows).mT, out)
    few_rows.add_product(x.unsqueeze(0), y.mT.unsqueeze(0), out.unsqueeze(0), by_column=rows.contiguous())
    return out


def lines_product(x: Tensor, y: Tensor, lines: Tensor, onto: Tensor | None = None) -> Tensor:
    """x y[lines] for x [M, R], y [K, N], added onto `onto` if given; the numbers were checked, and lie on the GPU."""
    out = shapes.ring_matmul_lines(x, y, lines).zero_() if onto is None else onto
    if not (out.numel() and x.shape[1]):
        return out
    if len(x) > few_rows.MOST:
        return product(x, y.index_select(0, lines), out)
    few_rows.add_product(x.unsqueeze(0), y.unsqueeze(0), out.unsqueeze(0), by_row=lines.contiguous())
    return out


def _stack(x: Tensor, batch: torch.Size) -> Tensor:
    return x.expand(*batch, *x.shape[-2:]).reshape(batch.numel(), *x.shape[-2:])
