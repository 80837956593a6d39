"""Vocab-matching: tokens from hidden states of a causal model, by trying all candidates (Cascade, section 4).

A hidden state at position p depends on tokens up to p alone, and almost never on two different texts alike. With the
text before known, all V continuations are run and the nearest state wins: V candidates a position when every state
is seen, V^g for a gap of g when only some are. States in unknown order are matched against all that are left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from private_llm.errors import DomainError

States = Callable[[Sequence[int], Tensor], Tensor]
"""(known tokens, tails [K, g]) to the attacked layer's states at the last position of each tail: [K, d]."""

CHUNK = 4096
"""Candidates in one call."""


@dataclass(frozen=True)
class Recovered:
    """What an attack found.

    tokens: from the front of the text. candidates: how many were tried. stopped_at: the position whose gap was beyond
    the budget (None: all states were used). distances: L1 distance of each match.
    """

    tokens: tuple[int, ...]
    candidates: int
    stopped_at: int | None
    distances: tuple[float, ...]


def cost_bound(positions: Sequence[int], vocabulary: int) -> int:
    """Candidates that the generalised attack tries at most: sum of V^gap (Algorithm 1)."""
    ordered = sorted(positions)
    return sum(vocabulary ** (b - a) for a, b in zip([-1, *ordered], ordered, strict=False))


def match_states(seen: Mapping[int, Tensor], states: States, vocabulary: Tensor, budget: int) -> Recovered:
    """The generalised attack: `seen` maps positions (from 0) to their states [d]; at most `budget` candidates in all.

    vocabulary: the token ids that are tried (all of them, or those an attacker deems likely). Stops before the first
    gap whose V^gap candidates the rest of the budget does not cover.
    """
    tokens: list[int] = []
    distances: list[float] = []
    tried = 0
    for position in sorted(seen):
        gap = position + 1 - len(tokens)
        if len(vocabulary) ** gap > budget - tried:
            return Recovered(tuple(tokens), tried, position, tuple(distances))
        tail, distance = _nearest(tokens, gap, seen[position], states, vocabulary)
        tried += len(vocabulary) ** gap
        tokens += tail
        distances.append(distance)
    return Recovered(tuple(tokens), tried, None, tuple(distances))


def match_permuted(rows: Tensor, states: States, vocabulary: Tensor) -> Recovered:
    """States of all positions in unknown order, rows [n, d]: each step takes the nearest (token, row) pair."""
    left = list(range(len(rows)))
    tokens: list[int] = []
    distances: list[float] = []
    for _ in range(len(rows)):
        made = torch.cat([states(tokens, tails) for tails in candidates(vocabulary, 1)])
        distance = torch.cdist(made.double(), rows[left].double(), p=1.0)
        best = int(distance.argmin())
        tokens.append(int(vocabulary[best // len(left)]))
        distances.append(float(distance.view(-1)[best]))
        left.pop(best % len(left))
    return Recovered(tuple(tokens), len(vocabulary) * len(rows), None, tuple(distances))


def candidates(vocabulary: Tensor, gap: int) -> Iterator[Tensor]:
    """All V^gap tails [K, gap], CHUNK at a time."""
    if gap < 1:
        raise DomainError(f"gap: got {gap}; want at least 1")
    total = len(vocabulary) ** gap
    powers = len(vocabulary) ** torch.arange(gap - 1, -1, -1)
    for start in range(0, total, CHUNK):
        numbers = torch.arange(start, min(start + CHUNK, total))
        yield vocabulary[numbers.unsqueeze(1) // powers % len(vocabulary)]


def _nearest(
    tokens: Sequence[int], gap: int, wanted: Tensor, states: States, vocabulary: Tensor
) -> tuple[list[int], float]:
    best: tuple[list[int], float] = ([], float("inf"))
    for tails in candidates(vocabulary, gap):
        distance = (states(tokens, tails) - wanted).abs().sum(-1)
        index = int(distance.argmin())
        if float(distance[index]) < best[1]:
            best = tails[index].tolist(), float(distance[index])
    return best
