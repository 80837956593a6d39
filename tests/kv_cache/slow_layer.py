"""One layer's cache under a policy, entry by entry in float64: what `EvictingLayer` is compared with."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from private_llm.kv_cache.policies.policy import CachePolicy, ClusterShape
from tests.kv_cache import slow_choices

MASS_GAP = 2e-4
"""Masses that decide lie further apart than errors of softmax, a few times 1e-5 here."""


@dataclass
class Held:
    """What one row holds for one key head."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    mass: list[float] = field(default_factory=list)
    hidden: list[bool] = field(default_factory=list)
    levels: list[list[Tensor]] = field(default_factory=list)
    padding: int = 0
    chosen: list[int] | None = None
    kept: list[int] | None = None


class SlowLayer:
    """`rows[b][g]`; tokens: bool [B, prompt], False at padding."""

    def __init__(
        self, policy: CachePolicy, batch: int, groups: int, tokens: Tensor, leader: SlowLayer | None = None,
        cap: float | None = None, sinks: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.policy, self.leader, self.cap, self.sinks = policy, leader, cap, sinks
        self.tokens = [row.tolist() for row in tokens]
        self.rows = [[Held() for _ in range(groups)] for _ in range(batch)]
        self.position = 0

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """q [B, H, n, D], k [B, G, n, D], v [B, G, n, Dv]: [B, H, n, Dv]."""
        new, start = query.shape[2], self.position
        self.position += new
        out = torch.zeros(*query.shape[:3], value.shape[3], dtype=torch.float64)
        for b, row in enumerate(self.rows):
            for g, held in enumerate(row):
                for i in range(new):
                    held.keys.append(key[b, g, i])
                    held.values.append(value[b, g, i])
                    held.positions.append(start + i)
                    held.mass.append(0.0)
                    held.hidden.append(False)
                shared = query.shape[1] // len(row)
                own = query[b, g * shared : (g + 1) * shared]
                out[b, g * shared : (g + 1) * shared] = self._attend(b, g, held, own, start)
        return out

    def _attend(self, b: int, g: int, held: Held, query: Tensor, start: int) -> Tensor:
        policy, new = self.policy, query.shape[1]
        there = [i for i in range(new) if self._token(b, start + i)]
        everybody = 0 if self.leader is not None else policy.mass_queries(new)
        own = policy.mass_queries(len(there)) or everybody
        counted = there[-own:] if everybody else []
        held.chosen = self._choose(b, g, held, query) if new == 1 else None
        out = torch.zeros(*query.shape[:2], len(held.values[0]), dtype=torch.float64)
        keys, values, got = torch.stack(held.keys), torch.stack(held.values), [0.0] * len(held.keys)
        for i in range(new):
            seen = [
                n for n in (range(len(held.keys)) if held.chosen is None else held.chosen)
                if held.positions[n] <= start + i and not held.hidden[n] and self._token(b, held.positions[n])
            ]  # fmt: skip
            for h in range(len(query)):
                sink = None if self.sinks is None else float(self.sinks[g * len(query) + h])
                if seen:
                    made = slow_choices.attention(query[h, i], keys, values, seen, 0.5, self.cap, sink)
                    out[h, i] = made[0]
                    if i in counted:
                        got = [a + float(w) for a, w in zip(got, made[1], strict=True)]
        eviction = policy.eviction
        call = eviction is not None and eviction.memory == "call"
        held.mass = got if call else [a + w for a, w in zip(held.mass, got, strict=True)]
        self._evict(b, g, held, new)
        if new > 1 and self.leader is None:
            self._grow(b, held)
        return out

    def _token(self, b: int, position: int) -> bool:
        return position >= len(self.tokens[b]) or bool(self.tokens[b][position])

    def _shape(self, held: Held) -> ClusterShape | None:
        selection = self.policy.selection
        return None if selection is None else selection.shape(len(held.keys))

    def _own(self, b: int, held: Held, shape: ClusterShape, recent: int) -> ClusterShape:
        """The clusters of a row: what is left of padding lies beyond them, and so do `recent` tokens."""
        size, padding = shape.sizes[0], sum(not self._token(b, p) for p in held.positions)
        count = max(0, len(held.keys) - shape.first - recent - padding % size) // size
        there = (count, *shape.there[1:])
        return replace(shape, there=there, tail=len(held.keys) - shape.first - count * size)

    def _order(self, b: int, held: Held, first: int, size: int) -> list[int]:
        """The first tokens, whole clusters of padding, the other tokens, the rest of padding."""
        tokens = [n for n, p in enumerate(held.positions) if self._token(b, p)]
        padding = [n for n, p in enumerate(held.positions) if not self._token(b, p)]
        whole = len(padding) // size * size
        return [*tokens[:first], *padding[:whole], *tokens[first:], *padding[whole:]]

    def _grow(self, b: int, held: Held) -> None:
        """What stands for a cluster is made once, when all of it is there."""
        selection, shape = self.policy.selection, self._shape(held)
        if selection is None or shape is None:
            return
        held.levels = held.levels or [[] for _ in shape.sizes]
        shape = self._own(b, held, shape, selection.recent)
        order = self._order(b, held, selection.first, shape.sizes[0])
        padding = sum(not self._token(b, p) for p in held.positions)
        if padding != held.padding:  # clusters begin elsewhere
            held.padding, held.levels = padding, [[] for _ in shape.sizes]
        keys, mass = torch.stack(held.keys)[order], torch.tensor(held.mass, dtype=torch.float64)[order]
        for made, size in zip(held.levels, shape.sizes, strict=True):
            del made[shape.clustered // size :]
            for c in range(len(made), shape.clustered // size):
                part = slice(shape.first + c * size, shape.first + (c + 1) * size)
                made.append(slow_choices.cluster(keys[part], selection, mass[part]))

    def _choose(self, b: int, g: int, held: Held, query: Tensor) -> list[int] | None:
        shape = self._shape(held)
        if shape is None or self.leader is not None:
            return None if shape is None or self.leader is None else self.leader.rows[b][g].chosen
        self._grow(b, held)
        if self.policy.selection is not None:
            shape = self._own(b, held, shape, self.policy.selection.recent)
        order = self._order(b, held, shape.first, shape.sizes[0])
        tokens = torch.tensor([self._token(b, held.positions[n]) for n in order])
        levels = [torch.stack(made) if made else torch.zeros(0, 1) for made in held.levels]
        count = shape.clustered
        real = [tokens[shape.first : shape.first + count].view(-1, size).any(1).tolist() for size in shape.sizes]
        return [order[n] for n in slow_choices.entries(query[:, 0].sum(0), levels, shape, real=real)]

    def _evict(self, b: int, g: int, held: Held, new: int) -> None:
        eviction, alive = self.policy.eviction, len(held.keys) - sum(held.hidden)
        kept = self.policy.ranked(alive, self.position, new)
        if eviction is None or kept >= alive:
            return
        if self.leader is None:
            held.kept = self._ranked(b, held, kept)
        else:
            held.kept = self.leader.rows[b][g].kept
        stay = held.kept or []
        if eviction.memory != "always":
            held.mass = [0.0] * len(held.mass)
        if not eviction.drop:
            held.hidden = [n not in stay for n in range(len(held.keys))]
            return
        for name in ("keys", "values", "positions", "mass", "hidden"):
            setattr(held, name, [getattr(held, name)[n] for n in stay])
        held.levels = []

    def _ranked(self, b: int, held: Held, kept: int) -> list[int]:
        eviction = self.policy.eviction
        if eviction is None:
            raise ValueError("nothing is evicted")
        newest, half, total = eviction.newest(kept), eviction.pool // 2, len(held.keys)
        tokens = sum(self._token(b, p) for p in held.positions)
        order = self._order(b, held, max(0, min(eviction.first, tokens - newest)), 1)
        middle = order[eviction.first : total - newest]
        ranks = []
        for n in middle:
            near = range(max(0, n - half), min(total, n + half + 1))
            rank = sum(held.mass[i] for i in near) if self._token(b, held.positions[n]) else -1.0
            ranks.append(-2.0 if held.hidden[n] else rank)
        wanted = kept - eviction.first - newest
        top = sorted(ranks, reverse=True)
        padding = top[wanted - 1] == top[wanted]  # of padding and of hidden entries the first stay
        inner = slow_choices.best(ranks, wanted, exact=padding, gap=MASS_GAP)
        return [*order[: eviction.first], *(middle[i] for i in inner), *order[total - newest :]]

    def crop(self, count: int) -> None:
        """Forget the last positions."""
        self.position -= count
        for row in self.rows:
            for held in row:
                for name in ("keys", "values", "positions", "mass", "hidden"):
                    setattr(held, name, getattr(held, name)[:-count])
                selection = self.policy.selection
                if selection is not None:
                    whole = max(0, len(held.keys) - selection.first) // selection.levels[0].size
                    sizes = [level.size for level in selection.levels]
                    held.levels = [
                        made[: whole * sizes[0] // size] for made, size in zip(held.levels, sizes, strict=False)
                    ]

    def select(self, index: list[int]) -> None:
        """Other rows."""

        def twin(held: Held) -> Held:
            lists = {k: list(v) if isinstance(v, list) else v for k, v in vars(held).items()}
            return Held(**{**lists, "levels": [list(made) for made in held.levels]})

        self.rows = [[twin(held) for held in self.rows[i]] for i in index]
        self.tokens = [list(self.tokens[i]) for i in index]
