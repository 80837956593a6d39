"""Many clients of three or four party services: alone, together, leaving, lying, and without a party."""

from __future__ import annotations

import copy
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from private_llm_hf import PrivateConfig
from private_llm_hf.service import party_service
from private_llm_hf.wire.commands import Call, CropCache, Forward, LoadModel, ManageCache, SelectRows, TellCosts, Tokens
from torch import Tensor
from transformers import AutoModelForCausalLM

from private_llm.errors import ConfigError, PartiesBusy, PartyFailed, PrivateLLMError, TransportError
from private_llm.net.admission import ClientLink
from tests.hf.compare import LOGIT_ERROR, worst
from tests.hf.service.conftest import Start, eventually


def ids_of(seed: int, length: int = 6) -> Tensor:
    return torch.randint(3, 90, (1, length), generator=torch.Generator().manual_seed(seed))


def text_of(model: Any, seed: int, length: int = 6, new: int = 6) -> Any:
    return model.generate(
        ids_of(seed, length), max_new_tokens=new, do_sample=False, output_logits=True, return_dict_in_generate=True
    )


def same(got: Any, want: Any) -> bool:
    assert max(worst(a, b) for a, b in zip(got.logits, want.logits, strict=True)) < LOGIT_ERROR
    return torch.equal(got.sequences, want.sequences)


@pytest.fixture(scope="module")
def plain(tiny_folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_folder)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("protocol", ["trio", "quad", "dealer"])
def test_sessions_at_the_same_time_get_their_own_text(start: Start, plain: Any, protocol: str) -> None:
    running = start(protocol)
    first = running.model()
    models = [first, first.open_session(), first.open_session()]
    found: dict[int, Any] = {}

    def ask(number: int) -> None:
        found[number] = text_of(models[number], number, length=4 + 2 * number)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(3):
        assert same(found[number], text_of(plain, number, length=4 + 2 * number))
    assert any(facts.requests > 1 for facts in running.watches[0].passes)
    for model in models:
        model.close()
    assert eventually(lambda: [len(watch.ended) for watch in running.watches] == [3] * len(running.watches))
    assert all(reason is None for watch in running.watches for reason in watch.ended)
    assert not running.services[1]._models[next(iter(running.services[1]._models))].state.positions(models[0].parties)


@pytest.mark.full
def test_a_session_alone_costs_what_it_costs_without_a_service(start: Start, tiny_folder: Path) -> None:
    from private_llm_hf import AutoPrivateModelForCausalLM

    running = start()
    with running.model() as model, AutoPrivateModelForCausalLM.from_pretrained(str(tiny_folder)) as other:
        for each in (model, other):
            each.cost(reset=True)
            text_of(each, 1)
        here, there = model.cost(), other.cost()
    assert here.rounds == there.rounds
    assert here.bytes_total == there.bytes_total
    assert here.by_module() == there.by_module()


def test_who_leaves_in_the_middle_ends_nothing_but_its_own_session(start: Start, plain: Any) -> None:
    running = start()
    with running.model() as model:
        other = model.open_session()
        call = Call({"use_cache": True}, (Tokens("input_ids", (1, 6), 99),), 1, None, None, ("logits",))
        other.parties.tell(Forward(call, ()))  # inputs never come
        other.parties.transport.close()
        assert same(text_of(model, 5), text_of(plain, 5))
        assert eventually(lambda: all(len(watch.ended) == 1 for watch in running.watches))


