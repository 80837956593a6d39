"""Chats and completions by the official client, against the plaintext model's own numbers."""

from __future__ import annotations

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from typing import Any

import httpx
import openai
import pytest
import torch
from openai import OpenAI
from openai.types import Completion as TextCompletion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from private_llm_gateway import endpoints
from private_llm_gateway.completion import Completion, SamplingParams, choose
from private_llm_gateway.decoding import TokenTexts

from private_llm.config import PrivateConfig
from tests.gateway.small_gateway import (
    CHAT,
    LOGIT_ERROR,
    PROMPT,
    TOKEN,
    Gateway,
    greedy,
    plain_model,
    prompt_ids,
    serving,
    small,
    text_of,
    tokenizer,
)  # fmt: skip
from tests.hf.service.conftest import eventually

GREEDY: dict[str, Any] = {"model": "small", "messages": CHAT, "max_tokens": 8, "temperature": 0}
HEADERS = {"Authorization": f"Bearer {TOKEN}"}


def test_greedy_text_is_the_plaintext_models(client: OpenAI) -> None:
    made = client.chat.completions.create(**GREEDY)
    assert made.choices[0].message.content == text_of(greedy(8))
    assert made.choices[0].finish_reason == "length"
    assert made.usage is not None
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (prompt_ids().shape[1], 8)
    assert made.usage.total_tokens == made.usage.prompt_tokens + 8


def test_objects_are_of_the_clients_types(gateway: Gateway) -> None:
    body = {**GREEDY, "logprobs": True, "top_logprobs": 2, "n": 2}
    made = httpx.post(f"{gateway.url}/v1/chat/completions", json=body, headers=HEADERS).json()
    ChatCompletion.model_validate(made, strict=True)
    assert made["usage"]["prompt_tokens"] == prompt_ids().shape[1], "a prompt counts once, however many its answers"
    assert made["private_llm"]["bytes"] > 0
    body = {"model": "small", "prompt": PROMPT, "max_tokens": 2, "logprobs": 1}
    TextCompletion.model_validate(
        httpx.post(f"{gateway.url}/v1/completions", json=body, headers=HEADERS).json(), strict=True
    )


