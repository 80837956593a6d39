"""Ring matrix products of CPU tensors: batches, broadcasting, and the choice of kernel by the layout of y."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from private_llm.kernels import cpu_matmul, shapes
from private_llm.kernels.address import memory

_ZERO = {torch.int64: np.uint64(0), torch.int32: np.uint32(0)}
_SHORTEST_DOT = 8
"""Below this inner size, lanes along k stay empty: y is copied into rows of columns instead."""


def product(x: Tensor, y: Tensor, onto: Tensor | None = None) -> Tensor:
    """x y modulo the ring size, added onto `onto` (contiguous, of the result's shape, changed in place) if given."""
    shapes.check_product(x, y)
    rows, inner, columns = x.shape[-2], x.shape[-1], y.shape[-1]
    batch = x.shape[:-2]
    if y.dim() == 2:  # all rows of x meet the same matrix
        stacks, rows_each = 1, math.prod(batch) * rows
    else:
        if batch != y.shape[:-2]:
            batch = torch.broadcast_shapes(batch, y.shape[:-2])
            x, y = x.expand(*batch, rows, inner), y.expand(*batch, inner, columns)
        stacks, rows_each = math.prod(batch), rows
    out = torch.zeros((*batch, rows, columns), dtype=x.dtype) if onto is None else onto
    if not (inner and out.numel()):
        return out
    if y.stride(-2) == 1 and inner >= _SHORTEST_DOT:
        multiply, y = cpu_matmul.dot_product, y.mT.contiguous()
    else:
        multiply, y = cpu_matmul.row_product, y.contiguous()
    x = x.contiguous()
    multiply(memory(x), memory(y), memory(out), stacks, rows_each, inner, columns, _ZERO[x.dtype])
    return out
