"""Rounds of a decode step of whole layers, by circuits and by comparison keys, and the same tokens either way."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from private_llm_hf import patch
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM, PreTrainedModel

from private_llm.config import PrivateConfig

CACHED = 127


def opt() -> PreTrainedModel:
    """A layer of OPT-125M, a fourth as wide: rounds do not depend on it."""
    return OPTForCausalLM(
        OPTConfig(
            vocab_size=96, hidden_size=192, ffn_dim=768, word_embed_proj_dim=192, num_hidden_layers=1,
            num_attention_heads=3, max_position_embeddings=256,
        )
    )  # fmt: skip


def llama() -> PreTrainedModel:
    """A layer of SmolLM2-135M, a sixth as wide."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=96, hidden_size=96, intermediate_size=256, num_hidden_layers=1, num_attention_heads=3,
            num_key_value_heads=1, max_position_embeddings=256,
        )
    )  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("adder", ["prefix", "keys"])
@pytest.mark.parametrize(("make", "rounds"), [(opt, {"prefix": 74, "keys": 40}), (llama, {"prefix": 75, "keys": 43})])
def test_a_decode_step_of_a_layer(make: Callable[[], PreTrainedModel], rounds: dict[str, int], adder: str) -> None:
    torch.manual_seed(0)
    model = make().eval()
    prompt, last = torch.randint(5, 90, (1, CACHED)), torch.tensor([[7]])
    with torch.no_grad():
        want = model(torch.cat([prompt, last], 1)).logits[:, -1]
    with patch(model, PrivateConfig.from_dict({"adder": adder})) as private:
        cache = private(prompt, use_cache=True).past_key_values
        private.cost(reset=True)
        got = private(last, past_key_values=cache, use_cache=True).logits[:, -1]
        ledgers = private.cost().ledgers
    assert float((got - want).abs().max()) <= 1.5e-3
    assert got.argmax() == want.argmax()
    waited = [sum(count for (scope, _), count in each.rounds.items() if ".layers.0" in scope) for each in ledgers]
    assert max(waited) == rounds[adder]
