"""A small model of the same class and settings as a large one, with random weights."""

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from transformers import PretrainedConfig, PreTrainedModel

from private_llm.errors import PatchMismatch
from private_llm_hf.checkpoint.dense import first_line
from private_llm_hf.checkpoint.weights import skeleton, stored_buffers

SIZES = {
    "hidden_size": 32, "n_embd": 32, "d_model": 32, "intermediate_size": 64, "ffn_dim": 64, "n_inner": 64, "d_ff": 64,
    "d_kv": 8, "embedding_size": 16, "head_dim": 8, "rotary_dim": 4, "decoder_ffn_dim": 64, "encoder_ffn_dim": 64,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 32, "kv_lora_rank": 16, "q_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 4, "v_head_dim": 8, "word_embed_proj_dim": 32,
    "input_embedding_size": 32, "output_embedding_size": 32, "mlp_dim": 64, "pooler_hidden_size": 32,
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "num_decoder_layers": 2, "encoder_layers": 2,
    "decoder_layers": 2, "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": 128, "max_position_embeddings": 64,
    "n_positions": 64, "max_seq_len": 64, "image_size": 16, "patch_size": 8, "num_experts": 8, "num_local_experts": 8,
    "n_routed_experts": 8, "sliding_window": 4, "window_size": 4,
    "vocab_size_per_layer_input": 128, "decoder_vocab_size": 128, "hidden_size_per_layer_input": 8,
}  # fmt: skip
"""Sizes by the names that families use; what a configuration does not have, or leaves out, stays so."""

_AT_MOST = {
    "num_experts_per_tok": 2, "moe_k": 2, "first_k_dense_replace": 1, "max_window_layers": 1, "n_group": 4,
    "topk_group": 2,
}  # fmt: skip
_DEPTHS = ("num_hidden_layers", "n_layer", "num_layers")
_LAYERS = (*_DEPTHS, "n_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")
_KEYS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
_STAGES = {"depths": 1, "layers": 1, "hidden_sizes": 16, "embed_dims": 16, "neck_hidden_sizes": 16}
"""Lists with an entry for each stage of a network of images: layers of each, or what widths are divided by."""
_STAGED_SIDE = 64  # pixels of images for networks in stages
_LARGEST = 60_000_000  # weights of a model that is tried at its real width, where no small one can be made
_LONGEST = 8  # layers, where a list says what each of them is


def miniature(model_class: type[PreTrainedModel], config: PretrainedConfig) -> PreTrainedModel:
    """A model of this class and settings but for sizes, random, float32. Raises PatchMismatch if it cannot be."""
    reasons = []
    for shrink in (small_config, _few_layers):
        try:
            small = shrink(config)
            weights = sum(value.numel() for value in skeleton(model_class, small).parameters())
            if weights <= _LARGEST:
                return filled(model_class(small).float().eval())
            reasons.append(f"{weights:,} weights")
        except Exception as error:  # noqa: BLE001 - a foreign class may raise anything for sizes that do not suit it
            reasons.append(f"{type(error).__name__}: {first_line(error)}")
    raise PatchMismatch(
        f"{model_class.__name__}: no test of this project compares this class with plaintext, and the library "
        f"could not make a small model of it to try first ({'; '.join(reasons)}); add its sizes to "
        "private_llm_hf/checkpoint/miniature.py"
    )


def small_config(config: PretrainedConfig) -> PretrainedConfig:
    """The same settings with small sizes."""
    return _built(config, _small(config.to_dict(), dict(config.attribute_map)))


def _few_layers(config: PretrainedConfig) -> PretrainedConfig:
    values = config.to_dict()
    wanted = {own: SIZES[name] for name, own in _own_names(values, dict(config.attribute_map)) if name in _LAYERS}
    return _built(config, _cut({**values, **wanted}, values))


def _built(config: PretrainedConfig, values: dict[str, Any]) -> PretrainedConfig:
    left_out = {"model_type", "transformers_version", "_name_or_path", "architectures", "dtype", "torch_dtype"}
    left_out |= {"out_features", "out_indices", "stage_names"}  # stages by name, which only backbones give out
    return type(config)(**{key: copy.deepcopy(value) for key, value in values.items() if key not in left_out})


