"""A gateway under protocol "assisted": the OpenAI API over a model whose linear layers two servers multiply."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from private_llm_cli.commands.gateway import gateway as run_gateway
from private_llm_cli.commands.gateway import when_ready
from private_llm_cli.commands.models import loaded_from
from private_llm_cli.using import GatewayChoices
from private_llm_gateway.pool import SessionPool
from private_llm_gateway.served import Served
from private_llm_gateway.settings import GatewaySettings
from private_llm_hf import AutoPrivateModelForCausalLM, patch, prepare_corrections
from private_llm_hf.party.product_server import ProductServer
from torch import Tensor

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, PartyFailed
from tests.cli.test_cli import start
from tests.gateway.small_gateway import (
    BUNDLED,
    CHAT,
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
)
from tests.hf.test_remote import free_ports

ASSISTED = PrivateConfig(protocol="assisted", timeout_s=30)
ASK = {"model": "small", "prompt": PROMPT, "temperature": 0}


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    with serving(small(ASSISTED)) as made:
        yield made


@pytest.fixture
def client(gateway: Gateway) -> Iterator[openai.OpenAI]:
    with gateway.client() as made:
        yield made


def test_texts_and_costs_are_those_of_the_model(client: openai.OpenAI) -> None:
    made = client.completions.create(**ASK, max_tokens=6)
    assert made.choices[0].text == text_of(greedy(6))
    with patch(plain_model(), ASSISTED) as private:
        private.generate(prompt_ids(), max_new_tokens=6, do_sample=False)
        costs = private.cost()
    spent = made.to_dict()["private_llm"]
    assert (spent["bytes"], spent["rounds"]) == (costs.bytes_total, costs.rounds)
    assert made.usage.total_tokens == prompt_ids().shape[1] + 6


def test_chat_streams_stops_and_counts(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="small", messages=CHAT, max_tokens=8, temperature=0)
    text = whole.choices[0].message.content
    asked = partial(client.chat.completions.create, model="small", messages=CHAT, max_tokens=8, temperature=0)
    pieces = list(asked(stream=True, stream_options={"include_usage": True}))
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices) == text
    assert pieces[-1].usage.completion_tokens == 8
    stopped = asked(stop=[text[len(text) // 2 :]])
    assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == (text[: len(text) // 2], "stop")


def test_sampling_repeats_with_its_seed_and_batches_run_together(client: openai.OpenAI) -> None:
    asked = partial(client.completions.create, model="small", prompt=PROMPT, max_tokens=6, temperature=1, n=3)
    one, two, other = asked(seed=4), asked(seed=4), asked(seed=5)
    texts = [[choice.text for choice in made.choices] for made in (one, two, other)]
    assert texts[0] == texts[1] != texts[2]
    assert one.to_dict()["private_llm"]["rounds"] == two.to_dict()["private_llm"]["rounds"]


def test_logprobs_are_those_of_plaintext(client: openai.OpenAI) -> None:
    made = client.completions.create(**ASK, max_tokens=1, logprobs=3, echo=True)
    with torch.no_grad():
        rows = torch.log_softmax(plain_model()(prompt_ids()).logits[0].double(), -1)
    want = [float(rows[at, token]) for at, token in enumerate(prompt_ids()[0, 1:].tolist())]
    assert made.choices[0].logprobs.token_logprobs[1:-1] == pytest.approx(want, abs=1e-3)


def test_the_page_says_what_each_server_gets(gateway: Gateway) -> None:
    about = httpx.get(f"{gateway.url}/v1/private/info", headers={"Authorization": f"Bearer {TOKEN}"}).json()
    holds = [party["holds"] for party in about["parties"]]
    assert [each.partition(",")[0] for each in holds] == ["the key of the masks", "masked rows"]
    assert about["weights"] == "public"
    assert "checks each product" in about["sentence"]
    assert "two that put their shares together learn all" in about["sentence"]


def reloading() -> Served:
    """One that can load its model anew, as `private-llm gateway` does."""
    load = partial(loaded_from, AutoPrivateModelForCausalLM, BUNDLED, ASSISTED)
    return Served("small", SessionPool(load(), 1, load), tokenizer())


class Breaking:
    """Stands for `ProductServer.product`, which does one thing at its n-th call, at server 1."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int, what: Any) -> None:
        self.left, original = at, ProductServer.product

        def product(server: ProductServer, *given: Tensor) -> Tensor:
            self.left -= server.transport.me
            made = original(server, *given)
            if self.left == 0 and server.transport.me == 1:
                self.left = -1
                return what(made)
            return made

        monkeypatch.setattr(ProductServer, "product", product)


