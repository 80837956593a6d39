"""Streams of tokens at random: whatever they hold, what is shown piece by piece is the answer, byte by byte."""

from __future__ import annotations

import codecs
import random
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from private_llm_gateway.call_formats import FormatReader, format_of
from private_llm_gateway.completion import Completion, Likelihood, SamplingParams
from private_llm_gateway.decoding import TokenTexts

from tests.gateway.test_decoding import smollm

STOPS = ["a", "ab", "aba", "\ufffd", "é", "\n\n", " the", "}", "e\N{COMBINING ACUTE ACCENT}"]


@cache
def texts() -> TokenTexts:
    return TokenTexts(smollm())


def size() -> int:
    return len(smollm())


@cache
def bytes_of_characters() -> list[int]:
    """Tokens that hold a part of a character, which are rare among all."""
    made = [(token, texts().bytes_of(token) or b"") for token in range(size())]
    return [token for token, added in made if added != added.decode(errors="replace").encode()]


TOKENS = st.lists(st.integers(0, 49151) | st.deferred(lambda: st.sampled_from(bytes_of_characters())), max_size=40)


def shown(answer: Completion, tokens: list[int]) -> tuple[str, list[Likelihood]]:
    """What a stream says of an answer that these tokens make."""
    text, rows = "", []
    for token in tokens:
        if answer.finish is None:
            answer.take(token, -1.0)
            if (piece := answer.new()) is not None:
                text += piece.text
                rows += piece.likelihoods
                assert answer.text.startswith(text)
    return text, rows


@pytest.mark.real_model
@settings(max_examples=150, deadline=None, derandomize=True)
@given(tokens=TOKENS, prompt=TOKENS, stops=st.lists(st.sampled_from(STOPS), max_size=3))
def test_pieces_of_a_stream_are_the_answer(tokens: list[int], prompt: list[int], stops: list[str]) -> None:
    """With their likelihoods, whose bytes are the text's; a stop text and what follows it show nowhere."""
    known = [token for token in tokens if token not in (1, 2, 0)]
    params = SamplingParams(len(known) + 1, temperature=0, logprobs=0, stop=tuple(stops))
    answer = Completion(0, prompt, params, texts(), (2,))
    text, rows = shown(answer, [*known, 2])
    assert text == answer.text
    assert rows == answer.likelihoods
    assert not any(stop in text for stop in stops)
    begun = b"".join(texts().bytes_of(token) or b"" for token in prompt)
    spoken = b"".join(texts().bytes_of(token) or b"" for token in known)
    whole = (begun + spoken).decode(errors="replace")
    before = len(begun.decode(errors="replace")) - _unfinished(begun)
    cut = min((at for stop in stops if (at := whole.find(stop, before)) >= 0), default=len(whole))
    assert text == whole[before:cut]
    if cut == len(whole):
        assert b"".join(texts().bytes_of(row.token) or b"" for row in rows) == spoken
    assert [row.at for row in rows] == sorted(row.at for row in rows)


@pytest.mark.full
@pytest.mark.real_model
def test_every_token_is_shown_once() -> None:
    """All of a tokenizer's, in an order that breaks off characters everywhere."""
    every = sorted({*range(size())} - texts().special)
    random.Random(5).shuffle(every)
    for first in range(0, len(every), 400):
        tokens = every[first : first + 400]
        answer = Completion(0, [], SamplingParams(500, logprobs=0), texts(), (2,))
        text, rows = shown(answer, [*tokens, 2])
        spoken = b"".join(texts().bytes_of(row.token) or b"" for row in rows)
        assert [row.token for row in rows] == tokens
        assert text == answer.text == spoken.decode(errors="replace")


def _unfinished(raw: bytes) -> int:
    """1 if bytes end within a character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(raw)
    return int(bool(decoder.getstate()[0]))


TEXTS = st.text("<tool_cal>{}\\\"'nameruts:,[] \n/é", max_size=60) | st.sampled_from(
    [
        '<tool_call>\n{"name": "a", "arguments": {"b": "}\\""}}\n</tool_call>',
        '<tool_call>{"arguments": {}, "name": "b"}',
    ]
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    parts=st.lists(TEXTS, max_size=4),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=9),
    sign=st.sampled_from(["<tool_call>", "[TOOL_CALLS]", "ipython"]),
)
def test_calls_do_not_depend_on_how_a_text_is_cut(parts: list[str], sizes: list[int], sign: str) -> None:
    text, form = "".join(parts), format_of(sign)
    assert form is not None

    def read(pieces: list[str]) -> tuple[str, list[list[str]]]:
        reader, said, calls = FormatReader(form, 9), "", []
        for at, piece in enumerate(pieces):
            told: dict[str, Any] = reader.feed(piece, "stop" if at + 1 == len(pieces) else None)
            said += told.get("content", "")
            for call in told.get("tool_calls", ()):
                if "id" in call:
                    calls.append([call["function"]["name"], ""])
                calls[call["index"]][1] += call["function"]["arguments"]
        return said, calls

    pieces, at = [], 0
    while at < len(text):
        pieces.append(text[at : at + sizes[len(pieces) % len(sizes)]])
        at += len(pieces[-1])
    assert read(pieces or [""]) == read([text])
