"""Works on one transformer layer that only papers' tables measure (see `bench.layers`)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import scripts_folder  # noqa: F401 - finds `bench`
import torch
from bench.layers import decode_work, layer_work, opt_config
from bench.work import Shape, Work
from torch import Tensor, nn

if TYPE_CHECKING:
    from private_llm_hf.models.sparse_blocks import SparseBlock
    from private_llm_hf.sparsity.price import PlannedSparsity


def sparse_decode(shape: Shape, planned: "PlannedSparsity") -> Work:
    """opt-decode with predictors that leave out what is planned, and are right: no other neuron is active."""
    import transformers
    from private_llm_hf.models.sparse_blocks import KEY, sparse_blocks

    config = opt_config(shape)
    settings, _ = planned.applied(transformers.OPTModel, transformers.AutoConfig.for_model(**config))
    chosen = {block.name: _chosen(block) for block in sparse_blocks(settings) if block.kind == "ffn"}

    def adapt(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        for name, active in chosen.items():
            each = weights[f"{name}.bias"].numel() // len(active)
            weights[f"{name}.bias"] -= 30.0 * ~active.repeat_interleave(each)
            weights[f"{name}_predictor.fc2.weight"] *= 0.0
            weights[f"{name}_predictor.fc2.bias"] = active * 2.0 - 1.0
        return weights

    return decode_work("opt-decode-sparse", shape, {**config, KEY: getattr(settings, KEY)}, adapt)


def _chosen(block: "SparseBlock") -> Tensor:
    """Active units, as many as are budgeted and anywhere: bool [units]."""
    order = np.random.default_rng(5).permutation(block.units)
    return torch.from_numpy(order < block.budget)


def alone(kind: Literal["gpt2", "llama"], shape: Shape) -> Work:
    """One token through a decoder layer, beside its cache: it sees itself alone. shape: hidden x heads x wide."""
    hidden, heads, wide = shape
    config = _llama((1, 1, *shape))
    if kind == "gpt2":
        config = {
            "model_type": kind, "n_embd": hidden, "n_head": heads, "n_inner": wide, "n_layer": 1, "n_positions": 2,
            "vocab_size": 4, "bos_token_id": 0, "eos_token_id": 0,
        }  # fmt: skip
    name, class_name, forward = {
        "gpt2": ("gpt2-alone", "GPT2Model", _gpt2_forward), "llama": ("llama-alone", "LlamaModel", _llama_forward)
    }[kind]  # fmt: skip
    return layer_work(name, shape, class_name, config, ((1, 1, hidden),), None, forward)


def llama_layer(shape: Shape) -> Work:
    """A pre-norm gated decoder layer without a cache; batch x tokens x hidden x heads x feed-forward."""
    batch, tokens, hidden = shape[:3]
    causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()[None, None]
    return layer_work(
        "llama-layer", shape, "LlamaModel", _llama(shape), ((batch, tokens, hidden),), causal, _llama_forward
    )


def llama_decode(shape: Shape) -> Work:
    """One new token through the same layer over a cache; batch x cached tokens x hidden x heads x feed-forward."""
    batch, cached, hidden, heads, _ = shape
    past = (batch, heads, cached, hidden // heads)
    return layer_work(
        "llama-decode", shape, "LlamaModel", _llama(shape), ((batch, 1, hidden), past, past), None, _llama_forward
    )


def _llama(shape: Shape) -> dict[str, Any]:
    _, tokens, hidden, heads, wide = shape
    return {
        "model_type": "llama", "hidden_size": hidden, "num_attention_heads": heads, "intermediate_size": wide,
        "num_hidden_layers": 1, "max_position_embeddings": tokens + 1, "vocab_size": 4, "bos_token_id": 0,
        "eos_token_id": 0,
    }  # fmt: skip


def _gpt2_forward(model: nn.Module, values: Sequence[Tensor], cache: Any, mask: Tensor | None) -> Tensor:  # noqa: ANN401
    out: Any = model.get_submodule("h.0")(values[0])
    return out if isinstance(out, Tensor) else out[0]


def _llama_forward(model: nn.Module, values: Sequence[Tensor], cache: Any, mask: Tensor | None) -> Tensor:  # noqa: ANN401
    from private_llm_hf.transformers_versions import CACHE

    layer, cached = model.get_submodule("layers.0"), 0
    if len(values) > 1:
        cache.update(values[1], values[2], 0)
        cached = values[1].shape[-2]
    positions = torch.arange(values[0].shape[1])[None] + cached
    turns = model.get_submodule("rotary_emb")(torch.zeros(1), positions)
    out: Any = layer(
        values[0], attention_mask=mask, position_embeddings=tuple(turn.to(values[0].dtype) for turn in turns),
        **{CACHE: cache if len(values) > 1 else None},
    )  # fmt: skip
    return out if isinstance(out, Tensor) else out[0]
