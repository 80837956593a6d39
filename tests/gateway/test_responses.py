"""The Responses API by the official client: items, events and what is kept."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from private_llm_gateway import endpoints, responses_api
from private_llm_gateway.errors import ApiError
from private_llm_gateway.responses_api import KeptResponses, ResponseAsked
from pydantic import TypeAdapter

from tests.gateway.small_gateway import CHAT, PROMPT, TOKEN, Gateway, greedy, prompt_ids, serving, small, text_of
from tests.gateway.test_tools import BOTH, ONE, QWEN, TWO, WEATHER, caller, says
from tests.gateway.test_types import checked

ASKED: dict[str, Any] = {"model": "small", "input": PROMPT, "max_output_tokens": 3, "temperature": 0}
CALLED: dict[str, Any] = {
    "model": "caller", "input": "Rain?",
    "tools": [{"type": "function", "name": "weather", "parameters": WEATHER, "strict": False},
              {"type": "function", "name": "city", "parameters": {"type": "object"}, "strict": False}],
}  # fmt: skip
HEADERS = {"Authorization": f"Bearer {TOKEN}"}
EVENT: Any = TypeAdapter(ResponseStreamEvent)
TEXT = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done"]  # fmt: skip
CALL = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]


@pytest.fixture(scope="module")
def tools() -> Iterator[Gateway]:
    with serving(caller("caller", QWEN)) as made:
        yield made


def told(gateway: Gateway, body: dict[str, Any]) -> tuple[Response, list[Any]]:
    """A response, and the events of its stream, which end in the same: all are of the official client's types."""
    answer = httpx.post(f"{gateway.url}/v1/responses", json=body, headers=HEADERS, timeout=60)
    assert answer.status_code == 200, answer.text
    whole = checked(Response, answer.json())
    lines = httpx.post(f"{gateway.url}/v1/responses", json={**body, "stream": True}, headers=HEADERS, timeout=60).text
    events = []
    for at, part in enumerate(lines.split("\n\n")[:-1]):
        kind, data = part.split("\n")
        raw = json.loads(data.removeprefix("data: "))
        assert (f"event: {raw['type']}", raw["sequence_number"]) == (kind, at)
        events.append(EVENT.validate_python(raw, strict=True))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0].response.output == []
    last = events[-1].response
    assert (last.status, last.output_text) == (whole.status, whole.output_text)
    counts = [(made.usage.input_tokens, made.usage.output_tokens) for made in (last, whole) if made.usage]
    assert counts[0] == counts[1]
    assert [bare(item) for item in last.output] == [bare(item) for item in whole.output]
    return whole, events


def bare(item: Any) -> Any:
    """An item without its ids."""
    return {name: value for name, value in item.model_dump().items() if name not in ("id", "call_id", "content")}


def kinds(events: list[Any]) -> list[str]:
    """Of the events between the first two and the last, each row of deltas as one."""
    found = [event.type.removeprefix("response.") for event in events[2:-1]]
    return [kind for at, kind in enumerate(found) if not at or kind != found[at - 1]]


def test_a_text(gateway: Gateway) -> None:
    whole, events = told(gateway, {**ASKED, "store": False})
    assert (whole.output_text, whole.status) == (text_of(greedy(3)), "incomplete")
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert whole.usage is not None
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (prompt_ids().shape[1], 3)
    assert kinds(events) == TEXT
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text


def test_the_clients_own_stream_and_parsing(client: OpenAI) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "s", "strict": True, "schema": {"enum": [[1, 2]]}}}
    with client.responses.stream(**{**ASKED, "max_output_tokens": 20}, text=form) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        made = stream.get_final_response()
    assert (json.loads(text), made.output_text, made.status) == ([1, 2], text, "completed")


