"""Sums and means; local (a mean carries its 1/n in the fractional bits until the next product)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from private_llm.tensor.dispatch import implements
from private_llm.tensor.scale import divided
from private_llm.tensor.secret import SecretTensor

Dims = int | Sequence[int] | None


def _total(x: SecretTensor, dim: Dims, keepdim: bool) -> SecretTensor:
    dims = tuple(range(x.ndim)) if dim is None else dim
    return SecretTensor(x.raw.sum(dims, keepdim))


@implements(torch.sum, Tensor.sum)
def total(
    x: SecretTensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> SecretTensor:
    """Sum over dimensions."""
    return _total(x, dim, keepdim)


@implements(torch.mean, Tensor.mean)
def mean(x: SecretTensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> SecretTensor:
    """Mean over dimensions."""
    summed = _total(x, dim, keepdim)
    count = x.shape.numel() // max(1, summed.shape.numel())
    return SecretTensor(divided(summed, max(1, count)))
