"""What a client with a valid certificate tries against a party service: each ends its own session, and nothing else."""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from private_llm_hf.party.agreement import Commit, Proposal, Vote
from private_llm_hf.service import batch_executor, party_service
from private_llm_hf.service.checks import past_of
from private_llm_hf.service.client_session import ClientSession
from private_llm_hf.service.limits import MOST_EDITS, MOST_HANDLES
from private_llm_hf.wire.commands import (
    CacheEdit,
    Call,
    CopyCache,
    CropCache,
    Forward,
    ManageCache,
    ResetCache,
    SelectRows,
    Tokens,
    Values,
)
from torch import Tensor

from private_llm.errors import DomainError, PartyFailed, PrivateLLMError, TransportError, UnsupportedOp
from private_llm.net import wire
from private_llm.net.incoming import Allowance
from private_llm.net.outgoing import Outgoing
from private_llm.net.transport import CLIENT
from private_llm.net.wire import FrameKind
from private_llm.ring.dpf import key_words
from tests.hf.service.conftest import Running, Start, eventually

IDS = torch.arange(3, 9)


def step(model: Any, length: int, cache: int | None = 1, **public: Any) -> Any:
    """One call of a session, of so many tokens."""
    vocabulary = model.config.vocab_size
    call = Call(
        {"use_cache": True, "logits_to_keep": 1, **public}, (Tokens("input_ids", (1, length), vocabulary),), cache,
        None, None, ("logits",),
    )  # fmt: skip
    return model.parties.forward(call, [(IDS[:length], vocabulary)])


def edit(model: Any, change: CacheEdit) -> None:
    model.parties.tell(ManageCache(change))


def together(running: Running, *calls: Callable[[], Any]) -> list[Any]:
    """What each of these calls returns or raises, when all their requests wait at the same time."""
    scheduler, found = running.services[0]._scheduler, [None] * len(calls)
    schedule, until, looks = scheduler.schedule, [math.inf], threading.Event()

    def later(*arguments: Any) -> Any:
        looks.set()
        if len(scheduler) < len(calls) and time.monotonic() < until[0]:
            time.sleep(0.01)
            return []
        scheduler.schedule = schedule  # type: ignore[method-assign]
        return schedule(*arguments)

    scheduler.schedule = later  # type: ignore[method-assign]
    assert looks.wait(60.0), "party 0 may still be choosing as before"
    until[0] = time.monotonic() + 5.0  # one of them may be refused before it waits

    def run(place: int) -> None:
        try:
            found[place] = calls[place]()
        except PrivateLLMError as error:
            found[place] = error  # type: ignore[call-overload]

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def opened(found: Any) -> Tensor:
    assert not isinstance(found, Exception), found
    logits: Tensor = found[1]["logits"]
    return logits


@pytest.mark.sampled(3)
@pytest.mark.parametrize("change", [ResetCache(1), CopyCache(2, 1), CropCache(1, 100)])
def test_a_change_of_a_cache_before_a_shared_pass_harms_nobody(start: Start, change: CacheEdit) -> None:
    running = start(timeout_s=120.0)  # the first pass compiles kernels, in parties that wait for each other
    with running.model() as model:
        other = model.open_session()
        for each in (model, other):
            step(each, 6)
        step(other, 1, cache=2)
        edit(other, change)
        mine, theirs = together(running, lambda: step(model, 1), lambda: step(other, 1))
        assert opened(mine).shape == opened(theirs).shape
    assert not any(watch.downs for watch in running.watches)


def test_what_a_cache_will_hold_behind_changes() -> None:
    held = {1: 5, 2: 0}
    call = Call({}, (Tokens("input_ids", (1, 1), 9),), 1, None, None, ())

    def of(*edits: CacheEdit, free: tuple[int, ...] = ()) -> int:
        return past_of(lambda handle: held.get(handle, 0), call, edits, free)

    assert of() == 5 == of(SelectRows(1, torch.tensor([0]))) == of(CopyCache(1, 1))
    assert of(CropCache(1, 2)) == 3
    assert of(CropCache(1, 2), CropCache(1, 9)) == 0 == of(ResetCache(1)) == of(CopyCache(2, 1)) == of(free=(1,))
    assert of(CopyCache(1, 3), ResetCache(1), CopyCache(3, 1)) == 5


