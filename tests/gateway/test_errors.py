"""What a client is told when something is wrong: OpenAI's envelope, the status of its own exception classes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI
from openai import OpenAI
from private_llm_gateway import app, endpoints, served
from private_llm_gateway.errors import ApiError
from private_llm_gateway.fields import Fields
from private_llm_gateway.guard import Guard
from private_llm_gateway.prompts import of_messages
from private_llm_gateway.responses import Response
from private_llm_gateway.served import Served
from private_llm_gateway.settings import GatewaySettings, bound_socket

from private_llm.errors import ConfigError
from tests.gateway.small_gateway import (
    CHAT,
    PROMPT,
    TOKEN,
    Gateway,
    greedy,
    prompt_ids,
    text_of,
    tokenizer,
    watch_crowd,
)  # fmt: skip

ASKED: dict[str, Any] = {"model": "small", "messages": CHAT, "max_tokens": 2, "temperature": 0}
CONTINUED: dict[str, Any] = {"model": "small", "prompt": PROMPT, "max_tokens": 2, "temperature": 0}
HEADERS = {"Authorization": f"Bearer {TOKEN}"}
SECRET = "what nobody may repeat"


def told(error: openai.APIStatusError) -> dict[str, Any]:
    """The envelope, which has these four fields and no other."""
    found = error.response.json()["error"]
    assert set(found) == {"message", "type", "param", "code"}
    assert isinstance(found["message"], str)
    assert SECRET not in error.response.text
    return dict(found)


WRONG: dict[str, dict[str, list[Any]]] = {
    "chat/completions": {
        "unsupported_parameter": [
            {"tools": [{"type": "function", "function": {"name": "a"}}]},
            {"modalities": ["audio"]}, {"functions": [{}]},
            {"prediction": {"type": "content", "content": SECRET}}, {"moderation": {"model": "any"}},
            {"store": True}, {"top_k": 5}, {"repetition_penalty": 1.1}, {"echo": True}, {"prompt": SECRET},
            {"max_new_tokens": 5}, {"include_stop_str_in_output": True}, {"truncation": "auto"},
            {"a_field_of_next_year": [1]}, {"temprature": 1},
            {"response_format": {"type": "json_object", "schema": {"type": "object"}}},
            ("response_format.strict", {"response_format": {"type": "text", "strict": True}}),
            ("stream_options.include_obfuscation", {"stream": True, "stream_options": {"include_obfuscation": True}}),
            ("stream_options.continuous_usage_stats",
             {"stream": True, "stream_options": {"continuous_usage_stats": True}}),
            ("messages[0].role", {"messages": [{"role": "tool", "content": "a", "tool_call_id": "1"}]}),
            ("messages[0].prefix", {"messages": [{"role": "user", "content": "a", "prefix": True}]}),
            ("messages[0].content[0].detail",
             {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "detail": "high"}]}]}),
            ("messages[0].tool_calls", {"messages": [{"role": "assistant", "content": "a", "tool_calls": [{}]}]}),
            ("messages[0].content[0].type",
             {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": SECRET}}]}]}),
        ],
        "invalid_value": [
            {"stream_options": {"include_usage": True}}, {"temperature": 2.5}, {"top_p": -0.1}, {"n": 0}, {"n": 65},
            {"stop": ["a"] * 5}, {"stop": [""]}, {"stop": 0}, {"stop": {}}, {"stop": "a" * 1025},
            {"max_tokens": 10**4000}, {"max_completion_tokens": 3, "max_tokens": 2}, {"top_logprobs": 3},
            {"logprobs": True, "top_logprobs": 21}, {"logit_bias": {"4096": 1}}, {"presence_penalty": 3},
            {"max_tokens": 0}, {"messages": []}, {"tool_choice": "required"},
            {"max_tokens": None, "max_completion_tokens": 1000},
            {"reasoning_effort": SECRET}, {"verbosity": SECRET},
            {"continue_final_message": True, "add_generation_prompt": True},
            ("messages[0].role", {"messages": [{"role": SECRET, "content": "a"}]}),
            ("response_format.type", {"response_format": {"type": SECRET}}),
        ],
        "invalid_type": [
            {"temperature": SECRET}, {"temperature": True}, {"seed": 1.5}, {"logprobs": 3}, {"messages": SECRET},
            {"max_completion_tokens": 3, "max_tokens": SECRET},
            ("messages[0].name", {"messages": [{"role": "user", "content": "a", "name": 3}]}),
        ],
        "missing_required_parameter": [
            {"messages": None},
            ("response_format.type", {"response_format": {"json_schema": {"name": "a", "schema": {"type": "object"}}}}),
            ("response_format.json_schema",
             {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}),
        ],
        "context_length_exceeded": [
            {"messages": [{"role": "user", "content": "a" * 40_000}]},
            {"messages": [{"role": "user", "content": f"{SECRET} " * 100}]},
            ("messages", {"max_tokens": 1000}),
        ],
        "unsupported_schema": [
            ("response_format.json_schema.schema",
             {"response_format": {"type": "json_schema",
                                  "json_schema": {"name": "a", "schema": {"not": {"const": SECRET}}}}}),
        ],
    },
    "completions": {
        "unsupported_parameter": [
            {"suffix": "end"}, {"best_of": 3}, {"max_completion_tokens": 3}, {"top_logprobs": 3},
        ],
        "invalid_value": [
            {"prompt": [SECRET] * 65}, {"prompt": [[4096]]}, {"prompt": ["a"] * 33, "n": 2}, {"max_tokens": 0},
        ],
        "invalid_type": [{"prompt": []}, {"prompt": [["a"]]}, {"logprobs": True}],
        "missing_required_parameter": [{"prompt": None}],
        "context_length_exceeded": [{"prompt": list(range(3, 130))}],
    },
}  # fmt: skip
"""Fields that are wrong, by address and code; the last one is to be named, or what stands before them."""
CASES = [
    (path, code, *(case if isinstance(case, tuple) else ([*case][-1], case)))
    for path, codes in WRONG.items()
    for code, cases in codes.items()
    for case in cases
]


@pytest.mark.parametrize(
    ("path", "code", "param", "more"),
    CASES,
    ids=lambda value: "-".join(value)[:40] if isinstance(value, dict) else None,
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_field_that_is_wrong_is_named(client: OpenAI, path: str, code: str, param: str, more: dict[str, Any]) -> None:
    body = {**(CONTINUED if path == "completions" else ASKED), **more}
    with pytest.raises(openai.BadRequestError) as refused:
        client.post(f"/{path}", body=body, cast_to=object)
    found = told(refused.value)
    assert (found["type"], found["param"], found["code"]) == ("invalid_request_error", param, code)
    assert refused.value.code == code


def test_the_context_error_counts_as_openai_does(client: OpenAI) -> None:
    count = prompt_ids().shape[1]
    with pytest.raises(openai.BadRequestError, match="maximum context length is 128 tokens") as refused:
        client.chat.completions.create(**{**ASKED, "max_tokens": 1000})
    assert f"requested {count + 1000} tokens ({count} in the messages, 1000 in" in refused.value.message
    fits = client.chat.completions.create(**{**ASKED, "max_tokens": 128 - count}, logit_bias={"2": 100})
    assert fits.choices[0].finish_reason == "stop"


NO_REQUESTS = [
    b"", b"{", b"[]", b'"a"', b"null", b"{}", b'{"model": 3}', b"\xff", b"[" * 1_000_000, b'{"a":' * 100_000,
    b'{"model": NaN}', b'{"model": -Infinity}', b'{"model": %s}' % (b"9" * 100_000), b'{"model": "\\ud800"}',
    b'{"a": [' + b"0," * 300_000 + b"0]}", b'{"a": "' + b"," * 300_000 + b'"}',
]  # fmt: skip


@pytest.mark.parametrize("body", NO_REQUESTS, ids=lambda body: body[:12])
def test_bodies_that_are_no_requests_are_never_422(gateway: Gateway, body: bytes) -> None:
    for path in ("chat/completions", "completions", "embeddings"):
        answer = httpx.post(f"{gateway.url}/v1/{path}", content=body, headers=HEADERS)
        assert answer.status_code == 400, path
        assert answer.json()["error"]["type"] == "invalid_request_error"


def test_numbers_beyond_floats_never_go_back(gateway: Gateway) -> None:
    body = b'{"model": "small", "input": "a", "user": [1e400], "max_output_tokens": 1}'
    answer = httpx.post(f"{gateway.url}/v1/responses", content=body, headers=HEADERS)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")


def test_texts_that_cannot_fit_are_not_taken_apart(client: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Served, "encode", lambda *_: pytest.fail("it was taken apart"))
    long = "a" * 40_000
    chat = {**ASKED, "messages": [{"role": "user", "content": long}]}
    for path, body in (("chat/completions", chat), ("completions", {**CONTINUED, "prompt": long})):
        with pytest.raises(openai.BadRequestError, match="40000 characters"):
            client.post(f"/{path}", body=body, cast_to=object)


@pytest.mark.parametrize("stream", [False, True])
def test_the_event_loop_neither_reads_nor_writes_bodies(
    client: OpenAI, gateway: Gateway, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """What a body, a prompt's likelihoods or a long answer take, the others do not wait for."""
    inside: dict[str, list[bool]] = {}

    def looping() -> bool:
        with contextlib.suppress(RuntimeError):
            return asyncio.get_running_loop() is not None
        return False

    def watched(holder: Any, name: str) -> None:
        real = getattr(holder, name)

        def call(*args: Any) -> Any:
            inside.setdefault(name, []).append(looping())
            return real(*args)

        monkeypatch.setattr(holder, name, call)

    names = {False: ((endpoints, "_sent"), (Response, "whole")), True: ((endpoints, "_chunk"), (Response, "opening"))}
    for holder, name in ((endpoints, "body_of"), *names[stream]):
        watched(holder, name)
    body = {**CONTINUED, "echo": True, "logprobs": 1, "stream": stream}
    httpx.post(f"{gateway.url}/v1/completions", json=body, headers=HEADERS, timeout=60)
    assert set(inside) == {"body_of", *(name for _, name in names[stream])}
    assert not any(place for places in inside.values() for place in places)


