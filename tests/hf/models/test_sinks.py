"""Attention with a learned sink for each head, and GPT-OSS, whose experts are of a form of their own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers as tr
from private_llm_hf import PrivateConfig, patch
from private_llm_hf.checkpoint.miniature import miniature
from private_llm_hf.models.experts import is_clamped_experts
from private_llm_hf.tools.estimate import estimate
from torch import nn

from private_llm.kv_cache.policies.policy import SlidingWindow
from tests.hf.compare import BATCH, GREEDY, LOGIT_ERROR, MASK, worst
from tests.hf.conftest import PLAIN, TRIO


def build(name: str, **settings: object) -> tr.PreTrainedModel:
    config = tr.AutoConfig.for_model(name, **settings)
    return miniature(tr.AutoModelForCausalLM._model_mapping[type(config)], config)


FAMILIES = {
    "gpt_oss-plain": PLAIN, "gpt_oss-trio": TRIO, "gpt_oss-public": replace(TRIO, weights="public"),
    "gpt_oss-quad": PrivateConfig(protocol="quad", timeout_s=60), "granite_swa-trio": TRIO,
    "granitemoe_swa-plain": PLAIN, "flint-plain": PLAIN, "mimo_v2_flash-plain": PLAIN,
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("case", FAMILIES)
def test_families(case: str) -> None:
    model = build(case.partition("-")[0])
    with patch(model, FAMILIES[case]) as private, torch.no_grad():
        assert worst(private(**BATCH).logits, model(**BATCH).logits, MASK) < LOGIT_ERROR
        assert torch.equal(private.generate(**BATCH, **GREEDY), model.generate(**BATCH, **GREEDY))


def test_sinks_matter() -> None:
    """The comparison above could tell a sink that is left out."""
    model = build("granite_swa")
    with torch.no_grad():
        before = model(**BATCH).logits
        for layer in model.model.layers:
            layer.self_attn.sinks.fill_(-1e4)
        assert worst(before, model(**BATCH).logits, MASK) > 10 * LOGIT_ERROR


def test_clamps_matter() -> None:
    """At the limit of 7 no tiny activation would be clamped."""
    model = build("gpt_oss", swiglu_limit=0.2)
    with patch(model, PLAIN) as private, torch.no_grad():
        assert worst(private(**BATCH).logits, model(**BATCH).logits, MASK) < LOGIT_ERROR


@pytest.mark.full
@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3"])
def test_estimates_are_real_runs(name: str) -> None:
    """Shapes alone say what is sent: sinks, routers, latents and experts run without values, too."""
    model = build(name)
    asked = {"max_new_tokens": 2, "do_sample": False, "eos_token_id": None}
    with patch(model, TRIO) as private:
        private.cost(reset=True)
        private.generate(BATCH["input_ids"][1:], **asked)
        ran = private.cost()
        made = estimate(type(model), model.config, TRIO, 5, 2, ranges=private.parties.ranges)
    assert (made.costs.bytes_total, made.costs.rounds) == (ran.bytes_total, ran.rounds)


def test_an_evicting_cache_keeps_sinks() -> None:
    model = build("granite_swa")
    policy = SlidingWindow(recent=8, first=1)  # nothing is evicted yet
    with patch(model, replace(PLAIN, kv_cache=policy)) as private, torch.no_grad():
        assert torch.equal(private.generate(**BATCH, **GREEDY), model.generate(**BATCH, **GREEDY))


def test_experts_of_another_form_are_none() -> None:
    experts = build("gpt_oss").model.layers[0].mlp.experts
    assert is_clamped_experts(experts)
    experts.down_proj = nn.Parameter(experts.down_proj.transpose(1, 2)[:, 1:])
    assert not is_clamped_experts(experts)
