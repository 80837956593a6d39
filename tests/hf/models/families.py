"""Tiny random models of architectures that need no code of their own: hidden 32, two layers, vocabulary 128."""

from __future__ import annotations

import torch
import transformers as tr
from private_llm_hf.checkpoint.miniature import small_config

SETTINGS = {
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0, "num_key_value_heads": 2,
}  # fmt: skip
SPECIAL = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "camembert": {"pad_token_id": 1},
    "hunyuan_v1_dense": {"head_dim": 128},
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
    known = tr.AutoConfig.for_model(model_type).to_dict()
    wanted = {**SETTINGS, **SPECIAL.get(model_type, {})}
    config = small_config(
        tr.AutoConfig.for_model(model_type, **{key: value for key, value in wanted.items() if key in known})
    )
    torch.manual_seed(0)
    model: tr.PreTrainedModel = _AUTO[model_type].from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.15)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model
