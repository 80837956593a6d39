"""What differs between the versions of transformers that this package supports."""

import multiprocessing
import warnings
from importlib import metadata
from typing import Any

from private_llm.errors import ConfigError, UntestedVersion

TESTED = (5, 24)  # the newest minor version of transformers that the tests of this release passed with

_NAMES = ("cache", "past_key_values")  # the KV cache as an argument and as an output: since 5.24, and before


def _numbers(version: str) -> tuple[int, ...]:
    """Its first two."""
    return tuple(int(part) for part in version.split(".")[:2])


_INSTALLED = metadata.version("transformers")  # which transformers itself takes half a second to tell
CACHE = _NAMES[0 if _numbers(_INSTALLED) >= (5, 24) else 1]  # its name in the version that is installed


def with_cache_named(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments with the KV cache under its installed name; users may give either. Raises ConfigError for both."""
    other = _NAMES[1 - _NAMES.index(CACHE)]
    if other not in arguments:
        return arguments
    if CACHE in arguments:
        raise ConfigError(f"{other}: got {CACHE} as well, which is the same argument; want one of them")
    return {CACHE if name == other else name: value for name, value in arguments.items()}


def warn_if_untested(version: str = _INSTALLED) -> None:
    """Warn (UntestedVersion) of a transformers that is newer than the one that was tested; parties stay silent."""
    if _numbers(version) > TESTED and multiprocessing.parent_process() is None:
        tested = ".".join(map(str, TESTED))
        warnings.warn(
            f"transformers {version} is newer than {tested}, the newest that this version of private-llm was tested "
            f"with; if a model fails, pip install 'transformers=={tested}.*', or a newer private-llm",
            UntestedVersion,
            stacklevel=3,
        )
