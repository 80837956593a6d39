"""Plain module trees as data: what a network without a transformers configuration looks like to the parties.

A description is JSON: `modules` maps names to a type of a closed list and its constructor arguments, `steps` says
which module or function runs on which earlier values (value 0 is the input, step k makes value k), `head` is the name
of a last softmax, which is left to the client. No code travels; whoever receives a description checks all of it.
"""

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import nn

from private_llm.errors import DomainError, PatchMismatch
from private_llm.nn.activations import ACTIVATIONS
from private_llm_hf.models.handlers import kinds_of_users

NetworkDescription = dict[str, Any]
Check = Callable[[object], bool]

_LARGEST = 1 << 31
_STEPS = 100_000


# -- what constructor arguments may be ----------------------------------------------------------------------------
def _whole(value: object, least: int = 0) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < _LARGEST


def _count(value: object) -> TypeGuard[int]:
    return _whole(value, 1)


def _dim(value: object) -> bool:
    return _whole(value, -8) and value < 8


def _real(value: object) -> bool:
    return isinstance(value, float | int) and not isinstance(value, bool) and math.isfinite(value)


def _one_or_two(check: Check) -> Check:
    return lambda value: check(value) or (isinstance(value, list) and len(value) == 2 and all(map(check, value)))


def _setting(value: object) -> bool:
    """A constructor argument of a user's module."""
    listed = isinstance(value, list) and all(map(_setting, value))
    return value is None or isinstance(value, str | bool) or _real(value) or listed


_CHECKS: dict[str, Check] = {
    **dict.fromkeys(("in_channels", "out_channels", "groups", "in_features", "out_features", "num_features"), _count),
    **dict.fromkeys(("kernel_size", "stride", "dilation"), _one_or_two(_count)),
    **dict.fromkeys(
        ("bias", "affine", "elementwise_affine", "ceil_mode", "count_include_pad"),
        lambda value: isinstance(value, bool),
    ),
    **dict.fromkeys(("start_dim", "end_dim"), _dim),
    "normalized_shape": _count,
    "eps": _real,
    "padding": _one_or_two(_whole),
    "output_size": _one_or_two(lambda value: value is None or _count(value)),
    "dim": lambda value: value is None or _dim(value),
}
"""What an argument may be, by its name."""

_OPTIONS: dict[type[nn.Module], str] = {
    nn.Conv2d: "in_channels out_channels kernel_size stride padding dilation groups bias",
    nn.Linear: "in_features out_features bias",
    nn.BatchNorm2d: "num_features eps affine",
    nn.BatchNorm1d: "num_features eps affine",
    nn.LayerNorm: "normalized_shape eps elementwise_affine",
    nn.AvgPool2d: "kernel_size stride padding ceil_mode count_include_pad",
    nn.MaxPool2d: "kernel_size stride padding dilation ceil_mode",
    nn.AdaptiveAvgPool2d: "output_size",
    nn.Flatten: "start_dim end_dim",
    nn.Softmax: "dim",
    nn.LogSoftmax: "dim",
    **dict.fromkeys((nn.Dropout, nn.Dropout2d, nn.Identity), ""),
}
"""Module types and their constructor arguments, in the order in which functions that do the same take them."""


@dataclass(frozen=True)
class LayerKind:
    """A module type that may travel: its class and its constructor arguments, each with a check."""

    build: type[nn.Module]
    options: dict[str, Check]


KINDS: dict[str, LayerKind] = {
    kind.__name__: LayerKind(kind, {name: _CHECKS[name] for name in names.split()}) for kind, names in _OPTIONS.items()
} | {
    made.module.__name__: LayerKind(
        made.module, {name: allowed.__contains__ for name, allowed in made.settings.items()}
    )
    for made in ACTIVATIONS if made.module is not None
}  # fmt: skip
"""The closed list; classes with a handler of a user (`register_handler`) come after it."""


def kind_of(name: object) -> LayerKind | None:
    """A module type by name, if it may travel."""
    if not isinstance(name, str):
        return None
    own = kinds_of_users().get(name)
    return KINDS.get(name) if own is None else LayerKind(own[0], dict.fromkeys(own[1], _setting))


def kind_name(cls: type[nn.Module]) -> str | None:
    """The name of a module type that may travel."""
    names = {kind.build: name for name, kind in KINDS.items()}
    return names.get(cls) or next((name for name, (own, _) in kinds_of_users().items() if own is cls), None)


HEADS = ("Softmax", "LogSoftmax")  # what only the client may compute, as the last step


