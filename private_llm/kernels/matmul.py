"""Ring matrix products of CPU tensors: batches, broadcasting, and the choice of kernel by the layout of y."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from private_llm.errors import UnsupportedOp
from private_llm.kernels import cpu_matmul, shapes

Array = np.ndarray[Any, Any]

_UNSIGNED: dict[torch.dtype, type[np.unsignedinteger[Any]]] = {torch.int64: np.uint64, torch.int32: np.uint32}
_SIGNED = {np.uint64: np.int64, np.uint32: np.int32}
_SHORTEST_DOT = 8
"""Below this inner size, lanes along k stay empty: y is copied into rows of columns instead."""


def product(x: Tensor, y: Tensor, onto: Tensor | None = None) -> Tensor:
    """x y modulo the ring size, added onto `onto` (contiguous, of the result's shape, changed in place) if given."""
    shapes.check_product(x, y)
    if not y.is_cpu:
        raise UnsupportedOp(f"ring_matmul: got operands on {x.device} and {y.device}; want both on one device")
    kind = _UNSIGNED[x.dtype]
    left: Array = x.numpy().view(kind)
    right: Array = y.numpy().view(kind)
    if right.ndim == 2:  # all rows of x meet the same matrix
        batch: tuple[int, ...] = left.shape[:-2]
        right = right[None]
        left = left.reshape(1, math.prod(left.shape[:-1]), left.shape[-1])
    else:
        batch = left.shape[:-2]
        if batch != right.shape[:-2]:
            batch = np.broadcast_shapes(batch, right.shape[:-2])
            left = np.broadcast_to(left, batch + left.shape[-2:])
            right = np.broadcast_to(right, batch + right.shape[-2:])
        if right.ndim != 3:
            count = math.prod(batch)
            left = left.reshape(count, *left.shape[-2:])
            right = right.reshape(count, *right.shape[-2:])
    shape = (left.shape[0], left.shape[1], right.shape[2])
    if onto is None:
        out: Array = np.zeros(shape, kind)
        onto = torch.from_numpy(out.view(_SIGNED[kind]).reshape(*batch, x.shape[-2], y.shape[-1]))
    else:
        out = onto.numpy().view(kind).reshape(shape)
    if out.size and left.shape[-1]:
        _multiply(np.ascontiguousarray(left), right, out)
    return onto


def _multiply(left: Array, right: Array, out: Array) -> None:
    """out += left right, with the kernel that fits the memory of `right`."""
    if right.strides[1] == right.itemsize and right.shape[1] >= _SHORTEST_DOT:
        cpu_matmul.dot_product(left, np.ascontiguousarray(right.transpose(0, 2, 1)), out)
    else:
        cpu_matmul.row_product(left, np.ascontiguousarray(right), out)