def test_parties_with_different_limits_hold_the_smallest(start: Start) -> None:
    running = start(positions=64)
    for party, own in enumerate((40, 8, 64)):
        running.stop(party)
        running.limits["positions"] = own
        running.start(party)
    assert eventually(lambda: all(service.ready for service in running.services), 20)
    with running.model() as model:
        other = model.open_session()
        with pytest.raises(DomainError, match="got 12 positions; this service keeps 8 for a session"):
            step(other, 6), step(other, 6)
        step(model, 6)
    assert not any("disagree" in reason for watch in running.watches for reason, _ in watch.downs)


def test_a_session_cannot_fill_the_parties_with_caches(start: Start) -> None:
    running = start(positions=40)
    with running.model() as model:
        other = model.open_session()
        for handle in range(1, 7):
            step(other, 6, cache=handle)
        with pytest.raises(DomainError, match="got 42 positions; this service keeps 40"):
            step(other, 6, cache=7)
        other = model.open_session()
        step(other, 6)
        edit(other, SelectRows(1, torch.zeros(30, dtype=torch.int64)))  # 180 positions
        with pytest.raises(DomainError, match="copy 180 positions; this service takes 160"):
            step(other, 1)
        step(model, 6)


def test_changes_that_copy_much_are_refused(start: Start) -> None:
    running = start(positions=40)
    with running.model() as model:
        other = model.open_session()
        step(other, 6)
        for _ in range(27):
            edit(other, SelectRows(1, torch.zeros(1, dtype=torch.int64)))
        with pytest.raises(DomainError, match="copy 162 positions; this service takes 160"):
            step(other, 1)
        step(model, 6)


def test_a_session_keeps_so_many_handles_and_changes(start: Start) -> None:
    running = start()
    with running.model() as model:
        other = model.open_session()
        for _ in range(MOST_EDITS + 1):
            edit(other, CropCache(1, 0))
        with pytest.raises(DomainError, match=f"more than {MOST_EDITS} changes"):
            step(other, 1)
        other = model.open_session()
        step(other, 1)
        edit(other, ResetCache(1))
        for handle in range(2, MOST_HANDLES + 1):
            edit(other, CopyCache(1, handle))
        step(other, 1)  # as many as there may be
        with pytest.raises(DomainError, match=f"more than {MOST_HANDLES} of them"):
            step(other, 1, cache=MOST_HANDLES + 1)


def test_a_call_that_would_fill_the_memory_is_refused(start: Start) -> None:
    running = start(elements=10_000)
    with running.model() as model:
        other = model.open_session()
        rows = Values("inputs_embeds", (30, 30, other.config.hidden_size))
        with pytest.raises(DomainError, match="is too large for this service; want 10000"):
            other.parties.forward(Call({}, (rows,), None, None, None, ()), [torch.zeros(rows.shape, dtype=torch.int64)])
        other = model.open_session()
        few = Values("inputs_embeds", (2, 50, other.config.hidden_size))
        with pytest.raises(DomainError, match=r"arrays of \d+ elements; this service takes 10000"):
            other.parties.forward(
                Call({}, (few,), None, None, None, ("logits",)), [torch.zeros(few.shape, dtype=torch.int64)]
            )
        step(model, 6)


def test_a_long_command_is_refused_unread(start: Start) -> None:
    running = start(positions=8)
    with running.model() as model:
        other = model.open_session()
        with pytest.raises(TransportError, match="at most 10"):
            step(other, 1, attention_mask=torch.ones(1, 1 << 20, dtype=torch.int64))
        step(model, 6)


