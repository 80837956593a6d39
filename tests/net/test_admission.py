"""Who comes into a party service, and in which order."""

from __future__ import annotations

import secrets
import time
from types import SimpleNamespace
from typing import Any

import pytest

from private_llm.errors import PartiesBusy, TransportError
from private_llm.net import admission as module
from private_llm.net.admission import Admission
from private_llm.net.hello import CALLER_BYTES, Greeted
from private_llm.net.transport import CLIENT


def caller() -> bytes:
    return secrets.token_bytes(CALLER_BYTES)


def hello(number: bytes, inbound: bool = True) -> Greeted:
    return Greeted(CLIENT, inbound, bytes(8), 0, 1, number)


def gate(me: int = 0, **limits: int) -> Admission:
    made = Admission(me, 5.0, None, **{"sessions": 2, "per_user": 9, "waiting": 2, **limits}, arrived=lambda link: None)
    made.reopen()
    return made


def refused(at: Admission, number: bytes, user: str = "") -> str:
    with pytest.raises(PartiesBusy) as raised:
        at.admit(hello(number), user)
    return str(raised.value)


def leave(at: Admission, number: bytes) -> None:
    class Link:
        def __init__(self) -> None:
            self.number = number.hex()

    at.leave(Link())  # type: ignore[arg-type]


def test_nobody_comes_in_while_it_is_closed() -> None:
    at = gate()
    at.close("the house is full of paint")
    assert "paint" in refused(at, caller())


def test_who_came_first_comes_in_first() -> None:
    at, inside, first, second = gate(), [caller(), caller()], caller(), caller()
    for number in inside:
        at.admit(hello(number), "")
        at.admit(hello(number, inbound=False), "")  # its other connection
    assert "0 clients are before you" in refused(at, first)
    assert "1 clients are before you" in refused(at, second)
    assert "2 clients wait already" in refused(at, caller())
    leave(at, inside[0])
    refused(at, second)
    at.admit(hello(first), "")
    leave(at, inside[1])
    at.admit(hello(second), "")


def test_who_stays_away_loses_its_place_in_line(monkeypatch: pytest.MonkeyPatch) -> None:
    at, inside, first, second = gate(), [caller(), caller()], caller(), caller()
    for number in inside:
        at.admit(hello(number), "")
    refused(at, first)
    monkeypatch.setattr(module, "_AWAY_S", 0.01)
    time.sleep(0.02)
    refused(at, second)
    leave(at, inside[0])
    at.admit(hello(second), "")


def test_a_user_with_all_its_sessions_keeps_nobody_waiting() -> None:
    at = gate(sessions=3, per_user=2)
    for _ in range(2):
        at.admit(hello(caller()), "alice")
    assert "user 'alice' has 2 sessions already" in refused(at, caller(), "alice")
    at.admit(hello(caller()), "bob")


def test_other_parties_follow_party_0_within_a_bound() -> None:
    at: Any = gate(me=1, sessions=1, per_user=1)
    known = [caller() for _ in range(1 + module._SPARE)]
    for number in known:
        at.admit(hello(number), "alice")
    at.confirm([number.hex() for number in known] + [caller().hex()])
    assert "all 1 sessions are taken" in refused(at, caller(), "bob")
    assert "user 'alice' has 1 sessions already" in refused(at, caller(), "alice")
    leave(at, known[0])
    at.admit(hello(caller()), "bob")


def test_callers_that_party_0_does_not_serve_make_room_at_the_others() -> None:
    at: Any = gate(me=1, sessions=10, per_user=9)
    served = caller()
    at.admit(hello(served), "bob")
    at.confirm([served.hex()])
    eves = [caller() for _ in range(9 + module._SPARE)]
    for number in eves:
        at.admit(hello(number), "eve")
    assert len(at._callers) == 10 + module._SPARE
    at.admit(hello(caller()), "bob")  # at the cost of eve's oldest
    assert eves[0] not in at._callers
    assert "all 10 sessions are taken" in refused(at, caller(), "eve")
    assert served in at._callers
    assert len(at._callers) == 10 + module._SPARE


def test_a_stranger_whose_links_are_made_is_told_why_it_goes() -> None:
    at: Any = gate(me=1, sessions=1, per_user=1)
    first, told = caller(), []
    at.admit(hello(first), "eve")
    at._callers[first].link = SimpleNamespace(abort=told.append)
    for _ in range(1 + module._SPARE):
        at.admit(hello(caller()), "eve")
    assert told == ["party 0 has no such session, and its place was needed"]


def test_a_session_is_of_the_user_that_began_it() -> None:
    at, number = gate(), caller()
    at.admit(hello(number), "alice")
    with pytest.raises(TransportError, match="another user"):
        at.admit(hello(number, inbound=False), "eve")


def test_a_user_has_so_many_places_in_line() -> None:
    at = gate(sessions=1, per_user=2, waiting=9)
    at.admit(hello(caller()), "bob")
    for _ in range(2):
        assert "clients are before you" in refused(at, caller(), "eve")
    assert "user 'eve' has 2 clients in line already" in refused(at, caller(), "eve")
    assert "2 clients are before you" in refused(at, caller(), "carol")


def test_places_of_callers_that_never_finish_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    at = gate(sessions=1)
    at.admit(hello(caller()), "")
    late = caller()
    refused(at, late)
    monkeypatch.setattr(module, "HANDSHAKE_S", 0.001)
    time.sleep(0.01)
    at.admit(hello(late), "")


def test_a_user_with_many_callers_in_line_keeps_nobody_waiting_for_more_than_it_may_have() -> None:
    at = gate(sessions=3, per_user=2, waiting=20)
    first = caller()
    at.admit(hello(first), "alice")
    for _ in range(2):
        at.admit(hello(caller()), "carol")
    for _ in range(10):
        refused(at, caller(), "alice")
    bob = caller()
    assert "1 clients are before you" in refused(at, bob, "bob")
