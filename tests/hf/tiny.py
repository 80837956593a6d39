"""Tiny random models of every supported architecture: hidden 64, two layers, vocabulary 128; no downloads."""

from __future__ import annotations

import torch
import transformers as tr

TEXT = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 128, "num_attention_heads": 4}
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LLAMA = {**TEXT, **SPECIAL, "intermediate_size": 96, "num_key_value_heads": 2, "max_position_embeddings": 64}
BERT = {**TEXT, "intermediate_size": 96, "max_position_embeddings": 64, "pad_token_id": 0}

DECODERS = {
    "opt": (
        tr.OPTForCausalLM,
        lambda: tr.OPTConfig(**TEXT, **SPECIAL, ffn_dim=96, word_embed_proj_dim=64, max_position_embeddings=64),
    ),
    "gpt2": (
        tr.GPT2LMHeadModel,
        lambda: tr.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=128, n_positions=64, **SPECIAL),
    ),
    "gpt_neox": (
        tr.GPTNeoXForCausalLM,
        lambda: tr.GPTNeoXConfig(**TEXT, **SPECIAL, intermediate_size=96, max_position_embeddings=64),
    ),
    "llama": (tr.LlamaForCausalLM, lambda: tr.LlamaConfig(**LLAMA)),
    "qwen2": (tr.Qwen2ForCausalLM, lambda: tr.Qwen2Config(**LLAMA)),
    "qwen3": (tr.Qwen3ForCausalLM, lambda: tr.Qwen3Config(**LLAMA, head_dim=16)),
    "mistral": (tr.MistralForCausalLM, lambda: tr.MistralConfig(**LLAMA, sliding_window=8)),
    "gemma2": (tr.Gemma2ForCausalLM, lambda: tr.Gemma2Config(**LLAMA, head_dim=16, sliding_window=8)),
    "gemma3_text": (tr.Gemma3ForCausalLM, lambda: tr.Gemma3TextConfig(**LLAMA, head_dim=16, sliding_window=8)),
    "phi3": (tr.Phi3ForCausalLM, lambda: tr.Phi3Config(**LLAMA)),
    "falcon": (tr.FalconForCausalLM, lambda: tr.FalconConfig(**TEXT, **SPECIAL, max_position_embeddings=64)),
    "bloom": (
        tr.BloomForCausalLM,
        lambda: tr.BloomConfig(hidden_size=64, n_layer=2, n_head=4, vocab_size=128, **SPECIAL),
    ),
}
ENCODERS = {
    "bert": (tr.BertModel, lambda: tr.BertConfig(**BERT)),
    "roberta": (tr.RobertaModel, lambda: tr.RobertaConfig(**{**BERT, "pad_token_id": 1})),
    "distilbert": (
        tr.DistilBertModel,
        lambda: tr.DistilBertConfig(
            dim=64, n_layers=2, n_heads=4, hidden_dim=96, vocab_size=128, max_position_embeddings=64
        ),
    ),
    "modernbert": (
        tr.ModernBertModel,
        lambda: tr.ModernBertConfig(**{**BERT, **SPECIAL}, global_attn_every_n_layers=2, local_attention=8),
    ),
}
OTHERS = {
    "vit": (
        tr.ViTModel,
        lambda: tr.ViTConfig(
            hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
            image_size=16, patch_size=8,
        ),
    ),
    "t5": (
        tr.T5ForConditionalGeneration,
        lambda: tr.T5Config(
            d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, vocab_size=128,
            decoder_start_token_id=0, eos_token_id=2, pad_token_id=0,
        ),
    ),
}  # fmt: skip
ALL = {**DECODERS, **ENCODERS, **OTHERS}


def build(
    name: str, cls: type[tr.PreTrainedModel] | None = None, seed: int = 0, **changes: object
) -> tr.PreTrainedModel:
    """A model with random weights, large enough that logits differ clearly."""
    default, make = ALL[name]
    config = make()
    for key, value in changes.items():
        setattr(config, key, value)
    torch.manual_seed(seed)
    model = (cls or default)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.15)
    return model
