"""Modules and values of a model in memory by the names that its class gives them, whatever stands around them.

A compiled module stands around the original, accelerate keeps weights elsewhere and brings them for each call,
parametrisations and pruning compute a weight when it is read.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize


def part(model: nn.Module, path: str) -> nn.Module | None:
    """A module by name; None if there is none."""
    found: Any = model
    for own in path.split(".") if path else ():
        found = uncompiled(found)._modules.get(own)
        if found is None:
            return None
    return uncompiled(found)


def uncompiled(module: nn.Module) -> nn.Module:
    """The original of what torch.compile made."""
    original: nn.Module = getattr(module, "_orig_mod", module)
    return original


def pairs(model: nn.Module, built: nn.Module) -> dict[str, tuple[nn.Module, nn.Module]]:
    """Modules of both by the names in `built`."""
    found = {name: (part(model, name), module) for name, module in built.named_modules(remove_duplicate=False)}
    return {name: (mine, module) for name, (mine, module) in found.items() if mine is not None}


def strange_modules(model: nn.Module, built: nn.Module) -> list[str]:
    """Modules of another class than in `built`, or that are not there, as "name (class, want class)".

    What is inside them is not listed.
    """
    found: dict[str, str] = {}
    for name, module in built.named_modules(remove_duplicate=False):
        mine, wanted = _kind(part(model, name)), _kind(module)
        if mine is not wanted and not name.startswith(tuple(f"{outer}." for outer in found)):
            found[name] = f"{name} ({_called(mine)}, want {_called(wanted)})"
    return list(found.values())


def _kind(module: nn.Module | None) -> type | None:
    if module is None:
        return None
    kind: type = parametrize.type_before_parametrizations(module)
    return kind


def _called(kind: type | None) -> str:
    return "none" if kind is None else f"{kind.__module__}.{kind.__qualname__}"


def value(model: nn.Module, name: str) -> Tensor | None:
    """A weight or buffer by name, also one that accelerate has offloaded; None without one that has values."""
    path, _, own = name.rpartition(".")
    module = part(model, path)
    found = None if module is None else getattr(module, own, None)
    if not isinstance(found, Tensor):
        return None
    return _offloaded(model, name) if found.is_meta else found


def _offloaded(model: nn.Module, name: str) -> Tensor | None:
    """A weight as a hook of accelerate keeps it: that of its module, or of one that holds it."""
    words = name.split(".")
    for count in range(len(words) - 1, -1, -1):
        module, own = part(model, ".".join(words[:count])), ".".join(words[count:])
        hook = getattr(module, "_hf_hook", None)
        for each in getattr(hook, "hooks", (hook,)):
            kept = getattr(each, "weights_map", None)
            try:
                found = None if kept is None else kept[own]
            except KeyError:
                continue
            if isinstance(found, Tensor):
                return found
    return None
