"""Sums and means; local for few entries (a mean carries its 1/n in the fractional bits until the next product)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from private_llm.tensor.dispatch import implements
from private_llm.tensor.means import mean_of
from private_llm.tensor.secret import SecretTensor

Dims = int | Sequence[int] | None


def _dims(x: SecretTensor, dim: Dims) -> list[int]:
    every = range(x.ndim) if dim is None or (not isinstance(dim, int) and not dim) else dim
    return [every % max(1, x.ndim)] if isinstance(every, int) else sorted(d % x.ndim for d in every)


@implements(torch.sum, Tensor.sum)
def total(
    x: SecretTensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> SecretTensor:
    """Sum over dimensions; local.

    The sum must stay below the limit of a product (2^26 with 18 fractional bits, 64-bit ring). An operand with more
    than twice the session's fractional bits is truncated first (1 round).
    """
    value = x.value(full=True) if x.value(full=True).frac <= 2 * x.session.frac else x.to_fixed()
    return SecretTensor(value.sum(_dims(x, dim), keepdim))


@implements(torch.mean, Tensor.mean)
def mean(x: SecretTensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> SecretTensor:
    """Mean over dimensions, up to any number of entries (means.py): in rows of 2^f, then over these rows.

    Local for a power of two or at most 16 entries (18 fractional bits, 64-bit ring), else 1 truncation of the means;
    beyond 2^f entries one of each row's sum. Error: means.py.
    """
    dims = _dims(x, dim)
    count = math.prod(x.shape[d] for d in dims)
    width = min(count, 1 << x.session.frac)
    outer = [size for d, size in enumerate(x.shape) if d not in dims]

    def rows(part: Tensor) -> Tensor:
        flat = part.movedim(dims, list(range(-len(dims), 0))).reshape(*outer, count)
        padded = torch.nn.functional.pad(flat, (0, -count % max(1, width)))
        return padded.reshape(*outer, -1, width).sum(-1, dtype=part.dtype)

    def over_rows(part: Tensor) -> Tensor:
        return part.sum(-1, dtype=part.dtype)

    made = mean_of(x, rows, over_rows, (width, -(-count // max(1, width))), max(1, count))
    shape = [1 if d in dims else size for d, size in enumerate(x.shape)]
    return SecretTensor(made.view(lambda part: part.reshape(shape)) if keepdim else made)