def _item(sizes: object, index: object) -> int:
    if not isinstance(sizes, tuple) or not isinstance(index, int):
        raise DomainError("network description: 'item' picks one size of a shape, nothing else")
    size: int = sizes[index]
    return size


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": operator.add, "mul": operator.mul, "cat": torch.cat, "flatten": torch.flatten,
    "reshape": lambda x, shape: x.reshape(*shape), "permute": torch.permute, "transpose": torch.transpose,
    "unsqueeze": torch.unsqueeze, "squeeze": torch.squeeze, "mean": torch.mean,
    "size": lambda x, dim=None: tuple(x.shape) if dim is None else x.shape[dim],
    "item": _item, "same": lambda x: x,
}  # fmt: skip
"""Functions between modules: sums, products and moves."""


# -- checking -------------------------------------------------------------------------------------------------------
def check_description(found: object) -> NetworkDescription:
    """The description itself, every part of it checked. Raises PatchMismatch saying what does not fit."""
    if not isinstance(found, dict) or set(found) != {"modules", "steps", "head"}:
        raise _wrong("want an object with modules, steps and head")
    modules, steps, head = found["modules"], found["steps"], found["head"]
    if not isinstance(modules, dict) or not isinstance(steps, list) or not 1 <= len(steps) <= _STEPS:
        raise _wrong("want modules by name and at least one step")
    for name, facts in modules.items():
        _check_module(name, facts)
    for place, step in enumerate(steps, 1):
        _check_step(place, step, modules)
    if head is not None and (head not in modules or steps[-1].get("module") != head):
        raise _wrong(f"the head {head!r} is not the last step")
    for step in steps:
        name = step.get("module")
        if name is not None and name != head and modules[name]["type"] in HEADS:
            raise _wrong(f"module {name!r}: {modules[name]['type']} may only be the last step, which the client does")
    return found


def _wrong(why: str) -> PatchMismatch:
    return PatchMismatch(f"network description: {why}")


def _check_module(name: object, facts: object) -> None:
    settings: dict[str, object] = facts if isinstance(facts, dict) else {}
    kind = kind_of(settings.get("type"))
    if not isinstance(name, str) or not name or kind is None:
        raise _wrong(
            f"module {name!r}: want a type of the list {', '.join((*KINDS, *kinds_of_users()))}; import a class of "
            "your own from the file that registers its handler, under the same name everywhere"
        )
    given = {key: value for key, value in settings.items() if key != "type"}
    if set(given) != set(kind.options):
        raise _wrong(f"module {name!r}: got arguments {sorted(given)}; want {sorted(kind.options)}")
    for key, value in given.items():
        if not kind.options[key](value):
            raise _wrong(f"module {name!r}: {key} may not be {value!r}")


def _check_step(place: int, step: object, modules: dict[str, Any]) -> None:
    if not isinstance(step, dict) or set(step) - {"module", "function", "args", "options"} or "args" not in step:
        raise _wrong(f"step {place} is not a call of a module or function")
    module, function = step.get("module"), step.get("function")
    if (module is None) == (function is None) or (module or function) not in (modules if module else FUNCTIONS):
        raise _wrong(f"step {place} calls neither one of the modules nor one of {', '.join(FUNCTIONS)}")
    if not isinstance(step["args"], list) or not isinstance(step.get("options", {}), dict):
        raise _wrong(f"step {place} has malformed arguments")
    _check_value(place, [step["args"], list(step.get("options", {}).values())], 3)


def _check_value(place: int, value: object, depth: int) -> None:
    """Numbers, flags and references to earlier values, in lists of limited depth."""
    if value is None or isinstance(value, bool) or _real(value):
        return
    if isinstance(value, list) and depth > 0:
        for item in value:
            _check_value(place, item, depth - 1)
    elif not (
        isinstance(value, dict) and set(value) == {"value"} and _whole(value["value"]) and value["value"] < place
    ):
        raise _wrong(f"step {place} takes something that is neither a number nor an earlier value")


def build_module(facts: dict[str, Any]) -> nn.Module:
    """A module of a checked description. Raises PatchMismatch if its kind's handler was taken away since."""
    options = {key: tuple(v) if isinstance(v, list) else v for key, v in facts.items() if key != "type"}
    kind = kind_of(facts["type"])
    if kind is None:
        raise _wrong(f"type {facts['type']!r} has no handler any more")
    return kind.build(**options)


def users_of(steps: list[Any]) -> dict[int, list[int]]:
    """Of each value the steps that take it, from step 1 on; one that takes it twice is there twice."""
    users: dict[int, list[int]] = {}
    for place, step in enumerate(steps, 1):
        for source in _named([step["args"], list(step.get("options", {}).values())]):
            users.setdefault(source, []).append(place)
    return users


def _named(value: object) -> list[int]:
    if isinstance(value, list):
        return [found for item in value for found in _named(item)]
    return [value["value"]] if isinstance(value, dict) else []
