"""MPCache: look-once static eviction, then clusters chosen for each query (arXiv 2501.06807)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from private_llm.errors import ConfigError, refuse_unknown
from private_llm.kv_cache.policies.policy import (
    BudgetedPolicy,
    Eviction,
    LayerSharing,
    Level,
    Selection,
    check_pool,
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
        check_observed(self.observed)
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
    def paper(cls, **settings: Any) -> MPCacheConfig:  # noqa: ANN401 - fields of this class
        """The settings that the paper's experiments name (5.1 to 5.4), but for those given here.

        A quarter of the text stays, by the attention of its last fifth; clusters of 32 and 16 (table 6); pairs of
        layers share choices. On models of 7 billion parameters; smaller ones lose more (docs/studies/kv-accuracy.md).
        """
        named: dict[str, Any] = {
            "gamma": 0.25, "observed": 0.2, "pool": 1, "first": 0, "levels": (Level(32, 0.5), Level(16, 0.4)),
            "shared_layers": 2, "apart": 2,
        }  # fmt: skip
        return cls(**{**named, **settings})


def check_observed(observed: float | int) -> None:
    """Raise ConfigError unless it is a whole number of tokens, or (a float) a share of the prompt."""
    fits = (0 < observed <= 1) if isinstance(observed, float) else isinstance(observed, int) and observed >= 1
    if not fits or isinstance(observed, bool):
        raise ConfigError(
            f"kv_cache: observed: got {observed!r}; want a whole number of tokens, at least 1, or a share of the "
            "prompt with a point, above 0 and at most 1.0"
        )


def checked_levels(given: object) -> tuple[Level, ...]:
    """Levels from Level objects or JSON: mappings with size and kept, or pairs. Raises ConfigError for anything else,
    and unless sizes divide each other, from large to small.
    """
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
