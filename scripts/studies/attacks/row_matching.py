"""Rows of a layer (queries, keys and values), and tokens from the rows of layer 0 (what an AttnNode holds).

At layer 0 a position's row is a function of its token and its place: trying the vocabulary once names the token, V
candidates for each. At deeper layers a causal model's row is a function of all tokens so far; a CompNode, which holds
the hidden state, makes the same row of it.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from private_llm.token_sharding import AttentionCall

Rows = tuple[Tensor, Tensor, Tensor]
"""Queries [K, H, D], keys [K, G, D] and values [K, G, E]."""

Row = tuple[Tensor, Tensor, Tensor]
"""Those of one position, without the first dimension."""

ALIKE = 0.05
"""Relative L1 distance up to which a row counts as found; right tokens stay below 0.01 even as float16 numbers."""


class Attacked(Protocol):
    """A model with public weights, as an attacker runs it."""

    layer: int
    call: AttentionCall

    def rows(self, known: Sequence[int], tails: Tensor) -> Rows:
        """Rows of `layer` at the last position of each tail [K, g] after the tokens `known`."""
        ...

    def alone(self, position: int, ids: Tensor) -> Rows:
        """Rows of layer 0 for tokens [K] at a position, whatever stands before them."""
        ...


class Contextual(Protocol):
    """An encoder with public weights, as an attacker runs it on whole texts."""

    def everywhere(self, texts: Tensor) -> Rows:
        """Rows of the attacked layer at all positions of texts [K, n]: each [K, n, heads, size]."""
        ...


def flat(rows: Rows) -> Tensor:
    """All numbers of each row, [K, numbers]."""
    return torch.cat([part.flatten(1) for part in rows], 1)


def one(row: Row) -> Tensor:
    """All numbers of one row, [numbers]."""
    return torch.cat([part.flatten() for part in row])


def match_rows(seen: Mapping[int, Row], model: Attacked, vocabulary: Tensor) -> dict[int, int]:
    """Tokens of the positions whose layer-0 rows are seen: the nearest of `vocabulary` by L1 distance, if near."""
    found = {}
    for position, row in seen.items():
        wanted = one(row)
        distance = (flat(model.alone(position, vocabulary)) - wanted).abs().sum(1)
        best = int(distance.argmin())
        if float(distance[best]) <= ALIKE * float(wanted.abs().sum()):
            found[position] = int(vocabulary[best])
    return found
