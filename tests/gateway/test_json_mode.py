"""Answers that must be JSON, written by a random model that would rather write anything else."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import openai
import pytest
from openai import OpenAI
from private_llm_gateway import constrained, grammar, served
from private_llm_gateway.constrained import Grammar, TokenTree
from private_llm_gateway.errors import ApiError
from private_llm_gateway.grammar import State, TooWide, WorkBudget, start
from private_llm_gateway.json_schema import any_object, of_schema
from pydantic import BaseModel

from tests.gateway.small_gateway import CHAT, small, tokenizer, watch_crowd

WILD: dict[str, Any] = {"model": "small", "messages": CHAT, "temperature": 1.8}
SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
     "required": ["name", "age"], "additionalProperties": False},
    {"type": "object", "properties": {"kind": {"enum": ["cat", "dög", None]}, "tags": {
        "type": "array", "items": {"type": "string", "maxLength": 3}, "minItems": 1, "maxItems": 2}},
     "required": ["tags"], "additionalProperties": False},
    {"type": "array", "items": {"anyOf": [{"type": "boolean"}, {"type": "number"}]}, "minItems": 2, "maxItems": 3},
    {"type": "object", "properties": {"at": {"$ref": "#/$defs/point"}}, "required": ["at"],
     "additionalProperties": False, "$defs": {"point": {"type": "object", "properties": {
         "x": {"type": "integer"}, "y": {"type": "integer"}}, "required": ["x", "y"], "additionalProperties": False}}},
]  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("schema", SCHEMAS, ids=["object", "enum", "array", "ref"])
def test_answers_are_of_their_schema(client: OpenAI, schema: dict[str, Any]) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": True}}
    made = client.chat.completions.create(**WILD, seed=1, max_tokens=60, response_format=form)
    assert made.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(made.choices[0].message.content or ""), schema)


def test_free_objects_end_in_time(client: OpenAI) -> None:
    """Whatever room there is: what was begun is closed before it ends."""
    for room in (6, 16):
        made = client.chat.completions.create(
            **WILD, seed=3, max_tokens=room, n=2, response_format={"type": "json_object"}
        )
        for choice in made.choices:
            assert isinstance(json.loads(choice.message.content or ""), dict)


def test_the_clients_own_parsing(client: OpenAI) -> None:
    class City(BaseModel):
        population: int
        coastal: bool

    made = client.chat.completions.parse(**{**WILD, "max_tokens": 60}, seed=4, response_format=City)
    assert isinstance(made.choices[0].message.parsed, City)


def test_a_stream_of_json_with_a_stop_text(client: OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMAS[0]}}
    parts = client.chat.completions.create(
        **WILD, seed=1, max_tokens=60, response_format=form, stop=['"age"'], stream=True
    )
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert text.startswith('{"name":')
    assert '"age"' not in text


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "string", "pattern": "a+"}, "pattern"),
        ({"type": "integer", "minimum": 3}, "minimum"),
        ({"oneOf": [{"type": "null"}]}, "oneOf"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}}, "to itself"),
        ({"$ref": "http://example/schema"}, "another document"),
        ({"type": "object", "patternProperties": {}}, "patternProperties"),
    ],
)
def test_what_cannot_be_promised_is_refused(client: OpenAI, schema: dict[str, Any], named: str) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    with pytest.raises(openai.BadRequestError, match=named) as refused:
        client.chat.completions.create(**WILD, max_tokens=9, response_format=form)
    assert refused.value.code == "unsupported_schema"


def chained(count: int, further: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    """A schema whose every definition names the next one, as `further` says."""
    made = {f"d{at}": further({"$ref": f"#/$defs/d{at + 1}"}) for at in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {**made, f"d{count}": {"type": "null"}}}


def pair(part: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": part, "b": part}, "required": ["a", "b"]}


def arrays(part: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [{"type": "array", "items": part, "minItems": 1}] * 2}


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "array", "minItems": 65536, "items": {"type": "array", "minItems": 65536}}, "shortest text"),
        ({"type": "array", "minItems": 9, "items": {"type": "string", "minLength": 65536}}, "shortest text"),
        (chained(40, pair), r"shortest text has about 10\^1"),
        ({"enum": [0] * 6_000}, "larger than 5000"),
        ({"type": ["string"] * 6_000}, "larger than 5000"),
        ({"type": []}, "want a type"),
        (chained(1500, lambda part: part), "deeper than 128"),
        (chained(200, lambda part: {"type": "array", "items": part}), "deeper than 128"),
        ({"enum": ["a" * 40_000, "b" * 40_000]}, "more than 65536 characters"),
        ({"properties": {"a" * 70_000: {}}}, "more than 65536 characters"),
        ({"anyOf": [{"type": "string", "maxLength": most} for most in range(1, 1500)]}, "too many ways"),
    ],
    ids=["arrays", "strings", "refs", "enum", "types", "no type", "chain", "deep", "long values", "long names", "wide"],
)
def test_schemas_that_would_fill_the_memory_are_refused(client: OpenAI, schema: dict[str, Any], named: str) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    with pytest.raises(openai.BadRequestError, match=named):
        client.chat.completions.create(**WILD, max_tokens=9, response_format=form)


@pytest.mark.parametrize(
    "schema",
    [
        chained(30, lambda part: {"anyOf": [part, part]}),
        {"type": "object", "properties": {f"p{at}": {"type": "null"} for at in range(1500)}},
        {"type": "object", "properties": {f"p{at}": {"type": "null"} for at in range(900)},
         "required": ["p899"] * 10_000},
    ],
    ids=["the same twice", "many properties", "required often"],
)  # fmt: skip
def test_large_schemas_are_written(client: OpenAI, schema: dict[str, Any]) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    made = client.chat.completions.create(**WILD, seed=1, max_tokens=40, response_format=form)
    named = dict.fromkeys(schema.get("required", ()))
    jsonschema.validate(json.loads(made.choices[0].message.content or ""), {**schema, "required": list(named)})


def test_texts_that_go_on_in_too_many_ways_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    state: State | None = start(of_schema(chained(18, arrays)), WorkBudget(100))
    for _ in range(11):
        state = state and state.after("[", WorkBudget(constrained._MOST_WORK))
    assert state is not None
    with pytest.raises(TooWide):
        state.after("[", WorkBudget(10_000))
    monkeypatch.setattr(constrained, "_MOST_WORK", 10)
    with pytest.raises(ApiError, match="too many ways"):
        Grammar(any_object(), TokenTree(tokenizer(), 4096)).following(start(any_object(), WorkBudget(10)))


def nested(depth: int, part: dict[str, Any]) -> dict[str, Any]:
    for _ in range(depth):
        part = {"type": "array", "items": part}
    return part


def strings(what: str, count: int) -> list[dict[str, Any]]:
    return [{"type": "string", what: each} for each in range(1, count)]


def members(count: int, part: Any, **more: Any) -> dict[str, Any]:
    return {"properties": {**more, **{f"p{at}": part for at in range(count)}}, "required": list(more)}


NULL = {"type": "null"}
ARRAYS = [{"type": "array", "items": {"$ref": "#/$defs/a"}, "maxItems": most} for most in range(1, 100)]
HEAVY: dict[str, dict[str, Any]] = {
    "deep": nested(110, {"anyOf": strings("maxLength", 20)}),
    "wide": {"anyOf": strings("maxLength", 200)},
    "long": {"anyOf": strings("minLength", 90)},
    "ambiguous": chained(12, arrays),
    "one value often": members(300, NULL, a={"enum": ["a"] * 2000}),
    "one type often": {"anyOf": ARRAYS, "$defs": {"a": {"anyOf": [NULL] * 3000}}},
    "one part often": {"anyOf": [{"$ref": "#/$defs/a"}] * 900, "$defs": {"a": {"anyOf": strings("maxLength", 9)}}},
    "optional": members(500, True),
    "names that begin alike": {"properties": {"-" * size: True for size in range(1, 200)}},
    "values that begin alike": {"enum": ["a" * size for size in range(1, 350)]},
    "long ends": members(0, NULL, **{"a" * size: True for size in range(1, 60)}, b={"const": "=-" * 4000}),
    "free objects": {"anyOf": [{"type": "object", "additionalProperties": part} for part in strings("maxLength", 90)]},
}


@pytest.fixture(scope="module")
def tree() -> TokenTree:
    return TokenTree(tokenizer(), 1000)


def lines_of(work: Callable[[], object]) -> int:
    """How many lines of the grammar's code run."""
    lines = 0

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace if frame.f_code.co_filename in (grammar.__file__, constrained.__file__) else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with contextlib.suppress(ApiError):
            work()
    finally:
        sys.settrace(before)
    return lines


