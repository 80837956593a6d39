"""Every architecture against its plaintext self: prefill with left padding, then cached steps; encoders; T5; ViT."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import transformers as tr
from torch import Tensor

import tests.hf.tiny as tiny
from private_llm.tensor.secret import SecretTensor
from tests.hf.party.parties import LOGIT_ERROR, error, ids, one_hot, private_twin, tokens
from tests.tensor.secrets import opened, plain_session, secret

WEIGHTS = ("secret", "public")


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def _positions(name: str, mask: Tensor, length: int) -> dict[str, Tensor]:
    if name == "bloom":
        return {}
    return {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)[:, -length:]}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("name", tiny.DECODERS)
def test_decoder_with_cache(name: str, weights: str) -> None:
    model = tiny.build(name)
    session = plain_session(weights=weights)
    party = private_twin(model, session)
    assert all(isinstance(p, SecretTensor) == (weights == "secret") for p in party.parameters())
    prompt, mask = ids(2, 7), torch.ones(2, 7, dtype=torch.long)
    mask[1, :3], prompt[1, :3] = 0, 0
    cache, plain_cache = party.new_cache(), None
    for step in range(5):
        here = prompt if step == 0 else ids(2, 1, seed=step)
        if step:
            mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
        public = {"attention_mask": mask, **_positions(name, mask, here.shape[1])}
        plain = model(input_ids=here, past_key_values=plain_cache, use_cache=True, **public)
        plain_cache = plain.past_key_values
        embeds = party.get_input_embeddings()(tokens(session, here))
        out = party(inputs_embeds=embeds, past_key_values=cache, return_dict=True, **public)
        assert error(out.logits, plain.logits, mask[:, -here.shape[1] :]) <= LOGIT_ERROR
    assert cache.get_seq_length() == 11


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("name", tiny.ENCODERS)
def test_encoder_with_padding(name: str, weights: str) -> None:
    model = tiny.build(name)
    session = plain_session(weights=weights)
    party = private_twin(model, session)
    text, mask = ids(2, 7), torch.ones(2, 7, dtype=torch.long)
    mask[1, 5:], text[1, 5:] = 0, model.config.pad_token_id
    public = {"attention_mask": mask}
    if name == "roberta":
        public["position_ids"] = mask.cumsum(-1) * mask + model.config.pad_token_id
    plain = model(input_ids=text, attention_mask=mask)
    embeds = party.get_input_embeddings()(one_hot(session, text))
    out = party(inputs_embeds=embeds, return_dict=True, **public)
    assert error(out.last_hidden_state, plain.last_hidden_state, mask) <= LOGIT_ERROR
    if plain.get("pooler_output") is not None:
        assert error(out.pooler_output, plain.pooler_output) <= LOGIT_ERROR


HEADS = {
    "bert": tr.BertForSequenceClassification,
    "roberta": tr.RobertaForSequenceClassification,
    "distilbert": tr.DistilBertForSequenceClassification,
    "modernbert": tr.ModernBertForSequenceClassification,
}


@pytest.mark.parametrize("name", HEADS)
def test_classification_heads(name: str) -> None:
    model = tiny.build(name, HEADS[name])
    session = plain_session()
    party = private_twin(model, session)
    text = ids(2, 7)
    public = {"position_ids": torch.arange(2, 9).expand(2, 7)} if name == "roberta" else {}
    embeds = party.get_input_embeddings()(tokens(session, text))
    out = party(inputs_embeds=embeds, attention_mask=torch.ones_like(text), return_dict=True, **public)
    assert error(out.logits, model(input_ids=text).logits) <= LOGIT_ERROR


@pytest.mark.parametrize("weights", WEIGHTS)
def test_vision(weights: str) -> None:
    model = tiny.build("vit")
    session = plain_session(weights=weights)
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    plain = model(pixels)
    out = private_twin(model, session)(pixel_values=secret(session, pixels), return_dict=True)
    assert error(out.last_hidden_state, plain.last_hidden_state) <= LOGIT_ERROR
    assert error(out.pooler_output, plain.pooler_output) <= LOGIT_ERROR


@pytest.mark.parametrize("weights", WEIGHTS)
def test_encoder_decoder_with_both_caches(weights: str) -> None:
    model = tiny.build("t5")
    session = plain_session(weights=weights)
    party = private_twin(model, session)
    text, mask = ids(2, 7), torch.ones(2, 7, dtype=torch.long)
    mask[1, 5:] = 0
    table = party.get_decoder().get_input_embeddings()
    encoded = party.get_encoder()(
        inputs_embeds=party.get_input_embeddings()(tokens(session, text)),
        attention_mask=mask,
        return_dict=True,
    )
    plain_encoded = model.get_encoder()(input_ids=text, attention_mask=mask)
    assert error(encoded.last_hidden_state, plain_encoded.last_hidden_state, mask) <= LOGIT_ERROR
    cache, plain_cache = party.new_cache(), None
    for step in range(5):
        here = ids(2, 3 if step == 0 else 1, seed=step)
        plain = model(
            encoder_outputs=plain_encoded,
            attention_mask=mask,
            decoder_input_ids=here,
            past_key_values=plain_cache,
            use_cache=True,
        )
        plain_cache = plain.past_key_values
        out = party(
            encoder_outputs=encoded,
            attention_mask=mask,
            decoder_inputs_embeds=table(tokens(session, here)),
            past_key_values=cache,
            return_dict=True,
        )
        assert error(out.logits, plain.logits) <= LOGIT_ERROR
    assert cache.cross_attention_cache.get_seq_length() == 7


def test_a_model_without_cache_or_mask_runs() -> None:
    model = tiny.build("llama")
    session = plain_session()
    party = private_twin(model, session)
    text = ids(1, 5)
    out = party(inputs_embeds=party.get_input_embeddings()(tokens(session, text)), return_dict=True)
    assert error(out.logits, model(text).logits) <= LOGIT_ERROR
    assert out.past_key_values is None


def test_inference_mode_changes_nothing() -> None:
    """Under inference_mode PyTorch decomposes functions differently and its tensors carry no version counter."""
    model = tiny.build("llama")
    session = plain_session()
    party = private_twin(model, session)
    text = ids(1, 5)
    outputs = []
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            embeds = party.get_input_embeddings()(tokens(session, text))
            outputs.append(party(inputs_embeds=embeds, return_dict=True).logits)
    assert torch.equal(opened(outputs[0].to_fixed()), opened(outputs[1].to_fixed()))