def failing(_: Tensor) -> Tensor:
    raise PartyFailed("its memory is full")


def test_an_answer_goes_on_after_a_server_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(reloading()) as made, made.client() as client:
        want = client.completions.create(**ASK, max_tokens=6).choices[0].text
        before = made.models["small"].pool.first
        breaking = Breaking(monkeypatch, 60, failing)
        assert client.completions.create(**ASK, max_tokens=6).choices[0].text == want
        assert breaking.left < 0
        assert made.models["small"].pool.first is not before
        assert client.completions.create(**ASK, max_tokens=6).choices[0].text == want


def test_an_answer_ends_where_a_server_lied_and_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(reloading()) as made, made.client() as client:
        Breaking(monkeypatch, 60, lambda right: right + 1)
        with pytest.raises(openai.InternalServerError, match="party 1 gave a wrong product") as told:
            client.completions.create(**ASK, max_tokens=6)
        assert told.value.code == "protocol_abort"
        assert client.completions.create(**ASK, max_tokens=2).choices[0].text  # with servers that are asked anew


def test_a_model_that_cannot_be_loaded_again_names_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(small(ASSISTED)) as made, made.client() as client:
        Breaking(monkeypatch, 3, failing)
        with pytest.raises(openai.InternalServerError, match=r"party 1.*its memory is full"):
            client.completions.create(**ASK, max_tokens=6)
        with pytest.raises(openai.InternalServerError, match="start the gateway again"):
            client.completions.create(**ASK, max_tokens=6)


def test_too_few_corrections_are_told_and_the_session_goes_on(tmp_path: Path) -> None:
    config = replace(ASSISTED, corrections=str(tmp_path / "masks"))
    prepare_corrections(plain_model(), config, prompt_ids().shape[1])
    with serving(small(config)) as made, made.client() as client:
        with pytest.raises(openai.InternalServerError, match=r"wants 1 rows; .*prepare MODEL") as told:
            client.completions.create(**ASK, max_tokens=2)
        assert (told.value.status_code, told.value.code) == (503, "corrections_used_up")
        prepare_corrections(plain_model(), config, 50)
        assert client.completions.create(**ASK, max_tokens=2).choices[0].text == text_of(greedy(2))


def test_sessions_side_by_side_are_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match=r"sessions: got 4; .*one session at a time"):
        run_gateway(GatewayChoices(sessions=4), ASSISTED, GatewaySettings(port=0))


@pytest.mark.full
def test_a_gateway_of_two_servers_as_commands(tmp_path: Any) -> None:
    """A server that is killed is named within the time-out; when it is back, the gateway asks it again."""
    links = ("--hosts", ",".join(free_ports(2)), "--allow-plain-loopback", "--protocol", "assisted")
    servers = [start("party", "--index", str(number), *links) for number in range(2)]
    config = replace(
        ASSISTED, party_mode="remote", hosts=tuple(links[1].split(",")), allow_plain_loopback=True, timeout_s=3
    )
    load = partial(loaded_from, AutoPrivateModelForCausalLM, BUNDLED, config)
    try:
        served = Served("small", SessionPool(when_ready(load, 60.0, lambda _: None), 1, load), tokenizer())
        with serving(served) as made, made.client() as client:
            want = client.completions.create(**ASK, max_tokens=4).choices[0].text
            servers[1].kill()
            servers[1].wait()
            with pytest.raises(openai.InternalServerError, match=r"party 1 at 127.0.0.1:.* was not reached") as told:
                client.completions.create(**ASK, max_tokens=4)
            assert (told.value.status_code, told.value.code) == (503, "party_unavailable")
            servers[1] = start("party", "--index", "1", *links)
            said = ""
            for _ in range(20):
                with contextlib.suppress(openai.InternalServerError):  # while it starts
                    said = said or client.completions.create(**ASK, max_tokens=4).choices[0].text
            assert said == want
    finally:
        for server in servers:
            server.kill()
            server.wait()
