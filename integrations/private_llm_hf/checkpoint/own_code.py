"""Code of the caller's own on a given model: hooks, methods of one object, classes around it. Parties run none of it.

It is looked for before wrappers are taken off and adapters are merged, because what sits on those goes with them. What
torch, transformers, accelerate and peft put on modules themselves changes nothing that they do not undo.
"""

import ast
import functools
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as every_module
from torch.nn.utils import parametrize, prune
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from private_llm.errors import PatchMismatch

_OWN = ("torch", "transformers")
_PACKAGES = (*_OWN, "accelerate", "peft")
_WRAPPERS = ("peft.", "torch._dynamo.", "torch.nn.parallel.")  # of classes that are taken off before parties build
_ALSO_RUN = ("_compiled_call_impl", "_loss_function")  # run by modules if one is set, in place of no method


def refuse_own_code(model: nn.Module) -> None:
    """Raise PatchMismatch, with the module's name, for code of the caller's that parties would not run.

    That is: forward hooks, methods replaced on one object, subclasses of wrappers and adapters, modules that torch.jit
    has compiled. A `forward` that was replaced on a module which stays in the model may pass: see `replaced_forwards`.
    """
    hooks = (*every_module._global_forward_hooks.values(), *every_module._global_forward_pre_hooks.values())
    if any(map(of_user, hooks)):
        raise PatchMismatch(
            "patch: a forward hook for all modules is registered in this process, and parties do not run it; remove it"
        )
    lost = dict(_taken_off(model))
    core = {name for kind in map(type, model.modules()) if _is_of(kind, ("transformers.",)) for name in dir(kind)}
    for name, module in model.named_modules():
        called, kind = name or type(model).__name__, parametrize.type_before_parametrizations(module)
        if isinstance(module, torch.jit.ScriptModule):
            raise PatchMismatch(
                f"patch: '{called}' was compiled by torch.jit, which fixes its code; patch the original"
            )
        own_hooks = filter(of_user, (*module._forward_hooks.values(), *module._forward_pre_hooks.values()))
        if not all(map(_prunes, own_hooks)):
            raise PatchMismatch(f"patch: '{called}' has a forward hook, which parties do not run; remove it")
        moving = getattr(module, "_hf_hook", None)  # accelerate's own way of hooks
        if not all(is_own_kind(type(hook)) for hook in (moving, *getattr(moving, "hooks", ())) if hook is not None):
            raise PatchMismatch(f"patch: '{called}' has a hook (_hf_hook) that parties do not run; remove it")
        if id(module) in lost and not is_own_kind(kind):
            raise PatchMismatch(
                f"patch: '{called}' is of a class of its own ({kind.__qualname__}) around or beside a part of the "
                "model, and parties run that part alone; patch the module inside, or use the class that it extends"
            )
        for own in _replaced(module, id(module) in lost, core):
            raise PatchMismatch(
                f"patch: '{called}.{own}' was replaced on this one object, and parties and the private model run "
                "the class's own; remove it (del), or call it on the private model"
            )


def replaced_forwards(model: nn.Module) -> list[str]:
    """Modules whose forward a user replaced on the object, or within what accelerate or a compiler put around it."""
    return [name or type(model).__name__ for name, module in model.named_modules() if _has_own_forward(module)]


def of_user(code: Any) -> bool:  # noqa: ANN401 - a hook or a method
    """Whether code, or what it wraps, is of somebody else than torch, transformers, accelerate and peft."""
    return any(map(_is_foreign, _around(code, None)))


def is_own_kind(kind: type) -> bool:
    """Whether a class is one that torch, transformers, accelerate or peft define under its name."""
    home = sys.modules.get(kind.__module__)
    return _is_of(kind, tuple(f"{name}." for name in _PACKAGES)) and getattr(home, kind.__name__, None) is kind


def _is_of(kind: type, homes: tuple[str, ...]) -> bool:
    return f"{kind.__module__}.".startswith(homes)


def _taken_off(module: nn.Module, beside: bool = False) -> Iterator[tuple[int, nn.Module]]:
    """Wrappers, layers with adapters and all that these hold beside the layer itself."""
    adapted = any(_is_of(kind, _WRAPPERS) for kind in type(module).__mro__)
    if adapted or beside:
        yield id(module), module
    for name, child in module.named_children():
        yield from _taken_off(child, beside or (adapted and "base_layer" in module._modules and name != "base_layer"))


def _replaced(module: nn.Module, lost: bool, core: set[str]) -> Iterator[str]:
    """Methods that a user put on one object; of wrappers also those that the model inside has."""
    for own, found in vars(module).items():
        shadows = callable(getattr(type(module), own, None)) or own in _ALSO_RUN or (lost and own in core)
        if own != "forward" and shadows and isinstance(found, Callable) and of_user(found):  # type: ignore[arg-type]
            yield own
    if lost and _has_own_forward(module):
        yield "forward"
    if parametrize.is_parametrized(module):  # its class is its own, so whoever changes that changes one object
        for own, found in vars(type(module)).items():
            if isinstance(found, types.FunctionType) and of_user(found):
                yield own


