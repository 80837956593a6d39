"""Modules and values of a model in memory by the names that its class gives them, whatever stands around them.

A compiled module stands around the original, accelerate keeps weights elsewhere and brings them for each call,
parametrisations and pruning compute a weight when it is read.
"""

import functools
import inspect
import types
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize
from transformers import PretrainedConfig, PreTrainedModel

from private_llm.errors import PatchMismatch
from private_llm_hf.checkpoint.model_spec import sent_values
from private_llm_hf.models.architectures import caches

_ACTIVATIONS = ("torch.nn.modules.activation", "transformers.activations")  # of which others may stand in, if equal
_IN_TRAINING = (nn.Dropout, nn.Identity)  # what computes nothing in evaluation
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
    """Modules of another class than in `built`, or in one of both, as "name (class, want class)", without their parts.
    Activations may be other classes that compute the same, lists of layers longer.
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
    return None if module is None else parametrize.type_before_parametrizations(module)


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


# -- what modules hold beside weights: buffers, settings and configurations -------------------------------------------
# A short text does not show a window, numbers of positions beyond it, or the index of a cache, so these are compared.
_OF_TRAINING = (
    "training", "gradient_checkpointing", "activation_checkpointing", "name_or_path", "warnings_issued",
    "all_tied_weights_keys",
)  # fmt: skip
"""Attributes of modules that change nothing in evaluation."""

_SIZES = (
    "vocab_size", "vocab_size_per_layer_input", "num_embeddings", "padding_idx", "in_features", "out_features", "nf",
    "nx",
)  # fmt: skip
"""Attributes that say what shapes of weights say, or only which gradients are whose."""

_OF_THE_WHOLE = (
    "vocab_size", "tie_word_embeddings", "pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id",
    "forced_bos_token_id", "forced_eos_token_id", "use_cache", "return_dict", "output_hidden_states",
    "output_attentions", "id2label", "label2id", "problem_type", "quantization_config",
)  # fmt: skip
"""Settings that few modules read: a copy that a module holds may be older where its class does not name them."""

ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")
"""Ways of transformers to compute the same attention."""

_PLAIN = (int, float, complex, str, types.NoneType, torch.dtype, torch.device)
_MISSING = object()


# -- buffers ----------------------------------------------------------------------------------------------------------
def check_buffers(model: PreTrainedModel, built: PreTrainedModel) -> None:
    """Raise PatchMismatch for buffers other than those of the configuration; `built` gets the model's own precision."""
    device = next(built.parameters()).device
    for path, module in built.named_modules(remove_duplicate=False):
        if isinstance(module, _BatchNorm):
            continue
        for own, wanted in module._buffers.items():
            name = _joined(path, own)
            found = value(model, name)
            if wanted is None and found is None:
                continue
            if wanted is None or found is None or not _same_buffer(found, wanted):
                raise PatchMismatch(
                    f"patch: buffer '{name}' is not what the model's configuration makes it, from which the parties "
                    "build it; undo the change, or change the configuration and load the model again"
                )
            module._buffers[own] = found.to(device)


def _same_buffer(found: Tensor, wanted: Tensor) -> bool:
    """Whether a buffer is the other, or what `half()` or `bfloat16()` left of it."""
    found = found.cpu()
    if found.shape != wanted.shape:
        return False
    if not wanted.is_floating_point():
        return torch.equal(found, wanted.to(found.dtype))
    rounded = [wanted.to(dtype).float() for dtype in (torch.float32, torch.float16, torch.bfloat16)]
    return any(torch.allclose(found.float(), each, rtol=1e-6, atol=0.0, equal_nan=True) for each in rounded)


# -- settings: eps, scaling, windows, functions -----------------------------------------------------------------------
def check_settings(model: PreTrainedModel, built: PreTrainedModel) -> None:
    """Raise PatchMismatch for settings of modules (eps, scaling, windows), functions and configurations that differ.
    Some modules change theirs in a call, so both should have computed the same inputs before.
    """
    ignored = {*_OF_TRAINING, *_SIZES} | (set() if caches(model.config) else {"layer_idx"})
    for path, (mine, module) in pairs(model, built).items():
        if isinstance(module, nn.Dropout):
            continue
        for own, wanted in vars(module).items():
            if own.startswith("_") or "drop" in own or own in ignored:
                continue
            found = getattr(mine, own, _MISSING)
            if not _same(found, wanted):
                _differs(_joined(path, own), found, wanted)
    _check_configurations(model, built)


