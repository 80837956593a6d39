"""Whether the fields of a dataclass of settings hold what their annotations say: Python itself does not look."""

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Collection, Mapping
from typing import Any, Literal, TypeVar

from private_llm.errors import ConfigError, refuse_unknown

_WORDS = {bool: "True or False", int: "a whole number", float: "a finite number", str: "a text", type(None): "None"}


_Config = TypeVar("_Config")


def settings_of(cls: Any) -> list[str]:  # noqa: ANN401 - a class of settings
    """What its constructor takes."""
    return [f.name for f in dataclasses.fields(cls)]


def refuses_unknown(cls: type[_Config]) -> type[_Config]:
    """Settings that do not exist are a ConfigError of the constructor, too, and not Python's TypeError."""
    construct = cls.__init__

    @functools.wraps(construct)
    def checked(self: _Config, *args: Any, **settings: Any) -> None:  # noqa: ANN401 - whatever the settings are
        refuse_unknown(settings, settings_of(cls))
        construct(self, *args, **settings)

    cls.__init__ = checked  # type: ignore[assignment, method-assign]
    return cls


def check_types(settings: object, where: str = "", but: Collection[str] = ()) -> None:
    """Raise ConfigError for a field of another type than its annotation, and for NaN and infinities.

    where: what stands before a field's name, as "plan: ". but: other fields. Whole numbers are numbers; True is none.
    """
    cls: Any = type(settings)
    for name, wanted in _hints(cls).items():
        value = getattr(settings, name)
        if name not in but and not _fits(value, wanted):
            raise ConfigError(f"{where}{name}: got {value!r}; want {_words(wanted)}")


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:  # noqa: ANN401 - a class
    return typing.get_type_hints(cls)


def _fits(value: object, wanted: Any) -> bool:  # noqa: ANN401 - an annotation
    origin, parts = typing.get_origin(wanted), typing.get_args(wanted)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is Literal:
        return any(type(value) is type(part) and value == part for part in parts)
    if origin is tuple:
        return isinstance(value, tuple | list) and all(_fits(item, parts[0]) for item in value)
    if wanted is float:
        return isinstance(value, float | int) and not isinstance(value, bool) and math.isfinite(value)
    if wanted is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, Mapping if origin is not None else wanted)


def _words(wanted: Any) -> str:  # noqa: ANN401 - an annotation
    origin, parts = typing.get_origin(wanted), typing.get_args(wanted)
    if origin is Literal:
        return f"one of {', '.join(map(repr, parts))}"
    if origin is tuple:
        return f"a list, each {_words(parts[0])}"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_words(part) for part in parts)
    return _WORDS.get(wanted, "a mapping" if origin is not None else f"a {getattr(wanted, '__name__', wanted)}")