def bad_commands(model: Any) -> dict[str, Any]:
    vocabulary = model.config.vocab_size
    ids = (Tokens("input_ids", (1, 6), vocabulary),)
    return {
        "a vocabulary of its own": lambda: model.parties.forward(
            Call({}, (Tokens("input_ids", (1, 6), vocabulary + 1),), None, None, None, ("logits",)),
            [(ids_of(0)[0], vocabulary + 1)],
        ),
        "an input that parties do not take": lambda: model.parties.forward(
            Call({"head_mask": True}, ids, None, None, None, ("logits",)), [(ids_of(0)[0], vocabulary)]
        ),
        "a cache that is not there": lambda: (
            model.parties.tell(ManageCache(CropCache(77, 1))),
            model.parties.forward(Call({}, ids, None, None, None, ("logits",)), [(ids_of(0)[0], vocabulary)]),
        ),
        "a mask of another length": lambda: model.parties.forward(
            Call({"attention_mask": torch.ones(1, 3, dtype=torch.int64)}, ids, None, None, None, ("logits",)),
            [(ids_of(0)[0], vocabulary)],
        ),
        "too many rows": lambda: model.parties.forward(
            Call({}, (Tokens("input_ids", (40, 1), vocabulary),), None, None, None, ("logits",)),
            [(ids_of(0, 40)[0], vocabulary)],
        ),
        "a model": lambda: (
            model.parties.tell(LoadModel(model.joins.args[1], None)), model.parties.stored_model()
        ),
    }  # fmt: skip


def test_a_mistake_ends_its_own_session_with_the_reason(start: Start, plain: Any) -> None:
    running = start()
    with running.model() as model:
        for name in bad_commands(model):
            other = model.open_session()
            with pytest.raises(PrivateLLMError) as raised:
                bad_commands(other)[name]()
            assert "party 0" in str(raised.value), name
            assert not isinstance(raised.value, PartyFailed) or name == "a model", f"{name}: {raised.value}"
        assert same(text_of(model, 6), text_of(plain, 6))
    assert not any(watch.downs for watch in running.watches)


def test_one_user_gets_so_many_sessions_and_another_gets_in(start: Start) -> None:
    running = start(users=("alice", "bob"), sessions_per_user=2, busy_wait_s=0.5)
    with running.model("alice") as model, model.open_session():
        with pytest.raises(PartiesBusy, match=r"user 'alice' has 2 sessions already"):
            model.open_session()
        with running.model("bob") as other:
            text_of(other, 1, new=1)
    with running.model("alice") as model:
        text_of(model, 1, new=1)


def test_clients_stand_in_line(start: Start) -> None:
    running = start(sessions=1, waiting=1, busy_wait_s=0.7)
    assert eventually(lambda: all(service.ready for service in running.services), 20)
    with running.model() as model, pytest.raises(PartiesBusy, match="all 1 sessions are taken"):
        model.open_session()


@pytest.mark.full
def test_a_party_that_stops_is_named_and_the_others_go_on_when_it_is_back(start: Start, plain: Any) -> None:
    running = start(timeout_s=5.0)
    model = running.model()
    want = text_of(plain, 3)
    assert same(text_of(model, 3), want)
    running.stop(1)
    with pytest.raises(TransportError):
        text_of(model, 3)
    running.start(1)
    assert eventually(lambda: all(service.ready for service in running.services), 20)
    model.reconnect()
    assert same(text_of(model, 3), want)
    model.close()


@pytest.mark.full
@pytest.mark.parametrize("party", [0, 2])
def test_a_service_that_drains_lets_its_sessions_end(start: Start, plain: Any, party: int) -> None:
    running = start(drain_s=30.0, busy_wait_s=0.5)
    assert eventually(lambda: all(service.ready for service in running.services), 20)
    model = running.model()
    running.services[party].drain()
    assert not running.services[party].ready
    assert same(text_of(model, 2), text_of(plain, 2))
    with pytest.raises(PrivateLLMError, match="about to stop"):
        model.open_session()
    model.close()
    running.threads[party].join(20)
    assert not running.threads[party].is_alive()


