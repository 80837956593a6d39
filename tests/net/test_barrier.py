"""Parties of one process that wait for each other at named points, or pass them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest

from private_llm.errors import PartyFailed
from private_llm.net.direct import Barrier, BarrierEnd
from private_llm.net.local import LocalMesh
from private_llm.net.transport import CLIENT


def ends(parties: int, failure: Callable[[], str | None] = lambda: None, timeout: float = 20.0) -> list[BarrierEnd]:
    barrier = Barrier(parties)
    return [
        BarrierEnd(barrier, party, failure, timeout, nullcontext, "{} is silent".format) for party in range(parties)
    ]


def each(run: Callable[[BarrierEnd], object], found: list[BarrierEnd]) -> list[object]:
    """What `run` gives at every party, in threads."""
    made: dict[int, object] = {}

    def party(end: BarrierEnd) -> None:
        try:
            made[end.me] = run(end)
        except Exception as error:
            made[end.me] = error

    threads = [threading.Thread(target=party, args=(end,)) for end in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [made[party] for party in range(len(found))]


def test_all_have_what_one_made_of_what_all_gave() -> None:
    calls: list[int] = []

    def run(end: BarrierEnd) -> list[object]:
        def action(given: object) -> object:
            calls.append(end.me)
            return given

        return [end.wait(("a", number), (end.me, number), action) for number in range(50)]

    made = each(run, ends(3))
    assert made == [[[(party, number) for party in range(3)] for number in range(50)]] * 3
    assert len(calls) == 50


def test_where_one_passes_nobody_waits_at_that_name_any_more() -> None:
    def run(end: BarrierEnd) -> list[object]:
        if end.me == 1:
            end.skip(("a", 1))
            first = None
        else:
            first = end.wait(("a", 1), end.me, list)
        return [first, end.wait(("a", 2), end.me, list), end.wait(("b", 1), end.me, list)]

    for _ in range(20):
        found = ends(3)
        assert each(run, found) == [[None, None, [0, 1, 2]]] * 3
        assert not found[0].barrier.arrived, "what was given is let go"


def test_what_all_pass_is_no_difference() -> None:
    def run(end: BarrierEnd) -> object:
        end.skip(("a", 1))
        return end.wait(("a", 2), end.me, list)

    assert each(run, ends(3)) == [[0, 1, 2]] * 3


def test_points_that_follow_are_kept_when_the_name_closes() -> None:
    def run(end: BarrierEnd) -> object:
        end.wait(("a", 1), end.me, list)
        end.barrier.close("a")
        return end.wait(("a", 1, 1), end.me, list, follows=True)

    assert each(run, ends(3)) == [[0, 1, 2]] * 3


def test_the_end_of_a_session_and_silence_are_errors() -> None:
    alone = ends(2, lambda: "party 1 stopped")[0]
    with pytest.raises(PartyFailed, match="party 1 stopped"):
        alone.wait(("a", 1), 0, list)
    with pytest.raises(PartyFailed, match=r"^1 is silent$"):
        ends(2, timeout=0.2)[0].wait(("a", 1), 0, list)


def test_who_waits_at_a_barrier_is_not_the_silent_one() -> None:
    mesh = LocalMesh(3, timeout=0.6)
    found = mesh.transport(1).barrier_end()
    assert found is not None
    end = replace(found, timeout=60.0)  # so that the client gives up first
    end.barrier.arrive(0, ("a", 1), 0)

    def wait() -> None:
        with contextlib.suppress(PartyFailed):
            end.wait(("a", 1), 0, list)

    waits = threading.Thread(target=wait)
    waits.start()
    while 1 not in mesh.waiting:
        time.sleep(0.01)
    with pytest.raises(PartyFailed, match=r"party 2 was silent for 0\.6 s, while a message of party 1 was awaited"):
        mesh.transport(CLIENT).recv_bytes(1, "control", 10)
    waits.join(10)
