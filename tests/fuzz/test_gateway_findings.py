"""What fuzzing found in the gateway: each was an unforeseen error, and is the caller's now."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from private_llm_gateway.constrained import Grammar, TokenTable
from private_llm_gateway.decoding import TokenTexts
from private_llm_gateway.errors import ApiError
from private_llm_gateway.fields import Fields, body_of
from private_llm_gateway.guard import Guard
from private_llm_gateway.pool import SessionPool
from private_llm_gateway.settings import GatewaySettings

from private_llm.errors import DomainError
from tests.gateway.small_gateway import tokenizer


@pytest.fixture(scope="module")
def table() -> TokenTable:
    return TokenTable(TokenTexts(tokenizer()), 4096, (2,))


@pytest.mark.parametrize(
    "raw",
    [
        b'{"prompt": "\\udfff"}',
        b'{"\\ud800": 1}',
        b'{"a": [["x", {"b": "\\ud800"}]]}',
        b'{"a": "\\\\\\ud800"}',
        b'["\\ud800\\ud835\\udd4f"]',
    ],
)
def test_a_lone_surrogate_is_in_no_text(raw: bytes) -> None:
    with pytest.raises(ApiError, match="cannot be read as JSON"):
        body_of(raw)


def test_a_pair_of_surrogates_is_a_character() -> None:
    assert body_of(b'{"a": "\\ud835\\udd4f", "b": "\\\\ud800"}') == {"a": "\U0001d54f", "b": "\\ud800"}


def test_values_are_counted_outside_texts() -> None:
    text = ',[{\\"' * 100_000
    assert len(body_of(f'{{"prompt": "{text}"}}'.encode())["prompt"]) == 400_000
    for many in (b"[0" + b",0" * 40_000 + b"]", b'""' * 40_000):
        with pytest.raises(ApiError, match="more than 32768 texts, lists"):
            body_of(many)


@pytest.mark.parametrize("value", [10**400, -(10**400), float("nan"), float("inf")])
def test_a_number_that_no_float_holds(value: float) -> None:
    with pytest.raises(ApiError, match="temperature: out of range"):
        Fields({"temperature": value}).number("temperature", 0, 2)


@pytest.mark.parametrize("name", [["a"], {"a": 1}, None, 3])
def test_a_required_name_that_is_none(name: object, table: TokenTable) -> None:
    with pytest.raises(ApiError, match="value of a keyword"):
        Grammar({"type": "object", "properties": {"a": {"type": "integer"}}, "required": [name]}, table)


@pytest.mark.parametrize("schema", [{"const": 1e999}, {"enum": [1, [{"a": -1e999}]]}, {"const": 10**400}])
def test_a_constant_that_no_json_holds(schema: object, table: TokenTable) -> None:
    with pytest.raises(ApiError, match="a number beyond the range of a float"):
        Grammar(schema, table)


@pytest.mark.parametrize("origin", ["http://[", "http://[::1", "null", "http://127.0.0.1:1@evil.example"])
def test_an_origin_that_is_none(origin: str) -> None:
    guard = Guard(lambda *_: None, GatewaySettings())  # type: ignore[arg-type, return-value]
    with pytest.raises(ApiError, match="pages of other sites"):
        guard._check("/health", {"host": "127.0.0.1:8000", "origin": origin})


@pytest.mark.parametrize(("over", "renewed"), [("a party refused a call", 1), (None, 0)])
def test_what_the_parties_refuse_to_one_request_fails_no_other(over: str | None, renewed: int) -> None:
    reconnects: list[int] = []
    model = SimpleNamespace(parties=SimpleNamespace(over=over), reconnect=lambda: reconnects.append(1))
    pool = SessionPool(model, 1)
    with pytest.raises(DomainError), pool.session(1.0):
        raise DomainError("caches: got 9 positions; this service keeps 8 for a session")
    with pool.session(1.0) as found:
        assert found is model
    assert len(reconnects) == renewed
