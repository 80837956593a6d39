"""First layers under secret sharing, the rest on nodes: plaintext's tokens; nodes get states of their rows only."""

from __future__ import annotations

import pytest
import torch
from private_llm_hf import PrivateConfig, patch

from private_llm.sharding import ShardingPlan
from tests.hf import tiny
from tests.hf.compare import LOGIT_ERROR, worst

PLAN = ShardingPlan(3, 3, 1)


def settings(protocol: str = "trio", split: int = 1, plan: ShardingPlan = PLAN, **more: object) -> PrivateConfig:
    return PrivateConfig.from_dict({"protocol": protocol, "plan": plan, "split": split, "timeout_s": 60, **more})


def text() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 100, (2, 13), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    return {"input_ids": ids, "attention_mask": mask}


GREEDY = {"max_new_tokens": 4, "do_sample": False}


@pytest.mark.parametrize("protocol", ["trio", "dealer", "quad"])
def test_every_protocol_before_the_nodes(protocol: str) -> None:
    model, batch = tiny.build("opt"), text()
    with patch(model, settings(protocol)) as private, torch.no_grad():
        assert worst(private(**batch).logits, model(**batch).logits, batch["attention_mask"]) < LOGIT_ERROR
        assert torch.equal(private.generate(**batch, **GREEDY), model.generate(**batch, **GREEDY))


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma3_text", "gpt_neox"])
def test_decoders(name: str) -> None:
    model, batch = tiny.build(name), text()
    with patch(model, settings()) as private, torch.no_grad():
        assert worst(private(**batch).logits, model(**batch).logits, batch["attention_mask"]) < LOGIT_ERROR
        assert torch.equal(private.generate(**batch, **GREEDY), model.generate(**batch, **GREEDY))


@pytest.mark.parametrize("name", ["bert", "distilbert", "modernbert"])
def test_encoders(name: str) -> None:
    model, batch = tiny.build(name), text()
    with patch(model, settings()) as private, torch.no_grad():
        out, want = private(**batch), model(**batch)
    assert worst(out.last_hidden_state, want.last_hidden_state, batch["attention_mask"]) < LOGIT_ERROR
