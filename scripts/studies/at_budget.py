"""Policies at one budget: settings with which a step attends to about the same share of the text under each."""

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from private_llm.errors import ConfigError
from private_llm.kv_cache.policies.papers import H2O, TOVA, InfLLM, LongCache, MPCacheConfig, SnapKV
from private_llm.kv_cache.policies.policy import CachePolicy, Level, Selection, SlidingWindow

sys.path.append(str(Path(__file__).resolve().parents[1]))
from long_context.budget import attended

_LEAST = 40
"""Entries that stay of a short text: more than the window of SnapKV."""
_SIZES = ((32, 16), (16, 8), (8, 4))
"""Clusters from large to small; the first of which a budget can be met with."""
_GRAIN = 400
"""Shares of a level are tried in steps of 1 / _GRAIN."""


def _largest(made: Callable[[float], CachePolicy], length: int, budget: float) -> CachePolicy | None:
    """The policy of the largest share with which a step attends to at most the budget; None if none does."""
    best = None
    for grain in range(1, _GRAIN + 1):
        policy = made(grain / _GRAIN)
        if attended(policy, length) <= max(_LEAST, math.ceil(budget * length)) + 1:
            best = policy
    return best


def mpcache_at(budget: float, length: int, base: MPCacheConfig | None = None) -> MPCacheConfig:
    """MPCache of a budget: sqrt(budget) of the text stays, and of that the same share is attended to.

    base: its other settings, and gamma if that is not 0.5, its default. The first level keeps half of its clusters,
    more if the budget asks for it; clusters are the largest with which nine tenths of the budget can be used. Raises
    ConfigError for a budget that is less than what always stays.
    """
    base = MPCacheConfig.paper(gamma=0.5, least=_LEAST) if base is None else base
    gamma = round(math.sqrt(budget), 3) if base.gamma == MPCacheConfig.gamma else base.gamma
    best: CachePolicy | None = None
    for large, small in _SIZES:

        def made(share: float, large: int = large, small: int = small) -> CachePolicy:
            first = round(max(0.5, math.sqrt(share)), 3)
            return replace(
                base, gamma=gamma, levels=(Level(large, first), Level(small, min(1.0, round(share / first, 3))))
            )

        found = _largest(made, length, budget)
        if found is not None and (best is None or attended(found, length) > attended(best, length)):
            best = found
        if best is not None and attended(best, length) >= 0.9 * budget * length:
            break
    if not isinstance(best, MPCacheConfig):
        raise ConfigError(f"budget: {budget} of {length} tokens is less than what always stays; want more of either")
    return best


def policies_at(budget: float, length: int) -> dict[str, CachePolicy]:
    """MPCache and its rivals by name, for prompts of `length` tokens. Raises ConfigError for too small a budget."""
    kept = math.ceil(budget * length)
    if kept <= _LEAST:
        raise ConfigError(f"budget: {kept} of {length} entries; want more than {_LEAST}")
    infllm = _largest(lambda share: InfLLM(kept=share, block=32 if kept > 128 else 8), length, budget)
    longcache = _largest(lambda share: LongCache(kept=share), length, budget)
    found: dict[str, CachePolicy | None] = {
        "sliding-window": SlidingWindow(recent=kept - 4, first=4),
        "h2o": H2O(gamma=budget, least=_LEAST),
        "tova": TOVA(gamma=budget, least=_LEAST),
        "snapkv": SnapKV(gamma=budget, least=_LEAST),
        "infllm": infllm,
        "longcache": longcache,
        "mpcache": mpcache_at(budget, length),
    }
    return {name: policy for name, policy in found.items() if policy is not None}


def levels_text(selection: Selection | None) -> str:
    """As in the paper's table 6: "s32(0.5) s16(0.4)"; "-" without levels."""
    return "-" if selection is None else " ".join(f"s{level.size}({level.kept:g})" for level in selection.levels)
