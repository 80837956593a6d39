"""Requests that other programs sent, recorded with shorter texts, are answered: the programs need not be installed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.gateway.small_gateway import Gateway, serving
from tests.gateway.test_tools import QWEN, caller, says
from tests.gateway.test_types import checked, told

SENT = [json.loads(line) for line in Path(__file__).with_name("client_requests.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    with serving(caller("caller", QWEN)) as made:
        yield made


@pytest.mark.parametrize("sent", SENT, ids=lambda sent: f"{sent['client']} {sent['what']}")
def test_requests_of_other_programs_are_answered(
    gateway: Gateway, sent: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    body = sent["body"]
    if "max_tokens" not in body:  # this model writes on until its context is full
        says(monkeypatch, '{"name": "Rex", "age": 3}')
    chat = "messages" in body
    answer, chunks = told(gateway, f"/v1/{'chat/' if chat else ''}completions", body)
    assert answer.status_code == 200, answer.text
    assert bool(chunks) == body.get("stream", False)
    for made in chunks or [answer.json()]:
        if chat:
            checked(ChatCompletionChunk if chunks else ChatCompletion, made)
    if "echo" in body:  # what an evaluation sums up
        rows = [choice["logprobs"]["token_logprobs"] for choice in answer.json()["choices"]]
        assert [len(row) for row in rows] == [len(ids) + 1 for ids in body["prompt"]]
