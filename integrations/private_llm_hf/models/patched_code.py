"""Code of transformers and torch.nn that this process has replaced: parties in other processes run the original."""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_OWN = tuple(str(Path(str(package.__file__)).parent) for package in (torch, transformers))
"""Where code of torch and transformers lies."""
_BASE = "transformers.modeling_utils"
"""Loading and saving, which parties do not do."""
_SHARED = frozenset({"transformers.masking_utils", "transformers.modeling_rope_utils", "transformers.pytorch_utils"})
"""Files whose functions models call."""


def patched_code(model: nn.Module) -> list[str]:
    """Dotted names of methods, functions and classes that somebody put in place of those of transformers and torch.nn.

    Looks at the classes of all modules, at the files that define them, and at the attention function.
    """
    kinds = {kind for module in model.modules() for kind in type(module).__mro__ if issubclass(kind, nn.Module)}
    homes = {kind.__module__ for kind in kinds if kind.__module__.startswith("transformers.")} - {_BASE} | _SHARED
    found = [n for kind in kinds if kind.__module__ in homes or _is_layer(kind) for n in patched_methods(kind)]
    found += [name for home in homes for name in _definitions(home)]
    found += [f"rotary positions {name!r}" for name, code in ROPE_INIT_FUNCTIONS.items() if not _is_own(code)]
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if attention in ALL_ATTENTION_FUNCTIONS.valid_keys() and not _is_own(ALL_ATTENTION_FUNCTIONS[attention]):
        found.append(f"attention function {attention!r}")
    return sorted(found)


def _is_layer(kind: type) -> bool:
    return kind.__module__.startswith("torch.nn.modules.") and kind is not nn.Module


def patched_methods(kind: type) -> Iterator[str]:
    """Dotted names of what somebody put in place of a class's own methods."""
    for name, value in vars(kind).items():
        if isinstance(value, types.FunctionType) and not (_is_own(value) and _is_of(kind, value)):
            yield f"{kind.__module__}.{kind.__name__}.{name}"


def _definitions(home: str) -> Iterator[str]:
    """What a file defines or imports, and its module holds in another form."""
    module = sys.modules[home]
    for name, origin in _names(home):
        value = getattr(module, name, None)
        foreign = isinstance(value, types.FunctionType) and not _is_own(value)
        if origin is not None:
            source = sys.modules.get(origin)
            if isinstance(value, types.FunctionType) and value is not getattr(source, name, value):
                yield f"{home}.{name}"
        elif foreign or (isinstance(value, type) and value.__module__ != home):
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


def _is_own(function: object) -> bool:
    """Whether code comes from a file of torch or transformers (dataclasses make methods from no file).

    Of what is wrapped the outermost counts: decorators of transformers are its own, those of others are not.
    """
    code = getattr(function, "__code__", None)
    return code is None or code.co_filename.startswith((*_OWN, "<"))


def _is_of(kind: type, function: types.FunctionType) -> bool:
    """Whether a method was written in its class, as far as its name says."""
    owner, dot, _ = inspect.unwrap(function).__code__.co_qualname.partition(".")
    written = f"{owner}{dot}" if "<locals>" not in function.__code__.co_qualname else ""
    return written in ("", owner, f"{kind.__name__}.")