def test_two_bodies_are_read_at_once(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all addresses together: reading holds the interpreter, and a thread of the pool that streams share."""
    seen = watch_crowd(monkeypatch, endpoints, "body_of", 2)

    def ask(path: str) -> int:
        return httpx.post(f"{gateway.url}/v1/{path}", content=b"{}", headers=HEADERS, timeout=60).status_code

    with ThreadPoolExecutor(6) as threads:
        paths = ["chat/completions", "completions", "embeddings"] * 2
        assert set(threads.map(ask, paths)) == {400}
    assert max(seen) == 2


def test_errors_are_short(client: OpenAI) -> None:
    for schema in ({"z" * 3_000_000: 1}, {"type": "z" * 3_000_000}, {"$ref": "#" + "/a" * 100}):
        form: Any = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(**ASKED, response_format=form)
        assert len(refused.value.response.text) < 1200


def test_fields_that_change_nothing(client: OpenAI) -> None:
    """Of the request, and of messages as agents send them: names, and answers that go back as they came."""
    more = {"user": "u", "metadata": {"a": "b"}, "safety_identifier": "s", "a_field_of_next_year": None, "store": False,
            "verbosity": "low", "reasoning_effort": "low", "service_tier": "flex", "prompt_cache_key": "k"}  # fmt: skip
    made = client.chat.completions.create(**ASKED, extra_body=more)
    said = made.choices[0].message
    assert said.content == text_of(greedy(2))
    messages: Any = [{**CHAT[0], "name": "planner"}, said.model_dump(), {"role": "user", "content": "and", "name": "a"}]
    again = client.chat.completions.create(**{**ASKED, "messages": messages})
    plain = [CHAT[0], {"role": "assistant", "content": said.content}, {"role": "user", "content": "and"}]
    wanted = client.chat.completions.create(**{**ASKED, "messages": plain})
    assert again.choices[0].message.content == wanted.choices[0].message.content
    assert (again.usage.prompt_tokens, again.usage.total_tokens) == (14, 16)  # type: ignore[union-attr]
    assert (wanted.usage.prompt_tokens, wanted.usage.total_tokens) == (14, 16)  # type: ignore[union-attr]


def test_what_a_template_may_use() -> None:
    """Names, efforts, and whether the last message goes on."""
    served: Any = SimpleNamespace(
        tokenizer=copy(tokenizer()), vocabulary=4096, context=None, encode=lambda text, special: [*text.encode()],
        thoughts=frozenset(),
    )  # fmt: skip
    served.tokenizer.chat_template = served.chat_template = (
        "{{ reasoning_effort }}{{ verbosity }}{% for m in messages %}<{{ m.name }}: {{ m.content }}>{% endfor %}"
        "{% if add_generation_prompt %}<assistant: {% endif %}"
    )
    ada, told = {"role": "user", "content": "a", "name": "Ada"}, {"role": "assistant", "content": "b"}
    for messages, more, wanted in (
        ([ada], {"reasoning_effort": "high"}, "high<Ada: a><assistant: "),
        ([ada], {"verbosity": "low"}, "low<Ada: a><assistant: "),
        ([ada], {"add_generation_prompt": False}, "<Ada: a>"),
        ([ada, told], {"continue_final_message": True}, "<Ada: a><: b"),
    ):
        assert bytes(of_messages(served, Fields({"messages": messages, **more}))).decode() == wanted


def test_a_bound_beyond_the_room_is_no_error(client: OpenAI) -> None:
    """`max_completion_tokens` bounds an answer, which the context ends earlier."""
    long = [{"role": "user", "content": " ".join([PROMPT] * (122 // prompt_ids().shape[1]))}]
    more: Any = {"messages": long, "max_tokens": None, "logit_bias": {"2": -100}}
    made = client.chat.completions.create(**{**ASKED, **more}, max_completion_tokens=100)
    assert made.usage is not None
    assert (made.choices[0].finish_reason, made.usage.total_tokens) == ("length", 128)


def test_a_wrong_token(gateway: Gateway) -> None:
    with gateway.client("another-token") as client, pytest.raises(openai.AuthenticationError) as refused:
        client.models.list()
    assert told(refused.value)["code"] == "invalid_api_key"
    assert refused.value.response.headers["www-authenticate"] == "Bearer"
    assert httpx.get(f"{gateway.url}/health").status_code == 200, "which tells nothing"
    for path in ("/v1/models", "/metrics", "/v1/private/info"):
        assert httpx.get(f"{gateway.url}{path}").status_code == 401


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"Host": "evil.example"}, "unknown_host"),
        ({"Host": "evil.example:8000"}, "unknown_host"),
        ({"Origin": "http://evil.example"}, "origin_not_allowed"),
        ({"Origin": "null"}, "origin_not_allowed"),
    ],
)
def test_pages_of_other_sites(gateway: Gateway, headers: dict[str, str], code: str) -> None:
    with gateway.client(default_headers=headers) as client, pytest.raises(openai.PermissionDeniedError) as refused:
        client.chat.completions.create(**ASKED)
    assert told(refused.value)["code"] == code
    asked = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    preflight = httpx.options(f"{gateway.url}/v1/chat/completions", headers=asked)
    assert preflight.status_code == 403
    assert not [name for name in preflight.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("authorization", "Bearer a-long-to"), ("authorization", "Bearer "), ("authorization", "Bearer a-long-token2"),
        ("origin", "http://evil127.0.0.1:8000"), ("origin", "http://127.0.0.1:80001"),
        ("host", "evillocalhost"), ("host", "localhost.example"),
    ],
)  # fmt: skip
def test_no_part_of_a_token_or_a_name_is_enough(name: str, value: str) -> None:
    guard = Guard(FastAPI(), GatewaySettings(token="a-long-token"))
    right = {"host": "127.0.0.1:8000", "authorization": "Bearer a-long-token"}
    guard._check("/v1/models", right)
    guard._check("/v1/models", right | {"origin": "http://127.0.0.1:8000"})
    with pytest.raises(ApiError):
        guard._check("/v1/models", right | {name: value})


def test_models_that_are_not_there(client: OpenAI) -> None:
    for path, body in (("chat/completions", ASKED), ("completions", CONTINUED), ("embeddings", {"input": "a"})):
        with pytest.raises(openai.NotFoundError) as refused:
            client.post(f"/{path}", body={**body, "model": SECRET}, cast_to=object)
        found = told(refused.value)
        assert (found["param"], found["code"]) == ("model", "model_not_found")
        assert found["message"].endswith("want one of: small")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve(SECRET)
    with pytest.raises(openai.BadRequestError) as unfit:
        client.embeddings.create(model="small", input="a")
    assert told(unfit.value)["code"] == "model_not_supported"


def test_addresses_and_methods(client: OpenAI) -> None:
    listed: Any = client.get("/models/", cast_to=object)
    assert listed == client.get("/models", cast_to=object)
    with pytest.raises(openai.NotFoundError) as nothing:
        client.images.generate(model="small", prompt="a")
    assert told(nothing.value)["code"] == "unknown_url"
    assert "the base URL of clients ends in /v1" in told(nothing.value)["message"]
    with pytest.raises(openai.APIStatusError) as refused:
        client.get("/chat/completions", cast_to=object)
    assert refused.value.status_code == 405
    assert told(refused.value)["code"] == "method_not_allowed"
    assert "another method (POST)" in told(refused.value)["message"]
    assert refused.value.response.headers["allow"] == "POST"


def test_bodies_that_are_too_large(client: OpenAI, gateway: Gateway) -> None:
    large = "a" * (4 << 20)
    with pytest.raises(openai.APIStatusError) as refused:
        client.completions.create(model="small", prompt=large)
    assert refused.value.status_code == 413
    assert told(refused.value)["code"] == "request_too_large"

    def pieces() -> Iterator[bytes]:
        for _ in range(65):
            yield b" " * (64 << 10)

    answer = httpx.post(f"{gateway.url}/v1/completions", content=pieces(), headers=HEADERS)  # of no announced length
    assert answer.status_code == 413


@pytest.mark.parametrize(
    "headers", [{"Content-Type": "text/plain"}, {"Content-Type": "application/x-www-form-urlencoded"},
                {"Content-Encoding": "gzip"}]
)  # fmt: skip
def test_bodies_of_another_kind(client: OpenAI, headers: dict[str, str]) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        client.chat.completions.create(**ASKED, extra_headers=headers)
    assert refused.value.status_code == 415
    assert told(refused.value)["code"] == "unsupported_media_type"


@pytest.mark.parametrize(("host", "alone"), [
    ("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("localhost", True),
    ("0.0.0.0", False), ("::", False), ("192.168.1.7", False), ("fd00::7", False), ("gateway.local", False),
])  # fmt: skip
def test_a_gateway_that_others_can_reach_wants_a_token(host: str, alone: bool) -> None:
    GatewaySettings(host=host, token="a-long-token")
    if alone:
        assert GatewaySettings(host=host).loopback
    else:
        with pytest.raises(ConfigError, match="token: got none for host"):
            GatewaySettings(host=host)


def test_a_second_gateway_at_the_same_place(gateway: Gateway) -> None:
    port = int(gateway.url.rpartition(":")[2])
    with pytest.raises(ConfigError, match="another gateway may run there: stop it, or give another --port"):
        bound_socket(GatewaySettings(port=port))
    with pytest.raises(ConfigError, match=r"host: got '256\.1\.1\.1'; want an address of this machine"):
        bound_socket(GatewaySettings(host="256.1.1.1", token="a-long-token"))


def test_collections_do_not_look_through_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """That takes 0.3 s, in which nobody is answered."""
    frozen: list[str] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append("models"))
    running = SimpleNamespace(run=lambda sockets: frozen.append("begun"))
    monkeypatch.setattr(app, "server_of", lambda _, __, ready: ready() or running)
    app.serve(FastAPI(), GatewaySettings(port=0), ready=lambda: frozen.append("ready"))
    assert frozen == ["models", "ready", "begun"]
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 1)
    monkeypatch.setattr(served, "TokenTable", lambda *_: frozen.append("table"))
    one = SimpleNamespace(_tabling=threading.Lock(), texts=None, vocabulary=1, ends=())
    assert Served.table.func(one) is None  # type: ignore[arg-type]
    assert frozen[3:] == ["table", "models"]
