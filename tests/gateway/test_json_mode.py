"""Answers that must be JSON, written by a random model that would rather write anything else."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import openai
import pytest
import torch
from openai import OpenAI
from private_llm_gateway import constrained, served
from private_llm_gateway.completion import Completion, SamplingParams, choose
from private_llm_gateway.constrained import Grammar, TokenTable
from private_llm_gateway.decoding import TokenTexts
from private_llm_gateway.errors import ApiError
from pydantic import BaseModel

from tests.gateway.small_gateway import BUNDLED, CHAT, small, tokenizer
from tests.gateway.test_decoding import pieces, smollm, words

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
    {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}},
    {"type": "object", "properties": {"code": {"type": "string", "pattern": "^[a-z]{2}-[0-9]+$"},
     "level": {"type": "integer", "minimum": 3, "maximum": 12}}, "required": ["level"], "additionalProperties": False},
]  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("schema", SCHEMAS, ids=["object", "enum", "array", "ref", "recursion", "pattern"])
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
    assert text.replace(" ", "").startswith('{"name":')
    assert '"age"' not in text


@pytest.mark.parametrize("make", [tokenizer, smollm, pieces])
@pytest.mark.parametrize("room", [12, 30, 80])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full)])
def test_random_tokens_are_of_their_schema(make: Callable[[], Any], room: int, seed: int) -> None:
    """Whichever token is drawn at each step: no text is cut off that could end before."""
    texts = TokenTexts(make())
    size = len(make())
    table = TokenTable(texts, size + 3, (2,))
    scores = torch.zeros(size + 3, dtype=torch.float64)
    for schema in [*SCHEMAS, {"type": "object"}, {"type": "number"}, {"enum": ["\N{EURO SIGN}", [1]]}]:
        grammar = Grammar(schema, table)
        possible = grammar.written().closing(min(room, 64)) is not None
        answer = Completion(0, [], SamplingParams(room, seed=seed, grammar=grammar), texts, (2,))
        while answer.finish is None:
            answer.take(choose(answer, scores))
        if possible or answer.finish == "stop":
            jsonschema.validate(json.loads(answer.text), schema)


def test_tokens_that_cannot_write_it() -> None:
    with pytest.raises(ApiError, match="no text fits it"):
        Grammar({"type": "object"}, TokenTable(TokenTexts(words()), 8, ()))


def test_the_seed_says_what_is_written() -> None:
    """Two answers of one grammar have a matcher of their own each."""
    texts = TokenTexts(tokenizer())
    grammar = Grammar({"type": "object"}, TokenTable(texts, 4096, (2,)))
    params = SamplingParams(40, seed=1, grammar=grammar)
    both = [Completion(0, [], params, texts, (2,)) for _ in range(2)]
    while both[0].finish is None:
        for answer in both:
            answer.take(choose(answer, torch.zeros(4096)))
    assert both[0].tokens == both[1].tokens


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"not": {"type": "null"}}, "not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"properties": {"a": {"multipleOf": 3}}}, "multipleOf at /properties/a"),
        ({"allOf": [{"type": "null"}]}, "allOf at the top"),
        ({"type": "object", "patternProperties": {}}, "patternProperties"),
        ({"x-guidance": {"item_separator": "and"}}, "x-guidance"),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "unevaluatedItems": False}, "unevaluatedItems"),
        ({"type": "array", "items": [{}], "additionalItems": False}, "additionalItems"),
        ({"properties": {"a": {"%lark": "start: /a/"}}}, "%lark at /properties/a"),
        ({"anyOf": [{"type": "string"}], "pattern": "a"}, "pattern beside anyOf"),
        ({"oneOf": [{"type": "string", "pattern": "a"}, {"type": "string", "pattern": "b"}]}, "oneOf"),
        ({"type": "string", "pattern": "(?=a)b"}, "pattern"),
        ({"type": "string", "pattern": "(a"}, "pattern; want a valid regular expression"),
        ({"type": "string", "format": "zork"}, "format"),
        ({"type": "zork"}, "value of a keyword"),
        ({"$ref": "http://example/schema"}, r"\$ref at the top"),
        ({"$ref": "#/default", "default": {"allOf": []}}, r"\$ref at the top"),
        ({"$ref": "#/$defs/a%2Fdefault", "$defs": {"a": {"default": {"allOf": []}}}}, r"\$ref at the top"),
        ({"$defs": [1]}, r"\$defs at the top"),
        ({"$ref": "#/$defs/a"}, "want one to a definition of this schema"),
        ({"$ref": "#/$defs/a b", "$defs": {"a b": {}}}, "name of a definition"),
        ({"$ref": "#"}, "no text fits it"),
        ({"type": []}, "no text fits it"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "no text fits it"),
    ],
)
def test_what_cannot_be_promised_is_refused(client: OpenAI, schema: dict[str, Any], named: str) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    with pytest.raises(openai.BadRequestError, match=named) as refused:
        client.chat.completions.create(**WILD, max_tokens=9, response_format=form)
    assert (refused.value.code, refused.value.param) == ("unsupported_schema", "response_format.json_schema.schema")


def chained(count: int, further: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    """A schema whose every definition names the next one, as `further` says."""
    made = {f"d{at}": further({"$ref": f"#/$defs/d{at + 1}"}) for at in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {**made, f"d{count}": {"type": "null"}}}


def nested(depth: int, part: dict[str, Any]) -> dict[str, Any]:
    for _ in range(depth):
        part = {"type": "array", "items": part}
    return part


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        (chained(1500, lambda part: part), "deeper than 512 levels"),
        (chained(300, lambda part: {"type": "array", "items": part}), "deeper than 512 levels"),
        (chained(6, lambda part: nested(100, part)), "deeper than 512 levels"),
        (nested(200, {}), "deeper than 127 levels"),
        ({"enum": ["a" * 80_000, "b" * 80_000]}, "more than 131072 characters"),
        ({"properties": {"a" * 140_000: {}}}, "more than 131072 characters"),
        ({"enum": [json.loads("[" * 100 + str(at) + "]" * 100) for at in range(300)]}, "more than 4096 lists"),
        ({"prefixItems": [{"maxItems": at * 1000} for at in range(3000)], "minItems": 3000}, "too much"),
        (chained(16, lambda part: {**part, "pattern": "(a|b)*a(a|b){9}"}), r"pattern beside \$ref"),
        ({"type": "string", "pattern": "(a|b)*a(a|b){18}", "minLength": 500}, "too much"),
        ({"anyOf": [{"type": "string", "maxLength": most} for most in range(1, 1500)]}, "too much"),
        ({"anyOf": [{"type": "number", "minimum": at * 1.2345, "maximum": at * 1e9} for at in range(900)]}, "too much"),
    ],
    ids=[
        "chain",
        "arrays",
        "deep definitions",
        "deep",
        "long values",
        "long names",
        "deep values",
        "array lengths",
        "patterns",
        "states",
        "lengths",
        "ranges",
    ],
)
def test_schemas_that_take_too_much_are_refused(client: OpenAI, schema: dict[str, Any], named: str) -> None:
    """Those that would end the process, or keep a processor busy for more than a moment."""
    form: Any = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    with pytest.raises(openai.BadRequestError, match=named):
        client.chat.completions.create(**WILD, max_tokens=9, response_format=form)


def test_deep_schemas_in_threads_with_little_stack() -> None:
    """As where a process's own stack may grow without end: threads have 2 MiB of it then."""
    given = (BUNDLED, json.dumps(chained(5, lambda part: nested(99, part))))
    ran = subprocess.run([sys.executable, "-c", DEEP, *given], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, "made\n"), ran.stderr[-500:]


