"""Modules and values of a model in memory by the names that its class gives them, whatever stands around them.

A compiled module stands around the original, accelerate keeps weights elsewhere and brings them for each call,
parametrisations and pruning compute a weight when it is read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

_ACTIVATIONS = ("torch.nn.modules.activation", "transformers.activations")
"""Where activations are from of which another one may stand in a module, if it computes the same."""
_IN_TRAINING = (nn.Dropout, nn.Identity)
"""What computes nothing in evaluation."""
_WIDEST, _POINTS = 1e3, 20_001


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
    compiled = type(module).__module__.startswith("torch._dynamo.")
    original: nn.Module = module._orig_mod if compiled else module  # type: ignore[assignment]
    return original


def pairs(model: nn.Module, built: nn.Module) -> dict[str, tuple[nn.Module, nn.Module]]:
    """Modules of both by the names in `built`."""
    found = {name: (part(model, name), module) for name, module in built.named_modules(remove_duplicate=False)}
    return {name: (mine, module) for name, (mine, module) in found.items() if mine is not None}


def strange_modules(model: nn.Module, built: nn.Module) -> list[str]:
    """Modules of another class than in `built`, or that only one of them has, as "name (class, want class)".

    What is inside them is not listed. An activation may be another class of torch or transformers that computes the
    same. A list of layers may have more of the same kind, as the configuration says how many of them run.
    """
    found: dict[str, str] = {}
    for name, module in built.named_modules(remove_duplicate=False):
        mine = part(model, name)
        if name.startswith(tuple(f"{outer}." for outer in found)):
            continue
        if not _same_kind(mine, module):
            found[name] = f"{name or 'the model'} ({_called(_kind(mine))}, want {_called(_kind(module))})"
        elif mine is not None and isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            inside = {_kind(child) for child in module.children()}
            for own, child in mine.named_children():
                extra = own not in module._modules and (type(module) is nn.Sequential or _kind(child) not in inside)
                if extra:
                    found[f"{name}.{own}"] = f"{name}.{own} ({_called(_kind(child))}, want none)"
    return list(found.values())


def _same_kind(mine: nn.Module | None, wanted: nn.Module) -> bool:
    """Whether both are of one class, or of two that compute the same in evaluation."""
    first, second = _kind(mine), _kind(wanted)
    if mine is None or first is second:
        return first is second
    if first in _IN_TRAINING and second in _IN_TRAINING:
        return True
    kinds = (type(mine), type(wanted))
    if any(kind.__module__ not in _ACTIVATIONS for kind in kinds) or any(mine.parameters()) or any(wanted.parameters()):
        return False
    x = torch.linspace(-_WIDEST, _WIDEST, _POINTS, device="cpu").view(1, -1)
    return torch.allclose(mine(x), wanted(x), rtol=1e-6, atol=1e-6)


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
