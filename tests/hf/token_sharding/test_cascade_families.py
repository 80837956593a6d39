"""Token sharding of Falcon, Bloom and the RoBERTas, and of conversations, crops, windows and the float16 wire."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import transformers as tr
from private_llm_hf import patch
from private_llm_hf.token_sharding.attention_calls import attention_calls
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.bloom import modeling_bloom
from transformers.models.falcon import modeling_falcon

from private_llm.token_sharding import ForwardStep, ShardingPlan, key_bias
from tests.hf import tiny
from tests.hf.token_sharding.test_cascade import ERROR, PLAN, same, settings, text
from tests.token_sharding.nodes.prices import layer_bytes

SPLIT = ShardingPlan(2, 4, 2, accept_weak_plan=True)
FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "falcon, rotary, one key head": ("falcon", {}),
    "falcon, rotary, grouped": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon, sequential": ("falcon", {"multi_query": False, "parallel_attn": False, "bias": True}),
    "falcon, alibi": ("falcon", {"alibi": True}),
    "falcon, alibi, 12 heads": ("falcon", {"alibi": True, "hidden_size": 48, "num_attention_heads": 12}),
    "bloom": ("bloom", {}),
    "bloom, 6 heads": ("bloom", {"hidden_size": 48, "n_head": 6, "apply_residual_connection_post_layernorm": True}),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FAMILIES)
def test_families_with_attention_of_their_own(name: str) -> None:
    base, changes = FAMILIES[name]
    model = tiny.build(base, **changes)
    ids, mask = text()
    with torch.no_grad(), patch(model, settings(SPLIT)) as private:
        difference = (model(ids, attention_mask=mask).logits - private(ids, attention_mask=mask).logits).abs()
        assert float(difference[mask.bool()].max()) < ERROR
        assert same(model, private)
        assert same(model, private, num_beams=3)


@pytest.mark.parametrize(("name", "build"), [("bloom", modeling_bloom), ("falcon", modeling_falcon)])
def test_the_bias_is_the_family_s_own_far_out(name: str, build: object) -> None:
    """1500 positions: Falcon's bfloat16 holds few of them. Six heads: slopes beside powers of two."""
    config = {"bloom": {"hidden_size": 48, "n_head": 6}, "falcon": {"hidden_size": 48, "num_attention_heads": 6}}[name]
    model = tiny.build(name, **config, alibi=True)
    (call, _) = attention_calls(type(model), model.config)
    mask = torch.ones(2, 1500, dtype=torch.int64)
    mask[1, :700] = 0
    own = build.build_alibi_tensor(mask, 6, torch.float32).view(2, 6, 1500)  # type: ignore[attr-defined]
    right = own / math.sqrt(8) if name == "falcon" else own
    found = key_bias(call, ForwardStep(None, 2, 0, 1500, mask.bool()), range(1500))
    assert torch.allclose(found, right, rtol=1e-6, atol=0)


def test_bloom_wakes_one_comp_node_and_beta_attn_nodes_and_sends_the_formula_s_bytes() -> None:
    model = tiny.build("bloom")
    ids, _ = text(2, 24)
    with torch.no_grad(), patch(model, settings()) as private:
        kept = private(ids).past_key_values
        sent = private.cost(reset=True).cost.sent
        private(ids[:, :1], past_key_values=kept)
        senders = {sender for sender, _ in private.cost().cost.sent if sender < PLAN.nodes}
    shard = PLAN.shard_of(24)
    assert senders == {PLAN.comp_of(24), *(PLAN.attn_endpoint(shard, other) for other in range(PLAN.beta))}
    between = sum(n for (frm, to), n in sent.items() if max(frm, to) < PLAN.nodes)
    assert between == layer_bytes(PLAN, attention_calls(type(model), model.config), 2, 24)


def test_grouped_falcon_sends_each_group_s_keys_once() -> None:
    model = tiny.build("falcon", new_decoder_architecture=True, num_kv_heads=2)
    assert [(call.heads, call.groups) for call in attention_calls(type(model), model.config)] == [(4, 2), (4, 2)]


# -- encoders ------------------------------------------------------------------------------------------------------
def roberta(cls: type[PreTrainedModel]) -> PreTrainedModel:
    config = cls.config_class(**{**tiny.BERT, "pad_token_id": 1, "num_labels": 2})
    torch.manual_seed(2)
    model = cls(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.15)
    return model