def test_a_stream_is_data_chunks_and_done(gateway: Gateway) -> None:
    body = {**GREEDY, "stream": True, "stream_options": {"include_usage": True}}
    with httpx.stream("POST", f"{gateway.url}/v1/chat/completions", json=body, headers=HEADERS) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    raw = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    chunks = [ChatCompletionChunk.model_validate(each, strict=True) for each in raw]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text_of(greedy(8))
    assert len(chunks) >= 8  # one a token, not all at the end
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8
    assert raw[-1]["private_llm"]["bytes"] >= raw[2]["private_llm"]["bytes"]
    assert raw[-1]["private_llm"]["tokens_per_s"] > 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_a_stream_byte_by_byte(gateway: Gateway, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """Events end with two line feeds, pings and errors too, and nothing else ends a line for any reader of lines."""
    monkeypatch.setattr(endpoints, "_PING_S", 0.001)
    rare = {str(token): 100 for token in tokenizer()("\u2028", add_special_tokens=False)["input_ids"]}
    body = {"model": "small", "max_tokens": 60, "stream": True, "logit_bias": rare, "logprobs": 1, "prompt": PROMPT}
    if path == "chat/completions":
        body |= {"messages": CHAT, "logprobs": True, "prompt": None}
    connection = HTTPConnection(gateway.url.removeprefix("http://"))
    connection.request("POST", f"/v1/{path}", json.dumps(body), {**HEADERS, "Content-Type": "application/json"})
    raw = connection.getresponse().read()
    connection.close()
    events = raw.split(b"\n\n")
    assert events.pop() == b""
    assert all(re.fullmatch(rb"data: [ -~]+|: ping - [ -~]+", event) for event in events)
    told = [event for event in events if not event.startswith(b": ping")]
    assert len(told) < len(events)
    assert told.pop() == b"data: [DONE]"
    assert len([json.loads(event[6:]) for event in told]) >= 2


def test_no_letter_of_a_stop_text_shows_when_letters_come_one_by_one() -> None:
    """And what only looked like its beginning does."""
    coder = tokenizer()
    letters = [coder.encode(letter, add_special_tokens=False)[0] for letter in "xstosxstop"]
    completion = Completion(0, [7], SamplingParams(20, temperature=0, stop=("stop",)), TokenTexts(coder), (2,))
    shown = ""
    for token in letters:
        completion.take(token)
        part = completion.new()
        shown += "" if part is None else part.text
        assert "xstosx".startswith(shown)
    assert (shown, completion.finish) == ("xstosx", "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_stop_texts_never_show(client: OpenAI, stream: bool) -> None:
    """Also one that begins inside a token and ends inside another."""
    whole = text_of(greedy(8))
    ends = [len(text_of(greedy(count))) for count in range(1, 8)]
    middle = ends[3]
    stop = whole[middle - 2 : middle + 2]
    wanted = whole[: whole.index(stop)]
    made = client.chat.completions.create(**GREEDY, stop=[stop, "never in it"], stream=stream)
    if stream:
        parts = [chunk.choices[0] for chunk in made]
        text, reason = "".join(part.delta.content or "" for part in parts), parts[-1].finish_reason
    else:
        text, reason = made.choices[0].message.content, made.choices[0].finish_reason
    assert (text, reason) == (wanted, "stop")


def test_seeds_give_the_same_text_whatever_else_runs(client: OpenAI) -> None:
    def ask(seed: int) -> str:
        made = client.chat.completions.create(**{**GREEDY, "temperature": 1.5, "max_tokens": 5}, seed=seed)
        return str(made.choices[0].message.content)

    alone = [ask(seed) for seed in (1, 2, 3)]
    state = torch.random.get_rng_state()
    with ThreadPoolExecutor(6) as threads:
        together = list(threads.map(ask, [1, 2, 3, 1, 2, 3]))
    assert together == alone * 2
    assert len(set(alone)) == 3
    assert torch.equal(state, torch.random.get_rng_state())


def test_several_answers_differ_and_are_in_order(client: OpenAI) -> None:
    made = client.chat.completions.create(**{**GREEDY, "temperature": 1.5, "max_tokens": 4}, n=3, seed=7)
    assert [choice.index for choice in made.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in made.choices}) == 3
    again = client.chat.completions.create(**{**GREEDY, "temperature": 1.5, "max_tokens": 4}, n=3, seed=7)
    assert [c.message.content for c in again.choices] == [c.message.content for c in made.choices]


def test_logprobs_are_the_plaintext_models(client: OpenAI) -> None:
    made = client.chat.completions.create(**{**GREEDY, "max_tokens": 3}, logprobs=True, top_logprobs=4)
    assert made.choices[0].logprobs is not None
    rows = made.choices[0].logprobs.content
    assert rows is not None
    ids = torch.cat([prompt_ids(), torch.tensor([greedy(3)])], 1)
    logprobs = plain_model()(ids).logits[0].log_softmax(-1)[prompt_ids().shape[1] - 1 : -1]
    for row, wanted, token in zip(rows, logprobs, greedy(3), strict=True):
        assert abs(row.logprob - float(wanted[token])) < LOGIT_ERROR
        best = wanted.topk(4).values.tolist()
        assert [top.logprob for top in row.top_logprobs] == pytest.approx(best, abs=LOGIT_ERROR)
    assert "".join(row.token for row in rows) == made.choices[0].message.content


def test_low_top_p_and_bias_and_penalties_steer(client: OpenAI) -> None:
    def tokens(**more: Any) -> str:
        made = client.chat.completions.create(**{**GREEDY, "max_tokens": 4, **more})
        return str(made.choices[0].message.content)

    assert tokens(temperature=1.0, top_p=0.0001, seed=3) == text_of(greedy(4))
    forced = tokenizer().encode(" city", add_special_tokens=False)
    assert len(forced) == 1
    assert tokens(logit_bias={str(forced[0]): 100}) == " city" * 4
    assert len(set(tokens(logit_bias={str(forced[0]): 100}, frequency_penalty=2.0).split())) == 1
    barely = {str(forced[0]): 12}
    assert tokens(logit_bias=barely, frequency_penalty=2.0).count(" city") <= tokens(logit_bias=barely).count(" city")


@pytest.mark.parametrize(
    ("params", "wanted"),
    [
        (SamplingParams(9, temperature=0), 5),
        (SamplingParams(9, temperature=0, frequency=0.5), 5),
        (SamplingParams(9, temperature=0, frequency=0.6), 6),
        (SamplingParams(9, temperature=0, presence=2.0), 7),
        (SamplingParams(9, temperature=0, frequency=-2.0), 5),
        (SamplingParams(9, temperature=0, frequency=0.6, bias=((7, 1.0),)), 7),
    ],
)
def test_penalties_are_openais_formula(params: SamplingParams, wanted: int) -> None:
    """logit - presence [it came] - frequency times how often, for tokens of the answer."""
    completion = Completion(0, [7, 7], params, TokenTexts(tokenizer()), (2,))
    for token in (5, 5, 5, 6):
        completion.take(token)
    logits = torch.zeros(4096)
    logits[5], logits[6], logits[7] = 3.0, 1.9, 1.05
    assert choose(completion, logits) == wanted


def test_sampling_follows_the_distribution(client: OpenAI) -> None:
    """First tokens of many answers, against probabilities at a temperature that leaves a few likely tokens."""
    made = client.chat.completions.create(
        **{**GREEDY, "max_tokens": 1, "temperature": 0.5, "top_p": 0.6}, n=60, seed=11
    )
    probs = (plain_model()(prompt_ids()).logits[0, -1].double() / 0.5).softmax(-1)
    values, indices = probs.sort(descending=True)
    kept = indices[: int((values.cumsum(0) < 0.6).sum()) + 1].tolist()
    found = [choice.message.content for choice in made.choices]
    assert set(found) <= {text_of([token]) for token in kept}
    first = float(values[0] / values[: len(kept)].sum())
    assert abs(found.count(text_of([kept[0]])) / 60 - first) < 4 * (first * (1 - first) / 60) ** 0.5 + 1e-9


def test_the_prompts_likelihood_as_evaluations_ask_for_it(client: OpenAI) -> None:
    """lm-eval's local-completions: token ids, echo, one token more."""
    rows = [prompt_ids()[0].tolist(), prompt_ids()[0, :4].tolist()]
    made = client.completions.create(
        model="small", prompt=rows, echo=True, logprobs=1, max_tokens=1, temperature=0, seed=1234
    )
    for row, choice in zip(rows, made.choices, strict=True):
        wanted = plain_model()(torch.tensor([row])).logits[0].log_softmax(-1)
        found = choice.logprobs
        assert found is not None
        assert found.token_logprobs is not None
        assert found.top_logprobs is not None
        assert len(found.token_logprobs) == len(row) + 1
        assert found.token_logprobs[0] is None
        assert found.token_logprobs[1:-1] == pytest.approx(
            [float(wanted[at - 1, row[at]]) for at in range(1, len(row))], abs=LOGIT_ERROR
        )
        best = [max(top.values()) for top in found.top_logprobs[1:]]
        assert best == pytest.approx(wanted.max(-1).values.tolist(), abs=LOGIT_ERROR)
        assert found.token_logprobs[-1] == best[-1]
        assert choice.text == tokenizer().decode([*row, int(wanted[-1].argmax())], skip_special_tokens=True)


def test_streamed_prompts_have_the_same_likelihoods(client: OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "small", "prompt": [PROMPT, "The city"], "echo": True, "logprobs": 2, "max_tokens": 3,
        "temperature": 0,
    }  # fmt: skip
    whole = client.completions.create(**asked)
    parts = [part.choices[0] for part in client.completions.create(**asked, stream=True)]
    for choice in whole.choices:
        mine = [part for part in parts if part.index == choice.index]
        assert "".join(part.text for part in mine) == choice.text
        assert mine[-1].finish_reason == choice.finish_reason
        wanted = choice.logprobs
        assert wanted is not None
        told = [part.logprobs for part in mine if part.logprobs is not None]
        assert [token for each in told for token in each.tokens or []] == wanted.tokens
        assert [at for each in told for at in each.text_offset or []] == wanted.text_offset
        found = [value for each in told for value in each.token_logprobs or []]
        assert found[0] is None
        assert found[1:] == pytest.approx((wanted.token_logprobs or [])[1:], abs=LOGIT_ERROR)
    nothing = list(client.completions.create(**{**asked, "max_tokens": 0}, stream=True))
    assert "".join(part.choices[0].text for part in nothing if part.choices[0].index == 0) == PROMPT


def test_a_chat_without_a_limit_fills_the_context(client: OpenAI) -> None:
    """Unless the model ends it, which is forbidden here."""
    text = " ".join([PROMPT] * (110 // prompt_ids().shape[1]))
    asked = {**GREEDY, "messages": [{"role": "user", "content": text}], "logit_bias": {"2": -100}}
    del asked["max_tokens"]
    made = client.chat.completions.create(**asked)
    assert made.choices[0].finish_reason == "length"
    assert made.usage is not None
    assert made.usage.total_tokens == plain_model().config.max_position_embeddings
    assert made.usage.completion_tokens > 16


@pytest.mark.parametrize("stream", [False, True])
def test_figures_count_what_nobody_waited_for(monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    """A client that leaves after a token or two: its prompt, its tokens and what they cost are counted as it leaves."""
    served, slow = small(), threading.Event()
    with serving(served) as gateway, gateway.client() as client:
        if stream:
            with client.chat.completions.create(**{**GREEDY, "max_tokens": 100}, stream=True) as parts:
                for _ in range(4):
                    next(parts)
        else:
            take = Completion.take
            monkeypatch.setattr(Completion, "take", lambda self, *row: (take(self, *row), slow.wait(0.05)))
            with pytest.raises(openai.APITimeoutError):
                client.with_options(timeout=0.5).chat.completions.create(**{**GREEDY, "max_tokens": 100})
        figures: dict[str, float] = {}

        def counted() -> bool:
            lines = httpx.get(f"{gateway.url}/metrics", headers=HEADERS, timeout=60).text.splitlines()
            figures.update(
                (name, float(value)) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")
            )
            return figures.get('private_llm_tokens_total{kind="prompt",model="small"}', 0) > 0

        assert eventually(counted)
    found = {
        kind: figures[f'private_llm_tokens_total{{kind="{kind}",model="small"}}'] for kind in ("prompt", "completion")
    }
    assert found["prompt"] == prompt_ids().shape[1]
    assert 1 <= found["completion"] < 100
    assert figures['private_llm_bytes_total{model="small"}'] > 0
    assert figures['private_llm_requests_total{endpoint="/v1/chat/completions",status="499"}'] == 1


def test_completions_continue_texts(client: OpenAI) -> None:
    made = client.completions.create(model="small", prompt=[PROMPT, "The"], max_tokens=4, temperature=0, n=2)
    assert [choice.index for choice in made.choices] == [0, 1, 2, 3]
    assert made.choices[0].text == made.choices[1].text == text_of(greedy(4))
    whole = client.completions.create(model="small", prompt=PROMPT, max_tokens=0, echo=True)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (PROMPT, "length")
    parts = client.completions.create(model="small", prompt=PROMPT, max_tokens=4, temperature=0, stream=True)
    assert "".join(part.choices[0].text for part in parts) == text_of(greedy(4))


def test_a_model_ends_its_text(client: OpenAI) -> None:
    made = client.chat.completions.create(**GREEDY, logit_bias={"2": 100})
    assert (made.choices[0].message.content, made.choices[0].finish_reason) == ("", "stop")


def test_trio_writes_the_same_text() -> None:
    config = PrivateConfig(party_mode="threads", timeout_s=60, calibrate=False)
    with serving(small(config)) as gateway, gateway.client() as client:
        made = client.chat.completions.create(**{**GREEDY, "max_tokens": 4})
        assert made.choices[0].message.content == text_of(greedy(4))
        assert made.model_extra is not None
        assert made.model_extra["private_llm"]["rounds"] > 0
        info = httpx.get(f"{gateway.url}/v1/private/info", headers=HEADERS).json()
    assert info["one_machine"]
    assert [party["name"] for party in info["parties"]] == ["party 0", "party 1", "party 2"]
    assert "two that put their shares together" in info["sentence"]


def test_only_tokens_are_opened_if_so_configured() -> None:
    config = PrivateConfig(
        protocol="plain", insecure=True, party_mode="threads", timeout_s=60, calibrate=False, reveal="token"
    )
    with serving(small(config)) as gateway, gateway.client() as client:
        asked = {"model": "small", "messages": CHAT, "max_tokens": 4}
        assert client.chat.completions.create(**asked).choices[0].message.content == text_of(greedy(4))
        for more in ({"temperature": 0.5}, {"logprobs": True}, {"logit_bias": {"5": 1}}, {"presence_penalty": 1},
                     {"response_format": {"type": "json_object"}}):  # fmt: skip
            response = httpx.post(f"{gateway.url}/v1/chat/completions", json=asked | more, headers=HEADERS)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == next(iter(more))
