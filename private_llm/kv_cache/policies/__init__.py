"""What stays in the KV cache and what is attended to, by policies that parties agree upon: those on offer, by name."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from private_llm.errors import ConfigError, refuse_unknown
from private_llm.kv_cache.policies import papers, policy
from private_llm.kv_cache.policies.policy import CachePolicy

POLICIES: dict[str, type[CachePolicy]] = {
    kind.name: kind
    for module in (policy, papers)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, CachePolicy) and "name" in vars(kind)
}
"""The policies on offer, by name: the classes of these files that have one."""


def policy_of(values: Mapping[str, Any]) -> CachePolicy:
    """The policy of `CachePolicy.to_dict`. Raises ConfigError for an unknown name or setting."""
    settings = dict(values)
    name = settings.pop("name", None)
    kind = POLICIES.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ConfigError(f"kv_cache: got {name!r}; want one of {', '.join(map(repr, POLICIES))}")
    refuse_unknown(settings, [field.name for field in dataclasses.fields(kind)], "kv_cache: ")
    return kind(**settings)