@pytest.mark.sampled(4)
@pytest.mark.parametrize("pad", ["left", "right"])
@pytest.mark.parametrize(
    "cls",
    [
        tr.RobertaModel,
        tr.RobertaForSequenceClassification,
        tr.XLMRobertaModel,
        tr.XLMRobertaForTokenClassification,
        tr.XLMRobertaForQuestionAnswering,
        tr.XLMRobertaForMaskedLM,
    ],
)
def test_robertas_count_positions_after_padding(cls: type[PreTrainedModel], pad: str) -> None:
    model = roberta(cls)
    ids, mask = text(padded=4)
    if pad == "right":
        mask = mask.flip(1)
    ids[mask == 0] = 1
    with torch.no_grad(), patch(model, settings(SPLIT)) as private:
        expected, found = model(ids, attention_mask=mask), private(ids, attention_mask=mask)
    assert set(expected) == set(found)
    for name, value in expected.items():
        difference = (value - found[name]).abs()
        assert float((difference[mask.bool()] if value.shape[:2] == ids.shape else difference).max()) < ERROR, name


# -- what generate() does with a cache -------------------------------------------------------------------------------
def both(model: PreTrainedModel, private: PreTrainedModel, run: Callable[[PreTrainedModel], Tensor]) -> bool:
    return torch.equal(run(model), run(private))


@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_a_conversation_goes_on_with_its_cache(name: str) -> None:
    """A second turn of several tokens behind what was generated, left padding in the first one's batch."""
    model = tiny.build(name)
    ids, mask = text()

    def talk(speaker: PreTrainedModel) -> Tensor:
        first = speaker.generate(
            ids, attention_mask=mask, max_new_tokens=6, min_new_tokens=6, do_sample=False,
            return_dict_in_generate=True,
        )  # fmt: skip
        turn = torch.cat([first.sequences, ids[:, :5].flip(1)], 1)
        seen = torch.cat([mask, torch.ones(2, turn.shape[1] - mask.shape[1], dtype=torch.int64)], 1)
        kept = first.past_key_values
        return speaker.generate(turn, attention_mask=seen, past_key_values=kept, max_new_tokens=8, do_sample=False)

    with torch.no_grad(), patch(model, settings()) as private:
        assert both(model, private, talk)


@pytest.mark.parametrize("name", ["llama", "falcon", "bloom"])
def test_guesses_are_cropped(name: str) -> None:
    """Prompt lookup guesses several tokens a step and forgets the wrong ones."""
    model = tiny.build(name)
    ids = text(1, 9)[0].repeat(1, 3)

    def guess(speaker: PreTrainedModel) -> Tensor:
        return speaker.generate(ids, max_new_tokens=12, do_sample=False, prompt_lookup_num_tokens=3)

    with torch.no_grad(), patch(model, settings()) as private:
        assert both(model, private, guess)
        assert torch.equal(guess(private), model.generate(ids, max_new_tokens=12, do_sample=False))


def test_local_and_global_layers_longer_than_the_window() -> None:
    """Gemma 3: windows of 8 in one layer, whole texts and another rotary base in the next."""
    model = tiny.build("gemma3_text", layer_types=["sliding_attention", "full_attention"])
    calls = attention_calls(type(model), model.config)
    assert [(call.back, call.ahead) for call in calls] == [(7, 0), (None, 0)]
    with torch.no_grad(), patch(model, settings(SPLIT)) as private:
        assert same(model, private)


def test_texts_of_unequal_lengths_are_served_together() -> None:
    model = tiny.build("bloom")
    ids, mask = text(4, 20)
    for row, padded in enumerate((0, 3, 11, 19)):
        mask[row] = 1
        mask[row, :padded] = 0

    def answer(speaker: PreTrainedModel) -> Tensor:
        return speaker.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)

    with torch.no_grad(), patch(model, settings(SPLIT)) as private:
        assert both(model, private, answer)


@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_generate_with_half_precision_on_the_wire(name: str) -> None:
    """Rows rounded to 11 bits move logits of about 1 by 2^-11 a few times over; the prompt's choices are clearer."""
    model = tiny.build(name)
    ids, mask = text()
    plan = ShardingPlan(2, 4, 2, accept_weak_plan=True, wire="float16")
    with torch.no_grad(), patch(model, settings(plan)) as private:
        difference = (model(ids, attention_mask=mask).logits - private(ids, attention_mask=mask).logits).abs()
        assert 0 < float(difference[mask.bool()].max()) < 1e-2
        assert same(model, private)
