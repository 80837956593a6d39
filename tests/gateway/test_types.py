"""Every object that the gateway sends is, strictly, of the official client's types, and has no field that they lack."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from openai._models import BaseModel
from openai.types import Completion, ErrorObject, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.gateway.small_gateway import CHAT, PROMPT, TOKEN, Gateway

HEADERS = {"Authorization": f"Bearer {TOKEN}"}
ASKED: dict[str, Any] = {"model": "small", "max_tokens": 3, "temperature": 0}
OWN = ".private_llm"
"""The one field that OpenAI's objects lack, of the object itself."""


def surplus(found: object, at: str = "") -> list[str]:
    """Fields that the types do not know."""
    if isinstance(found, list):
        return [name for each in found for name in surplus(each, f"{at}[]")]
    if not isinstance(found, BaseModel):
        return []
    below = [name for field in found.model_fields_set for name in surplus(getattr(found, field, None), f"{at}.{field}")]
    return [f"{at}.{name}" for name in found.model_extra or {}] + below


def checked(kind: type[BaseModel], raw: dict[str, Any]) -> Any:
    made = kind.model_validate(raw, strict=True)
    missing = [name for name, field in kind.model_fields.items() if field.is_required() and name not in raw]
    assert not missing
    assert set(surplus(made)) <= {OWN}
    return made


def told(gateway: Gateway, path: str, body: dict[str, Any]) -> tuple[httpx.Response, list[dict[str, Any]]]:
    """The answer, and the objects of its stream."""
    answer = httpx.post(f"{gateway.url}{path}", json=body, headers=HEADERS, timeout=60)
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert not lines or lines[-1] == "[DONE]"
    return answer, [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize(
    "more",
    [
        {}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 3}, {"n": 2}, {"stop": ["e"]}, {"max_tokens": 1},
        {"response_format": {"type": "json_object"}, "max_tokens": 12}, {"stream_options": {"include_usage": True}},
    ],
    ids=lambda more: "-".join(more) or "plain",
)  # fmt: skip
def test_chats(gateway: Gateway, more: dict[str, Any]) -> None:
    body = {**ASKED, "messages": CHAT, **more}
    _, chunks = told(gateway, "/v1/chat/completions", {**body, "stream": True})
    made = [checked(ChatCompletionChunk, chunk) for chunk in chunks]
    body.pop("stream_options", None)
    answer, _ = told(gateway, "/v1/chat/completions", body)
    whole = checked(ChatCompletion, answer.json())
    for choice in whole.choices:
        parts = [part for chunk in made for part in chunk.choices if part.index == choice.index]
        assert "".join(part.delta.content or "" for part in parts) == choice.message.content
        assert [part.finish_reason for part in parts if part.finish_reason] == [choice.finish_reason]
        rows = [row for part in parts if part.logprobs for row in part.logprobs.content or ()]
        if "logprobs" in more:
            assert [row.token for row in rows] == [row.token for row in choice.logprobs.content]
    assert len({chunk.id for chunk in made}) == 1


@pytest.mark.parametrize(
    "more",
    [
        {}, {"logprobs": 0}, {"logprobs": 2}, {"echo": True}, {"echo": True, "logprobs": 2, "max_tokens": 0}, {"n": 2},
        {"prompt": [PROMPT, "The"]}, {"stream_options": {"include_usage": True}},
    ],
    ids=lambda more: "-".join(more) or "plain",
)  # fmt: skip
def test_completions(gateway: Gateway, more: dict[str, Any]) -> None:
    body = {**ASKED, "prompt": PROMPT, **more}
    _, chunks = told(gateway, "/v1/completions", {**body, "stream": True})
    assert chunks
    body.pop("stream_options", None)
    answer, _ = told(gateway, "/v1/completions", body)
    for chunk in chunks:
        for choice in chunk["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"  # null until the end, as OpenAI sends it
    for made in (answer.json(), *chunks):
        for choice in made["choices"]:
            rows = choice["logprobs"]
            if rows and "echo" in more:  # nothing predicts a prompt's first token: null, as OpenAI sends it
                rows["token_logprobs"] = [each or 0.0 for each in rows["token_logprobs"]]
                rows["top_logprobs"] = [each or {} for each in rows["top_logprobs"]]
        checked(Completion, made)


def test_models_and_errors(gateway: Gateway) -> None:
    for entry in httpx.get(f"{gateway.url}/v1/models", headers=HEADERS).json()["data"]:
        checked(Model, entry)
    for path, body in (
        ("/v1/chat/completions", {**ASKED, "messages": CHAT, "top_k": 5}),
        ("/v1/chat/completions", {**ASKED, "messages": CHAT, "model": "another"}),
        ("/v1/nothing", ASKED),
    ):
        answer, _ = told(gateway, path, body)
        assert answer.status_code >= 400
        assert not surplus(ErrorObject.model_validate(answer.json()["error"], strict=True))
