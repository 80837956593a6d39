"""A gateway before party services: clients that leave, parties that fail in the middle, certificates that expire."""

from __future__ import annotations

import datetime
import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from openai import OpenAI
from private_llm_cli.app import main
from private_llm_cli.commands.gateway import when_ready
from private_llm_gateway import usage
from private_llm_gateway.pool import SessionPool
from private_llm_gateway.served import Served
from private_llm_gateway.usage import UsageMeter
from private_llm_hf import AutoPrivateModelForCausalLM
from private_llm_hf.service.local import LocalParties

from private_llm.config import PrivateConfig
from private_llm.errors import PartyFailed, TransportError
from private_llm.net.authority import Authority, write_certificate, write_key
from tests.gateway.small_gateway import (
    CHAT,
    PROMPT,
    TOKEN,
    Gateway,
    greedy,
    prompt_ids,
    serving,
    text_of,
    tokenizer,
)  # fmt: skip
from tests.hf.service.conftest import Running, eventually

HEADERS = {"Authorization": f"Bearer {TOKEN}"}
LONG: dict[str, Any] = {"model": "small", "messages": CHAT, "max_tokens": 40, "temperature": 0}
SHORT = {**LONG, "max_tokens": 4}
SESSIONS = 3
TIMEOUT_S = 4.0


@dataclass
class Whole:
    """Parties and the gateway before them."""

    parties: Running
    gateway: Gateway
    authority: Authority

    @property
    def pool(self) -> SessionPool:
        return self.gateway.models["small"].pool

    def client(self) -> OpenAI:
        return self.gateway.client()

    def right(self, count: int = 4) -> bool:
        """Whether a new request is answered as the plaintext model does."""
        with self.client() as client:
            made = client.chat.completions.create(**{**LONG, "max_tokens": count})
        return made.choices[0].message.content == text_of(greedy(count))


@pytest.fixture(scope="module")
def whole(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Whole]:
    made: list[Authority] = []
    new = Authority.new

    def remembered(*arguments: Any) -> Authority:
        made.append(new(*arguments))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Authority, "new", remembered)
        config = PrivateConfig(timeout_s=TIMEOUT_S, busy_wait_s=2.0)
        parties = Running(config, tmp_path_factory.mktemp("parties"), {"llama": shared}, ())
    try:
        pool = SessionPool(parties.model(), SESSIONS)
        with serving(Served("small", pool, tokenizer())) as gateway:
            yield Whole(parties, gateway, made[0])
    finally:
        parties.close()


@pytest.fixture(autouse=True)
def back(whole: Whole) -> Iterator[None]:
    """Every test leaves parties and sessions behind that go on."""
    yield
    assert eventually(lambda: whole.pool.in_use == 0)
    assert whole.right()


def test_prompts_of_one_request_share_passes(whole: Whole) -> None:
    watch = whole.parties.watches[0]
    before = len(watch.passes)
    rows = [prompt_ids()[0].tolist()] * 6
    with whole.client() as client:
        made = client.completions.create(model="small", prompt=rows, max_tokens=6, temperature=0)
    assert [choice.text for choice in made.choices] == [text_of(greedy(6))] * 6
    assert max(facts.requests for facts in watch.passes[before:]) > 1
    assert made.usage is not None
    assert made.usage.completion_tokens == 36


def test_a_request_takes_no_session_that_somebody_waits_for(whole: Whole) -> None:
    with whole.pool.session(5), whole.pool.session(5), whole.pool.session(5), whole.pool.spare_session() as spare:
        assert spare is None
    with whole.pool.spare_session() as spare:
        assert spare is not None
    whole.pool._waiting += 1  # who waits has been told of a free session, and is about to take it
    try:
        with whole.pool.spare_session() as spare:
            assert spare is None
    finally:
        whole.pool._waiting -= 1


def test_more_answers_than_a_pass_has_rows(whole: Whole) -> None:
    """A service refuses more than its `rows` in one call."""
    count = whole.parties.services[0].rows + 4
    with whole.client() as client:
        made = client.chat.completions.create(**{**LONG, "max_tokens": 2}, n=count)
    assert [choice.message.content for choice in made.choices] == [text_of(greedy(2))] * count


