"""What the guide says of each field is true, and it says something of all that the official client has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParams
from openai.types.embedding_create_params import EmbeddingCreateParams
from openai.types.responses.response_create_params import ResponseCreateParamsBase as ResponseParams
from private_llm_gateway.completion import SamplingParams
from private_llm_gateway.errors import ApiError
from private_llm_gateway.fields import Fields

from tests.gateway.small_gateway import CHAT, PROMPT, greedy, text_of

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "gateway.md"
COLUMNS = {
    "chat": ChatParams,
    "responses": ResponseParams,
    "completions": CompletionParams,
    "embeddings": EmbeddingCreateParams,
}


def table() -> dict[str, dict[str, str]]:
    """By endpoint: field and what the guide says of it."""
    found: dict[str, dict[str, str]] = {name: {} for name in COLUMNS}
    part = GUIDE.read_text(encoding="utf-8").split("<!-- fields -->")[1].split("<!-- /fields -->")[0]
    for line in part.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        name = re.fullmatch(r"`(\w+)`", cells[0])
        if name:
            for column, cell in zip(COLUMNS, cells[1:], strict=True):
                if cell:
                    found[column][name[1]] = cell
    return found


@pytest.mark.parametrize("column", COLUMNS)
def test_every_field_of_the_official_client_has_a_row(column: str) -> None:
    listed = set(table()[column]) - {"stream"}  # which tells the client's two forms apart
    known = set(COLUMNS[column].__annotations__) - {"stream"}
    assert listed == known


@pytest.mark.parametrize("column", ["chat", "responses", "completions"])
def test_refused_fields_are_refused_and_ignored_ones_change_nothing(client: OpenAI, column: str) -> None:
    path, body = {
        "chat": ("/chat/completions", {"messages": CHAT, "max_tokens": 3}),
        "responses": ("/responses", {"input": PROMPT, "max_output_tokens": 3}),
        "completions": ("/completions", {"prompt": PROMPT, "max_tokens": 3}),
    }[column]
    asked: dict[str, Any] = {"model": "small", "temperature": 0, **body}
    for name, said in table()[column].items():
        more = {**asked, name: "anything"} if name != "best_of" else {**asked, name: 9}
        if said.startswith("refused"):
            with pytest.raises(openai.BadRequestError) as refused:
                client.post(path, body=more, cast_to=object)
            assert (refused.value.param, refused.value.code) == (name, "unsupported_parameter")
        elif said == "ignored":
            made: Any = client.post(path, body=more, cast_to=object)
            (part,) = made["output"][0]["content"] if column == "responses" else made["choices"]
            assert (part["message"]["content"] if column == "chat" else part["text"]) == text_of(greedy(3))


def test_every_code_of_an_error_stands_in_the_guide() -> None:
    package = Path(__import__("private_llm_gateway").__file__).parent
    source = "".join(path.read_text(encoding="utf-8") for path in package.glob("*.py"))
    codes = set(re.findall(r'code="(\w+)"', source))
    codes |= {"invalid_type", "invalid_value", "unsupported_parameter", "context_length_exceeded", "party_unavailable"}
    guide = GUIDE.read_text(encoding="utf-8")
    assert not [code for code in codes if f"`{code}`" not in guide]


def test_what_writing_defaults_to_is_what_openai_says() -> None:
    params = SamplingParams(1)
    assert (params.temperature, params.top_p, params.presence, params.frequency, params.seed) == (1, 1, 0, 0, None)


@pytest.mark.parametrize(("value", "wanted"), [(0, "want 1 or more"), (9, "want 8 at most")])
def test_the_bound_that_a_number_passes_is_named(value: int, wanted: str) -> None:
    with pytest.raises(ApiError, match=f"^n: out of range; {wanted}$"):
        Fields({"n": value}).integer("n", 1, 8)
