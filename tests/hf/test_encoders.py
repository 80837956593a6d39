"""Encoders, classifiers, images and encoder-decoders give the plaintext model's outputs (protocol `plain`)."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers as tr
from private_llm_hf import (
    AutoPrivateModel,
    AutoPrivateModelForImageClassification,
    AutoPrivateModelForSeq2SeqLM,
    AutoPrivateModelForSequenceClassification,
    patch,
)
from private_llm_hf.client.session_client import PrivateEncoderOutput
from transformers import PreTrainedModel

from private_llm.errors import DomainError
from tests.hf import tiny
from tests.hf.compare import LOGIT_ERROR, worst
from tests.hf.conftest import PLAIN

IDS = torch.tensor([[5, 6, 7, 0, 0], [9, 8, 7, 6, 5]])
MASK = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])


def inputs_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The batch with this model's own padding token."""
    return {"input_ids": IDS.masked_fill(MASK == 0, model.config.pad_token_id or 0), "attention_mask": MASK}


@pytest.mark.parametrize("name", list(tiny.ENCODERS))
def test_hidden_states_of_a_padded_batch(name: str) -> None:
    model = tiny.build(name)
    with patch(model, PLAIN) as private, torch.no_grad():
        out, want = private(**inputs_of(model)), model(**inputs_of(model))
    assert type(out) is type(want)
    assert list(out.keys()) == list(want.keys())
    assert worst(out.last_hidden_state, want.last_hidden_state, MASK) < LOGIT_ERROR
    if "pooler_output" in want:
        assert worst(out.pooler_output, want.pooler_output) < LOGIT_ERROR


def test_segments_are_public_positions_of_the_table() -> None:
    model = tiny.build("bert")
    segments = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 1, 1]])
    with patch(model, PLAIN) as private, torch.no_grad():
        out, want = (m(input_ids=IDS, token_type_ids=segments, return_dict=False) for m in (private, model))
    assert isinstance(out, tuple)
    assert all(worst(a, b) < LOGIT_ERROR for a, b in zip(out, want, strict=True))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "cls"),
    [
        ("bert", tr.BertForSequenceClassification),
        ("roberta", tr.RobertaForSequenceClassification),
        ("distilbert", tr.DistilBertForSequenceClassification),
        ("modernbert", tr.ModernBertForSequenceClassification),
    ],
)
def test_sentence_classifiers(name: str, cls: type[PreTrainedModel], tmp_path: Path) -> None:
    model = tiny.build(name, cls)
    model.save_pretrained(tmp_path)
    with AutoPrivateModelForSequenceClassification.from_pretrained(str(tmp_path), PLAIN) as private, torch.no_grad():
        assert type(private).__name__ == f"Private{cls.__name__}"
        out, want = private(**inputs_of(model)), model(**inputs_of(model))
    assert out.logits.shape == (2, 2)
    assert worst(out.logits, want.logits) < LOGIT_ERROR


def test_a_decoder_classifies_by_its_last_token() -> None:
    model = tiny.build("llama", tr.LlamaForSequenceClassification)
    left = {"input_ids": IDS.flip(1), "attention_mask": MASK.flip(1)}
    with patch(model, PLAIN) as private, torch.no_grad():
        assert worst(private(**left).logits, model(**left).logits) < LOGIT_ERROR
        with pytest.raises(DomainError, match="padding on the right; want it on the left"):
            private(input_ids=IDS, attention_mask=MASK)
        with pytest.raises(DomainError, match="a row ends with the padding token"):
            private(input_ids=left["input_ids"].index_fill(1, torch.tensor([4]), model.config.pad_token_id))


def test_images(tmp_path: Path) -> None:
    torch.manual_seed(0)
    pixels = torch.randn(2, 3, 16, 16)
    model = tiny.build("vit")
    model.save_pretrained(tmp_path / "features")
    with AutoPrivateModel.from_pretrained(str(tmp_path / "features"), PLAIN) as private, torch.no_grad():
        out, want = private(pixel_values=pixels), model(pixel_values=pixels)
    assert worst(out.last_hidden_state, want.last_hidden_state) < LOGIT_ERROR
    classifier = tiny.build("vit", tr.ViTForImageClassification)
    classifier.save_pretrained(tmp_path / "classes")
    with AutoPrivateModelForImageClassification.from_pretrained(str(tmp_path / "classes"), PLAIN) as private:
        assert worst(private(pixels).logits, classifier(pixels).logits) < LOGIT_ERROR


# -- encoder-decoder ------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[PreTrainedModel, PreTrainedModel]]:
    folder = tmp_path_factory.mktemp("t5")
    model = tiny.build("t5")
    model.save_pretrained(folder)
    with AutoPrivateModelForSeq2SeqLM.from_pretrained(str(folder), PLAIN) as private:
        yield model, private


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "how",
    [
        {"do_sample": False},
        {"num_beams": 3, "do_sample": False},
        {"do_sample": True, "top_k": 10, "num_return_sequences": 2},
    ],
)
def test_t5_generates(t5: tuple[PreTrainedModel, PreTrainedModel], how: dict[str, object]) -> None:
    results = []
    for model in t5:
        torch.manual_seed(0)
        results.append(model.generate(input_ids=IDS, attention_mask=MASK, max_new_tokens=6, **how))
    assert torch.equal(*results)


def test_t5_encodes_once_and_keeps_the_result_at_the_parties(t5: tuple[PreTrainedModel, PreTrainedModel]) -> None:
    model, private = t5
    start = torch.zeros(2, 1, dtype=torch.int64)
    with torch.no_grad():
        encoded = private.get_encoder()(input_ids=IDS, attention_mask=MASK)
        out = private(encoder_outputs=encoded, attention_mask=MASK, decoder_input_ids=start)
        want = model(input_ids=IDS, attention_mask=MASK, decoder_input_ids=start)
    assert isinstance(encoded, PrivateEncoderOutput)
    assert encoded.last_hidden_state.dtype == torch.int64, "a handle, no hidden states"
    assert worst(out.logits, want.logits) < LOGIT_ERROR
    with pytest.raises(DomainError, match="encoder_outputs: got 2 rows; want 1"):
        private(encoder_outputs=encoded, decoder_input_ids=start[:1])
    with pytest.raises(DomainError, match="want what this model's get_encoder"):
        private(encoder_outputs=model.get_encoder()(input_ids=IDS), decoder_input_ids=start)


def test_t5_caches_can_be_copied_and_reordered(t5: tuple[PreTrainedModel, PreTrainedModel]) -> None:
    model, private = t5
    start = torch.zeros(2, 2, dtype=torch.int64)
    following = torch.tensor([[7], [9]])
    with torch.no_grad():
        encoded = private.get_encoder()(input_ids=IDS, attention_mask=MASK)
        known = {"encoder_outputs": encoded, "attention_mask": MASK}
        cache = private(**known, decoder_input_ids=start, use_cache=True).past_key_values
        twin = copy.deepcopy(cache)
        cache.crop(-1)
        out = private(**known, decoder_input_ids=following, past_key_values=twin).logits
        ids = torch.cat([start, following], dim=1)
        want = model(input_ids=IDS, attention_mask=MASK, decoder_input_ids=ids).logits
        assert worst(out, want[:, -1:]) < LOGIT_ERROR
        out = private(**known, decoder_input_ids=following, past_key_values=cache).logits
        want = model(input_ids=IDS, attention_mask=MASK, decoder_input_ids=ids[:, 1:]).logits
        assert worst(out, want[:, -1:]) < LOGIT_ERROR
