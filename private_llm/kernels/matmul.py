"""Ring matrix products of tensors: batches, broadcasting, and the choice of kernel by the layout of y."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from private_llm.errors import DomainError, UnsupportedOp
from private_llm.kernels import cpu_matmul

_UNSIGNED = {torch.int64: np.uint64, torch.int32: np.uint32}


def _array(t: Tensor) -> np.ndarray[Any, Any]:
    return t.numpy().view(_UNSIGNED[t.dtype])


def _stacks(x: Tensor, y: Tensor) -> tuple[torch.Size, Tensor, Tensor]:
    """The result's shape, x as [B, M, K] and y as [B, K, N]; a y without batch takes all rows of x at once."""
    if x.dim() < 2 or y.dim() < 2 or x.shape[-1] != y.shape[-2]:
        raise DomainError(f"ring_matmul: got {tuple(x.shape)} and {tuple(y.shape)}; want [..., M, K] and [..., K, N]")
    if x.dtype != y.dtype or x.dtype not in _UNSIGNED:
        raise DomainError(f"ring_matmul: got {x.dtype} and {y.dtype}; want int64 or int32, both the same")
    rows, inner, columns = x.shape[-2], x.shape[-1], y.shape[-1]
    if y.dim() == 2:
        return torch.Size((*x.shape[:-1], columns)), x.reshape(1, x.shape[:-1].numel(), inner), y.unsqueeze(0)
    batch = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    count = batch.numel()
    x = x.expand(*batch, rows, inner).reshape(count, rows, inner)
    y = y.expand(*batch, inner, columns).reshape(count, inner, columns)
    return torch.Size((*batch, rows, columns)), x, y


def product(x: Tensor, y: Tensor, onto: Tensor | None = None) -> Tensor:
    """x y modulo the ring size, added onto `onto` (contiguous, changed in place) where given."""
    if x.device.type != "cpu" or y.device.type != "cpu":
        raise UnsupportedOp(f"ring_matmul: no kernel for devices {x.device} and {y.device}; want both on one device")
    shape, x, y = _stacks(x, y)
    if onto is None:
        onto = torch.zeros(shape, dtype=x.dtype)
    elif onto.shape != shape:
        raise DomainError(f"ring_matmul: got a result of {tuple(onto.shape)} to add to; want {tuple(shape)}")
    if not (onto.numel() and x.shape[-1]):
        return onto
    out = _array(onto).reshape(x.shape[0], x.shape[1], y.shape[2])
    if y.stride(-2) == 1 and y.shape[1] > 8:
        cpu_matmul.dot_product(_array(x.contiguous()), _array(y.mT.contiguous()), out)
    else:
        cpu_matmul.row_product(_array(x.contiguous()), _array(y.contiguous()), out)
    return onto