def _has_own_forward(module: nn.Module) -> bool:
    held = vars(module)
    found = (held[own] for own in ("forward", "_old_forward") if own in held)
    return any(_is_foreign(code) for each in found for code in _around(each, type(module).forward))


def _prunes(hook: object) -> bool:
    """Whether a hook only multiplies a weight with a mask, which somebody's own method of pruning made before."""
    base, kind = prune.BasePruningMethod, type(hook)
    return issubclass(kind, base) and kind.__call__ is base.__call__ and kind.apply_mask is base.apply_mask


def _around(code: Any, of_class: object) -> Iterator[Any]:  # noqa: ANN401 - a function, method or partial
    """Functions around that of the class, from the outermost; all of them if it is not within."""
    while code is not None:
        function = getattr(code, "__func__", code)
        if function is of_class:
            return
        yield from _around(function.func, of_class) if isinstance(function, functools.partial) else (function,)
        code = getattr(function, "__wrapped__", getattr(function, "_torchdynamo_orig_callable", None))


def _is_foreign(function: Any, packages: tuple[str, ...] = _PACKAGES) -> bool:  # noqa: ANN401 - a callable
    """functools.wraps gives a function another's `__module__`; its globals stay those of the file that it is from."""
    home = getattr(function, "__globals__", {}).get("__name__") or getattr(function, "__module__", None)
    return str(home or type(function).__module__).partition(".")[0] not in packages


# -- code of transformers and torch.nn that this process has replaced: parties in other processes run the original -----
_BASE = "transformers.modeling_utils"  # loading and saving, which parties do not do
_SHARED = frozenset({"transformers.masking_utils", "transformers.modeling_rope_utils", "transformers.pytorch_utils"})
"""Files whose functions models call."""


def patched_code(model: nn.Module) -> list[str]:
    """Dotted names of methods, functions and classes that somebody put in place of those of transformers and torch.nn.
    Looks at the classes of all modules, at the files that define them, and at the attention function.
    """
    kinds = {kind for module in model.modules() for kind in type(module).__mro__ if issubclass(kind, nn.Module)}
    homes = {kind.__module__ for kind in kinds if kind.__module__.startswith("transformers.")} - {_BASE} | _SHARED
    layers = {kind for kind in kinds if kind.__module__.startswith("torch.nn.modules.")} - {nn.Module}
    found = [n for kind in kinds if kind.__module__ in homes or kind in layers for n in patched_methods(kind)]
    found += [name for home in homes for name in _definitions(home)]
    found += [f"rotary positions {name!r}" for name, code in ROPE_INIT_FUNCTIONS.items() if _is_foreign(code, _OWN)]
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if attention in ALL_ATTENTION_FUNCTIONS.valid_keys() and _is_foreign(ALL_ATTENTION_FUNCTIONS[attention], _OWN):
        found.append(f"attention function {attention!r}")
    return sorted(found)


def patched_methods(kind: type) -> Iterator[str]:
    """Dotted names of what somebody put in place of a class's own methods."""
    for name, value in vars(kind).items():
        if isinstance(value, types.FunctionType) and (_is_foreign(value, _OWN) or not _written_in(kind, value)):
            yield f"{kind.__module__}.{kind.__name__}.{name}"


def _definitions(home: str) -> Iterator[str]:
    """What a file defines or imports, and its module holds in another form."""
    module = sys.modules[home]
    for name, origin in _names(home):
        value = getattr(module, name, None)
        function = isinstance(value, types.FunctionType)
        if origin is not None:
            changed = function and value is not getattr(sys.modules.get(origin), name, value)
        else:
            changed = (function and _is_foreign(value, _OWN)) or (isinstance(value, type) and value.__module__ != home)
        if changed:
            yield f"{home}.{name}"


@functools.cache
def _names(home: str) -> tuple[tuple[str, str | None], ...]:
    """Names of a file's functions and classes, and of those that it imports under their own name, with where from."""
    found: list[tuple[str, str | None]] = []
    for node in ast.parse(inspect.getsource(sys.modules[home])).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.append((node.name, None))
        elif isinstance(node, ast.ImportFrom):
            origin = importlib.util.resolve_name("." * node.level + (node.module or ""), home.rpartition(".")[0])
            found += [(name.name, origin) for name in node.names if name.asname is None]
    return tuple(found)


def _written_in(kind: type, function: types.FunctionType) -> bool:
    """Whether a method was written in its class, as far as its name says."""
    owner, dot, _ = inspect.unwrap(function).__code__.co_qualname.partition(".")
    written = f"{owner}{dot}" if "<locals>" not in function.__code__.co_qualname else ""
    return written in ("", owner, f"{kind.__name__}.")
