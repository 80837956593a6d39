"""Secrets in order: `topk`, `sort`, `argsort`, `msort`; indices are secret numbers without fractional bits.

Batcher's network (oblivious/sort_network.py): of equal entries the first one comes first, in either direction.
"""

from __future__ import annotations

import torch
from torch import Tensor

from private_llm.errors import DomainError
from private_llm.exact.argmax import first_maximum
from private_llm.oblivious.topk import largest_values
from private_llm.tensor.dispatch import TorchArg, implements
from private_llm.tensor.fixed import Fixed
from private_llm.tensor.secret import SecretTensor


@implements(torch.topk, Tensor.topk)
def topk(x: SecretTensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> TorchArg:
    """The k largest (or smallest) entries over a dimension, which becomes k, in order, with their indices.

    Cost: `oblivious.topk.values_cost`; of `exact.argmax` for one. In order for sorted=False, too. Raises DomainError
    unless k is 1 to the entries there are.
    """
    return torch.return_types.topk(_in_order(x, "topk", k, dim, largest))


@implements(torch.sort, Tensor.sort)
def sort(x: SecretTensor, dim: int = -1, descending: bool = False, stable: bool = True) -> TorchArg:
    """Entries over a dimension in order, with their indices; stable in any case. Cost: `oblivious.topk.values_cost`.

    Raises DomainError for an empty dimension.
    """
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
