"""Messages as JSON and back: frozen dataclasses, of which every field is checked against its annotation.

A message is an object with the name of its class under "message", all fields of that class, and nothing else. Fields
may be bool, int, float, str, None, tuples, dicts by str, unions, public integer tensors, other dataclasses, and
`object` (JSON that somebody else checks). `Annotated[..., check]` adds a check: a function that raises `Unfit`. What
fields must be together is said by the class's own `__post_init__`. Never pickle.
"""

import dataclasses
import functools
import json
import math
import re
import reprlib
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import Field, dataclass, field
from typing import Annotated, Any, ClassVar, NoReturn, TypeVar, Union, get_args, get_origin

import torch
from torch import Tensor

from private_llm.errors import ConfigError, DomainError, TransportError
from private_llm.net.roles import legible

NAME = "message"
_TENSOR = "__tensor__"
_DTYPES = {"int64": torch.int64, "int32": torch.int32, "bool": torch.bool}
_MOST_DIMENSIONS = 8

_MOST_ITEMS = 1 << 22  # values of one message: a small text of brackets and commas would become gigabytes


@typing.dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Message:
    """What travels: subclasses are frozen dataclasses. Raises DomainError for values that none of its kind has."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)


M = TypeVar("M", bound=Message)


def shown(value: object) -> str:
    """A value from another endpoint in an error: one short line."""
    return legible(reprlib.repr(value))


class Unfit(ValueError):
    """A value that is not what its place wants. path: where it lies, from the outside in."""

    def __init__(self, got: object, want: str, text: str | None = None) -> None:
        """text: what to say in place of both."""
        super().__init__(text)
        self.got, self.want, self.text = got, want, text
        self.path: list[str] = []

    def __str__(self) -> str:
        """Made when it is asked for: unions try several types."""
        return f"got {shown(self.got)}; want {self.want}" if self.text is None else self.text

    def inside(self, place: str) -> "Unfit":
        """The same, seen from outside `place`."""
        self.path.insert(0, place)
        return self


@dataclass(frozen=True)
class Between:
    """A check of whole numbers."""

    least: int
    most: int

    def __call__(self, value: int) -> None:
        """Raise Unfit outside of the range."""
        if not self.least <= value <= self.most:
            raise Unfit(value, f"a whole number from {self.least} to {self.most}")


@dataclass(frozen=True)
class ShapeOf:
    """A check of shapes: few dimensions, so that their product is quickly known."""

    most: int
    least: int = 0

    def __call__(self, value: tuple[int, ...]) -> None:
        """Raise Unfit for another shape."""
        if len(value) > _MOST_DIMENSIONS or not all(self.least <= size <= self.most for size in value):
            raise Unfit(value, f"at most {_MOST_DIMENSIONS} sizes from {self.least} to {self.most}")


@dataclass(frozen=True)
class OneOf:
    """A check of names."""

    names: tuple[str, ...]

    def __call__(self, value: str) -> None:
        """Raise Unfit for any other name."""
        if value not in self.names:
            raise Unfit(value, f"one of {', '.join(self.names)}")


@dataclass(frozen=True)
class Matching:
    """A check of texts by a regular expression, and what it asks for."""

    pattern: str
    want: str

    def __call__(self, value: str) -> None:
        """Raise Unfit for another text."""
        if not re.fullmatch(self.pattern, value):
            raise Unfit(value, self.want)


@dataclass(frozen=True)
class Dims:
    """A check of tensors: their type and how many dimensions they have."""

    count: int
    dtype: torch.dtype

    def __call__(self, value: Tensor) -> None:
        """Raise Unfit for another tensor."""
        if value.ndim != self.count or value.dtype != self.dtype:
            raise Unfit((value.dtype, tuple(value.shape)), f"a tensor of {self.dtype} with {self.count} dimension(s)")


# -- out ------------------------------------------------------------------------------------------------------
def text_of(message: object, ordered: bool = False) -> str:
    """A message as JSON. ordered: equal ones give equal texts. Raises TypeError, ValueError for other contents."""
    return json.dumps(message, default=_packed, allow_nan=False, separators=(",", ":"), sort_keys=ordered)


def _packed(value: object) -> object:
    """What JSON does not know."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        found = {field.name.rstrip("_"): getattr(value, field.name) for field in dataclasses.fields(value)}
        return {NAME: type(value).__name__, **found}
    if not isinstance(value, Tensor):
        raise TypeError(f"a message holds JSON, dataclasses and integer tensors, not {type(value).__name__}")
    name = str(value.dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise TypeError(f"a message holds integer tensors, not {name}")
    return {_TENSOR: [name, list(value.shape), value.reshape(-1).tolist()]}


# -- in -------------------------------------------------------------------------------------------------------
def message_of(raw: bytes, kinds: tuple[type[M], ...], source: str, what: str = "message") -> M:
    """The message in `raw`, which must be of one of `kinds`. Raises TransportError that names its `source`."""
    text = f"control message from {source}"
    if sum(map(raw.count, (b"[", b"{", b","))) > _MOST_ITEMS:
        raise TransportError(f"{text}: got more than {_MOST_ITEMS} values; want fewer")
    try:
        value = json.loads(raw, parse_constant=_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise TransportError(f"{text} is malformed: {type(error).__name__}") from None
    name = value.get(NAME) if isinstance(value, dict) else None
    known: dict[str, object] = {kind.__name__: kind for kind in kinds}
    if not isinstance(name, str) or name not in known:
        raise TransportError(
            f"{text}: unknown {what} {shown(name)}; want {' or '.join(known)}: it runs another version"
        )
    try:
        found: M = _reader(known[name])(value)
    except Unfit as error:
        raise TransportError(f"{text}: {'.'.join([name, *error.path])}: {error}") from None
    except RecursionError:
        raise TransportError(f"{text} is malformed: too deep") from None
    return found


def _constant(name: str) -> NoReturn:
    raise ValueError(f"got {name}; want a number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"got {text[:40]}; want a finite number")
    return number


ReadValue = Callable[[object], Any]


@functools.cache
def _reader(hint: object) -> ReadValue:
    """What reads a value of a type."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _checked(_reader(inner[0]), inner[1:])
    if origin in (Union, types.UnionType):
        return _one_of(inner)
    if origin is dict:
        return functools.partial(_dict, _reader(inner[1]))
    if origin is tuple:
        if inner[-1] is Ellipsis:
            return functools.partial(_list, _reader(inner[0]))
        return functools.partial(_row, tuple(map(_reader, inner)))
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _fields(hint)
    if hint is object:
        return lambda value: value
    if hint is float:
        return _float
    if hint is Tensor:
        return _tensor
    if hint in _PLAIN:
        return functools.partial(_exactly, hint)
    raise TypeError(f"a message cannot hold {hint}")


_PLAIN: dict[object, str] = {bool: "true or false", int: "a whole number", str: "a text"}


def _exactly(kind: object, value: object) -> object:
    if type(value) is not kind:  # True is no number here
        raise Unfit(value, _PLAIN[kind])
    return value


def _float(value: object) -> float:
    try:
        number = float(value) if type(value) in (int, float) else math.nan  # type: ignore[arg-type]
    except OverflowError:
        number = math.nan
    if number != value:  # not a number, or a whole one between two floats
        raise Unfit(value, "a number that a float holds")
    return number


def _tensor(value: object) -> Tensor:
    """A public integer tensor, whose type, shape and data fit together."""
    packed = value.get(_TENSOR) if type(value) is dict and len(value) == 1 else None
    name, shape, data = packed if type(packed) is list and len(packed) == 3 else (None, None, None)
    dtype = _DTYPES.get(name) if type(name) is str else None
    if dtype is None or type(shape) is not list or type(data) is not list or len(shape) > _MOST_DIMENSIONS:
        raise Unfit(value, "an integer tensor")
    if not all(type(size) is int and 0 <= size < 1 << 31 for size in shape) or math.prod(shape) != len(data):
        raise Unfit((shape, len(data)), "a tensor of as many numbers as its shape says")
    if {type(number) for number in data} - {bool if dtype is torch.bool else int}:
        raise Unfit(value, f"a tensor of {name}")
    try:
        return torch.tensor(data, dtype=dtype).view(shape)
    except (RuntimeError, ValueError):  # numbers beyond its type
        raise Unfit(value, f"a tensor of {name}") from None


def _checked(reader: ReadValue, checks: tuple[Callable[[Any], None], ...]) -> ReadValue:
    def read(value: object) -> object:
        found = reader(value)
        for check in checks:
            check(found)
        return found

    return read


def _one_of(members: tuple[object, ...]) -> ReadValue:
    """A union: a dataclass is found by its name, anything else by trying."""
    empty = type(None) in members
    classes = [member for member in members if isinstance(member, type) and dataclasses.is_dataclass(member)]
    named = {member.__name__: _reader(member) for member in classes}
    others = [_reader(member) for member in members if member not in classes and member is not type(None)]

    def read(value: object) -> object:
        if value is None and empty:
            return None
        if named and type(value) is dict and type(name := value.get(NAME)) is str and name in named:
            return named[name](value)
        wants = [*named, *(["nothing"] if empty else [])]
        for reader in others:
            try:
                return reader(value)
            except Unfit as error:
                if error.path:  # it is of this type, and something in it is wrong
                    raise
                wants.append(error.want)
        raise Unfit(value, " or ".join(wants))

    return read


def _dict(reader: ReadValue, value: object) -> dict[str, object]:
    if type(value) is not dict:
        raise Unfit(value, "an object")
    try:
        return {key: reader(inner) for key, inner in value.items()}
    except Unfit as error:
        raise error.inside("items") from None


def _list(reader: ReadValue, value: object) -> tuple[object, ...]:
    if type(value) is not list:
        raise Unfit(value, "a list")
    return _items([reader] * len(value), value)


def _row(readers: tuple[ReadValue, ...], value: object) -> tuple[object, ...]:
    if type(value) is not list or len(value) != len(readers):
        raise Unfit(value, f"a list of {len(readers)}")
    return _items(readers, value)


def _items(readers: Sequence[ReadValue], values: list[object]) -> tuple[object, ...]:
    try:
        return tuple([reader(value) for reader, value in zip(readers, values, strict=True)])
    except Unfit as error:
        raise error.inside("items") from None


def _fields(kind: type) -> ReadValue:
    """A dataclass: every field, no other, and what the class itself refuses."""
    hints = typing.get_type_hints(kind, include_extras=True)
    readers = {field.name.rstrip("_"): (field.name, _reader(hints[field.name])) for field in dataclasses.fields(kind)}
    wanted = {NAME, *readers}

    def read(value: object) -> object:
        if type(value) is not dict or value.get(NAME) != kind.__name__:
            raise Unfit(value, f"a {kind.__name__}")
        if value.keys() != wanted:
            lost, surplus = sorted(wanted - value.keys()), sorted(value.keys() - wanted)
            text = f"missing field(s) {shown(lost)}, unknown field(s) {shown(surplus)}"
            raise Unfit(value, kind.__name__, text)
        found, name = {}, ""
        try:
            for name, (attribute, reader) in readers.items():
                found[attribute] = reader(value[name])
        except Unfit as error:
            raise error.inside(name) from None
        try:
            return kind(**found)
        except (DomainError, ConfigError) as error:
            raise Unfit(value, kind.__name__, legible(str(error)[:300])) from None

    return read
