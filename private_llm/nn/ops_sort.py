"""Secrets in order: `topk`, `sort`, `argsort`, `msort`; indices are secret numbers without fractional bits.

Batcher's network (oblivious/sort_network.py): of equal entries the first one comes first, in either direction.

Maxima of secrets and where they are: `amax`, `max`, `argmax`; indices are secret numbers.
"""

import torch
from torch import Tensor

from private_llm.errors import DomainError, UnsupportedOp
from private_llm.exact.maximum import first_maximum, maximum
from private_llm.oblivious.topk import largest_values
from private_llm.tensor.dispatch import TorchArg, implements
from private_llm.tensor.fixed import Fixed
from private_llm.tensor.ops_pointwise import MINUS_INFINITY
from private_llm.tensor.secret import SecretTensor


@implements(torch.topk, Tensor.topk)
def topk(x: SecretTensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> TorchArg:
    """The k largest (or smallest) entries over a dimension, which becomes k, in order, with their indices.

    Cost: `sort_network.sort_cost`; of `exact.maximum.argmax` for one. In order for sorted=False, too. Raises
    DomainError unless k is 1 to the entries there are.
    """
    return torch.return_types.topk(_in_order(x, "topk", k, dim, largest))


@implements(torch.sort, Tensor.sort)
def sort(x: SecretTensor, dim: int = -1, descending: bool = False, stable: bool = True) -> TorchArg:
    """Sorted entries and indices, stable: `sort_network.sort_cost`. Raises DomainError for an empty dimension."""
    return torch.return_types.sort(_in_order(x, "sort", None, dim, descending))


@implements(torch.argsort, Tensor.argsort)
def argsort(x: SecretTensor, dim: int = -1, descending: bool = False, stable: bool = True) -> SecretTensor:
    """Where the entries of `sort` are found, at its cost. Raises DomainError for an empty dimension."""
    return _in_order(x, "argsort", None, dim, descending)[1]


@implements(torch.msort, Tensor.msort)
def msort(x: SecretTensor) -> SecretTensor:
    """The values of `sort` over the first dimension, at its cost. Raises DomainError if that is empty."""
    return _in_order(x, "msort", None, 0, False)[0]


def _in_order(
    x: SecretTensor, name: str, k: int | None, dim: int, descending: bool
) -> tuple[SecretTensor, SecretTensor]:
    """The first k entries over `dim` (None: all), and their indices."""
    if not x.ndim:
        raise DomainError(f"{name}: got a secret without dimensions; want one at least")
    width = x.shape[dim]
    k = width if k is None else k
    if not 0 < k <= width:
        raise DomainError(f"{name}: got k={k} over dimension {dim}; want 1 to {width}, the entries of {tuple(x.shape)}")
    rows = x.to_fixed().view(lambda part: part.movedim(dim, -1))
    values, indices = _first(rows if descending else -rows, k)
    return _placed(values if descending else -values, dim), _placed(indices, dim)


def _first(rows: Fixed, k: int) -> tuple[Fixed, Fixed]:
    """The k largest, [..., k]."""
    if k > 1 or rows.shape[-1] == 1:
        return largest_values(rows, k)
    values, indices = first_maximum(rows)  # compares fewer bits than the network, as deep
    return values.view(lambda part: part.unsqueeze(-1)), indices.view(lambda part: part.unsqueeze(-1))


def _placed(made: Fixed, dim: int) -> SecretTensor:
    return SecretTensor(made.view(lambda part: part.movedim(-1, dim)))


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
    """Index of the first maximum over `dim` (None: over all), no fractional bits. Cost: `exact.maximum.argmax`."""
    return _kept(first_maximum(_rows(x, dim))[1], dim, keepdim, x.ndim)


@implements(torch.amax, Tensor.amax)
def amax(x: SecretTensor, dim: TorchArg = (), keepdim: bool = False) -> SecretTensor:
    """Maximum over one dimension or all; `exact.maximum`, not coarse. Raises UnsupportedOp for several dimensions."""
    if not isinstance(dim, int) and len(dim) > 1:
        raise UnsupportedOp(f"amax over the dimensions {tuple(dim)}; want one, or all")
    over = dim if isinstance(dim, int) else dim[0] if len(dim) else None
    made = maximum(_rows(x, over)).view(lambda part: part.squeeze(-1))
    return _kept(made, over, keepdim, x.ndim)


@implements(torch.maximum, Tensor.maximum)
def larger_of(x: Tensor, y: Tensor) -> SecretTensor:
    """The secret, of it and public numbers of -1e9 or less. Local. Raises UnsupportedOp for anything else."""
    if not isinstance(x, SecretTensor):
        x, y = y, x
    if not isinstance(x, SecretTensor) or isinstance(y, SecretTensor) or not bool((y <= MINUS_INFINITY).all()):
        raise UnsupportedOp("maximum of two tensors has no private rule; want max over a dimension, or over all")
    return x


@implements(torch.max, Tensor.max)
def largest(x: SecretTensor, dim: TorchArg = None, keepdim: bool = False) -> TorchArg:
    """Maximum over all, or (maxima, first indices): as `amax` or `exact.maximum.argmax`; of a tensor `larger_of`."""
    if isinstance(dim, Tensor):
        return larger_of(x, dim)
    if dim is None:
        return amax(x)
    values, indices = first_maximum(_rows(x, dim))
    return torch.return_types.max((_kept(values, dim, keepdim, x.ndim), _kept(indices, dim, keepdim, x.ndim)))
