"""A gateway under protocol "assisted": the OpenAI API over a model whose linear layers two servers multiply."""

from __future__ import annotations

import contextlib
import copy
import gc
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import httpx
import openai
import pytest
import torch
from bench.link import LinkSpeed, SlowMesh
from private_llm_cli.commands.gateway import _drafts as drafts_of
from private_llm_cli.commands.gateway import gateway as run_gateway
from private_llm_cli.commands.gateway import when_ready
from private_llm_cli.commands.models import loaded_from
from private_llm_cli.using import GatewayChoices
from private_llm_gateway.pool import SessionPool
from private_llm_gateway.served import Served
from private_llm_gateway.settings import GatewaySettings
from private_llm_hf import AutoPrivateModelForCausalLM, KeepAll, SpeculationConfig, patch, prepare_corrections
from private_llm_hf.party.product_server import ProductServer
from private_llm_hf.service.product_service import ProductService
from private_llm_hf.service.settings import ServiceSettings
from torch import Tensor

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, PartyFailed
from private_llm.kv_cache.policies.policy import SlidingWindow
from private_llm.net.addresses import hosts_of, open_listeners
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
from tests.hf.service.conftest import eventually
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


def bundled() -> Served:
    """One that can read its weights again, as that of `private-llm gateway`."""
    return Served("small", SessionPool(loaded_from(AutoPrivateModelForCausalLM, BUNDLED, ASSISTED), 1), tokenizer())


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
    with serving(bundled()) as made, made.client() as client:
        want = client.completions.create(**ASK, max_tokens=6).choices[0].text
        before = made.models["small"].pool.first.parties
        breaking = Breaking(monkeypatch, 60, failing)
        assert client.completions.create(**ASK, max_tokens=6).choices[0].text == want
        assert breaking.left < 0
        assert made.models["small"].pool.first.parties is not before
        assert client.completions.create(**ASK, max_tokens=6).choices[0].text == want


def test_an_answer_ends_where_a_server_lied_and_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(bundled()) as made, made.client() as client:
        Breaking(monkeypatch, 60, lambda right: right + 1)
        with pytest.raises(openai.InternalServerError, match="party 1 gave a wrong product") as told:
            client.completions.create(**ASK, max_tokens=6)
        assert told.value.code == "protocol_abort"
        assert client.completions.create(**ASK, max_tokens=2).choices[0].text  # with servers that are asked anew


def test_weights_that_are_gone_cannot_be_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served("small", SessionPool(patch(copy.deepcopy(plain_model()), ASSISTED), 1), tokenizer())
    gc.collect()
    with serving(served) as made, made.client() as client:
        Breaking(monkeypatch, 3, failing)
        with pytest.raises(openai.APIStatusError, match="the plaintext model is gone"):
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


def test_sessions_side_by_side_want_servers_of_their_own() -> None:
    with pytest.raises(ConfigError, match=r"sessions: got 4 without hosts.*--clients N"):
        run_gateway(GatewayChoices(sessions=4), ASSISTED, GatewaySettings(port=0), socket.socket())


@pytest.mark.full
@pytest.mark.parametrize("draft", ["auto", "lookup"])
def test_drafts_far_from_the_servers_change_no_text(draft: str, capsys: pytest.CaptureFixture[str]) -> None:
    """20 ms apart, rounds take the time, so that they are looked up; a text that repeats takes fewer."""
    asked: dict[str, Any] = {"model": "small", "prompt": PROMPT, "temperature": 0, "max_tokens": 60}
    with patch(plain_model(), ASSISTED, SlowMesh(2, 30.0, LinkSpeed(1000.0, 20.0), instant="control")) as model:
        drafts = drafts_of(GatewayChoices(draft=draft), model, tokenizer())
        assert drafts == SpeculationConfig()
        assert capsys.readouterr().err.startswith("drafts: looked up: a pass over 8" if draft == "auto" else "")
    rounds = []
    for chosen in (None, drafts):
        with serving(replace(small(ASSISTED), speculation=chosen)) as made, made.client() as client:
            found = client.completions.create(**asked)
        assert found.choices[0].text == text_of(greedy(60))
        rounds.append(found.to_dict()["private_llm"]["rounds"])
    assert rounds[1] < rounds[0]


def test_why_no_drafts_are_looked_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for more, why in (({"corrections": str(tmp_path)}, "stored correction"), ({}, "evicts or chooses entries")):
        model = Mock(config=plain_model().config, _is_stateful=False)
        model.parties.config = SimpleNamespace(kv_cache=KeepAll() if more else SlidingWindow(8), **more)
        assert drafts_of(GatewayChoices(draft="auto"), model, tokenizer()) is None
        told = capsys.readouterr().err
        assert told.startswith("drafts: none: ")
        assert why in told
    with pytest.raises(ConfigError, match="evicts or chooses entries"):
        drafts_of(GatewayChoices(draft="lookup"), model, tokenizer())


@contextlib.contextmanager
def two_servers(clients: int) -> Iterator[tuple[list[ProductService], PrivateConfig]]:
    """For several clients, on checkpoints of their own; and how clients reach them."""
    listeners = open_listeners(2)
    config = replace(ASSISTED, party_mode="remote", hosts=hosts_of(listeners), allow_plain_loopback=True, timeout_s=10)
    settings = ServiceSettings(sessions=clients, drain_s=0.0)
    services = [ProductService(config, each, settings, None, BUNDLED, listeners[each]) for each in range(2)]
    threads = [threading.Thread(target=service.run, daemon=True) for service in services]
    for thread in threads:
        thread.start()
    yield services, config
    for service, thread in zip(services, threads, strict=True):
        service.drain()
        thread.join(20)


def test_two_requests_run_at_a_time_and_go_on_when_their_sessions_end() -> None:
    """Each on a session of its own at the same servers; a session that ends under load is renewed, and no text lost."""
    lengths = [4, 5, 6, 7, 8, 9]
    with two_servers(clients=2) as (services, config):
        model = loaded_from(AutoPrivateModelForCausalLM, BUNDLED, config)
        served = Served("small", SessionPool(model, 2), tokenizer())
        with serving(served) as made, made.client() as client, ThreadPoolExecutor(6) as threads:
            want = [client.completions.create(**ASK, max_tokens=length).choices[0].text for length in lengths]
            asked = [threads.submit(client.completions.create, **ASK, max_tokens=length) for length in lengths]
            assert eventually(lambda: len(services[1]._sessions) == 2)
            for each in list(services[1]._sessions):
                each.link.abort("it was told to")
            assert [each.result().choices[0].text for each in asked] == want
            assert len(served.pool._all) == 2


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
        served = Served("small", SessionPool(when_ready(load, 60.0, lambda _: None), 1), tokenizer())
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
