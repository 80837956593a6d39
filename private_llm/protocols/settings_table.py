"""What endpoints say of their settings when they meet: digests, by which they find which ones differ.

The settings of a computation are no secrets, and who has the same values has the same digests. So an error can name
each setting that differs, and what the other endpoint has, if that is the default or one of few values.
"""

import hashlib
import json
from collections.abc import Iterable
from typing import Any, Literal, get_args, get_origin, get_type_hints

from private_llm.config import VERSION, PrivateConfig
from private_llm.errors import ConfigError
from private_llm.net.roles import named
from private_llm.protocol_facts import ASSISTED, CASCADE, protocol_names

_ENTRY, _ENTRIES = 4, 64
TABLE_BYTES = _ENTRY * _ENTRIES
"""The size of a table, whatever settings a version has."""


def settings_table(config: PrivateConfig) -> bytes:
    """A digest of the library's version, and of each setting that all endpoints must agree upon; TABLE_BYTES."""
    entries = [_entry("version", VERSION), *(_entry(*each) for each in config.agreed().items())]
    return b"".join(entries).ljust(TABLE_BYTES, b"\0")


def other_settings(config: PrivateConfig, name: str, theirs: bytes) -> ConfigError:
    """The error for endpoint `name`, which disagrees and sent the table `theirs`: it names the settings that differ."""
    who, kinds = named(config, name), get_type_hints(PrivateConfig)
    version, *entries = (theirs[at : at + _ENTRY] for at in range(0, TABLE_BYTES, _ENTRY))
    agreed = config.agreed()
    differing = [
        _difference(setting, value, kinds[setting], entry, who)
        for (setting, value), entry in zip(agreed.items(), entries, strict=False)
        if entry != _entry(setting, value)
    ]
    if version == _entry("version", VERSION) and differing:
        return ConfigError("; ".join([*differing, "want the same at all endpoints"]))
    return ConfigError(
        f"{who} runs other settings or another version; {', '.join(agreed)} and the library's version must be equal at "
        "all endpoints"
    )


def _difference(setting: str, mine: object, kind: object, entry: bytes, who: str) -> str:
    for value in (PrivateConfig().agreed()[setting], *_values(setting, kind)):
        if _entry(setting, value) == entry:
            return f"{setting}: {who} has {value!r}, this endpoint {mine!r}"
    return f"{setting}: {who} has another than this endpoint ({mine!r})"


def _values(setting: str, kind: object) -> Iterable[object]:
    """Values besides the default that another endpoint is likely to have."""
    if setting == "protocol":
        return (*protocol_names(), CASCADE, ASSISTED)
    if get_origin(kind) is Literal:
        return get_args(kind)
    return (True, False) if kind is bool else range(65)  # bits and counts


def _entry(setting: str, value: Any) -> bytes:  # noqa: ANN401 - of any setting
    text = json.dumps([setting, value], sort_keys=True).encode()
    return hashlib.blake2b(text, digest_size=_ENTRY, person=b"pllm-setting").digest()