def test_a_flood_of_notes_and_a_trickled_input_end_their_sessions(start: Start) -> None:
    running = start()
    with running.model() as model:
        noisy, slow = model.open_session(), model.open_session()
        link = noisy.parties.transport._out[0]
        for _ in range(2000):
            link.note(FrameKind.WAITING, bytes([CLIENT]))
        assert eventually(lambda: any("more notes" in str(reason) for reason in running.watches[0].ended))
        vocabulary = model.config.vocab_size
        slow.parties.tell(Forward(Call({}, (Tokens("input_ids", (1, 50), vocabulary),), None, None, None, ("logits",))))
        link = slow.parties.transport._out[0]
        words = 2 * 50 * key_words(vocabulary)
        link._sock.send(wire.encode(FrameKind.DATA, CLIENT, link._session, link._sequence, "index", torch.int64, words))
        session = max(running.services[0]._sessions.values(), key=lambda each: each.began)
        ended = threading.Event()

        def trickle() -> None:
            with contextlib.suppress(OSError):
                while not ended.wait(0.05):
                    link._sock.send(b"\0")

        thread = threading.Thread(target=trickle)
        thread.start()
        time.sleep(0.2)
        session.cut("the service is about to stop")
        assert eventually(lambda: not session._thread.is_alive())
        ended.set()
        thread.join()
        step(model, 6)


def test_an_allowance_is_used_up_and_grows_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    allowance = Allowance(0.5, 3)
    assert [allowance.lacks() for _ in range(5)] == [0.0, 0.0, 0.0, 0.5, 1.0]
    now[0] += 10
    assert [allowance.lacks() for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]


def test_a_connection_without_a_thread_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(_: object) -> None:
        raise RuntimeError("can't start new thread")

    here, there = socket.socketpair()
    with here, there:
        out = Outgoing(here, 0, CLIENT, bytes(8))
        monkeypatch.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(PartyFailed, match="no thread left to write to the client"):
            out.send_payload("reveal", torch.zeros(1 << 20, dtype=torch.int64))
        out.abort("it is over")
        assert out.drained(0)


def test_function_keys_that_do_not_fit_end_sessions_twice_and_no_more(start: Start) -> None:
    running = start("quad", users=("eve", "bob"))
    with running.model("bob") as model:
        for _ in range(2):
            assert eventually(lambda: all(service.ready for service in running.services), 30)
            eve = running.model("eve")
            send = eve.parties.end.transport.send

            def lie(to: int, tag: str, payload: Tensor, send: Any = send) -> None:
                send(to, tag, payload + 1 if tag == "index" and to == 2 else payload)

            eve.parties.end.transport.send = lie
            with pytest.raises(PrivateLLMError):
                step(eve, 1)
        assert eventually(lambda: all(service.ready for service in running.services), 30)
        with pytest.raises(TransportError, match="user 'eve' ended the sessions of all"):
            running.model("eve")
        model.reconnect()
        assert opened(step(model, 1)).shape == (1, 1, model.config.vocab_size)


SHAPES: list[Tokens | Values] = [
    Tokens("input_ids", (5,), 128),
    Tokens("input_ids", (1, 2, 3), 128),
    Values("inputs_embeds", (5,)),
    Values("inputs_embeds", (5, 2)),
    Values("inputs_embeds", (1, 2, 64, 1)),
]


@pytest.mark.parametrize("item", SHAPES, ids=lambda item: f"{item.name} {len(item.shape)}")
def test_inputs_of_a_shape_that_no_input_has_end_their_session_alone(start: Start, item: Tokens | Values) -> None:
    running = start()
    with running.model() as model:
        other = model.open_session()
        zeros = torch.zeros(item.shape, dtype=torch.int64)
        given: Any = (zeros.view(-1), item.vocabulary) if isinstance(item, Tokens) else zeros
        with pytest.raises(TransportError, match="got shape"):
            other.parties.forward(Call({}, (item,), 1, None, None, ("logits",)), [given])
        step(model, 6)
    assert not any(watch.downs for watch in running.watches)


def test_facts_that_cannot_be_compared_end_their_sessions_alone(start: Start) -> None:
    running = start()
    with running.model() as model:
        others = [model.open_session() for _ in range(2)]
        several = torch.ones(2, dtype=torch.int64)
        found = together(running, *[lambda each=each: step(each, 2, use_cache=several) for each in others])
        assert all("use_cache: want True or False" in str(each) for each in found)
        step(model, 6)
    assert not any(watch.downs for watch in running.watches)