def test_likelihoods(gateway: Gateway) -> None:
    body = {**ASKED, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole, events = told(gateway, body)
    rows = whole.output[0].content[0].logprobs  # type: ignore[union-attr]
    assert "".join(row.token for row in rows) == whole.output_text
    deltas = [row for event in events if event.type == "response.output_text.delta" for row in event.logprobs]
    assert [row.token for row in deltas] == [row.token for row in rows]


def test_likelihoods_of_what_adds_no_text(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    says(monkeypatch, "Well.<s>")
    whole, events = told(gateway, {**ASKED, "max_output_tokens": 9, "include": ["message.output_text.logprobs"]})
    rows = whole.output[0].content[0].logprobs  # type: ignore[union-attr]
    deltas = [row for event in events if event.type == "response.output_text.delta" for row in event.logprobs]
    assert [row.token for row in deltas] == [row.token for row in rows]
    assert rows[-1].token == "<s>"


def test_likelihoods_beside_calls(tools: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a text belong to it, those of a call's tokens to nothing, and no message holds a call alone."""
    for text in ("Let me see. ", ""):
        says(monkeypatch, f"{text}<tool_call>{ONE}</tool_call><tool_call>{TWO}</tool_call>")
        _, events = told(tools, {**CALLED, "include": ["message.output_text.logprobs"]})
        assert kinds(events) == [*(TEXT if text else []), *CALL, *CALL]
        deltas = [event for event in events if event.type == "response.output_text.delta"]
        assert all("".join(row.token for row in event.logprobs).startswith(event.delta) for event in deltas)
    says(monkeypatch, f"<tool_call>{ONE}</tool_call> Well.")
    body = {**CALLED, "include": ["message.output_text.logprobs"], "stream": True}
    lines = httpx.post(f"{tools.url}/v1/responses", json=body, headers=HEADERS, timeout=60).text.split("\n\n")
    call, message = json.loads(lines[-2].partition("data: ")[2])["response"]["output"]
    (part,) = message["content"]
    tokens = "".join(row["token"] for row in part["logprobs"])
    assert (call["type"], part["text"]) == ("function_call", " Well.")
    assert tokens.endswith(" Well.")
    assert "city" not in tokens


def test_what_goes_on_from_a_response(client: OpenAI) -> None:
    """Its chat comes first, without its instructions; it is the key's alone, and gone when it is deleted."""
    first = client.responses.create(**ASKED, instructions="Be brief.")
    chat = [*CHAT, {"role": "assistant", "content": first.output_text}, {"role": "user", "content": "and"}]
    asked = {**ASKED, "input": "and", "previous_response_id": first.id}
    then = client.responses.create(**asked)
    wanted: Any = client.chat.completions.create(model="small", messages=chat, max_tokens=3, temperature=0)
    assert then.output_text == wanted.choices[0].message.content
    assert then.previous_response_id == first.id
    assert client.responses.retrieve(then.id).output_text == then.output_text
    client.responses.delete(first.id)
    unkept = client.responses.create(**ASKED, store=False)
    for name in (first.id, unkept.id, "resp_another"):
        with pytest.raises(openai.NotFoundError) as refused:
            client.responses.retrieve(name)
        assert refused.value.code == "response_not_found"
    with pytest.raises(openai.BadRequestError) as missing:
        client.responses.create(**asked)
    assert (missing.value.code, missing.value.param) == ("previous_response_not_found", "previous_response_id")


def test_another_keys_response_is_not_there() -> None:
    """Where a gateway on loopback asks for no token, keys tell users apart."""
    with (
        serving(small(), token=None) as gateway,
        gateway.client("first-key") as one,
        gateway.client("another") as other,
    ):
        made = one.responses.create(**ASKED)
        assert one.responses.retrieve(made.id).id == made.id
        for ask in (other.responses.retrieve, other.responses.delete):
            with pytest.raises(openai.NotFoundError):
                ask(made.id)
        with pytest.raises(openai.BadRequestError, match="keeps no such response"):
            other.responses.create(**ASKED, previous_response_id=made.id)


def test_the_oldest_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses_api, "_MOST_KEPT", 3)
    monkeypatch.setattr(responses_api, "_MOST_SIZE", 1000)
    kept = KeptResponses()

    def there() -> list[int]:
        return [at for at in range(9) if not_raised(lambda at=at: kept.find("key", str(at)))]

    for at in range(5):
        kept.add("key", {"id": str(at)}, [])
    assert there() == [2, 3, 4]
    kept.add("key", {"id": "5"}, [{"content": "a" * 940}])
    assert there() == [4, 5]
    kept.add("key", {"id": "6"}, [{"content": "a" * 1000}])
    assert there() == []


def test_the_key_that_keeps_most_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses_api, "_MOST_SIZE", 1000)
    kept = KeptResponses()
    kept.add("other", {"id": "mine"}, [])
    for at in range(9):
        kept.add("key", {"id": str(at)}, [{"content": "a" * 300}])
    assert kept.find("other", "mine")
    assert not_raised(lambda: kept.find("key", "8"))
    assert not not_raised(lambda: kept.find("key", "5"))


def test_a_key_finds_its_responses_however_it_is_written(client: OpenAI) -> None:
    made = client.responses.create(**ASKED, metadata={"a": "b"})
    assert made.metadata == {"a": "b"}
    for header in (f"bearer {TOKEN}", f"Bearer  {TOKEN}"):
        assert client.responses.retrieve(made.id, extra_headers={"Authorization": header}).id == made.id


def not_raised(call: Any) -> bool:
    try:
        call()
    except ApiError:
        return False
    return True


def test_calls_and_their_outputs(tools: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    says(monkeypatch, f"Let me see. <tool_call>{ONE}</tool_call><tool_call>{TWO}</tool_call>")
    whole, events = told(tools, CALLED)
    assert kinds(events) == [*TEXT, *CALL, *CALL]
    calls: list[Any] = [item for item in whole.output if item.type == "function_call"]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == BOTH
    outputs = [{"type": "function_call_output", "call_id": call.call_id, "output": "no"} for call in calls]
    seen: list[dict[str, Any]] = []
    chat = endpoints.requests.chat
    monkeypatch.setattr(
        endpoints.requests, "chat", lambda models, body, most: seen.append(body) or chat(models, body, most)
    )
    with tools.client() as client:
        client.responses.create(**{**CALLED, "input": outputs, "previous_response_id": whole.id})
        back = [{"role": "user", "content": "Rain?"}, *(item.model_dump() for item in whole.output), *outputs]
        client.responses.create(**{**CALLED, "input": back})
    for body in seen:
        roles = [message["role"] for message in body["messages"]]
        assert roles == ["user", "assistant", "tool", "tool"]
        assert [call["function"]["name"] for call in body["messages"][1]["tool_calls"]] == ["weather", "city"]
    assert seen[0]["messages"] == seen[1]["messages"]
    chosen = ResponseAsked({**CALLED, "tool_choice": {"type": "function", "name": "city"}}, "", KeptResponses())
    assert chosen.chat["tool_choice"] == {"type": "function", "function": {"name": "city"}}


@pytest.mark.parametrize(
    ("code", "param", "more"),
    [
        ("missing_required_parameter", "input", {"input": None}), ("invalid_type", "input", {"input": 3}),
        ("unsupported_parameter", "input[0].type", {"input": [{"type": "item_reference", "id": "a"}]}),
        ("unsupported_parameter", "input", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
        ("unsupported_parameter", "tools", {"tools": [{"type": "web_search"}]}),
        ("unsupported_parameter", "background", {"background": True}), ("unsupported_parameter", "seed", {"seed": 1}),
        ("unsupported_parameter", "include", {"include": ["file_search_call.results"]}),
        ("invalid_value", "max_output_tokens", {"max_output_tokens": 1000}),
        ("invalid_type", "temperature", {"temperature": "a"}), ("invalid_type", "store", {"store": 1}),
        ("context_length_exceeded", "input", {"input": "a " * 300}), ("invalid_type", "text", {"text": []}),
        ("unsupported_parameter", "tools[0].more", {"tools": [{"type": "function", "name": "a", "more": 1}]}),
        ("invalid_value", "temperature", {"temperature": 10**400}), ("invalid_value", "top_p", {"top_p": 10**400}),
        ("invalid_type", "text.format", {"text": {"format": [1]}}), ("invalid_type", "metadata", {"metadata": "a"}),
        *(("invalid_value", "metadata", {"metadata": given})
          for given in ({"a": "b" * 513}, {"a" * 65: "b"}, {"a": 1}, {str(at): "" for at in range(17)})),
        ("unsupported_schema", "text.format.schema",
         {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"allOf": []}}}}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_is_wrong_is_named(client: OpenAI, code: str, param: str, more: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.post("/responses", body={**ASKED, **more}, cast_to=object)
    assert (refused.value.code, refused.value.param) == (code, param)
    assert f" {param}" in refused.value.message


def test_a_stream_that_fails_says_so(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(served: Any, groups: Any, tell: Any, *_: Any) -> None:
        groups[0][0].take(greedy(1)[0])
        tell(groups[0][0].new(), endpoints.Usage())
        raise RuntimeError

    monkeypatch.setattr(endpoints.engine, "write", fails)
    with gateway.client() as client:
        last = list(client.responses.create(**ASKED, stream=True))[-1]
    assert last.type == "response.failed"
    assert last.response.error is not None
