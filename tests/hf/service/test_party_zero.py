"""What party 0 of a quad service says to one party alone, and what only one party hears: altered, nothing is opened."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from private_llm_hf.party import agreement
from private_llm_hf.party.agreement import Ack, Commit, Proposal, RequestRef, Told, Vote
from private_llm_hf.service import limits, party_service
from private_llm_hf.service.client_session import ClientSession
from private_llm_hf.service.limits import Limits
from private_llm_hf.service.scheduler import RequestSize
from private_llm_hf.wire.codec import Message

from private_llm.errors import PrivateLLMError
from tests.hf.party.vouching import vouch
from tests.hf.service.conftest import Running, Start, eventually
from tests.hf.service.test_attacks import opened, step, together

Lie = Callable[[Any, int, int], Message]
"""What is sent instead of a message from one party to another."""


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """Which party sent which session something opened."""
    found: list[tuple[int, str]] = []
    give = ClientSession.give

    def watched(self: ClientSession, tag: str, payload: torch.Tensor) -> None:
        found.append((self.host.number, self.id))
        give(self, tag, payload)

    monkeypatch.setattr(ClientSession, "give", watched)
    return found


def lying(patch: pytest.MonkeyPatch, lie: Lie) -> None:
    """The next message between parties that `lie` alters is sent altered."""
    spent = threading.Event()
    for module in (party_service, limits, agreement):
        send = module.send_message

        def altered(links: Any, to: int, message: Message, send: Any = send) -> None:
            made = lie(message, links.me, to) if to < 4 and not spent.is_set() else message
            if made != message:
                spent.set()
            send(links, to, made)

        patch.setattr(module, "send_message", altered)


def corrupt(patch: pytest.MonkeyPatch) -> None:
    """Party 0 finds all votes and records to its liking."""
    patch.setattr(party_service, "tally", lambda votes, own: [True for _ in own])
    vouch(patch)


def ends(running: Running, before: int) -> list[str]:
    """Why the parties' links ended, after `before` of their ends."""
    assert eventually(lambda: sum(len(watch.downs) for watch in running.watches) >= before + len(running.watches), 30)
    return [reason for watch in running.watches for reason, _ in watch.downs[-1:]]


def test_another_users_request_is_not_run_for_an_accomplice(
    start: Start, monkeypatch: pytest.MonkeyPatch, given: list[tuple[int, str]]
) -> None:
    """Party 0 lets party 1 run Eve's request where parties 2 and 3 run Bob's, and vouches for the result."""
    running = start("quad", users=("bob", "eve"))
    lead = running.services[0]
    with running.model("bob") as bob, running.model("eve") as eve:
        monkeypatch.setattr(lead, "_measure", lambda request: RequestSize(None, 0))  # one request a batch
        corrupt(monkeypatch)

        def lie(message: Message, me: int, to: int) -> Message:
            if isinstance(message, Proposal) and message.requests and to == 1:
                (other,) = lead._scheduler._requests.values()
                return Proposal(message.step, (RequestRef(other.session.id, other.number),), message.live)
            return message

        lying(monkeypatch, lie)
        assert all(
            isinstance(each, PrivateLLMError) for each in together(running, lambda: step(bob, 6), lambda: step(eve, 6))
        )
    assert not given
    assert any("told to run different things" in reason for reason in ends(running, 0))


def only(sender: int, kind: type[Message], **changes: Any) -> Lie:
    """A party alters its messages of a kind to one other, those that name a request."""

    def lie(message: Message, me: int, to: int) -> Message:
        named = getattr(message, "requests" if kind is Proposal else "places", True)
        if (me, to) == (sender, 0 if sender else 2) and isinstance(message, kind) and named:
            made = {name: change(getattr(message, name)) for name, change in changes.items()}
            return dataclasses.replace(message, **made)
        return message

    return lie


