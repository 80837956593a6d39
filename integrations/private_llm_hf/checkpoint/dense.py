"""A loaded model as its plain weights: quantised weights unpacked, adapters merged, or refused in one sentence.

An adapter beside a weight that is tied to another becomes part of its own copy of it, and the merged model is compared
with the adapted one before anybody uses it.
"""

import copy
import sys
import warnings
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from private_llm.errors import PatchMismatch
from private_llm_hf.checkpoint.given_parts import strange_modules, uncompiled
from private_llm_hf.checkpoint.own_code import refuse_own_code
from private_llm_hf.checkpoint.sample_inputs import difference, first_difference, outputs, recorded, sample_inputs
from private_llm_hf.checkpoint.weights import skeleton
from private_llm_hf.vision.network import Network

FOREIGN = (ImportError, ValueError, RuntimeError, TypeError, AttributeError, KeyError)
"""What transformers, peft and the packages of quantisers raise for a model that they cannot handle."""

TIED = "(?s).*tie(d|_word)"  # what peft warns of where adapters meet tied weights, which are separated before merging

_MERGED, _ROUNDED = 1e-4, 5e-2  # difference by merging, in parts of the largest output: in 32 bits, of 16-bit weights


def dense_model(model: nn.Module, owned: bool = False) -> nn.Module:
    """The model, or a copy with plain weights. owned: it need not be copied. Raises PatchMismatch for weights that
    cannot be plain, and for somebody's own hooks and methods on it, around it and on adapters.
    """
    refuse_own_code(model)
    model = _merged(unwrapped(model), owned)
    if isinstance(model, PreTrainedModel) and not isinstance(model, Network):
        plain = skeleton(type(model), without_quantisation(model.config))
        if getattr(model, "is_quantized", False) and strange_modules(model, plain):
            model = _dequantised(model, owned)
    return model


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside what torch.compile and data parallelism put around it."""
    while True:
        parallel = type(model) in (nn.DataParallel, nn.parallel.DistributedDataParallel)
        inner = model.module if parallel else uncompiled(model)
        if inner is model or not isinstance(inner, nn.Module):
            return model
        model = inner


def without_quantisation(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration of the same model with plain weights."""
    if getattr(config, "quantization_config", None) is None:
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
        mine: Any = model if owned else _copied(model)
        if adapted and not hasattr(mine.base_model, "merge_and_unload"):
            raise TypeError("it works on prompts or activations, which no weight can hold")
        base = mine.base_model.model if adapted else mine
        given = sample_inputs(base)
        wanted, calls = outputs(mine, given), recorded(mine, dict(base.named_modules()), given)
        _separate(base)
        off = any(getattr(layer, "disable_adapters", False) is True for layer in mine.modules())  # the base answers
        end = "unload" if off else "merge_and_unload"
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=TIED)
            plain = getattr(mine, end)() if adapted else _without_layers(mine)
    except FOREIGN as error:
        raise PatchMismatch(
            f"{kind}: its adapter cannot be merged into its weights ({first_line(error)}); patch the base model, or "
            "merge it yourself"
        ) from None
    if not isinstance(plain, nn.Module):
        raise PatchMismatch(f"{kind}: merging its adapter gave a {type(plain).__name__}; want a model")
    half = any(value.dtype in (torch.float16, torch.bfloat16) for value in plain.parameters())
    allowed = _ROUNDED if half else _MERGED
    found = difference(wanted, outputs(plain, given), allowed)
    if found is not None:
        where = first_difference(calls, recorded(plain, dict(plain.named_modules()), given), allowed)
        raise PatchMismatch(
            f"{kind}: with its adapter merged, '{where or kind}' computes something else than with the adapter beside "
            f"it ({found}); merge it yourself and patch the result, or leave that module out of the adapter"
        )
    return plain


def _copied(model: nn.Module) -> nn.Module:
    """A deep copy. Layers with tied adapters (`ensure_weight_tying`) keep views of them, which torch does not copy."""
    kept = [vars(module).get("kwargs") for module in model.modules()]
    tied = [each["tied_adapter"] for each in kept if isinstance(each, dict) and each.get("tied_adapter")]
    return copy.deepcopy(model, {id(view): view.detach() for views in tied for view in views.values()})


def _separate(model: nn.Module) -> None:
    """Give each layer with an adapter a weight of its own: merging into a tied one would change others, too."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    holders: dict[int, set[int]] = {}
    for module in model.modules():
        for weight in module._parameters.values():
            holders.setdefault(id(weight), set()).add(id(module))
    for layer in [module for module in model.modules() if isinstance(module, BaseTunerLayer)]:
        base = layer.get_base_layer()
        for own, weight in list(base._parameters.items()):
            if weight is not None and len(holders[id(weight)]) > 1:
                base._parameters[own] = nn.Parameter(weight.detach().clone(), requires_grad=False)


def _without_layers(model: nn.Module) -> nn.Module:
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
