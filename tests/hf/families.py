"""Tiny random models of architectures that need no code of their own: hidden 32, two layers, vocabulary 128."""

from __future__ import annotations

import torch
import transformers as tr

WIDTHS = {
    "hidden_size": 32, "n_embd": 32, "d_model": 32, "intermediate_size": 64, "ffn_dim": 64, "d_ff": 64, "d_kv": 8,
    "embedding_size": 16, "head_dim": 8, "rotary_dim": 4,
}  # fmt: skip
COUNTS = {
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "num_attention_heads": 4, "n_head": 4,
    "n_heads": 4, "num_heads": 4, "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 64,
    "n_positions": 64, "max_seq_len": 64, "image_size": 16, "patch_size": 8, "num_channels": 3,
}  # fmt: skip
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0}
SPECIAL = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 4, "hidden_size": 32, "num_layers": 2},
    "camembert": {"pad_token_id": 1},
}

DECODERS = (
    "stablelm", "olmo", "olmo2", "granite", "cohere", "cohere2", "starcoder2", "phi", "gptj", "codegen", "smollm3",
    "gemma", "gpt_neo", "gpt_bigcode", "glm", "glm4", "helium", "nemotron", "persimmon", "exaone4", "ernie4_5",
    "hunyuan_v1_dense", "seed_oss", "arcee", "biogpt", "ctrl", "mpt",
)  # fmt: skip
ENCODERS = ("electra", "albert", "deberta-v2", "ernie", "camembert")
VISION = ("dinov2", "vit_msn", "ijepa")
BOTH = ("mt5",)
_AUTO = {
    **dict.fromkeys(DECODERS, tr.AutoModelForCausalLM), **dict.fromkeys(ENCODERS, tr.AutoModelForMaskedLM),
    **dict.fromkeys(VISION, tr.AutoModelForImageClassification), **dict.fromkeys(BOTH, tr.AutoModelForSeq2SeqLM),
}  # fmt: skip


def build(model_type: str) -> tr.PreTrainedModel:
    """A model with random weights, large enough that logits differ clearly."""
    default = tr.AutoConfig.for_model(model_type)
    known = default.to_dict()
    wanted = {**WIDTHS, **COUNTS, **TOKENS}
    wanted |= {own: wanted[usual] for usual, own in default.attribute_map.items() if usual in wanted and own in known}
    values = {key: value for key, value in wanted.items() if key in known}
    config = tr.AutoConfig.for_model(model_type, **{**values, **SPECIAL.get(model_type, {})})
    torch.manual_seed(0)
    model: tr.PreTrainedModel = _AUTO[model_type].from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.15)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model