def test_a_client_that_leaves_frees_its_session(whole: Whole) -> None:
    with whole.client() as client:
        for _ in range(SESSIONS + 1):
            before = len(whole.parties.watches[0].passes)
            stream = client.chat.completions.create(**LONG, stream=True)
            for chunk in stream:
                if chunk.choices[0].delta.content:
                    break
            stream.close()
            assert eventually(lambda: whole.pool.in_use == 0)
            assert len(whole.parties.watches[0].passes) - before < 30, "long before its 40 tokens are there"


@pytest.mark.full
def test_a_party_that_restarts_in_the_middle_is_not_noticed(whole: Whole) -> None:
    """The request goes on in a new session, behind the text that it had."""
    with whole.client() as client:
        text = ""
        for count, chunk in enumerate(client.chat.completions.create(**LONG, stream=True)):
            text += chunk.choices[0].delta.content or ""
            if count == 3:
                whole.parties.stop(1)
                whole.parties.start(1)
    assert text == text_of(greedy(40))


@pytest.mark.full
def test_sampled_text_goes_on_as_its_seed_says(whole: Whole) -> None:
    asked = {**LONG, "temperature": 1.3, "seed": 5, "max_tokens": 12}
    with whole.client() as client:
        wanted = client.chat.completions.create(**asked).choices[0].message.content
        text = ""
        for count, chunk in enumerate(client.chat.completions.create(**asked, stream=True)):
            text += chunk.choices[0].delta.content or ""
            if count == 3:
                whole.parties.stop(2)
                whole.parties.start(2)
    assert text == wanted


