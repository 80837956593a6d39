"""One recorded prefill stands for that of every policy."""

from __future__ import annotations

import pytest
import torch
from long_context import plain_attention
from long_context.budget import record
from long_context.plain_attention import policy_attention
from long_context.plain_cache import PolicyCache
from transformers import PreTrainedModel

from private_llm.errors import ConfigError, UnsupportedOp
from tests.long_context.test_plain_cache import ERROR, POLICIES, built, text_of


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
@pytest.mark.parametrize("padded", [0, 5])
def test_caches_are_those_of_a_prefill(name: str, padded: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where attention is counted a few queries at a time."""
    model, (text, mask) = built(name), text_of(padded=padded)
    given = {"input_ids": text[:, :17], "attention_mask": mask[:, :17]}
    with policy_attention(model):
        prefill = record(model, **given)
        for chunk in (256, 3):
            monkeypatch.setattr(plain_attention, "_CHUNK", chunk)
            for key, policy in POLICIES.items():
                if key == "head-merging":
                    continue
                own, made = PolicyCache(policy, model), prefill.cache(policy)
                with torch.no_grad():
                    logits = model(**given, past_key_values=own).logits[:, -1]
                assert float((logits - prefill.logits).abs().max()) < ERROR
                assert own.entries() == made.entries()
                assert float((step(model, own) - step(model, made)).abs().max()) < ERROR, key
    assert prefill.length == 17


def step(model: PreTrainedModel, cache: PolicyCache) -> torch.Tensor:
    text, mask = text_of()
    out = []
    for start in range(17, 20):
        with torch.no_grad():
            part = slice(start, start + 1)
            out.append(model(text[:, part], attention_mask=mask[:, : start + 1], past_key_values=cache).logits)
    return torch.cat(out)


def test_what_changes_the_prompt_is_refused() -> None:
    model, (text, _) = built("llama"), text_of()
    with policy_attention(model):
        prefill = record(model, input_ids=text)
    with pytest.raises(ConfigError, match="head-merging reads the prompt in another way"):
        prefill.cache(POLICIES["head-merging"])
    with pytest.raises(UnsupportedOp, match="with policy_attention"):
        record(model, input_ids=text)
