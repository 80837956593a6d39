"""Calls that a service's session has planned: prepared while nobody waits, used once, gone with their session."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from private_llm_hf import AutoPrivateModelForCausalLM, ForwardPlan, GeneratePlan, PrivateConfig
from private_llm_hf.party.calls import PreprocessingPlan
from private_llm_hf.service.party_service import PartyService
from private_llm_hf.service.preprocessing_store import PreprocessingStore
from private_llm_hf.wire.commands import Call, CropCache, Preprocess, Tokens
from transformers import AutoModelForCausalLM

from private_llm.errors import ConfigError, PrivateLLMError, ProtocolAbort
from tests.hf.compare import LOGIT_ERROR, worst
from tests.hf.service.conftest import Running, Start, eventually
from tests.hf.service.test_party_service import ids_of, same, text_of

PLAN = GeneratePlan(prompt=6, new_tokens=4)


@pytest.fixture(scope="module")
def plain(tiny_folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_folder)


def on_disk(running: Running) -> int:
    return sum(service._preprocessing.nbytes for service in running.services)


def kept(running: Running) -> list[int]:
    return [len(model.state._groups) for service in running.services for model in service._models.values()]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("protocol", "adder"), [("trio", "auto"), ("quad", "auto"), ("dealer", "auto"), ("trio", "keys")]
)
def test_planned_calls_need_no_helping_party(
    start: Start, plain: Any, tiny_folder: Path, protocol: str, adder: Any
) -> None:
    running = start(protocol, adder=adder)
    want = text_of(plain, 1, new=4)
    with running.model() as model:
        helper = running.client.helper
        assert same(text_of(model, 1, new=4), want)
        usual = model.cost(reset=True)
        done = model.preprocess(PLAN)
        before = model.cost(reset=True)
        assert done.stored_bytes >= before.bytes_total > 0
        assert on_disk(running) == done.stored_bytes
        assert {frm for (frm, _), count in before.cost.sent.items() if count} == {helper}
        assert before.rounds == 0
        assert same(text_of(model, 1, new=4), want)
        online = model.cost(reset=True)
        assert not any(count for (frm, _), count in online.cost.sent.items() if frm == helper)
        assert online.rounds == usual.rounds
        assert on_disk(running) == 0
        assert same(text_of(model, 1, new=4), want), "the plan is used up: as ever"
    config = PrivateConfig(protocol=protocol, adder=adder)
    with AutoPrivateModelForCausalLM.from_pretrained(str(tiny_folder), config) as alone:
        alone.preprocess(PLAN)
        assert alone.cost(reset=True).bytes_total == before.bytes_total
        text_of(alone, 1, new=4)
        openings = 8 * 17 if protocol == "quad" else 0  # one verdict of the parties for all that a call opens
        assert alone.cost().bytes_total == online.bytes_total + openings
    assert not any(watch.downs for watch in running.watches)


@pytest.mark.full
def test_others_go_on_meanwhile_and_who_only_plans_comes_last(start: Start, plain: Any) -> None:
    running = start()
    with running.model() as model, model.open_session() as other:
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(text_of(other, 2, new=12)))
        thread.start()
        model.preprocess(PLAN)
        thread.join()
        assert same(found[0], text_of(plain, 2, new=12))
        threads = [threading.Thread(target=lambda n=n, m=m: found.append((n, text_of(m, n, new=4))))  # type: ignore[misc]
                   for n, m in ((3, model), (4, other))]  # fmt: skip
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for number, got in found[1:]:
            assert same(got, text_of(plain, number, new=4))
    assert all(facts.requests == 1 for facts in running.watches[0].passes[:1])


@pytest.mark.full
def test_what_is_left_goes_with_a_new_plan_and_with_the_session(start: Start, plain: Any) -> None:
    running = start()
    with running.model() as model:
        other = model.open_session()
        other.preprocess(PLAN)
        assert on_disk(running) > 0
        other.close()
        assert eventually(lambda: on_disk(running) == 0)
        first = model.preprocess(PLAN)
        assert model.preprocess(PLAN).stored_bytes == first.stored_bytes
        assert on_disk(running) == first.stored_bytes
        text_of(model, 1, new=2)  # ends before its plan does
        model.preprocess()
        assert same(text_of(model, 5, new=5), text_of(plain, 5, new=5))
        assert on_disk(running) == 0
    assert eventually(lambda: kept(running) == [0, 0, 0])


def test_a_forward_of_its_own_shape(start: Start, plain: Any) -> None:
    running = start()
    with running.model() as model, torch.no_grad():
        model.preprocess(ForwardPlan({"input_ids": (3, 5), "use_cache": False}, times=2))
        ids = torch.cat([ids_of(seed, 5) for seed in range(3)])
        for _ in range(2):
            assert (model(ids, use_cache=False).logits - plain(ids).logits).abs().max() < 1e-2


@pytest.mark.full
def test_a_party_that_comes_back_knows_of_no_plan(start: Start, plain: Any) -> None:
    running = start(timeout_s=5.0)
    model = running.model()
    model.preprocess(PLAN)
    running.stop(1)
    with pytest.raises(PrivateLLMError):
        text_of(model, 1, new=4)
    assert eventually(lambda: on_disk(running) == 0)
    running.start(1)
    assert eventually(lambda: all(service.ready for service in running.services), 20)
    model.reconnect()
    assert same(text_of(model, 1, new=4), text_of(plain, 1, new=4))
    model.close()


def test_one_user_has_half_of_the_disk() -> None:
    def prepared(user: str, nbytes: int) -> Any:
        return SimpleNamespace(user=user, phase=SimpleNamespace(nbytes=nbytes))

    store = PreprocessingStore()
    store._plans = {"a": prepared("eve", 300), "b": prepared("eve", 100), "c": prepared("", 50)}
    assert [store.free_bytes(user, 1001) for user in ("eve", "bob", "")] == [101, 501, 551]
    store._plans["d"] = prepared("bob", 500)
    assert [store.free_bytes(user, 1001) for user in ("eve", "bob", "")] == [51, 1, 51]


@pytest.mark.full
@pytest.mark.parametrize("room", [0, 10_000])
def test_the_disk_is_bounded(start: Start, plain: Any, room: int) -> None:
    running = start(offline_bytes=room)
    with running.model() as model:
        greedy = model.open_session()
        with pytest.raises(ConfigError, match=f"more than the {room} bytes that are left for it on disk; plan fewer"):
            greedy.preprocess(PLAN)
        assert same(text_of(model, 1), text_of(plain, 1))
        assert on_disk(running) == 0
    assert not any(watch.downs for watch in running.watches)


@pytest.mark.full
def test_a_folder_that_cannot_be_opened_is_told_at_the_start_and_ends_who_plans_alone(start: Start, plain: Any) -> None:
    running = start()
    settings, nowhere = running.services[2].settings, "/nowhere/at/all"
    with pytest.raises(ConfigError, match="store folder '/nowhere/at/all'"):
        PartyService(replace(running.configs[2], offline_folder=nowhere), 2, settings)
    with running.model() as model:
        object.__setattr__(running.services[2].config, "offline_folder", nowhere)  # it goes while the party serves
        for _ in range(2):
            other = model.open_session()
            with pytest.raises(ConfigError, match=r"store folder '/nowhere/at/all'.*; plan fewer"):
                other.preprocess(PLAN)
        assert same(text_of(model, 1), text_of(plain, 1))
        assert on_disk(running) == 0
    assert not any(watch.downs for watch in running.watches)


def test_the_disk_is_bounded_for_all_sessions_together(start: Start) -> None:
    with (running := start()).model() as model:
        model.preprocess(PLAN)
        one = on_disk(running)
    assert one > 0
    running = start(offline_bytes=one * 3 // 2)
    with running.model() as model, model.open_session() as other:
        model.preprocess(PLAN)
        with pytest.raises(ConfigError, match="that are left for it on disk; plan fewer"):
            other.preprocess(PLAN)
        assert one <= on_disk(running) <= one * 3 // 2


def cheats(model: Any) -> dict[str, Any]:
    vocabulary = model.config.vocab_size
    call = Call({"use_cache": True}, (Tokens("input_ids", (1, 6), vocabulary),), 7, None, None, ("logits",))
    tokens = [(ids_of(0)[0], vocabulary)]

    def ask(place: tuple[int, int]) -> None:
        with model.parties._call(), model.parties.asking(call, tokens, place) as answer:
            answer()

    def plan(*requests: Any, number: int = 5) -> None:
        with model.parties._call():
            model.parties.tell(Preprocess(number, tuple(requests), ()))
            model.parties.costs()

    return {
        "a call that nobody planned": lambda: (setattr(model.parties, "_ask_all", True), ask((1, 0))),
        "a call twice": lambda: (model.preprocess(PLAN), ask((1, 0)), ask((1, 0))),
        "a plan twice": lambda: (plan(call, number=3), plan(call, number=3)),
        "a cache that is not there": lambda: plan(CropCache(3, 1), call),
        "a cache of the session's own": lambda: (text_of(model, 1), plan(CropCache(1, 1), call)),
        "a vocabulary of its own": lambda: plan(
            Call({}, (Tokens("input_ids", (1, 6), 7),), None, None, None, ("logits",))
        ),
        "an input that parties do not take": lambda: plan(
            Call({"head_mask": True}, call.secret, None, None, None, ("logits",))
        ),
        "too many calls": lambda: plan(*[call] * 4097),
        "too many rows": lambda: plan(
            Call({}, (Tokens("input_ids", (40, 6), vocabulary),), None, None, None, ("logits",))
        ),
    }


@pytest.mark.full
@pytest.mark.parametrize("protocol", ["trio", "quad"])
def test_a_cheat_ends_its_own_session(start: Start, plain: Any, protocol: str) -> None:
    running = start(protocol)
    with running.model() as model:
        for name in cheats(model):
            other = model.open_session()
            with pytest.raises(PrivateLLMError):
                cheats(other)[name]()
            assert same(text_of(model, 6, new=1), text_of(plain, 6, new=1)), name
        assert on_disk(running) == 0
    assert not any(watch.downs for watch in running.watches)


@pytest.mark.full
def test_a_plan_ends_with_the_model_that_it_was_made_for(start: Start, plain: Any) -> None:
    running = start(models=("llama", "gpt2"), timeout_s=60.0)
    with running.model() as model, model.open_session() as other:
        digests = {served.name: digest for digest, served in running.services[0]._models.items()}
        vocabulary = other.config.vocab_size
        call = Call({"use_cache": True}, (Tokens("input_ids", (1, 6), vocabulary),), 7, None, None, ("logits",))
        other.parties.preprocess([call])
        with other.parties._call():
            other.parties.stored_model(digests["gpt2"])
        with pytest.raises(ProtocolAbort, match="not what comes next"):
            other.parties.forward(call, [(ids_of(0)[0], vocabulary)])
        assert same(text_of(model, 6), text_of(plain, 6))
    assert not any(watch.downs for watch in running.watches)


@pytest.mark.full
def test_planned_changes_of_a_cache_and_caches_of_one_number(start: Start, plain: Any) -> None:
    running = start()
    with running.model() as model, torch.no_grad():
        vocabulary = model.config.vocab_size

        def call(length: int) -> Call:
            return Call(
                {"use_cache": True}, (Tokens("input_ids", (1, length), vocabulary),), 7, None, None, ("logits",)
            )

        model.parties.preprocess([call(6), CropCache(7, 2), call(3)])
        # a call beside the plan on a cache of the plan's number: the helping party has that one filled already
        with model.parties._call():
            model.parties.ask(call(6), [(ids_of(4)[0], vocabulary)])
            got = model.parties.opened()[1]["logits"]
        assert worst(got, plain(ids_of(4)).logits) < LOGIT_ERROR
        model.parties.forward(call(6), [(ids_of(1)[0], vocabulary)])
        model.parties.command(CropCache(7, 2))
        got = model.parties.forward(call(3), [(ids_of(2, 3)[0], vocabulary)])[1]["logits"]
        want = plain(torch.cat([ids_of(1)[:, :4], ids_of(2, 3)], 1)).logits[:, 4:]
        assert worst(got, want) < LOGIT_ERROR
        model.parties._unused.clear()  # this client never has two caches of one number
        with model.parties._call():  # the other cache is as it was
            model.parties.ask(call(3), [(ids_of(2, 3)[0], vocabulary)])
            got = model.parties.opened()[1]["logits"]
        assert worst(got, plain(torch.cat([ids_of(4), ids_of(2, 3)], 1)).logits[:, 6:]) < LOGIT_ERROR
        assert same(text_of(model, 5), text_of(plain, 5))
    assert not any(watch.downs for watch in running.watches)


def test_a_plan_call_by_call() -> None:
    call = Call({}, (Tokens("input_ids", (1, 6), 9),), 1, None, None, ("logits",))
    plan = PreprocessingPlan(2, [call, CropCache(1, 1), CropCache(1, 2), call, CropCache(1, 1)], before=1)
    assert [(s.number, s.index, len(s.edits), s.last) for s in plan.calls] == [(0, 0, 0, False), (3, 1, 2, True)]
    with pytest.raises(ProtocolAbort, match="not what comes next"):
        plan.take((2, 3))
    assert plan.take((2, 0)).call == call
    assert not plan.finished
    assert plan.take((2, 3)).last
    assert plan.finished
    with pytest.raises(ProtocolAbort):
        plan.take((2, 3))
    with pytest.raises(ProtocolAbort):
        PreprocessingPlan(2, [], before=2)
