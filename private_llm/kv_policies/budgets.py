"""How many entries stay: a share of the text, between bounds; common to policies that evict by attention."""

from __future__ import annotations

import math
from dataclasses import dataclass

from private_llm.errors import ConfigError
from private_llm.kv_policies.policy import CachePolicy, share, whole


@dataclass(frozen=True)
class BudgetedPolicy(CachePolicy):
    """Keeps a share of the text so far.

    gamma: the share of all positions whose entries stay (above 0; 1 evicts nothing). least, most: never fewer, nor more
    (None: no bound) entries; nothing is evicted of a text no longer than `least`. recent: so many of the newest entries
    always stay; a call of more new tokens (a prompt, a turn of a chat) evicts. every: shorter calls evict once so many
    entries are held beyond the budget (None: never, so the cache grows by one entry a token). first: so many of the
    first entries always stay. Raises ConfigError, also if first and recent leave nothing to choose within `least`.
    """

    gamma: float = 0.5
    least: int = 64
    most: int | None = None
    recent: int = 16
    every: int | None = None
    first: int = 0

    def __post_init__(self) -> None:
        share(self, "gamma")
        whole(self, least=1, recent=0, first=0)
        for key in ("most", "every"):
            if getattr(self, key) is not None:
                whole(self, **{key: 1})
        if self.most is not None and self.most < self.least:
            raise ConfigError(f"kv_cache: most: got {self.most}; want at least {self.least}, the setting `least`")
        if self.first + self.recent >= self.least:
            raise ConfigError(
                f"kv_cache: first and recent: got {self.first} and {self.recent}; want less together than "
                f"least={self.least}, the entries that stay of a short text"
            )

    def budget(self, position: int) -> int:
        """How many entries stay of a text of `position` tokens."""
        wanted = max(self.least, math.ceil(self.gamma * position))
        return wanted if self.most is None else min(wanted, self.most)

    def entries(self, held: int, position: int, queries: int) -> int:
        """The budget after a long call, or once `every` entries are held beyond it; else all."""
        budget = self.budget(position)
        if queries > self.recent:
            return min(held, budget)
        full = self.every is not None and held >= budget + self.every
        return budget if full else held

    @property
    def newest(self) -> int | None:
        """The recent ones; all, if nothing is ever evicted."""
        return None if self.gamma == 1 and self.most is None else self.recent