@pytest.mark.parametrize("schema", HEAVY.values(), ids=HEAVY)
def test_looks_count_the_work(monkeypatch: pytest.MonkeyPatch, tree: TokenTree, schema: dict[str, Any]) -> None:
    """A look is a few lines, and so is a branch of the vocabulary, whatever the schema says, refused or not."""
    monkeypatch.setattr(constrained, "_MOST_WORK", 4000)
    made = Grammar(of_schema(schema), tree)
    state: State | None = made.start
    with contextlib.suppress(ApiError):
        for _ in range(12):
            assert lines_of(lambda: made.following(state)) < 40 * 4000  # noqa: B023
            found = made.following(state)
            assert sum(len(each.stacks) for each in found.states) <= found.looks
            state = max(found.states, key=lambda each: len(each.stacks), default=state)


def test_one_grammar_is_walked_at_once(tree: TokenTree, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all requests together: they keep one processor busy at most."""
    seen = watch_crowd(monkeypatch, Grammar, "_walk", 1)
    made = [Grammar(any_object(), tree) for _ in range(3)]
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda each: each.following(each.start), made))
    assert seen == [1, 1, 1]


def test_depth_adds_no_work(tree: TokenTree) -> None:
    """Neither lines nor bytes, but for the brackets that close the text."""
    lines, peaks = [], []
    for depth in (1, 110):
        made = Grammar(of_schema(nested(depth, {"anyOf": strings("maxLength", 40)})), tree)
        state: State | None = made.start
        for character in "[" * depth:
            state = state and state.after(character, WorkBudget(1000))
        tracemalloc.start()
        made._walk(state)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        lines.append(lines_of(lambda: made._walk(state)))  # noqa: B023
    assert lines[1] < 3 * lines[0]
    assert peaks[1] < 3 * peaks[0]


def test_requests_together_make_one_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    made, both = [], threading.Barrier(4)

    def slow(*_: Any) -> object:
        made.append(time.sleep(0.05))
        return object()

    def ask(_: int) -> object:
        both.wait()
        return fresh.tree

    fresh = small()
    monkeypatch.setattr(served, "TokenTree", slow)
    with ThreadPoolExecutor(4) as threads:
        assert len(set(threads.map(ask, range(4)))) == len(made) == 1
    fresh.pool.close()


def test_many_biases_are_added_at_once(client: OpenAI) -> None:
    """Token ids written in two ways are one token."""
    bias: Any = {**{str(token): -100 for token in range(4096)}, "7": 10, "07": 100}
    made = client.completions.create(
        model="small", prompt="a", max_tokens=2, temperature=0, logprobs=0, extra_body={"logit_bias": bias}
    )
    found = made.choices[0].logprobs
    assert found is not None
    assert found.tokens == [tokenizer().decode([7])] * 2
