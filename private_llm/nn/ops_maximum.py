"""Maxima of secrets and where they are: `amax`, `max`, `argmax`; indices are secret numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from private_llm.errors import UnsupportedOp
from private_llm.exact.argmax import first_maximum
from private_llm.exact.maximum import maximum
from private_llm.tensor.dispatch import TorchArg, implements
from private_llm.tensor.fixed import Fixed
from private_llm.tensor.ops_pointwise import MINUS_INFINITY
from private_llm.tensor.secret import SecretTensor


def _rows(x: SecretTensor, dim: int | None) -> Fixed:
    """The entries to compare as the last dimension."""
    if dim is None:
        return x.to_fixed().view(lambda part: part.reshape(-1))
    return x.to_fixed().view(lambda part: part.movedim(dim, -1))


def _kept(made: Fixed, dim: int | None, keepdim: bool, ndim: int) -> SecretTensor:
    """With the compared dimension as one of size 1, if wanted."""
    if not keepdim:
        return SecretTensor(made)
    if dim is None:
        return SecretTensor(made.view(lambda part: part.reshape([1] * ndim)))
    return SecretTensor(made.view(lambda part: part.unsqueeze(dim)))


@implements(torch.argmax, Tensor.argmax)
def argmax(x: SecretTensor, dim: int | None = None, keepdim: bool = False) -> SecretTensor:
    """Index of the first maximum over `dim` (None: over all), as a secret without fractional bits.

    Cost: `exact.argmax`.
    """
    return _kept(first_maximum(_rows(x, dim))[1], dim, keepdim, x.ndim)


@implements(torch.amax, Tensor.amax)
def amax(x: SecretTensor, dim: TorchArg = (), keepdim: bool = False) -> SecretTensor:
    """Maximum over a dimension, or over all (no dimension). Cost: `exact.maximum`, not coarse.

    Raises UnsupportedOp for two or more dimensions.
    """
    if not isinstance(dim, int) and len(dim) > 1:
        raise UnsupportedOp(f"amax over the dimensions {tuple(dim)}; want one, or all")
    over = dim if isinstance(dim, int) else dim[0] if len(dim) else None
    made = maximum(_rows(x, over)).view(lambda part: part.squeeze(-1))
    return _kept(made, over, keepdim, x.ndim)


@implements(torch.maximum, Tensor.maximum)
def larger_of(x: Tensor, y: Tensor) -> SecretTensor:
    """Maximum of a secret and public numbers that are all minus infinity (-1e9 or less): the secret as it is. Local.

    Raises UnsupportedOp for anything else.
    """
    if not isinstance(x, SecretTensor):
        x, y = y, x
    if not isinstance(x, SecretTensor) or isinstance(y, SecretTensor) or not bool((y <= MINUS_INFINITY).all()):
        raise UnsupportedOp("maximum of two tensors has no private rule; want max over a dimension, or over all")
    return x


@implements(torch.max, Tensor.max)
def largest(x: SecretTensor, dim: TorchArg = None, keepdim: bool = False) -> TorchArg:
    """Maximum over all, or (maxima, first indices) over a dimension; cost of `amax`, or of `exact.argmax`.

    With a tensor for `dim`: `larger_of`.
    """
    if isinstance(dim, Tensor):
        return larger_of(x, dim)
    if dim is None:
        return amax(x)
    values, indices = first_maximum(_rows(x, dim))
    return torch.return_types.max((_kept(values, dim, keepdim, x.ndim), _kept(indices, dim, keepdim, x.ndim)))