def _same(found: Any, wanted: Any) -> bool:  # noqa: ANN401 - anything that a module may hold
    """Whether a setting is the class's; True for what is none (caches, modules, what is compared elsewhere)."""
    if isinstance(wanted, tuple | list):
        alike = isinstance(found, tuple | list) and len(found) == len(wanted)
        return alike and all(map(_same, found, wanted))
    if isinstance(wanted, dict) and isinstance(found, dict):
        if any(isinstance(item, Tensor) for item in found.values()):  # what was computed once
            return True
        return set(found) == set(wanted) and all(_same(found[k], wanted[k]) for k in wanted)
    if isinstance(wanted, functools.partial):
        parts = ("func", "args", "keywords")
        return isinstance(found, functools.partial) and all(_same(getattr(found, p), getattr(wanted, p)) for p in parts)
    if isinstance(wanted, types.FunctionType):  # the same code, with the same values around it
        alike = isinstance(found, types.FunctionType) and found.__code__ is wanted.__code__
        return alike and _same(_around(found), _around(wanted))
    if isinstance(wanted, types.BuiltinFunctionType | type):
        return found is wanted
    if isinstance(wanted, types.MethodType):
        return isinstance(found, types.MethodType) and found.__func__ is wanted.__func__
    if isinstance(found, Tensor) and (wanted is None or isinstance(wanted, Tensor)):
        cached = wanted is None and found.numel() != 1  # a table that was made in a call
        return cached or (wanted is not None and not wanted.is_meta and _same_buffer(found, wanted))
    if isinstance(wanted, _PLAIN):
        return found is not _MISSING and bool(found == wanted) and isinstance(found, str) == isinstance(wanted, str)
    return found is not _MISSING


def _around(function: types.FunctionType) -> list[object]:
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    return [cells, function.__defaults__ or (), function.__kwdefaults__ or {}]


# -- configurations ---------------------------------------------------------------------------------------------------
def _check_configurations(model: PreTrainedModel, built: PreTrainedModel) -> None:
    whole, read = sent_values(model.config), sent_values(built.config)
    corrected = {key: each for key, each in whole.items() if each != read.get(key)}
    seen = set()
    for path, (mine, module) in pairs(model, built).items():
        for own, wanted in vars(module).items():
            found = getattr(mine, own, None)
            if not isinstance(wanted, PretrainedConfig) or found is model.config:
                continue
            if not isinstance(found, PretrainedConfig):
                _differs(_joined(path, own), found, wanted)
            if (id(found), id(wanted), type(mine)) in seen:
                continue
            seen.add((id(found), id(wanted), type(mine)))
            name = _joined(path, own)
            said, asked = sent_values(found), sent_values(wanted)
            for key in sorted({*said, *asked}):
                here, there = said.get(key, _MISSING), asked.get(key, _MISSING)
                if here == there or (key in _OF_THE_WHOLE and not _reads(type(mine), key)):
                    continue
                if key not in corrected or corrected[key] != here:
                    _differs(f"{name}.{key}", here, there)
            way = found._attn_implementation
            if way not in (None, *ATTENTION, model.config._attn_implementation):
                _differs(f"{name}._attn_implementation", way, wanted._attn_implementation)


def _reads(kind: type, key: str) -> bool:
    """Whether methods of a class, or of one of transformers' models that it extends, name a setting."""
    homes = [base for base in kind.__mro__ if base.__module__.startswith("transformers.models.")]
    methods = [
        inspect.unwrap(found).__code__
        for base in homes
        if not base.__name__.endswith("PreTrainedModel")
        for own, found in vars(base).items()
        if isinstance(found, types.FunctionType) and own != "__init__"
    ]
    return any(key in code.co_names or key in code.co_consts for code in methods)


def _differs(name: str, found: object, wanted: object) -> NoReturn:
    raise PatchMismatch(
        f"patch: '{name}' is {_short(found)} here, and {_short(wanted)} by the model's configuration, from which the "
        "parties build it; set it back, or change the configuration of the whole model and load it again"
    )


def _short(found: object) -> str:
    if found is _MISSING:
        return "missing"
    return f"{found:g}" if type(found) is float else getattr(found, "__name__", None) or str(found)[:80]


def _joined(path: str, own: str) -> str:
    return f"{path}.{own}" if path else own
