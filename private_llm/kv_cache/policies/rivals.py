"""The policies that MPCache is judged against, as declarations: what they have in common is `BudgetedPolicy`.

Each chooses for every key head alone; where a paper says otherwise, the docstring does.
"""

from __future__ import annotations

from dataclasses import dataclass

from private_llm.errors import ConfigError
from private_llm.kv_cache.policies.policy import (
    BudgetedPolicy,
    CachePolicy,
    Eviction,
    Level,
    Selection,
    check_pool,
    share,
    whole,
)


@dataclass(frozen=True)
class H2O(BudgetedPolicy):
    """Heavy hitters: entries of the most attention from all queries so far, and recent ones (arXiv 2306.14048).

    Half of what stays is for the newest entries. every: 1 as in the paper, an eviction after each token.
    """

    name = "h2o"
    gamma: float = 0.2
    recent: int = 4
    every: int | None = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.first + self.eviction.newest(self.least) >= self.least:
            raise ConfigError(
                f"kv_cache: first: got {self.first}; want less than half of least={self.least}, the entries that stay "
                "of a short text: the other half are the newest"
            )

    def mass_queries(self, queries: int) -> int:
        """All queries of the call."""
        return queries

    @property
    def eviction(self) -> Eviction:
        """Attention adds up for ever."""
        return Eviction(self.first, self.recent, recent_share=0.5, memory="always")


@dataclass(frozen=True)
class TOVA(BudgetedPolicy):
    """Entries of the least attention from the newest token go, one a token (arXiv 2401.06104).

    The paper adds up all heads of a layer; here each key head ranks for itself.
    """

    name = "tova"
    gamma: float = 0.2
    every: int | None = 1
    recent: int = 1

    def mass_queries(self, queries: int) -> int:
        """The newest query alone."""
        return 1

    @property
    def eviction(self) -> Eviction:
        """By this call's last query."""
        return Eviction(self.first, self.recent)


@dataclass(frozen=True)
class SnapKV(BudgetedPolicy):
    """After the prompt, entries of most attention from its last tokens, smoothed over neighbours (arXiv 2404.14469).

    recent: the window whose attention counts, which stays itself. pool: neighbours that are averaged (odd).
    """

    name = "snapkv"
    gamma: float = 0.2
    recent: int = 32
    pool: int = 7

    def __post_init__(self) -> None:
        super().__post_init__()
        whole(self, recent=1)
        check_pool(self, self.pool)

    def mass_queries(self, queries: int) -> int:
        """The last `recent` queries."""
        return min(queries, self.recent)

    @property
    def eviction(self) -> Eviction:
        """Smoothed attention of the window."""
        return Eviction(self.first, self.recent, pool=self.pool)


@dataclass(frozen=True)
class _SelectingPolicy(CachePolicy):
    """Evicts nothing, and attends to the first tokens, the newest ones, and the best of what is between."""

    kept: float = 0.1
    first: int = 4
    recent: int = 16

    def __post_init__(self) -> None:
        share(self, "kept")
        whole(self, first=0, recent=0)


@dataclass(frozen=True)
class InfLLM(_SelectingPolicy):
    """Blocks of the context, each known by its keys of most attention (arXiv 2402.04617).

    kept: the share of blocks that a query attends to. block: tokens of one; heavy: keys that stand for it. The paper
    finds these by raw products with the next queries; here it is the attention of a prompt's last fifth. Raises
    ConfigError for more heavy keys than a block has.
    """

    name = "infllm"
    block: int = 32
    heavy: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        whole(self, block=1, heavy=1)
        if self.heavy > self.block:
            raise ConfigError(f"kv_cache: heavy: got {self.heavy}; want at most block={self.block}")

    def mass_queries(self, queries: int) -> int:
        """A fifth of a prompt, all of a short call."""
        return -(-queries // 5)

    @property
    def selection(self) -> Selection:
        """Blocks by their heavy keys."""
        return Selection((Level(self.block, self.kept),), "heavy", heavy=self.heavy, first=self.first,
                         recent=self.recent)  # fmt: skip


@dataclass(frozen=True)
class LongCache(_SelectingPolicy):
    """Single entries by the cosine between key and query, at every step (arXiv 2407.15176). kept: their share."""

    name = "longcache"

    @property
    def selection(self) -> Selection:
        """Each key stands for itself."""
        return Selection((Level(1, self.kept),), "unit", first=self.first, recent=self.recent)


@dataclass(frozen=True)
class HeadMerging(CachePolicy):
    """Neighbouring heads attend as one: `merged` heads share the softmax of their mean scores (arXiv 2408.03561).

    Nothing is evicted. The paper trains a model for it; an untrained one loses much.
    """

    name = "head-merging"
    merged: int = 2

    def __post_init__(self) -> None:
        whole(self, merged=1)

    @property
    def merged_heads(self) -> int:
        """As set."""
        return self.merged