@pytest.mark.full
def test_a_party_that_stays_away_is_named(whole: Whole) -> None:
    """In a stream by an event behind the text so far; else by a status. The gateway needs no restart afterwards."""
    body = json.dumps({**LONG, "stream": True})
    events: list[str] = []
    headers = {**HEADERS, "Content-Type": "application/json"}
    with httpx.stream("POST", f"{whole.gateway.url}/v1/chat/completions", content=body, headers=headers,
                      timeout=60) as answer:  # fmt: skip
        for line in answer.iter_lines():
            if line.startswith("data: "):
                events.append(line.removeprefix("data: "))
                if len(events) == 4:
                    whole.parties.stop(1)
    try:
        text = "".join(json.loads(event)["choices"][0]["delta"].get("content", "") for event in events[:-1])
        assert text
        assert text_of(greedy(40)).startswith(text)
        error = json.loads(events[-1])["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "server_error"
        assert error["code"] in ("party_unavailable", "parties_busy"), "the others say that they wait for it"
        assert "party 1" in error["message"]
        assert PROMPT not in error["message"]
        health = httpx.get(f"{whole.gateway.url}/health")
        assert health.status_code == 503
        with whole.client() as client:
            with pytest.raises(openai.InternalServerError, match="party 1") as refused:
                client.chat.completions.create(**SHORT)
            assert refused.value.status_code == 503
            assert refused.value.response.headers["retry-after"] == "5"
            with pytest.raises(openai.APIError, match="party 1"):
                list(client.chat.completions.create(**SHORT, stream=True))
    finally:
        whole.parties.start(1)

    def healthy() -> bool:
        return httpx.get(f"{whole.gateway.url}/health").status_code == 200

    assert eventually(healthy, 30), "without any request"


def test_requests_wait_for_a_party_that_comes_back(whole: Whole) -> None:
    whole.parties.stop(2)
    with ThreadPoolExecutor(2) as threads:
        made = [threads.submit(whole.right) for _ in range(2)]
        time.sleep(0.5)
        whole.parties.start(2)
        assert all(each.result() for each in made)


def expired(whole: Whole) -> tuple[bytes, bytes]:
    """Put a certificate in the client's place that ended yesterday; what was there."""
    tls = whole.parties.client.tls
    assert tls is not None
    before = Path(tls.certificate).read_bytes(), Path(tls.key).read_bytes()
    key, day = ec.generate_private_key(ec.SECP256R1()), datetime.timedelta(days=1)
    made = whole.authority.issue("client", key.public_key(), datetime.datetime.now(datetime.UTC) - 2 * day, day)
    for path in (tls.certificate, tls.key):
        Path(path).unlink()
    write_key(Path(tls.key), key)
    write_certificate(Path(tls.certificate), made)
    return before


def test_a_new_gateway_waits_for_a_party_that_is_starting(whole: Whole) -> None:
    whole.parties.stop(1)
    later = threading.Timer(3.0, whole.parties.start, (1,))
    later.start()
    told: list[str] = []
    model = when_ready(whole.parties.model, 60.0, told.append)
    later.join()
    model.close()
    assert told
    assert all("party 1" in each for each in told)


def test_an_expired_certificate_is_named(
    whole: Whole, shared: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the running gateway once it calls again, and by one that starts."""
    tls = whole.parties.client.tls
    assert tls is not None
    certificate, key = expired(whole)
    try:
        whole.parties.stop(0)
        whole.parties.start(0)
        with whole.client() as client, pytest.raises(openai.InternalServerError, match="expired") as refused:
            client.chat.completions.create(**SHORT)
        assert refused.value.status_code == 503
        with pytest.raises(TransportError, match="expired"):
            whole.parties.model()
        hosts = ",".join(whole.parties.client.hosts)
        words = ["gateway", str(shared / "client"), "--port", "0", "--hosts", hosts, "--tls", str(Path(tls.ca).parent)]
        monkeypatch.setattr("sys.argv", ["private-llm", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code not in (0, None)
        assert "expired" in " ".join(capsys.readouterr().err.split())
    finally:
        Path(tls.certificate).write_bytes(certificate)
        Path(tls.key).write_bytes(key)


def children(process: int) -> list[int]:
    tasks = Path(f"/proc/{process}/task").iterdir()
    return sorted(int(child) for task in tasks for child in (task / "children").read_text().split())


def test_a_local_party_that_is_killed_comes_back(shared: Path) -> None:
    """In the middle of an answer, which goes on."""
    config = PrivateConfig(timeout_s=60.0, busy_wait_s=60.0)
    with LocalParties(config, {"small": shared}) as parties:
        model = AutoPrivateModelForCausalLM.from_pretrained(str(shared / "client"), parties.config)
        starter = next(pid for pid in children(os.getpid()) if len(children(pid)) == config.parties)
        before = children(starter)
        with serving(Served("small", SessionPool(model, 2), tokenizer())) as gateway, gateway.client() as client:
            text = ""
            for count, chunk in enumerate(client.chat.completions.create(**{**LONG, "max_tokens": 10}, stream=True)):
                text += chunk.choices[0].delta.content or ""
                if count == 3:
                    os.kill(before[1], signal.SIGKILL)
        after = children(starter)
    assert text == text_of(greedy(10))
    assert len(set(before) & set(after)) == config.parties - 1
    assert len(after) == config.parties


def test_a_closing_gateway_tells_those_who_wait(shared: Path) -> None:
    class Model:
        def close(self) -> None:
            pass

    pool = SessionPool(Model(), 1)
    with ThreadPoolExecutor(1) as threads, pool.session(1):
        waits = threads.submit(lambda: pool.session(30).__enter__())
        pool.close()
        with pytest.raises(PartyFailed, match="closing"):
            waits.result(10)


def test_nothing_is_lost_when_parties_fail_as_costs_are_read(whole: Whole, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was new then comes with the first piece afterwards."""
    read, calls = UsageMeter._costs, itertools.count(1)

    def costs(meter: UsageMeter, reset: bool) -> tuple[int, int]:
        if next(calls) == 5:
            raise PartyFailed("party 1: gone for a moment")
        return read(meter, reset)

    monkeypatch.setattr(usage, "_LOOK_S", -1.0)
    monkeypatch.setattr(UsageMeter, "_costs", costs)
    with whole.client() as client:
        chunks = list(client.chat.completions.create(**{**LONG, "max_tokens": 8}, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text_of(greedy(8))
    assert next(calls) > 8


@pytest.mark.parametrize(("failures", "fails"), [(1, False), (2, False), (3, True)])
def test_a_session_that_ends_as_it_begins_is_begun_again(failures: int, fails: bool) -> None:
    """Twice: parties that form their links anew end what has just begun; ones that are gone must be told of."""

    class Model:
        left = failures

        def reconnect(self) -> None:
            self.left -= 1
            if self.left >= 0:
                raise PartyFailed("party 0 passes on: party 2 lost its connection to the client")

    model = Model()
    pool = SessionPool(model, 1)
    if fails:
        with pytest.raises(PartyFailed, match="lost its connection"):
            pool.renew(model)
    else:
        pool.renew(model)
        assert pool.healthy
