"""Which entries of a KV cache stay: what a user chooses, and what all parties then do alike.

After every call each layer asks the policy, which sees public facts (lengths, positions, padding) and, if it asks for
it, how much attention every entry got, as a secret. It answers with public indices, so that what it evicts is gone
for all parties at once: later steps neither compute nor send anything for it.

A policy is a frozen dataclass. Its settings are part of what all endpoints must agree upon
(`PrivateConfig.agreement`), and a name that is not in `POLICIES` is refused.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from private_llm.errors import ConfigError, refuse_unknown


@dataclass(frozen=True, eq=False)
class CacheFacts:
    """What is public of one layer's cache when a policy is asked.

    layer: its number. position: the number of the next position. positions: those of the entries held, int64
    [B or 1, G or 1, held], ascending. padding: bool [B, position], True where a token counts; None: everywhere.
    """

    layer: int
    position: int
    positions: Tensor
    padding: Tensor | None


@dataclass(frozen=True)
class CachePolicy(ABC):
    """Decides after the call that fills a cache, and after each later one, which entries stay.

    How many stay is a function of how many there are (`entries`), the same for all rows, heads and layers: the client
    knows it without being told, and no shape depends on a secret.

    A choice by secrets, such as MPCache's, takes more. After the prefill it asks for the mass of the prompt's last
    fifth (`mass_queries`) and makes one-hot rows [B, G, kept, held] of the largest entries by an oblivious top-k; the
    product of these with keys and values belongs into `KVBuffer`, beside `keep`. Positions are secret from then on,
    so no mask can tell such entries apart: the choice must never take padding. In a decode step it selects entries
    for one query and evicts nothing; that belongs into attention, before the scores.
    """

    name: ClassVar[str]
    """What it is called in JSON and on the command line."""

    @abstractmethod
    def entries(self, held: int, prefill: bool) -> int:
        """How many of `held` entries stay. prefill: after the call that filled an empty cache."""

    @property
    @abstractmethod
    def newest(self) -> int | None:
        """So many of the newest entries always stay, and may be cropped away again (drafts do); None: all of them."""

    def mass_queries(self, queries: int) -> int:
        """The mass of so many of a call's last `queries` is wanted; 0, the default: of none."""
        return 0

    def after_prefill(self, facts: CacheFacts, mass: Tensor | None) -> Tensor | None:
        """As `after_step`, after the call that filled an empty cache; the same unless a policy says otherwise."""
        return self.after_step(facts, mass)

    @abstractmethod
    def after_step(self, facts: CacheFacts, mass: Tensor | None) -> Tensor | None:
        """Which entries stay: ascending indices into those held, int64 [kept] or [B or 1, G or 1, kept]; None: all.

        mass: a `SecretTensor` [B, G, held], the attention that entries got from the queries that `mass_queries` asked
        for, in this call; None if it asked for none.
        """

    def to_dict(self) -> dict[str, Any]:
        """Name and settings, for JSON."""
        return {"name": self.name, **dataclasses.asdict(self)}


@dataclass(frozen=True)
class KeepAll(CachePolicy):
    """Nothing is evicted."""

    name = "keep-all"

    def entries(self, held: int, prefill: bool) -> int:
        """All."""
        return held

    @property
    def newest(self) -> None:
        """All."""

    def after_step(self, facts: CacheFacts, mass: Tensor | None) -> None:
        """All."""


KEEP_ALL = KeepAll()
"""The default."""


@dataclass(frozen=True)
class SlidingWindow(CachePolicy):
    """The first `first` tokens of each row and the last `recent` positions stay (StreamingLLM: attention sinks).

    Padding on the left does not count as first tokens. Entries keep the positions that they were made at; StreamingLLM
    numbers them anew within the cache, which lets a text outgrow the model's positions; here it cannot. A query sees
    what was held before its call, and its call: a prompt is read whole. Raises ConfigError for recent < 1 or first < 0.
    """

    name = "sliding-window"
    recent: int = 256
    first: int = 4

    def __post_init__(self) -> None:
        for key, least in (("recent", 1), ("first", 0)):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"cache_policy: {key}: got {value!r}; want a whole number, at least {least}")

    def entries(self, held: int, prefill: bool) -> int:
        """At most `first + recent`."""
        return min(held, self.first + self.recent)

    @property
    def newest(self) -> int:
        """The recent ones."""
        return self.recent

    def after_step(self, facts: CacheFacts, mass: Tensor | None) -> Tensor | None:
        """Of a row with fewer tokens than fit, the padding before them stays too: all rows are of one length."""
        kept = self.first + self.recent
        if facts.positions.shape[-1] <= kept:
            return None
        start = torch.zeros(1, dtype=torch.int64)
        if facts.padding is not None:  # a row of padding alone, so far, starts after it
            start = torch.where(facts.padding.any(-1), facts.padding.int().argmax(-1), facts.position)
        start = start.clamp(max=facts.position - kept).view(-1, 1, 1)
        positions = facts.positions
        stays = (positions >= start) & (positions < start + self.first) | (positions >= facts.position - self.recent)
        return stays.nonzero()[:, -1].view(*stays.shape[:2], -1)


POLICIES: dict[str, type[CachePolicy]] = {policy.name: policy for policy in (KeepAll, SlidingWindow)}
"""The policies on offer, by name."""


def policy_of(values: Mapping[str, Any]) -> CachePolicy:
    """The policy of `CachePolicy.to_dict`. Raises ConfigError for an unknown name or setting."""
    settings = dict(values)
    name = settings.pop("name", None)
    kind = POLICIES.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ConfigError(f"cache_policy: got {name!r}; want one of {', '.join(map(repr, POLICIES))}")
    refuse_unknown(settings, [field.name for field in dataclasses.fields(kind)], "cache_policy: ")
    return kind(**settings)
