"""Which requests may share a batch."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
import transformers as tr
from private_llm_hf.party.model import empty_model
from private_llm_hf.service.checks import WASTE, batch_key, bucket, tolerates_left_padding
from private_llm_hf.wire.commands import OPENED, Call, Encoded, Tokens, Values
from transformers import PreTrainedModel

from private_llm.config import PrivateConfig
from private_llm.kv_cache.policies.policy import SlidingWindow
from private_llm.sparsity_config import CometConfig
from tests.harness import TRIO
from tests.hf import tiny
from tests.hf.party.parties import description

ONES = torch.ones(1, 6, dtype=torch.int64)


@cache
def party(name: str) -> PreTrainedModel:
    return empty_model(*description(tiny.build(name)))


def call(rows: int = 1, length: int = 6, cache: int | None = 1, **public: object) -> Call:
    return Call(public, (Tokens("input_ids", (rows, length), 128),), cache, None, None, OPENED)  # type: ignore[arg-type]


def of(asked: Call, past: int = 0, name: str = "llama", config: PrivateConfig = TRIO) -> object:
    return batch_key(party(name), config, asked, past)


def test_padding_wastes_a_quarter_at_most() -> None:
    for length in range(1, 3000):
        longest = bucket(length)
        assert longest >= length
        assert bucket(longest) == longest
        assert (longest - length) * WASTE <= longest
    assert [bucket(n) for n in (1, 2, 3, 5, 7, 10, 14, 19)] == [1, 2, 4, 6, 9, 13, 18, 25]


def test_what_goes_together() -> None:
    assert of(call(1, 10)) == of(call(3, 13)) == of(call(1, 10, attention_mask=torch.ones(1, 10)))
    assert of(call(1, 10)) != of(call(1, 14))
    assert of(call(1, 1), 5) == of(call(2, 1), 700) == of(call(1, 1, position_ids=ONES[:, :1]), 1000)
    assert of(call(1, 1), 5) != of(call(1, 1), 1025)
    assert of(call(1, 1), 1025) == of(call(1, 1), 2040) != of(call(1, 1), 2050)
    assert of(call(1, 1), 5) != of(call(1, 1))
    assert of(call(1, 2), 5) == of(call(1, 2), 9) != of(call(1, 1), 5)


def test_what_is_asked_tells_apart() -> None:
    usual = of(call())
    assert None is not usual == of(call(1, 5))
    assert of(call(cache=None)) not in (usual, None)
    assert of(call(use_cache=True)) != usual
    assert of(call(logits_to_keep=1)) != usual
    assert of(call(logits_to_keep=2)) not in (of(call(logits_to_keep=1)), of(call(logits_to_keep=0)))
    assert of(call(logits_to_keep=6)) == of(call(logits_to_keep=0)) == of(call(1, 5, logits_to_keep=9))
    assert of(replace(call(), outputs=())) != usual
    assert of(replace(call(), secret=(Values("inputs_embeds", (1, 6, 64)),))) not in (usual, None)


def test_what_goes_alone() -> None:
    assert of(call(token_type_ids=ONES)) is None
    assert of(call(cache=None, position_ids=ONES)) is None  # may say that several texts are in one row
    for config in (PrivateConfig(kv_cache=SlidingWindow(8)),
                   PrivateConfig(sparsity=CometConfig(predictors="/nowhere"))):  # fmt: skip
        assert of(call(), config=config) is None
    t5 = replace(call(), secret=(Tokens("decoder_input_ids", (1, 6), 128),), encoded=Encoded(1, None))
    assert of(t5, name="t5") is None
    assert of(replace(call(), encode_to=4), name="t5") is None
    assert of(replace(call(cache=None), secret=(Values("pixel_values", (1, 3, 16, 16)),)), name="vit") is None


def test_encoders_share_texts_of_one_length() -> None:
    for name in tiny.ENCODERS:
        usual = of(call(cache=None), name=name)
        assert None is not usual == of(call(3, 6, None, attention_mask=ONES), name=name)
        assert usual != of(call(1, 7, None), name=name)
        assert usual != of(call(cache=None, token_type_ids=ONES), name=name)


@pytest.mark.parametrize("name", tiny.DECODERS)
def test_positions_that_are_stated_or_not(name: str) -> None:
    model = tiny.build(name)
    assert tolerates_left_padding(type(model), model.config) is (name != "bloom")


def test_models_that_count_columns_go_alone() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    for config, model in (
        (tr.FalconConfig(alibi=True), tr.FalconForCausalLM),
        (tr.MptConfig(), tr.MptForCausalLM),
        (tr.LlamaConfig(**tiny.LLAMA, rope_parameters=rope), tr.LlamaForCausalLM),
        (tr.LlamaConfig(**tiny.LLAMA), tr.LlamaForSequenceClassification),
    ):
        assert not tolerates_left_padding(model, config)


def test_the_trial_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that counts positions itself is noticed."""
    forward = tr.GPT2LMHeadModel.forward

    def deaf(self: PreTrainedModel, input_ids: object = None, position_ids: object = None, **more: object) -> object:
        return forward(self, input_ids=input_ids, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(tr.GPT2LMHeadModel, "forward", deaf)
    assert not tolerates_left_padding(tr.GPT2LMHeadModel, tiny.build("gpt2").config)
