"""Architectures that need no code of their own give the plaintext model's outputs (protocol `plain`)."""

from __future__ import annotations

import pytest
import torch
from private_llm_hf import patch

from tests.hf.compare import BATCH, GREEDY, LOGIT_ERROR, MASK, worst
from tests.hf.conftest import PLAIN, TRIO
from tests.hf.models import families


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", families.DECODERS)
def test_decoders_with_padding_and_a_cache(name: str) -> None:
    model = families.build(name)
    with patch(model, PLAIN) as private, torch.no_grad():
        assert worst(private(**BATCH).logits, model(**BATCH).logits, MASK) < LOGIT_ERROR
        assert torch.equal(private.generate(**BATCH, **GREEDY), model.generate(**BATCH, **GREEDY))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", families.ENCODERS)
def test_encoders_with_padding(name: str) -> None:
    model = families.build(name)
    given = {name: value.flip(1) for name, value in BATCH.items()}
    given["input_ids"] = given["input_ids"].masked_fill(given["attention_mask"] == 0, model.config.pad_token_id)
    with patch(model, PLAIN) as private, torch.no_grad():
        assert worst(private(**given).logits, model(**given).logits, given["attention_mask"]) < LOGIT_ERROR


@pytest.mark.parametrize("name", families.VISION)
def test_classifiers_of_images(name: str) -> None:
    model = families.build(name)
    pixels = torch.linspace(-2, 2, 2 * 3 * 16 * 16).view(2, 3, 16, 16)
    with patch(model, PLAIN) as private, torch.no_grad():
        assert worst(private(pixels).logits, model(pixels).logits) < LOGIT_ERROR


@pytest.mark.parametrize("name", families.BOTH)
def test_encoder_decoders(name: str) -> None:
    model = families.build(name)
    with patch(model, PLAIN) as private:
        assert torch.equal(private.generate(**BATCH, **GREEDY), model.generate(**BATCH, **GREEDY))


@pytest.mark.parametrize("name", ["cohere", "gpt_neo", "nemotron"])
def test_on_shares(name: str) -> None:
    """Of each new kind of module one: a layer norm of its own, two masks on top of each other, squares of ReLU."""
    model = families.build(name)
    with patch(model, TRIO) as private, torch.no_grad():
        assert worst(private(**BATCH).logits, model(**BATCH).logits, MASK) < LOGIT_ERROR
