"""Policies that choose by positions alone: everything stays, or the first and the newest entries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from private_llm.kv_policies.policy import CacheFacts, CachePolicy, whole

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class KeepAll(CachePolicy):
    """Nothing is evicted."""

    name = "keep-all"


KEEP_ALL = KeepAll()
"""The default."""


@dataclass(frozen=True)
class NoCache(CachePolicy):
    """Nothing is cached: every token runs the whole text again, as `use_cache=False` does. For comparison."""

    name = "no-cache"

    def entries(self, held: int, position: int, queries: int) -> int:
        """None."""
        return 0

    @property
    def newest(self) -> int:
        """None."""
        return 0


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
        whole(self, recent=1, first=0)

    def entries(self, held: int, position: int, queries: int) -> int:
        """At most `first + recent`."""
        return min(held, self.first + self.recent)

    @property
    def newest(self) -> int:
        """The recent ones."""
        return self.recent

    def after_step(self, facts: CacheFacts, mass: Tensor | None) -> Tensor | None:
        """Of a row with fewer tokens than fit, the padding before them stays too: all rows are of one length."""
        import torch  # settings do without, and it takes a second to import

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
