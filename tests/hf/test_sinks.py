"""Attention with a learned sink for each head, and GPT-OSS, whose experts are of a form of their own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers as tr
from private_llm_hf import PrivateConfig, patch
from private_llm_hf.models.experts import is_clamped_experts
from private_llm_hf.models.miniature import miniature
from torch import nn

from private_llm.cache_policy import SlidingWindow
from tests.hf.compare import BATCH, GREEDY, LOGIT_ERROR, MASK, worst
from tests.hf.conftest import PLAIN, TRIO


def build(name: str, **settings: object) -> tr.PreTrainedModel:
    config = tr.AutoConfig.for_model(name, **settings)
    return miniature(tr.AutoModelForCausalLM._model_mapping[type(config)], config)


@pytest.mark.parametrize(
    ("name", "config"),
    [("gpt_oss", PLAIN), ("gpt_oss", TRIO), ("gpt_oss", replace(TRIO, weights="public")), ("granite_swa", TRIO),
     ("gpt_oss", PrivateConfig(protocol="quad", timeout_s=60)),
     ("granitemoe_swa", PLAIN), ("flint", PLAIN), ("mimo_v2_flash", PLAIN)],
    ids=["gpt_oss-plain", "gpt_oss-trio", "gpt_oss-public", "granite_swa", "gpt_oss-quad", "granitemoe_swa", "flint",
         "mimo_v2_flash"],
)  # fmt: skip
def test_families(name: str, config: PrivateConfig) -> None:
    model = build(name)
    with patch(model, config) as private, torch.no_grad():
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


def test_an_evicting_cache_keeps_sinks() -> None:
    model = build("granite_swa")
    policy = SlidingWindow(recent=8, first=1)  # nothing is evicted yet
    with patch(model, replace(PLAIN, cache_policy=policy)) as private, torch.no_grad():
        assert torch.equal(private.generate(**BATCH, **GREEDY), model.generate(**BATCH, **GREEDY))


def test_experts_of_another_form_are_none() -> None:
    experts = build("gpt_oss").model.layers[0].mlp.experts
    assert is_clamped_experts(experts)
    experts.down_proj = nn.Parameter(experts.down_proj.transpose(1, 2)[:, 1:])
    assert not is_clamped_experts(experts)