def _own_names(values: Mapping[str, Any], renamed: Mapping[str, str]) -> list[tuple[str, str]]:
    """(usual name, name in this configuration) of sizes that it states."""
    sizes = {**SIZES, **_AT_MOST}
    if isinstance(values.get("depths"), list | tuple):  # a number of layers by another name is one of stages
        sizes = {name: size for name, size in sizes.items() if name not in _DEPTHS}
    return [(name, renamed.get(name, name)) for name in sizes if _is_size(values.get(renamed.get(name, name)))]


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _small(values: dict[str, Any], renamed: Mapping[str, str]) -> dict[str, Any]:
    made = dict(values)
    for name, own in _own_names(values, renamed):
        made[own] = min(values[own], _AT_MOST[name]) if name in _AT_MOST else SIZES[name]
    heads = next((values[own] for name, own in _own_names(values, renamed) if name in _HEADS), None)
    for name in _KEYS:
        own = renamed.get(name, name)
        if _is_size(values.get(own)):
            made[own] = 4 if values[own] == heads else 1 if values[own] == 1 else 2
    for name in _TOKENS:
        if isinstance(values.get(name), list) or (_is_size(values.get(name)) and values[name] >= SIZES["vocab_size"]):
            made[name] = _TOKENS.index(name)
    for name, value in values.items():
        if isinstance(value, dict) and "model_type" in value:
            made[name] = _small(value, {})
        if name in _STAGES and isinstance(value, list) and all(_is_size(size) for size in value):
            made[name] = [1 if _STAGES[name] == 1 else max(8, size // _STAGES[name] // 8 * 8) for size in value]
    if not isinstance(values.get("depths"), list | tuple):
        return _cut(made, values)
    # a network of images in stages: sides halve from stage to stage, so that they begin larger
    stated = {name for name in ("image_size", "patch_size", "embed_dim", "window_size") if _is_size(values.get(name))}
    made |= {"image_size": _STAGED_SIDE} if "image_size" in stated else {}
    made |= {"patch_size": values["patch_size"]} if "patch_size" in stated else {}
    if "embed_dim" in stated and isinstance(values.get("num_heads"), list | tuple):
        made["embed_dim"] = 8 * values["num_heads"][0]
        made["depths"] = [min(depth, 2) for depth in values["depths"]]  # windows are shifted in every second layer
        if {"window_size", "patch_size"} <= stated:  # the last stage is one window
            made |= {"window_size": 2, "image_size": values["patch_size"] * 2 ** len(values["depths"])}
    return _cut(made, values)


def _cut(made: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Lists with an entry for each layer, or for each frequency, as long as there are layers and frequencies now."""
    kinds = values.get("layer_types")
    count = next((made[name] for name in _DEPTHS if _is_size(made.get(name))), 0)
    before = next((values[name] for name in _DEPTHS if _is_size(values.get(name))), 0)
    if isinstance(kinds, list) and kinds:
        last = max(kinds.index(kind) for kind in set(kinds))
        count = max(count, min(last + 1, _LONGEST))
        for name in _DEPTHS:
            if _is_size(made.get(name)):
                made[name] = count
    for name, value in made.items():
        if isinstance(value, list) and len(value) == before and before > count > 0:
            made[name] = value[:count]
    width = made.get("head_dim") or SIZES["hidden_size"] // SIZES["num_attention_heads"]
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(made.get(name), dict):
            rope = made[name] = dict(made[name])
            share = rope.get("partial_rotary_factor") or made.get("partial_rotary_factor") or 1.0
            for factor in ("short_factor", "long_factor"):
                if isinstance(rope.get(factor), list):
                    rope[factor] = rope[factor][: max(1, int(width * share) // 2)]
    return made


def filled(model: PreTrainedModel) -> PreTrainedModel:
    """The model with random weights, of a size at which activations neither vanish nor grow, and none is special."""
    random = np.random.default_rng(7)

    def noise(value: Tensor, size: float) -> Tensor:
        return torch.from_numpy(random.normal(0.0, size, tuple(value.shape))).to(value.dtype)

    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                width = parameter[0].numel() if parameter.ndim == 4 else parameter.shape[-1]
                parameter.copy_(noise(parameter, 0.85 / max(width, 1) ** 0.5))
            else:
                parameter.add_(noise(parameter, 0.1))
        for module in model.modules():
            if isinstance(module, _BatchNorm) and module.running_mean is not None and module.running_var is not None:
                module.running_mean.add_(noise(module.running_mean, 0.1))
                module.running_var.add_(noise(module.running_var, 0.3).abs())
                continue
            for _, value in stored_buffers(module):
                value.add_(noise(value, 0.1))  # a weight by another name
    return model
