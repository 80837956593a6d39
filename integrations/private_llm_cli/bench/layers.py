"""Works on one transformer layer: HuggingFace's own module at the parties, with random weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from private_llm.protocols.session import Session
from private_llm.tensor.fixed import Fixed
from private_llm.tensor.secret import SecretTensor
from private_llm_cli.bench.work import Shape, Work

if TYPE_CHECKING:
    from private_llm_hf.models.sparse_blocks import SparseBlock
    from private_llm_hf.sparsity.planned import PlannedSparsity
    from transformers import PreTrainedModel

Adapt = Callable[[dict[str, Tensor]], dict[str, Tensor]]
Forward = Callable[[nn.Module, Sequence[Tensor], Any, Tensor | None], Tensor]


def opt_layer(shape: Shape) -> Work:
    """A pre-norm ReLU decoder layer without a cache; batch x tokens x hidden x heads x feed-forward."""
    batch, tokens, hidden = shape[:3]
    causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()[None, None]
    return _layer("opt-layer", shape, "OPTModel", _opt(shape), ((batch, tokens, hidden),), causal, _opt_forward)


def opt_decode(shape: Shape) -> Work:
    """One new token through the same layer over a cache; batch x cached tokens x hidden x heads x feed-forward."""
    return _decode("opt-decode", shape, _opt(shape))


def sparse_decode(shape: Shape, planned: PlannedSparsity) -> Work:
    """The same with predictors that leave out what is planned, and are right: no other neuron is active."""
    import transformers
    from private_llm_hf.models.sparse_blocks import KEY, sparse_blocks

    config = _opt(shape)
    settings, _ = planned.applied(transformers.OPTModel, transformers.AutoConfig.for_model(**config))
    chosen = {block.name: _chosen(block) for block in sparse_blocks(settings) if block.kind == "ffn"}

    def adapt(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        for name, active in chosen.items():
            each = weights[f"{name}.bias"].numel() // len(active)
            weights[f"{name}.bias"] -= 30.0 * ~active.repeat_interleave(each)
            weights[f"{name}_predictor.fc2.weight"] *= 0.0
            weights[f"{name}_predictor.fc2.bias"] = active * 2.0 - 1.0
        return weights

    return _decode("opt-decode-sparse", shape, {**config, KEY: getattr(settings, KEY)}, adapt)


def _chosen(block: SparseBlock) -> Tensor:
    """Active units, as many as are budgeted and anywhere: bool [units]."""
    order = np.random.default_rng(5).permutation(block.units)
    return torch.from_numpy(order < block.budget)


def _decode(name: str, shape: Shape, config: dict[str, Any], adapt: Adapt | None = None) -> Work:
    batch, cached, hidden, heads, _ = shape
    past = (batch, heads, cached, hidden // heads)
    return _layer(name, shape, "OPTModel", config, ((batch, 1, hidden), past, past), None, _opt_forward, adapt)


def alone(kind: Literal["gpt2", "llama"], shape: Shape) -> Work:
    """One token through a decoder layer that attends to itself alone: what a step costs beside its cache.

    shape: hidden x heads x feed-forward.
    """
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
    return _layer(name, shape, class_name, config, ((1, 1, hidden),), None, forward)


def llama_layer(shape: Shape) -> Work:
    """A pre-norm gated decoder layer without a cache; batch x tokens x hidden x heads x feed-forward."""
    batch, tokens, hidden = shape[:3]
    causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()[None, None]
    return _layer("llama-layer", shape, "LlamaModel", _llama(shape), ((batch, tokens, hidden),), causal, _llama_forward)


def llama_decode(shape: Shape) -> Work:
    """One new token through the same layer over a cache; batch x cached tokens x hidden x heads x feed-forward."""
    batch, cached, hidden, heads, _ = shape
    past = (batch, heads, cached, hidden // heads)
    return _layer(
        "llama-decode", shape, "LlamaModel", _llama(shape), ((batch, 1, hidden), past, past), None, _llama_forward
    )


def bert_layer(shape: Shape) -> Work:
    """A post-norm GELU encoder layer; batch x tokens x hidden x heads x feed-forward."""
    batch, tokens, hidden, heads, wide = shape
    config = {
        "model_type": "bert", "hidden_size": hidden, "num_attention_heads": heads, "intermediate_size": wide,
        "num_hidden_layers": 1, "vocab_size": 4, "max_position_embeddings": 2, "hidden_act": "gelu",
    }  # fmt: skip
    return _layer("bert-layer", shape, "BertModel", config, ((batch, tokens, hidden),), None, _bert_forward)


def _opt(shape: Shape) -> dict[str, Any]:
    _, _, hidden, heads, wide = shape
    return {
        "model_type": "opt", "hidden_size": hidden, "num_attention_heads": heads, "ffn_dim": wide,
        "num_hidden_layers": 1, "vocab_size": 4, "max_position_embeddings": 2, "word_embed_proj_dim": hidden,
        "pad_token_id": 1, "activation_function": "relu",
    }  # fmt: skip


def _llama(shape: Shape) -> dict[str, Any]:
    _, tokens, hidden, heads, wide = shape
    return {
        "model_type": "llama", "hidden_size": hidden, "num_attention_heads": heads, "intermediate_size": wide,
        "num_hidden_layers": 1, "max_position_embeddings": tokens + 1, "vocab_size": 4, "bos_token_id": 0,
        "eos_token_id": 0,
    }  # fmt: skip


def _opt_forward(model: nn.Module, values: Sequence[Tensor], cache: Any, mask: Tensor | None) -> Tensor:  # noqa: ANN401
    from private_llm_hf.transformers_versions import CACHE

    layer = model.get_submodule("decoder.layers.0")
    if len(values) > 1:
        cache.update(values[1], values[2], 0)
    out: Tensor = layer(values[0], attention_mask=mask, **{CACHE: cache if len(values) > 1 else None})
    return out


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


def _bert_forward(model: nn.Module, values: Sequence[Tensor], cache: Any, mask: Tensor | None) -> Tensor:  # noqa: ANN401
    out: Tensor = model.get_submodule("encoder.layer.0")(values[0], attention_mask=mask)
    return out


def _layer(
    name: str, shape: Shape, class_name: str, config: dict[str, Any], inputs: tuple[Shape, ...], mask: Tensor | None,
    forward: Forward, adapt: Adapt | None = None,
) -> Work:  # fmt: skip
    """A work that runs `forward` on the one-layer model of `config`, its weights secret.

    Predictors that the configuration names are not part of the truth.
    """
    from private_llm_hf.party.model import build_party_model, empty_model

    shapes = {key: tuple(value.shape) for key, value in empty_model(config, class_name).named_parameters()}

    def prepare(session: Session, weights: Mapping[str, Fixed]) -> Callable[[Session, Sequence[Fixed]], Fixed]:
        model = build_party_model(config, class_name, dict(weights), session)

        def run(_: Session, values: Sequence[Fixed]) -> Fixed:
            wrapped = [SecretTensor(value) for value in values]
            out = forward(model, wrapped, model.new_cache(), mask)
            if not isinstance(out, SecretTensor):
                raise TypeError(f"{name}: the layer returned {type(out).__name__}")
            return out.to_fixed()

        return run

    def truth(values: Sequence[Tensor], weights: Mapping[str, Tensor]) -> Tensor:
        from transformers import DynamicCache

        own = {key: value for key, value in weights.items() if "_predictor." not in key}
        return forward(_plaintext(config, class_name, own), values, DynamicCache(), mask)

    return Work(name, shape, inputs, prepare, truth, (1.0,), weights=shapes, adapt=adapt)


def _plaintext(config: Mapping[str, Any], class_name: str, weights: Mapping[str, Tensor]) -> PreTrainedModel:
    """The same model in float64 with PyTorch's own attention."""
    import transformers

    values = dict(config)
    settings = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    settings._attn_implementation = "sdpa"
    model: PreTrainedModel = getattr(transformers, class_name)(settings).double().eval()
    model.load_state_dict(dict(weights), strict=True)
    return model
