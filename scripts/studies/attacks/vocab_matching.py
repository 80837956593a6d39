"""Vocab-matching: tokens from rows of a causal model's layer, by trying all candidates (Cascade, section 4).

A row at position p depends on tokens up to p alone, and almost never on two different texts alike. With the text
before known, all V continuations are run and the nearest row wins: V candidates a position when every row is seen,
V^g where g unknown tokens lie between two that are. Rows in unknown order are matched against all that are left.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from private_llm.errors import DomainError

States = Callable[[Sequence[int], Tensor], Tensor]
"""(known tokens, tails [K, g]) to the numbers seen of the last position of each tail: [K, d]."""

Progress = Callable[[int], None]
"""Told how many more candidates were tried."""

CHUNK = 1024
"""Candidates in one call (measured: larger ones fall out of the processor's caches)."""


@dataclass(frozen=True)
class Recovered:
    """What an attack found.

    tokens: from the front of the text. candidates: how many were tried. stopped_at: the position whose gap was beyond
    the budget, or for which no candidate came near (None: all rows were used). distances: L1 distance of each match.
    """

    tokens: tuple[int, ...]
    candidates: int
    stopped_at: int | None
    distances: tuple[float, ...]


def unknown_between(seen: Sequence[int], known: Sequence[int] = ()) -> list[int]:
    """Unknown tokens that each seen position adds to those before it: the exponents of the generalised attack.

    known: positions whose tokens the attacker has. One that is seen counts unless it is known.
    """
    before = -1
    counts = []
    for position in sorted(seen):
        counts.append(sum(1 for p in range(before + 1, position + 1) if p not in known))
        before = position
    return counts


def cost_bound(seen: Sequence[int], vocabulary: int, known: Sequence[int] = ()) -> int:
    """Candidates that the generalised attack tries at most: sum of V^(unknown tokens) (Algorithm 1)."""
    return sum(vocabulary**count for count in unknown_between(seen, known) if count)


def match_states(
    seen: Mapping[int, Tensor], states: States, vocabulary: Tensor, budget: int,
    known: Mapping[int, int] | None = None, alike: float = float("inf"), progress: Progress | None = None,
) -> Recovered:  # fmt: skip
    """The generalised attack: `seen` maps positions (from 0) to what is seen of them [d].

    vocabulary: token ids that are tried (all, or those an attacker deems likely). known: tokens that need no search.
    budget: candidates for each gap at most; the attack ends before the first gap that needs more, and where the
    nearest candidate is farther than `alike` times the row's L1 norm (the true token is not in `vocabulary`).
    """
    given = known or {}
    tokens: list[int] = []
    distances: list[float] = []
    tried = 0
    for position in sorted(seen):
        while len(tokens) <= position and len(tokens) in given:
            tokens.append(given[len(tokens)])  # run once with the text before, not with every candidate
        gap = range(len(tokens), position + 1)
        unknown = [p - len(tokens) for p in gap if p not in given]
        count = len(vocabulary) ** len(unknown)
        if count > budget:
            return Recovered(tuple(tokens), tried, position, tuple(distances))
        if not unknown:
            continue
        frame = torch.tensor([given.get(p, 0) for p in gap])
        tail, distance = _nearest(tokens, frame, unknown, seen[position], states, vocabulary, progress)
        tried += count
        if distance > alike * float(seen[position].abs().sum()):
            return Recovered(tuple(tokens), tried, position, tuple(distances))
        distances.append(distance)
        tokens += tail.tolist()
    return Recovered(tuple(tokens), tried, None, tuple(distances))


def match_permuted(rows: Tensor, states: States, vocabulary: Tensor, progress: Progress | None = None) -> Recovered:
    """Rows of all positions in unknown order, [n, d]: each step takes the nearest (token, row) pair."""
    left = list(range(len(rows)))
    tokens: list[int] = []
    distances: list[float] = []
    for _ in range(len(rows)):
        parts = []
        for tails in candidates(vocabulary, 1):
            parts.append(torch.cdist(states(tokens, tails), rows[left], p=1.0))
            if progress is not None:
                progress(len(tails))
        distance = torch.cat(parts)
        best = int(distance.argmin())
        tokens.append(int(vocabulary[best // len(left)]))
        distances.append(float(distance.view(-1)[best]))
        left.pop(best % len(left))
    return Recovered(tuple(tokens), len(vocabulary) * len(rows), None, tuple(distances))


def candidates(vocabulary: Tensor, gap: int) -> Iterator[Tensor]:
    """All V^gap tails [K, gap], CHUNK at a time. Raises DomainError for a gap below 1."""
    if gap < 1:
        raise DomainError(f"gap: got {gap}; want at least 1")
    total = len(vocabulary) ** gap
    powers = len(vocabulary) ** torch.arange(gap - 1, -1, -1)
    for start in range(0, total, CHUNK):
        numbers = torch.arange(start, min(start + CHUNK, total))
        yield vocabulary[numbers.unsqueeze(1) // powers % len(vocabulary)]


def _nearest(
    tokens: Sequence[int], frame: Tensor, unknown: Sequence[int], wanted: Tensor, states: States, vocabulary: Tensor,
    progress: Progress | None,
) -> tuple[Tensor, float]:  # fmt: skip
    """`frame` [g] with its `unknown` places filled by the candidates whose row is nearest, and the L1 distance."""
    best, smallest = frame, float("inf")
    for filling in candidates(vocabulary, len(unknown)):
        tails = frame.repeat(len(filling), 1)
        tails[:, unknown] = filling
        distance = (states(tokens, tails) - wanted).abs_().sum(-1)
        index = int(distance.argmin())
        if float(distance[index]) < smallest:
            best, smallest = tails[index], float(distance[index])
        if progress is not None:
            progress(len(filling))
    return best, smallest
