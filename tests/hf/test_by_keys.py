"""Whole models by comparison keys, together with the other settings of a computation: outputs are plaintext's."""

from __future__ import annotations

import pytest
import torch
from private_llm_hf import patch

from private_llm.config import PrivateConfig
from tests.hf import tiny
from tests.hf.compare import BATCH, GREEDY, LOGIT_ERROR, MASK, worst

SETTINGS: dict[str, dict[str, object]] = {
    "not calibrated": {"calibrate": False},
    "token": {"reveal": "token"},
    "rotating": {"parallel_sessions": 2, "rotate_roles": True},
    "exact": {"truncation": "exact"},
    "remask": {"protocol": "dealer", "matmul": "remask"},
}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("name", ["opt", "llama", "t5"])
def test_text_is_plaintext_s(name: str, settings: dict[str, object]) -> None:
    model = tiny.build(name)
    with patch(model, PrivateConfig.from_dict({"adder": "keys", "timeout_s": 60, **settings})) as private:
        assert torch.equal(private.generate(**BATCH, **GREEDY), model.generate(**BATCH, **GREEDY))
        assert "piecewise" in private.cost().by_op(), "keys were used"
        if "reveal" not in settings:
            more = {"decoder_input_ids": BATCH["input_ids"]} if name == "t5" else {}
            with torch.no_grad():
                assert worst(private(**BATCH, **more).logits, model(**BATCH, **more).logits, MASK) <= LOGIT_ERROR


@pytest.mark.sampled(3)
@pytest.mark.parametrize("settings", [each for each in SETTINGS.values() if "reveal" not in each])
def test_states_of_an_encoder_are_plaintext_s(settings: dict[str, object]) -> None:
    model = tiny.build("bert")
    config = PrivateConfig.from_dict({"adder": "keys", "timeout_s": 60, **settings})
    with patch(model, config) as private, torch.no_grad():
        assert worst(private(**BATCH).last_hidden_state, model(**BATCH).last_hidden_state, MASK) <= LOGIT_ERROR
        assert "piecewise" in private.cost().by_op(), "keys were used"
