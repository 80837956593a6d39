"""The option --kv-cache: a policy of the KV cache by name, and its settings, in one text.

    mpcache,gamma=0.25,levels=32:0.5+16:0.5,every=64

Settings are numbers, true and false, none, or words; levels are sizes and shares, joined by "+", or none. MPCache's
settings of the paper have a name: `mpcache,preset=paper`; others after it replace them.
"""

import dataclasses
from typing import Annotated, Any

import typer

from private_llm.errors import ConfigError
from private_llm.kv_cache.policies import POLICIES, policy_of
from private_llm.kv_cache.policies.papers import MPCacheConfig

KvCacheOption = Annotated[
    str,
    typer.Option(
        "--kv-cache",
        help=f"What the KV cache keeps: {', '.join(POLICIES)}; settings after commas, as mpcache,gamma=0.25 or "
        "mpcache,preset=paper; "
        "an unknown one lists those that there are.",
        rich_help_panel="Cache of keys and values (trio, quad, dealer, plain)",
    ),
]


def kv_cache_of(text: str) -> dict[str, Any]:
    """Settings of --kv-cache. Raises ConfigError for unknown names, settings and values, which lists the known ones."""
    if not text:
        return {}
    name, *parts = (part.strip() for part in text.split(","))
    if name not in POLICIES:
        raise ConfigError(f"kv_cache: got {name!r}; want {'; '.join(map(_of, POLICIES))}")
    settings: dict[str, Any] = {}
    for part in parts:
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not (key and equals and value) or key in settings:
            raise ConfigError(f"kv_cache: got {text!r}; want KEY=VALUE once for each setting: {_of(name)}")
        settings[key] = _levels(value) if key == "levels" else _value(value)
    if name == MPCacheConfig.name and "preset" in settings:
        if settings.pop("preset") != "paper":
            raise ConfigError(f"kv_cache: got {text!r}; want preset=paper, or no preset")
        settings = {**dataclasses.asdict(MPCacheConfig.paper()), **settings}
    try:
        policy_of({"name": name, **settings})
    except ConfigError as error:
        raise ConfigError(f"{error}; settings: {_of(name)}") from error
    return {"kv_cache": {"name": name, **settings}}


def _of(name: str) -> str:
    """A policy with its settings."""
    fields = ", ".join(field.name for field in dataclasses.fields(POLICIES[name]))
    fields += ", preset=paper" if name == MPCacheConfig.name else ""
    return f"{name} ({fields})" if fields else name


def _value(text: str) -> bool | int | float | str | None:
    words: dict[str, bool | None] = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _levels(text: str) -> list[list[Any]]:
    """[[32, 0.5], [16, 0.5]] of "32:0.5+16:0.5"; none of "none"."""
    if text.lower() == "none":
        return []
    made = []
    for part in text.split("+"):
        size, colon, kept = part.partition(":")
        if not colon:
            raise ConfigError(f"kv_cache: levels: got {text!r}; want sizes and shares, as 32:0.5+16:0.5, or none")
        made.append([_value(size.strip()), _value(kept.strip())])
    return made