@pytest.mark.full
def test_the_others_are_told_that_a_party_stops_in_order_and_wait_for_it(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(party_service, "_CONNECT_S", 1.5)
    running = start()
    assert eventually(lambda: all(service.ready for service in running.services), 20)
    for watch in running.watches:
        watch.awaited.clear()
    running.stop(1)
    others = [running.watches[0], running.watches[2]]
    assert eventually(lambda: all(watch.downs and len(watch.awaited) > 1 for watch in others), 20)
    for watch in running.watches:
        (reason, orderly), *_ = watch.downs
        assert orderly
        assert reason.endswith("party 1 has stopped")
    for watch in others:
        assert all(who is not None and "party 1" in who for who, _, _ in watch.awaited)
        seconds = [at for _, _, at in watch.awaited]
        assert seconds == sorted(seconds)
        assert seconds[0] > 1.0
    running.start(1)
    assert eventually(lambda: all(service.ready for service in running.services), 20)


def test_links_that_break_are_no_orderly_stop(start: Start) -> None:
    running = start()
    assert eventually(lambda: all(service.ready for service in running.services), 20)

    def broken(*_: object) -> None:
        raise RuntimeError("a mistake")

    running.services[2]._carry_out = broken  # type: ignore[method-assign]
    assert eventually(lambda: all(watch.downs for watch in running.watches), 20)
    assert not any(orderly for watch in running.watches for _, orderly in watch.downs)


def test_a_client_that_tells_the_parties_different_things_is_sent_away(start: Start, plain: Any) -> None:
    running = start()
    with running.model() as model:
        liar = model.open_session()
        tell = liar.parties.tell
        ids = (Tokens("input_ids", (1, 6), model.config.vocab_size),)

        def lie(message: Any, parties: Any = None) -> None:
            if not isinstance(message, Forward):
                tell(message, parties)
                return
            for party in range(3):
                keep = {"logits_to_keep": 1} if party == 1 else {}
                tell(Forward(Call(keep, ids, None, None, None, ("logits",))), [party])

        liar.parties.tell = lie
        with pytest.raises(TransportError, match="different things"):
            liar.parties.forward(
                Call({}, ids, None, None, None, ("logits",)), [(ids_of(0)[0], model.config.vocab_size)]
            )
        assert same(text_of(model, 6), text_of(plain, 6))


def test_a_client_that_names_different_models_is_sent_away(start: Start, plain: Any) -> None:
    running = start()
    with running.model() as model:
        liar = model.open_session()
        for session in running.services[1]._sessions.values():
            if session.id != min(running.services[1]._sessions, key=lambda n: running.services[1]._sessions[n].began):
                session.model = copy.copy(session.model)
                session.model.digest = "another"
        with pytest.raises(TransportError, match="different things"):
            text_of(liar, 6)
        assert same(text_of(model, 6), text_of(plain, 6))


def test_who_never_reads_is_sent_away_and_who_selects_too_much(start: Start, plain: Any) -> None:
    running = start(timeout_s=3.0)
    with running.model() as model:
        greedy, deaf = model.open_session(), model.open_session()
        greedy.parties.tell(ManageCache(SelectRows(1, torch.zeros(33, dtype=torch.int64))))
        assert eventually(lambda: any("33" in str(reason) for reason in running.watches[0].ended))
        session = max(running.services[0]._sessions.values(), key=lambda each: each.began)
        object.__setattr__(session, "link", Deaf(session.link))
        deaf.parties.tell(TellCosts(False))
        assert eventually(lambda: any("read nothing" in str(reason) for reason in running.watches[0].ended))
        assert same(text_of(model, 6), text_of(plain, 6))


class Deaf:
    """A client's link whose other end reads nothing."""

    await_reader = ClientLink.await_reader

    def __init__(self, link: Any) -> None:
        self._link = link

    def taken(self, seconds: float) -> bool:
        time.sleep(seconds)
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)


def test_sessions_want_parties_that_outlive_them() -> None:
    from private_llm_hf import patch

    from tests.hf import tiny

    with patch(tiny.build("llama"), PrivateConfig(protocol="plain", insecure=True)) as private:
        with pytest.raises(ConfigError, match="end with their session"):
            private.open_session()
        with pytest.raises(ConfigError, match="end with their session"):
            private.reconnect()


@pytest.mark.full
def test_settings_that_a_service_does_not_have(start: Start) -> None:
    running = start()
    from dataclasses import replace

    from private_llm_hf.service.party_service import PartyService

    for change, text in (
        ({"weights": "public"}, "weights='secret'"),
        ({"parallel_sessions": 2}, "parallel_sessions=1"),
        ({"party_mode": "threads"}, "wants 'remote'"),
    ):
        with pytest.raises(ConfigError, match=text):
            PartyService(replace(running.configs[0], **change), 0, running.services[0].settings)
    with pytest.raises(ConfigError, match="want 0 to 2"):
        PartyService(running.configs[0], 3, running.services[0].settings)
