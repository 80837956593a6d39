"""A GGUF file of the tiny Llama with a tokenizer of single characters, as llama.cpp's converter lays one out."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from transformers import PreTrainedModel

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def write_gguf(model: PreTrainedModel, path: Path, kind: str = "Q4_1") -> None:
    """Matrices quantised as `kind`, vectors in float32."""
    config = model.config
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    characters = [chr(code) for code in range(33, 127)]  # and tokens that no text gives, up to the vocabulary
    tokens = ["<pad>", "<s>", "</s>", *characters, "ab", *(f"<{n}>" for n in range(config.vocab_size - 98))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    writer.add_pad_token_id(config.pad_token_id)
    writer.add_chat_template(TEMPLATE)
    for name, value in model.state_dict().items():
        array = value.detach().numpy().astype(np.float32)
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if heads is not None:  # llama.cpp's order of the halves that rotate
            shape = (heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
            array = array.reshape(shape).swapaxes(1, 2).reshape(array.shape)
        kind_of = gguf.GGMLQuantizationType[kind] if array.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(_name(name), gguf.quants.quantize(array, kind_of), raw_dtype=kind_of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _name(name: str) -> str:
    if name in NAMES:
        return NAMES[name]
    number, _, rest = name.removeprefix("model.layers.").partition(".")
    module, _, kind = rest.rpartition(".")
    return f"blk.{number}.{NAMES[module]}.{kind}"
