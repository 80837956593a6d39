"""Answers that must be JSON, written by a random model that would rather write anything else."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from tests.gateway.small_gateway import CHAT

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
