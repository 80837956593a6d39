"""Policies of papers, as declarations: MPCache, and those that it is judged against.

MPCache evicts once, after the prompt, and then chooses clusters for each query (arXiv 2501.06807). The others choose
for every key head alone; where a paper says otherwise, the docstring does.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from private_llm.errors import ConfigError, refuse_unknown
from private_llm.kv_cache.policies.policy import (
    BudgetedPolicy,
    CachePolicy,
    Eviction,
    LayerSharing,
    Level,
    Selection,
    check_pool,
    share,
    whole,
)
from private_llm.typed_settings import check_types


@dataclass(frozen=True)
class MPCacheConfig(BudgetedPolicy):
    """MPCache's settings, with those of `BudgetedPolicy`; section and equation numbers are the paper's.

    gamma: the share of the text whose entries stay after the prompt (4.2). observed: the last tokens of a prompt
    whose attention counts for that, as a whole number or as a share of the prompt (4.2: 0.2). pool: an odd number of
    neighbours over which attention is averaged before entries are ranked (the paper: 1). levels: clusters from large
    to small, with the share of those left that goes on, as in table 6 (4.3); () attends to all that is held. alpha:
    weight of the largest keys in a cluster's representative (equation 6). shared_layers: neighbouring layers that use
    one choice (4.4; 1: none); apart: the first layers, which choose for themselves. gather: how chosen entries come
    together on shares: "scores" (one-hot rows times scores), "shuffled-scores", "keys" (one-hot rows times keys and
    values, as in the paper), or "auto", the one of the fewest bytes. drop: False keeps evicted entries under a secret
    mask, a baseline that saves nothing.

    What parties learn: nothing; all numbers here are public, which entries stay and are chosen is not
    (docs/threat-model.md). Raises ConfigError for shares outside (0, 1], sizes that do not divide each other from large
    to small, and as `BudgetedPolicy`.
    """

    name = "mpcache"
    first: int = 4
    observed: float | int = 32
    pool: int = 7
    levels: tuple[Level, ...] = ()
    alpha: float = 0.6
    shared_layers: int = 1
    apart: int = 2
    gather: Literal["auto", "scores", "shuffled-scores", "keys"] = "auto"
    drop: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        seen = self.observed
        fits = (0 < seen <= 1) if isinstance(seen, float) else isinstance(seen, int) and seen >= 1
        if not fits or isinstance(seen, bool):
            raise ConfigError(
                f"kv_cache: observed: got {seen!r}; want a whole number of tokens, at least 1, or a share of the "
                "prompt with a point, above 0 and at most 1.0"
            )
        whole(self, shared_layers=1, apart=0)
        check_pool(self, self.pool)
        check_types(self, "kv_cache: ", but=("levels", "name"))
        if not 0 <= self.alpha <= 1:
            raise ConfigError(f"kv_cache: alpha: got {self.alpha!r}; want a number from 0 to 1")
        object.__setattr__(self, "alpha", float(self.alpha))  # 1 and 1.0 are one setting, as in `share`
        object.__setattr__(self, "levels", checked_levels(self.levels))

    def entries(self, held: int, position: int, queries: int) -> int:
        """As `BudgetedPolicy`; all with drop=False."""
        return super().entries(held, position, queries) if self.drop else held

    def ranked(self, held: int, position: int, queries: int) -> int:
        """As `BudgetedPolicy.entries`."""
        return super().entries(held, position, queries)

    def mass_queries(self, queries: int) -> int:
        """The observed tokens of a long call; all of a short one if later calls evict again."""
        if queries > self.recent:
            share_of_them = isinstance(self.observed, float)
            return math.ceil(self.observed * queries) if share_of_them else min(queries, int(self.observed))
        return queries if self.every is not None else 0

    @property
    def eviction(self) -> Eviction | None:
        """By the attention since the last eviction; None if nothing is ever evicted."""
        if self.newest is None:
            return None
        return Eviction(self.first, self.recent, pool=self.pool, memory="since", drop=self.drop)

    @property
    def selection(self) -> Selection | None:
        """The levels; None without."""
        if not self.levels:
            return None
        return Selection(self.levels, "extremes", self.alpha, first=self.first, recent=self.recent, gather=self.gather)

    @property
    def sharing(self) -> LayerSharing:
        """As set."""
        return LayerSharing(self.shared_layers, self.apart)

    @classmethod
    def paper(cls, **settings: Any) -> "MPCacheConfig":  # noqa: ANN401 - fields of this class
        """The settings that the paper's experiments name (5.1 to 5.4), but for those given here.

        A quarter of the text stays, by the attention of its last fifth; clusters of 32 and 16 (table 6); pairs of
        layers share choices. On models of 7 billion parameters; smaller ones lose more (docs/studies/kv-accuracy.md).
        """
        named: dict[str, Any] = {
            "gamma": 0.25, "observed": 0.2, "pool": 1, "first": 0, "levels": (Level(32, 0.5), Level(16, 0.4)),
            "shared_layers": 2, "apart": 2,
        }  # fmt: skip
        return cls(**{**named, **settings})


def checked_levels(given: object) -> tuple[Level, ...]:
    """Levels of Level objects or JSON (mappings, pairs). Raises ConfigError unless sizes fall and divide each other."""
    if not isinstance(given, list | tuple):
        raise ConfigError(f"kv_cache: levels: got {given!r}; want a list of sizes and shares, such as [[32, 0.5]]")
    levels = []
    for item in given:
        if isinstance(item, Mapping):
            refuse_unknown(item, ["size", "kept"], "kv_cache: levels: ")
        pair = (item.get("size"), item.get("kept")) if isinstance(item, Mapping) else item
        pair = (pair.size, pair.kept) if isinstance(pair, Level) else pair
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise ConfigError(f"kv_cache: levels: got {item!r}; want a size and the share that is kept, as [32, 0.5]")
        size, kept = pair
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError(f"kv_cache: levels: got a size of {size!r}; want a whole number, at least 1")
        if isinstance(kept, bool) or not isinstance(kept, int | float) or not 0 < kept <= 1:
            raise ConfigError(f"kv_cache: levels: got a share of {kept!r}; want one above 0 and at most 1")
        levels.append(Level(size, float(kept)))
    for large, small in itertools.pairwise(levels):
        if large.size % small.size or large.size == small.size:
            raise ConfigError(
                f"kv_cache: levels: got size {small.size} after {large.size}; want each to divide the one before it"
            )
    return tuple(levels)


@dataclass(frozen=True)
class H2O(BudgetedPolicy):
    """Half stays for most attention so far, half for the newest (arXiv 2306.14048); every: tokens between evictions."""

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
    """Entries of the least attention from the newest token go, one a token (arXiv 2401.06104), here by key head."""

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
    """`merged` neighbouring heads share the softmax of mean scores (arXiv 2408.03561, where models are trained so)."""

    name = "head-merging"
    merged: int = 2

    def __post_init__(self) -> None:
        whole(self, merged=1)

    @property
    def merged_heads(self) -> int:
        """As set."""
        return self.merged