BY_PARTY_0 = {
    "proposal: step": only(0, Proposal, step=lambda step: step + 1),
    "proposal: number": only(0, Proposal, requests=lambda r: (RequestRef(r[0].session, r[0].number + 1),)),
    "proposal: session": only(0, Proposal, requests=lambda requests: (RequestRef("00" * 16, 1),)),
    "proposal: live": only(0, Proposal, live=lambda live: ("00" * 16,)),
    "commit: step": only(0, Commit, step=lambda step: step + 1),
    "commit: places": only(0, Commit, places=lambda places: ()),
    "commit: ended": only(0, Commit, ended=lambda ended: ("00" * 16,)),
}
TO_PARTY_0 = {
    "vote: step": only(2, Vote, step=lambda step: step + 1),
    "vote: facts": only(2, Vote, facts=lambda facts: tuple({**each, "call": "0" * 32} for each in facts)),
    "told: facts": only(1, Told, facts=lambda facts: {**facts, "call": "0" * 32}),
    "ack: step": only(3, Ack, step=lambda step: step + 1),
}
ABORTS = ("told to run different things", "disagree on the step", "a request that is not here")


@pytest.mark.full
def test_a_message_that_one_party_hears_ends_in_an_abort(
    start: Start, monkeypatch: pytest.MonkeyPatch, given: list[tuple[int, str]]
) -> None:
    """Only false facts of a vote end less: the session that they are about. A batch was right before it is done."""
    running = start("quad", timeout_s=20.0)
    with running.model() as model:
        right = opened(step(model, 6))
        for name, lie in {**BY_PARTY_0, **TO_PARTY_0}.items():
            given.clear()
            before = sum(len(watch.downs) for watch in running.watches)
            with monkeypatch.context() as patch:
                if name in BY_PARTY_0:
                    corrupt(patch)
                lying(patch, lie)
                if name == "ack: step":
                    with contextlib.suppress(PrivateLLMError):  # the links may end before all of it has come
                        assert torch.allclose(opened(step(model, 6, cache=2)), right, atol=1e-2)
                else:
                    with pytest.raises(PrivateLLMError):
                        step(model, 6, cache=2)
                    assert not given, name
                if name != "vote: facts":
                    found = ends(running, before)
                    assert any(text in reason for reason in found for text in ABORTS), (name, found)
            assert eventually(lambda: all(service.ready for service in running.services), 30)
            model.reconnect()
            assert torch.allclose(opened(step(model, 6)), right, atol=1e-2), name


def test_limits_that_are_stated_to_one_party_alone_end_in_an_abort(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    lying(
        monkeypatch,
        lambda message, me, to: (
            dataclasses.replace(message, positions=7) if isinstance(message, Limits) and (me, to) == (0, 2) else message
        ),
    )
    vouch(monkeypatch)
    running = start("quad")
    assert any("told to run different things" in reason for reason in ends(running, 0))


@pytest.mark.parametrize("protocol", ["quad", "trio"])
def test_a_session_that_party_0_calls_over_ends_everywhere(start: Start, protocol: str) -> None:
    """Its cache is let go of, so its next call would be computed as if it were the first."""
    running = start(protocol, timeout_s=20.0)
    with running.model() as model, torch.no_grad():
        step(model, 6)
        first = running.services[0]
        with first._lock:
            first._ended.append(next(iter(first._sessions)))
        eventually(lambda: not first._ended)
        with pytest.raises(PrivateLLMError):
            opened(step(model, 1))
    with running.model() as model, torch.no_grad():
        opened(step(model, 6))
    assert not any(watch.downs for watch in running.watches)


def test_what_names_no_session_is_not_forgotten(start: Start) -> None:
    running = start("quad", timeout_s=20.0)
    with running.model() as model, torch.no_grad():
        step(model, 6)
        first = running.services[0]
        with first._lock:
            first._ended.append(f"{next(iter(first._sessions))} plan")
        eventually(lambda: any(watch.downs for watch in running.watches))


@pytest.mark.parametrize("protocol", ["trio", "quad"])
def test_parties_that_know_a_session_under_two_users_do_not_run_it(start: Start, protocol: str) -> None:
    """What a user may keep is counted by name, so one name at all parties or no batch."""
    running = start(protocol)
    with running.model() as model:
        step(model, 6)
        other = model.open_session()
        step(other, 6)
        known = running.services[1]._sessions
        known[max(known, key=lambda number: known[number].began)].user = "eve"
        with pytest.raises(PrivateLLMError):
            step(other, 1)
        step(model, 1)