DEEP = """
import json, sys, threading
from private_llm_gateway.constrained import Grammar, TokenTable
from private_llm_gateway.decoding import TokenTexts
from transformers import AutoTokenizer
table = TokenTable(TokenTexts(AutoTokenizer.from_pretrained(sys.argv[1])), 4096, (2,))
def work():
    Grammar(json.loads(sys.argv[2]), table)
    print("made")
threading.stack_size(2 << 20)
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


def pair(part: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": part, "b": part}, "required": ["a", "b"]}


def arrays(part: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [{"type": "array", "items": part, "minItems": 1}] * 2}


def strings(what: str, count: int) -> list[dict[str, Any]]:
    return [{"type": "string", what: each} for each in range(1, count)]


def members(count: int, part: Any, **more: Any) -> dict[str, Any]:
    return {"properties": {**more, **{f"p{at}": part for at in range(count)}}, "required": list(more)}


NULL = {"type": "null"}
HEAVY: dict[str, dict[str, Any]] = {
    "the same twice": chained(30, lambda part: {"anyOf": [part, part]}),
    "the same in many ways": chained(12, arrays),
    "pairs of pairs": chained(40, pair),
    "long arrays": {"type": "array", "minItems": 65536, "items": {"type": "array", "minItems": 65536}},
    "deep": nested(110, {"anyOf": strings("maxLength", 20)}),
    "lengths": {"anyOf": strings("maxLength", 200)},
    "least lengths": {"anyOf": strings("minLength", 90)},
    "optional": members(1500, NULL),
    "required often": {**members(900, NULL), "required": ["p899"] * 10_000},
    "one value often": {"enum": [0] * 6_000},
    "one type often": {"type": ["string"] * 6_000},
    "one part often": {"anyOf": [{"$ref": "#/$defs/a"}] * 900, "$defs": {"a": {"anyOf": strings("maxLength", 9)}}},
    "names that begin alike": {"properties": {"-" * size: True for size in range(1, 200)}},
    "values that begin alike": {"enum": ["a" * size for size in range(1, 350)]},
    "long ends": members(0, NULL, **{"a" * size: True for size in range(1, 60)}, b={"const": "=-" * 4000}),
    "free objects": {"anyOf": [{"type": "object", "additionalProperties": part} for part in strings("maxLength", 90)]},
    "patterns": {"anyOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{15}}{at}"} for at in range(500)]},
}


@pytest.mark.parametrize("schema", HEAVY.values(), ids=HEAVY)
def test_large_schemas_are_written(schema: dict[str, Any]) -> None:
    """Or refused, if a text goes on in too many ways."""
    texts = TokenTexts(tokenizer())
    grammar = Grammar(schema, TokenTable(texts, 4096, (2,)))
    answer = Completion(0, [], SamplingParams(90, seed=1, grammar=grammar), texts, (2,))
    possible = grammar.written().closing(60) is not None
    while answer.finish is None:
        answer.take(choose(answer, torch.zeros(4096)))
    if possible:
        once = {
            name: list(dict.fromkeys(schema[name])) for name in ("required", "type") if type(schema.get(name)) is list
        }
        jsonschema.validate(json.loads(answer.text), {**schema, **once})


def test_the_search_for_an_end_is_bounded() -> None:
    """Where hardly any token leaves a way to close, few are tried; the text ends in time all the same."""
    coder = tokenizer()
    table = TokenTable(TokenTexts(coder), 4096, (2,))
    grammar = Grammar({"type": "string", "pattern": "^[b-y]{522}$"}, table)
    answer = Completion(0, [], SamplingParams(63, seed=1, grammar=grammar), TokenTexts(coder), (2,))
    while answer.finish is None:
        answer.take(choose(answer, torch.zeros(4096)))
    assert (answer.finish, len(answer.text)) == ("stop", 524)
    assert answer.written is not None
    assert answer.written._steps <= constrained._STEPS + 5 * 63


def test_a_text_that_goes_on_in_too_many_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is found while an answer is written is an error of the schema, too."""
    monkeypatch.setitem(constrained._LIMITS, "max_items_in_row", 400)
    written = Grammar(members(300, NULL), TokenTable(TokenTexts(tokenizer()), 4096, (2,))).written()
    with pytest.raises(ApiError, match="too much at one place"):
        written.take(tokenizer().convert_tokens_to_ids("{"))


def test_a_gateway_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ApiError, match=r"pip install 'private-llm\[gateway\]'") as refused:
        TokenTable(TokenTexts(tokenizer()), 4096, (2,))
    assert refused.value.status == 501


def test_requests_together_make_one_table(monkeypatch: pytest.MonkeyPatch) -> None:
    made, both = [], threading.Barrier(4)

    def slow(*_: Any) -> object:
        made.append(time.sleep(0.05))
        return object()

    def ask(_: int) -> object:
        both.wait()
        return fresh.table

    fresh = small()
    monkeypatch.setattr(served, "TokenTable", slow)
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
