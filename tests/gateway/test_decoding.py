"""Every token's bytes and place in a text, against what tokenizers decode to."""

from __future__ import annotations

import json
import random
from functools import cache
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from private_llm_gateway.completion import Likelihood
from private_llm_gateway.decoding import DecodedText, TokenTexts
from private_llm_gateway.responses import _completion_logprobs
from private_llm_hf.models import smollm2
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.gateway.small_gateway import TOKEN, Gateway, tokenizer

HEADERS = {"Authorization": f"Bearer {TOKEN}"}


def words() -> Any:
    """Word pieces, which are joined by spaces that the first one has not."""
    vocabulary = {word: at for at, word in enumerate(["[UNK]", "the", "city", "##ies", "é", "##é", "a", "."])}
    made = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]")


def pieces() -> Any:
    """Llama's kind: words begin with a mark, the first space is stripped, rare characters are bytes."""
    names = ["<unk>", "▁the", "▁city", "ies", "é", "▁a", "▁", "a", *(f"<0x{byte:02X}>" for byte in range(256))]
    made = Tokenizer(models.BPE({name: at for at, name in enumerate(names)}, [], unk_token="<unk>", byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")


def smollm() -> Any:
    if smollm2.missing() is not None:
        pytest.skip(str(smollm2.missing()))
    return AutoTokenizer.from_pretrained(smollm2.folder())


@cache
def ids_of_bytes() -> dict[bytes, int]:
    texts = TokenTexts(tokenizer())
    return {texts.bytes_of(token) or b"": token for token in range(len(tokenizer()))}


def place(before: bytes, added: bytes) -> int:
    """Where bytes begin in the text of all: within its last character if they go on with that."""
    count = len(before.decode(errors="replace"))
    return count - (count == len((before + added[:1]).decode(errors="replace")) and bool(before))


@pytest.mark.parametrize("make", [tokenizer, pytest.param(smollm, marks=pytest.mark.real_model)])
def test_all_tokens_of_bytes(make: Any) -> None:
    """In a random order, which breaks off characters everywhere: the bytes, the text and the place of each."""
    made = make()
    texts = TokenTexts(made)
    silent = [token for token in range(len(made)) if texts.bytes_of(token) is None]
    assert made.decode(silent, skip_special_tokens=True) == ""
    every = sorted({*range(len(made))} - {*silent})
    random.Random(3).shuffle(every)
    for first in range(0, len(every), 300):
        tokens, text, raw = every[first : first + 300], DecodedText(texts), b""
        for token in tokens:
            added = texts.bytes_of(token)
            assert added
            assert text.take(token) == place(raw, added), (raw[-8:], added)
            raw += added
        text.end()
        assert text.text == raw.decode(errors="replace") == made.decode(tokens)


@pytest.mark.parametrize("make", [words, pieces])
def test_tokens_of_words(make: Any) -> None:
    """Text by text what the tokenizer decodes, also where it strips the first space."""
    made, texts = make(), TokenTexts(make())
    for seed in range(50):
        tokens = [1, *random.Random(seed).choices(range(1, 8), k=9)]
        text = DecodedText(texts)
        places = [*(text.take(token) for token in tokens), len(text.text)]
        assert text.text == made.decode(tokens)
        added = [text.text[at:upto].encode() for at, upto in pairwise(places)]
        assert added[1:] == [texts.bytes_of(token) for token in tokens[1:]]
        assert (added[0], texts.bytes_of(1)) == (b"the", b" the")


def test_a_prompt_of_words_is_echoed_as_it_stands() -> None:
    served: Any = SimpleNamespace(texts=TokenTexts(words()))
    ahead = [Likelihood(1, None, (), 0), Likelihood(2, -1.0, (), 3)]
    assert _completion_logprobs(served, ahead, [], "the city")["tokens"] == ["the", " city"]


def test_bytes_of_rare_characters() -> None:
    """Where a tokenizer has them for want of a token: known one by one, and shown together."""
    made, rare = pieces(), "€".encode()
    texts, ids = TokenTexts(made), made.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in rare])
    text = DecodedText(texts, [1])
    assert [text.take(token) for token in (*ids, 2)] == [3, 3, 3, 4]
    assert text.text == "the€ city"
    assert [texts.bytes_of(token) for token in ids] == [bytes([byte]) for byte in rare]
    assert texts.name_of(ids[0]) == "bytes:\\xe2"


def test_tokens_that_the_tokenizer_lacks() -> None:
    texts = TokenTexts(tokenizer())
    assert (texts.bytes_of(1 << 20), texts.name_of(1 << 20)) == (None, "<token 1048576>")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_ends_within_a_character(gateway: Gateway, echo: bool, stream: bool) -> None:
    """The answer completes it, with the likelihoods of each of its bytes, or breaks it off."""
    for prompt, bias, said in ((b"ni\xc3", b"\xb1", "ni\xf1\ufffd"), (b"ni\xf0\x9f", b"a", "ni\ufffdaa")):
        body = {
            "model": "small", "prompt": [ids_of_bytes()[bytes([byte])] for byte in prompt], "max_tokens": 2,
            "temperature": 0, "logit_bias": {str(ids_of_bytes()[bias]): 100}, "logprobs": 1, "echo": echo,
            "stream": stream,
        }  # fmt: skip
        raw = httpx.post(f"{gateway.url}/v1/completions", json=body, headers=HEADERS, timeout=60)
        parts = [json.loads(line[6:]) for line in raw.text.split("\n\n")[:-2]] if stream else [raw.json()]
        choices = [choice for part in parts for choice in part["choices"]]
        text = "".join(choice["text"] for choice in choices)
        assert text == (said if echo else said[2:])
        told = [choice["logprobs"] for choice in choices if choice["logprobs"]]
        names = [name for each in told for name in each["tokens"]]
        places = [at for each in told for at in each["text_offset"]]
        wanted = [bytes([byte]) for byte in prompt] * echo + [bias] * 2
        assert names == [TokenTexts(tokenizer()).name_of(ids_of_bytes()[each]) for each in wanted]
        raw_places = [place(b"".join([prompt] * (not echo) + wanted[:at]), each) for at, each in enumerate(wanted)]
        assert places == [at - (0 if echo else 2) for at in raw_places]


def test_parts_of_characters_in_a_chat(gateway: Gateway) -> None:
    """Each token's own bytes: joined, they are the text's."""
    first, second = (ids_of_bytes()[bytes([byte])] for byte in b"\xc3\xb1")
    for bias in (first, second):
        body = {
            "model": "small", "messages": [{"role": "user", "content": "ni"}], "max_tokens": 2, "logprobs": True,
            "logit_bias": {str(bias): 100}, "temperature": 0, "top_logprobs": 1,
        }  # fmt: skip
        made = httpx.post(f"{gateway.url}/v1/chat/completions", json=body, headers=HEADERS, timeout=60).json()
        rows = made["choices"][0]["logprobs"]["content"]
        own = 0xC3 if bias == first else 0xB1
        assert [row["bytes"] for row in rows] == [[own]] * 2
        assert [row["token"] for row in rows] == [f"bytes:\\x{own:02x}"] * 2
        assert made["choices"][0]["message"]["content"] == "\ufffd\ufffd"
