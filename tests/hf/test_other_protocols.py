"""Models of HuggingFace under `quad` and `dealer`: the plaintext model's results, by one suite for both."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from private_llm_cli.commands.models import demo_model
from private_llm_hf import AutoPrivateModelForCausalLM, PrivateConfig, patch
from private_llm_hf.tools.estimate import estimate
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.hf import tiny
from tests.hf.compare import BATCH, GREEDY, LOGIT_ERROR, MASK, worst

QUAD = PrivateConfig(protocol="quad", timeout_s=60)
DEALER = PrivateConfig(protocol="dealer", timeout_s=60)
REMASK = replace(DEALER, matmul="remask")
each = pytest.mark.parametrize("config", [QUAD, DEALER], ids=["quad", "dealer"])
each_way = pytest.mark.parametrize("config", [QUAD, DEALER, REMASK], ids=["quad", "dealer", "remask"])


@pytest.mark.sampled(6)
@each_way
@pytest.mark.parametrize("name", ["opt", "llama", "t5"])
def test_generate(name: str, config: PrivateConfig) -> None:
    check_generation(name, config)


@pytest.mark.full
@pytest.mark.parametrize("name", ["bloom", "gemma3_text"])
def test_generate_with_biases_and_windows(name: str) -> None:
    check_generation(name, QUAD)


def check_generation(name: str, config: PrivateConfig) -> None:
    model = tiny.build(name)
    with patch(model, config) as private, torch.no_grad():
        assert torch.equal(private.generate(**BATCH, **GREEDY), model.generate(**BATCH, **GREEDY))
        if name != "t5":
            assert worst(private(**BATCH).logits, model(**BATCH).logits, MASK) < LOGIT_ERROR


@pytest.mark.sampled(3)
@each
@pytest.mark.parametrize("name", ["bert", "vit"])
def test_encoders(name: str, config: PrivateConfig) -> None:
    model = tiny.build(name)
    pixels = torch.linspace(-2, 2, 2 * 3 * 16 * 16).view(2, 3, 16, 16)
    inputs = {"pixel_values": pixels} if name == "vit" else {"input_ids": BATCH["input_ids"].flip(1)}
    with patch(model, config) as private, torch.no_grad():
        assert worst(private(**inputs).last_hidden_state, model(**inputs).last_hidden_state) < LOGIT_ERROR


@pytest.mark.sampled(2)
@each
def test_the_bundled_model_continues_a_prompt_as_in_plaintext(config: PrivateConfig) -> None:
    source = demo_model()
    prompt = AutoTokenizer.from_pretrained(source)("The sea was", return_tensors="pt")
    want = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).generate(**prompt, **GREEDY)
    with AutoPrivateModelForCausalLM.from_pretrained(source, config) as private:
        assert torch.equal(private.generate(**prompt, **GREEDY), want)


@each
def test_public_weights_and_token_reveal(config: PrivateConfig) -> None:
    model = tiny.build("opt")
    with patch(model, replace(config, weights="public", reveal="token")) as private:
        assert torch.equal(private.generate(**BATCH, **GREEDY), model.generate(**BATCH, **GREEDY))


@pytest.mark.full
@each
def test_parties_as_processes(config: PrivateConfig) -> None:
    model = tiny.build("opt")
    with patch(model, replace(config, party_mode="processes")) as private:
        assert torch.equal(private.generate(**BATCH, **GREEDY), model.generate(**BATCH, **GREEDY))


@pytest.mark.sampled(3)
@each_way
def test_estimate_equals_the_ledger_of_a_run(config: PrivateConfig) -> None:
    model, config = tiny.build("opt"), replace(config, calibrate=False)
    with patch(model, config) as private:
        private(torch.ones(1, 6, dtype=torch.int64))
        real = private.cost()
    assert estimate(type(model), model.config, config, sequence=6).costs.cost == real.cost