def test_an_output_is_opened_once(start: Start) -> None:
    running = start()
    with running.model() as model:
        other = model.open_session()
        call = Call({}, (Tokens("input_ids", (1, 2), 128),), 1, None, None, ("logits",) * 1000)
        with pytest.raises(UnsupportedOp, match="1000 outputs, some of them twice"):
            other.parties.forward(call, [(IDS[:2], 128)])
        step(model, 6)


@pytest.mark.parametrize("where", ["_measure", "check_fits"])
def test_what_nobody_foresaw_in_a_request_ends_its_session_alone(
    start: Start, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """At all parties alike, before anything of the request is sent."""
    running = start()
    unforeseen = RuntimeError("a size of 77")
    place: Any = running.services[0] if where == "_measure" else batch_executor
    whole = getattr(place, where)

    def check(*arguments: Any) -> Any:
        call = arguments[0].call if where == "_measure" else arguments[2]
        if call.secret[0].shape == (1, 3):
            raise unforeseen
        return whole(*arguments)

    with running.model() as model:
        monkeypatch.setattr(place, where, check)
        other = model.open_session()
        step(model, 6)
        mine, theirs = together(running, lambda: step(model, 1), lambda: step(other, 3))
        assert opened(mine).shape == (1, 1, model.config.vocab_size)
        if where == "_measure":  # it ran alone
            assert opened(theirs).shape == opened(mine).shape
        else:
            assert "cannot run (RuntimeError)" in str(theirs)
            assert "77" not in str(theirs)
        step(model, 1)
    assert not any(watch.downs for watch in running.watches)


def test_what_one_party_alone_lacks_ends_the_links(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without memory it cannot take its part of the batch, which the others begin: nobody may wait for it."""
    running = start()
    whole = batch_executor.check_fits

    def check(model: Any, *arguments: Any) -> None:
        if model is running.services[1]._models[model.digest]:
            raise MemoryError
        whole(model, *arguments)

    with running.model() as model:
        monkeypatch.setattr(batch_executor, "check_fits", check)
        with pytest.raises(PartyFailed, match="party 1: MemoryError"):
            step(model, 3)
        monkeypatch.undo()
        assert eventually(lambda: all(service.ready for service in running.services), 20)
        model.reconnect()
        step(model, 3)


def test_party_0_cannot_run_a_request_twice(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its inputs would be unmasked with two streams."""
    running = start()
    send = party_service.send_message

    def twice(links: Any, to: int, message: Any) -> None:
        if isinstance(message, Proposal) and message.requests:
            message = Proposal(message.step, message.requests * 2, message.live)
        if isinstance(message, Commit) and message.places:
            message = Commit(message.step, (0, 1), message.ended)
        send(links, to, message)

    def vote(links: Any, frm: int, kinds: Any) -> Any:
        found = recv(links, frm, kinds)
        if Vote not in kinds or len(found.facts) < 2:
            return found
        return Vote(found.step, found.facts[:1], found.ended, found.leaving)

    recv = party_service.recv_message
    with running.model() as model:
        monkeypatch.setattr(party_service, "send_message", twice)
        monkeypatch.setattr(party_service, "recv_message", vote)
        with pytest.raises(PrivateLLMError):
            step(model, 2)
        monkeypatch.undo()
    assert eventually(lambda: any("runs a request twice" in reason for reason, _ in running.watches[1].downs))
    assert eventually(lambda: all(service.ready for service in running.services), 30)  # else their end takes 10 s


def test_a_session_that_begins_anew_at_one_party_is_another(start: Start) -> None:
    """Its masks would begin anew there, too. Under the same number it takes nothing away from the one that goes on."""
    running = start()
    with running.model() as model:
        other = model.open_session()
        step(other, 3)
        step(model, 3)
        service = running.services[1]
        old = max(service._sessions.values(), key=lambda each: each.began)
        service._scheduler.finish_session(ClientSession(service, old.link))
        old._earlier = ClientSession(service, old.link)._earlier
        with pytest.raises(TransportError, match="told the parties different things"):
            step(other, 1)
        session = next(iter(service._sessions.values()))
        service.admission.leave = lambda link: None  # type: ignore[method-assign]
        service.over(ClientSession(service, session.link), None)
        assert service._sessions[session.id] is session
