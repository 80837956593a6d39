"""Models whose parties compute on a GPU give the plaintext model's text; without a GPU there is nothing to run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from private_llm_cli.commands.models import demo_model
from private_llm_hf import AutoPrivateModelForCausalLM
from transformers import AutoModelForCausalLM

from private_llm.config import PrivateConfig

HOW: dict[str, Any] = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize(
    "settings",
    [
        {}, {"prg": "aes"}, {"replay": False}, {"protocol": "dealer"}, {"protocol": "quad"},
        {"weights": "public"}, {"weights_at_rest": "seeds"}, {"adder": "keys"}, {"party_mode": "processes"},
        {"protocol": "assisted"},
    ],
    ids=str,
)  # fmt: skip
def test_the_bundled_model_on_a_gpu(settings: dict[str, Any]) -> None:
    ids = torch.arange(5, 21)[None]
    want = AutoModelForCausalLM.from_pretrained(demo_model()).generate(ids, **HOW)
    config = PrivateConfig.from_dict({"device": "cuda", "timeout_s": 300.0, **settings})
    with AutoPrivateModelForCausalLM.from_pretrained(demo_model(), private_config=config) as private:
        for _ in range(2):
            assert torch.equal(private.generate(ids, **HOW), want)
