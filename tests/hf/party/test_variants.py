"""Switches of the architectures that change their forward: norms, residuals, heads, positions, activations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers as tr

import tests.hf.tiny as tiny
from tests.hf.party.parties import LOGIT_ERROR, error, ids, private_twin, tokens
from tests.tensor.secrets import plain_session

DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "opt_350m": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 32}),
    "opt_bare": ("opt", {"enable_bias": False, "layer_norm_elementwise_affine": False}),
    "opt_gelu": ("opt", {"activation_function": "gelu"}),
    "gpt2_layer_scale": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "gpt2_gelu_fast": ("gpt2", {"activation_function": "gelu_fast"}),
    "gpt2_quick_gelu": ("gpt2", {"activation_function": "quick_gelu"}),
    "neox_serial": ("gpt_neox", {"use_parallel_residual": False}),
    "neox_full_rope": ("gpt_neox", {"partial_rotary_factor": 1.0}),
    "llama_bias_tied": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama_one_kv_head": ("llama", {"num_key_value_heads": 1}),
    "llama_rope3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "llama_odd_heads": ("llama", {"hidden_size": 72, "num_attention_heads": 6, "num_key_value_heads": 3}),
    "mistral_short_window": ("mistral", {"sliding_window": 3}),
    "qwen2_window": ("qwen2", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}),
    "gemma3_short_window": ("gemma3_text", {"sliding_window": 3, "query_pre_attn_scalar": 24}),
    "falcon_old": ("falcon", {"multi_query": False, "parallel_attn": False, "bias": True}),
    "falcon_new": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon_alibi": ("falcon", {"alibi": True}),
    "bloom_post_residual": ("bloom", {"apply_residual_connection_post_layernorm": True}),
    "bloom_six_heads": ("bloom", {"hidden_size": 72, "n_head": 6}),
}


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", DECODERS)
def test_decoder_variants_with_cache(name: str) -> None:
    base, changes = DECODERS[name]
    model, session = tiny.build(base, **changes), plain_session()
    party = private_twin(model, session)
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[1, :2] = 0
    cache, plain_cache = party.new_cache(), None
    for step, here in enumerate((ids(2, 6), ids(2, 1), ids(2, 1, seed=3))):
        if step:
            mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
        public = {"attention_mask": mask}
        if base != "bloom":
            public["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)[:, -here.shape[1] :]
        plain = model(input_ids=here, past_key_values=plain_cache, use_cache=True, **public)
        plain_cache = plain.past_key_values
        embeds = party.get_input_embeddings()(tokens(session, here))
        out = party(inputs_embeds=embeds, past_key_values=cache, return_dict=True, **public)
        assert error(out.logits, plain.logits, mask[:, -here.shape[1] :]) <= LOGIT_ERROR


ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert_gelu_new": ("bert", {"hidden_act": "gelu_new"}),
    "bert_relu": ("bert", {"hidden_act": "relu"}),
    "modernbert_all_global": ("modernbert", {"global_attn_every_n_layers": 1}),
    "modernbert_bias": ("modernbert", {"norm_bias": True, "attention_bias": True, "mlp_bias": True}),
    "distilbert_sinusoids": ("distilbert", {"sinusoidal_pos_embds": True}),
}


@pytest.mark.parametrize("name", ENCODERS)
def test_encoder_variants(name: str) -> None:
    base, changes = ENCODERS[name]
    model, session = tiny.build(base, **changes), plain_session()
    party = private_twin(model, session)
    text, mask = ids(2, 12), torch.ones(2, 12, dtype=torch.long)
    mask[0, 9:] = 0
    embeds = party.get_input_embeddings()(tokens(session, text))
    out = party(inputs_embeds=embeds, attention_mask=mask, output_hidden_states=True, return_dict=True)
    plain = model(input_ids=text, attention_mask=mask, output_hidden_states=True)
    assert error(out.last_hidden_state, plain.last_hidden_state, mask) <= LOGIT_ERROR
    assert len(out.hidden_states) == len(plain.hidden_states)
    for got, want in zip(out.hidden_states, plain.hidden_states, strict=True):
        assert error(got, want, mask) <= LOGIT_ERROR


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("activation", ["gated-gelu", "gated-silu", "gelu"])
def test_t5_feed_forward_variants(activation: str, tied: bool) -> None:
    """`tie_word_embeddings=False` marks T5 1.1, which keeps tying but does not scale the decoder's output."""
    settings = tiny.build("t5").config.to_dict()
    for made_from_others in ("dense_act_fn", "is_gated_act", "scale_decoder_outputs", "model_type"):
        settings.pop(made_from_others, None)
    config = tr.T5Config(**{**settings, "feed_forward_proj": activation, "tie_word_embeddings": tied})
    torch.manual_seed(0)
    model, session = tr.T5ForConditionalGeneration(config).eval(), plain_session()
    assert model.config.scale_decoder_outputs == tied
    party = private_twin(model, session)
    text, started = ids(2, 7), ids(2, 3, seed=4)
    out = party(
        inputs_embeds=party.get_input_embeddings()(tokens(session, text)),
        decoder_inputs_embeds=party.get_decoder().get_input_embeddings()(tokens(session, started)),
        return_dict=True,
    )
    plain = model(input_ids=text, decoder_input_ids=started).logits
    assert error(out.logits, plain) <= LOGIT_ERROR * max(1.0, float(plain.abs().max()) / 8)
