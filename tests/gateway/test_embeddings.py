"""Vectors by the official client, against mean pooling of the plaintext model's hidden states."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from functools import cache

import httpx
import numpy as np
import openai
import pytest
import torch
from openai.types import CreateEmbeddingResponse
from private_llm_gateway.pool import SessionPool
from private_llm_gateway.served import Served
from private_llm_hf import patch
from private_llm_hf.checkpoint.sentence_vectors import SentenceVectors
from transformers import BertConfig, BertModel

from tests.gateway.small_gateway import PLAIN, TOKEN, Gateway, serving, tokenizer

TEXTS = ["The history of the city", "Once upon a time there was a king who had a horse", "I", "My fellow citizens"]
ROWS = 3
ERROR = 2e-3
OTHERS: dict[str, object] = {
    "normalize": False, "pooling": "cls", "task": "retrieval.query", "input_type": "query", "prompt_name": "query",
    "instruction": "a", "late_chunking": True, "embedding_type": "binary", "truncate_dim": 8, "messages": [],
    "a_field_of_next_year": 1,
}  # fmt: skip
"""What other servers know, and would change the vectors."""
HEADERS = {"Authorization": f"Bearer {TOKEN}"}


@cache
def encoder() -> BertModel:
    torch.manual_seed(8)
    config = BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48, vocab_size=4096,
        max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    return BertModel(config).eval().requires_grad_(False)


def wanted(text: str) -> np.ndarray:
    """As sentence-transformers' mean pooling and normalising do."""
    ids = tokenizer()(text, return_tensors="pt")["input_ids"]
    return torch.nn.functional.normalize(encoder()(input_ids=ids).last_hidden_state.mean(1), dim=1)[0].numpy()


@pytest.fixture(scope="module")
def vectors() -> Iterator[Gateway]:
    served = Served("vectors", SessionPool(patch(encoder(), PLAIN), 1), tokenizer())
    with serving(served, rows=ROWS, max_choices=8) as made:
        yield made


def test_vectors_are_the_plaintext_models(vectors: Gateway) -> None:
    """Of texts of several lengths in one request, also more than run side by side, in their order."""
    with vectors.client() as client:
        made = client.embeddings.create(model="vectors", input=TEXTS)
        listed = client.embeddings.create(model="vectors", input=TEXTS, encoding_format="float")
        tokens = client.embeddings.create(model="vectors", input=tokenizer()(TEXTS[0])["input_ids"])
    assert [row.index for row in made.data] == list(range(len(TEXTS)))
    for row, text in zip(made.data, TEXTS, strict=True):
        assert np.abs(np.array(row.embedding) - wanted(text)).max() < ERROR
    for row, same in zip(listed.data, made.data, strict=True):
        assert row.embedding == pytest.approx(same.embedding, abs=ERROR)
    assert tokens.data[0].embedding == pytest.approx(made.data[0].embedding, abs=ERROR)
    count = sum(len(ids) for ids in tokenizer()(TEXTS)["input_ids"])
    assert (made.usage.prompt_tokens, made.usage.total_tokens) == (count, count)


def test_a_model_that_pools_otherwise_is_served_as_it_says() -> None:
    """The first token, twice the size, a prompt, lower case, not of length 1, a shorter limit."""
    how = SentenceVectors(("cls", "max"), unit=False, prompt="Query: ", lower=True, longest=8)
    served = Served("others", SessionPool(patch(encoder(), PLAIN), 1), tokenizer(), how)
    states = encoder()(input_ids=tokenizer()("query: the city", return_tensors="pt")["input_ids"]).last_hidden_state
    want = torch.cat([states[0, 0], states[0].amax(0)]).numpy()
    with serving(served) as made, made.client() as client:
        (row,) = client.embeddings.create(model="others", input="The City", dimensions=64).data
        assert np.abs(np.array(row.embedding) - want).max() < 4 * ERROR
        with pytest.raises(openai.BadRequestError, match="8"):
            client.embeddings.create(model="others", input="a b c d e f g h")


def test_both_forms_are_of_the_clients_type(vectors: Gateway) -> None:
    answers = {}
    for form in ("float", "base64"):
        body = {"model": "vectors", "input": TEXTS[0], "encoding_format": form}
        answers[form] = httpx.post(f"{vectors.url}/v1/embeddings", json=body, headers=HEADERS).json()
    CreateEmbeddingResponse.model_validate(answers["float"], strict=True)
    raw = base64.b64decode(answers["base64"]["data"][0]["embedding"])
    assert np.frombuffer(raw, "<f4") == pytest.approx(answers["float"]["data"][0]["embedding"], abs=ERROR)


@pytest.mark.parametrize(
    ("more", "param", "code"),
    [
        ({"dimensions": 8}, "dimensions", "unsupported_parameter"),
        ({"encoding_format": "int8"}, "encoding_format", "invalid_value"),
        ({"encoding_format": 0}, "encoding_format", "invalid_value"),
        ({"truncate": "END"}, "truncate", "unsupported_parameter"),
        *[({name: value}, name, "unsupported_parameter") for name, value in OTHERS.items()],
        ({"input": [[]]}, "input", "invalid_type"),
        ({"input": []}, "input", "invalid_type"),
        ({"input": ["a"] * 9}, "input", "invalid_value"),
        ({"input": "a b c d " * 40}, "input", "context_length_exceeded"),
    ],
)
def test_what_is_wrong_is_named(vectors: Gateway, more: dict[str, object], param: str, code: str) -> None:
    with vectors.client() as client, pytest.raises(openai.BadRequestError) as refused:
        client.post("/embeddings", body={"model": "vectors", "input": "a", **more}, cast_to=object)
    assert (refused.value.param, refused.value.code) == (param, code)


def test_an_encoder_writes_no_text(vectors: Gateway) -> None:
    with vectors.client() as client, pytest.raises(openai.BadRequestError, match="gives vectors") as refused:
        client.chat.completions.create(model="vectors", messages=[{"role": "user", "content": "a"}])
    assert refused.value.code == "model_not_supported"
