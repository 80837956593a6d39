"""What stays in the KV cache and what is attended to, by policies that parties agree upon: those on offer, by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from private_llm.errors import ConfigError, refuse_unknown
from private_llm.kv_policies.mpcache import MPCacheConfig
from private_llm.kv_policies.policy import CachePolicy, KeepAll, NoCache, SlidingWindow
from private_llm.kv_policies.rivals import H2O, TOVA, HeadMerging, InfLLM, LongCache, SnapKV

_KINDS: tuple[type[CachePolicy], ...] = (
    KeepAll, NoCache, SlidingWindow, MPCacheConfig, H2O, TOVA, SnapKV, InfLLM, LongCache, HeadMerging,
)  # fmt: skip
POLICIES: dict[str, type[CachePolicy]] = {policy.name: policy for policy in _KINDS}
"""The policies on offer, by name."""


def policy_of(values: Mapping[str, Any]) -> CachePolicy:
    """The policy of `CachePolicy.to_dict`. Raises ConfigError for an unknown name or setting."""
    settings = dict(values)
    name = settings.pop("name", None)
    kind = POLICIES.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ConfigError(f"kv_cache: got {name!r}; want one of {', '.join(map(repr, POLICIES))}")
    refuse_unknown(settings, [field.name for field in dataclasses.fields(kind)], "kv_cache: ")
    return kind(**settings)
