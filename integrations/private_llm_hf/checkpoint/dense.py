"""A loaded model as its plain weights: quantised weights unpacked, adapters merged, or refused in one sentence.

Parties build a model from its class and configuration. What a model does beside them (layers that were put in the
place of others) they cannot know, so a model whose modules are not those of its class is refused by their names.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from private_llm.errors import PatchMismatch
from private_llm_hf.checkpoint.weights import skeleton
from private_llm_hf.vision.network import Network

FOREIGN = (ImportError, ValueError, RuntimeError, TypeError, AttributeError, KeyError)
"""What transformers, peft and the packages of quantisers raise for a model that they cannot handle."""
_SHOWN = 5


def dense_model(model: nn.Module, owned: bool = False) -> nn.Module:
    """The model itself if its weights are plain, else a copy with plain ones.

    owned: nobody else uses the model, so it need not be copied. Raises PatchMismatch for what cannot be made plain.
    """
    model = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    model = _merged(model, owned)
    if isinstance(model, PreTrainedModel) and not isinstance(model, Network):
        if getattr(model, "is_quantized", False) and _replaced(model):
            model = _dequantised(model, owned)
        _check_modules(model)
    return model


def quantisation(config: PretrainedConfig) -> object:
    """What a configuration says of quantised weights; None if nothing."""
    found: object = getattr(config, "quantization_config", None)
    return found


def without_quantisation(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration of the same model with plain weights."""
    if quantisation(config) is None:
        return config
    plain = copy.deepcopy(config)
    del plain.quantization_config
    return plain


def first_line(error: Exception) -> str:
    """An error of another package, short."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(". ") if lines else type(error).__name__


# -- adapters ---------------------------------------------------------------------------------------------------
def _merged(model: nn.Module, owned: bool) -> nn.Module:
    """Adapters in the weights that they change. Only a process that imported peft can hold a model with some."""
    peft: Any = sys.modules.get("peft")
    if peft is None:
        return model
    adapted = isinstance(model, peft.PeftModel | peft.PeftMixedModel)
    if not adapted and not getattr(model, "_hf_peft_config_loaded", False):
        return model
    kind = type(model).__name__
    try:
        mine: Any = model if owned else copy.deepcopy(model)
        if adapted and not hasattr(mine.base_model, "merge_and_unload"):
            raise TypeError("it works on prompts or activations, which no weight can hold")
        end = "unload" if _disabled(mine) else "merge_and_unload"
        plain = getattr(mine, end)() if adapted else _unwrapped(mine)
    except FOREIGN as error:
        raise PatchMismatch(
            f"{kind}: its adapter cannot be merged into its weights ({first_line(error)}); patch the base model, or "
            "merge it yourself"
        ) from None
    if not isinstance(plain, nn.Module):
        raise PatchMismatch(f"{kind}: merging its adapter gave a {type(plain).__name__}; want a model")
    return plain


def _disabled(model: nn.Module) -> bool:
    """Whether the adapters of a peft model are switched off, so that the base model answers."""
    return any(getattr(layer, "disable_adapters", False) is True for layer in model.modules())


def _unwrapped(model: nn.Module) -> nn.Module:
    """A model that transformers' own add_adapter or load_adapter changed: each layer with its adapter merged."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, BaseTunerLayer)}
    for name, layer in layers.items():
        if not layer.disable_adapters:
            layer.merge(safe_merge=True)
        elif layer.merged:
            layer.unmerge()
        model.set_submodule(name, layer.get_base_layer())
    return model


# -- quantised weights --------------------------------------------------------------------------------------------
def _dequantised(model: PreTrainedModel, owned: bool) -> PreTrainedModel:
    """Weights that transformers' quantiser unpacks."""
    method = getattr(model, "quantization_method", "unknown")
    try:
        mine: Any = model if owned else copy.deepcopy(model)
        with torch.no_grad():
            plain: PreTrainedModel = mine.dequantize()
    except FOREIGN as error:
        raise PatchMismatch(
            f"{type(model).__name__} is quantised ({getattr(method, 'value', method)}), and transformers cannot unpack "
            f"it ({first_line(error)}); load the model's checkpoint in float or half precision"
        ) from None
    return plain


def _check_modules(model: PreTrainedModel) -> None:
    """Raises PatchMismatch naming modules that its class would not build."""
    found = _replaced(model)
    if found:
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise PatchMismatch(
            f"patch: {len(found)} module(s) of this {type(model).__name__} are not those of its class: "
            f"{', '.join(found[:_SHOWN])}{more}; the parties build it from its configuration alone, so load it without "
            "quantisation, merge its adapters, or undo the change"
        )


def _replaced(model: PreTrainedModel) -> list[str]:
    """Modules of another class than the model's class builds, or of another name; what is inside them is not listed."""
    plain = skeleton(type(model), without_quantisation(model.config))
    built = {name: type(module) for name, module in plain.named_modules()}
    mine = {name: type(module) for name, module in model.named_modules()}
    found: dict[str, str] = {}
    for name in [*mine, *(name for name in built if name not in mine)]:
        if mine.get(name) is not built.get(name) and not name.startswith(tuple(f"{outer}." for outer in found)):
            found[name] = f"{name} ({_called(mine.get(name))}, want {_called(built.get(name))})"
    return list(found.values())


def _called(kind: type | None) -> str:
    return "none" if kind is None else f"{kind.__module__}.{kind.__qualname__}"
