"""Links between threads: programs and Python see the same messages in the same order, whoever wrote them."""

from __future__ import annotations

import queue
import random
import threading
import weakref

import pytest
import torch

from private_llm.errors import PartyFailed, TransportError
from private_llm.net import connection, local, memory_link
from private_llm.net.local import LocalMesh, LocalTransport
from private_llm.net.memory_link import MemoryLink, ObjectLink, new_link
from private_llm.net.transport import CLIENT
from private_llm.replay import runner

from .test_direct import SIZES, Refusing, numbers, receives, sends, together

pytestmark = pytest.mark.skipif(not connection.IN_MEMORY, reason="memory is lent on x86-64 only")


@pytest.fixture(autouse=True, scope="module")
def _compiled() -> None:
    """Before anything has to answer in time."""
    runner.run(0, 0, 0, 0, 0, 0)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs wait as long as it takes."""
    monkeypatch.setattr(memory_link, "_WAIT_MS", 60_000)


def couple(timeout: float = 10.0) -> tuple[LocalTransport, LocalTransport]:
    mesh = LocalMesh(2, timeout)
    return mesh.transport(0), mesh.transport(1)


@pytest.mark.usefixtures("patient")
def test_programs_on_both_ends_need_no_python() -> None:
    zero, one = couple()
    payloads = [numbers(size, size) for size in SIZES]
    with Refusing(zero), Refusing(one):
        for _ in range(20):  # several times round the ring
            got = together(lambda: sends(zero, 1, "t", *payloads), lambda: receives(one, 0, "t", *SIZES))
            assert all(map(torch.equal, got, payloads))


def test_any_mixture_of_writers_and_readers_keeps_the_order() -> None:
    zero, one = couple()
    chance = random.Random(1)
    sizes = [chance.choice([1, 2, 7, 8, 9, 500, 9000, connection.ROOM, connection.ROOM + 1]) for _ in range(120)]
    ways = [(chance.random() < 0.5, chance.random() < 0.5) for _ in sizes]

    def write() -> None:
        for number, (size, (program, _)) in enumerate(zip(sizes, ways, strict=True)):
            payload = numbers(size, number)
            sends(zero, 1, "t", payload) if program else zero.send(1, "t", payload)

    writer = threading.Thread(target=write)
    writer.start()
    for number, (size, (_, program)) in enumerate(zip(sizes, ways, strict=True)):
        if chance.random() < 0.2:
            one.wait(0)
        got = receives(one, 0, "t", size)[0] if program else one.recv(0, "t", (size,), torch.int64)
        assert torch.equal(got, numbers(size, number)), number
    writer.join()
    assert one._mesh.links[(0, 1)].ahead == 0


def test_a_writer_far_ahead_of_its_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_link, "_WAIT_MS", 5)  # for room that does not come, at each of 40 payloads
    zero, one = couple()
    payloads = [numbers(3000, seed) for seed in range(60)]  # three rings full
    sends(zero, 1, "t", *payloads)
    assert all(map(torch.equal, receives(one, 0, "t", *[3000] * 60), payloads))


@pytest.mark.usefixtures("patient")
def test_room_is_waited_for() -> None:
    zero, one = couple()
    payloads = [numbers(3000, seed) for seed in range(60)]
    with Refusing(zero), Refusing(one):
        got = together(lambda: sends(zero, 1, "t", *payloads), lambda: receives(one, 0, "t", *[3000] * 60))
    assert all(map(torch.equal, got, payloads))


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("looked", [False, True])
def test_room_is_not_waited_for_while_there_is_something_to_read(looked: bool) -> None:
    """Its peer may be waiting for room as well: the rest is Python's, at once."""
    zero, one = couple()
    payloads = [numbers(3000, seed) for seed in range(60)]
    one.send(0, "back", payloads[0])
    if looked:
        zero.wait(1)
    sends(zero, 1, "t", *payloads)
    assert all(map(torch.equal, receives(one, 0, "t", *[3000] * 60), payloads))
    assert torch.equal(zero.recv(1, "back", (3000,), torch.int64), payloads[0])


@pytest.mark.usefixtures("patient")
def test_the_end_of_a_session_wakes_a_program_that_waits_for_room() -> None:
    zero, one = couple(60.0)
    threading.Timer(0.05, one.abort, ("the user left",)).start()

    def sends_and_waits() -> None:
        sends(zero, 1, "t", *[numbers(3000, seed) for seed in range(60)])
        zero.recv(1, "t", (1,), torch.int64)

    with pytest.raises(PartyFailed, match="the user left"):
        sends_and_waits()


@pytest.mark.parametrize("program", [True, False])
def test_another_message_ends_the_session(program: bool) -> None:
    for tag, size in (("other", 5), ("t", 4)):
        zero, one = couple()
        sends(zero, 1, tag, numbers(size))
        with pytest.raises(TransportError, match=f"got '{tag}' with {size} x torch.int64; want 't' with 5"):
            receives(one, 0, "t", 5) if program else one.recv(0, "t", (5,), torch.int64)


def test_the_end_of_a_session_wakes_a_program() -> None:
    zero, one = couple(60.0)
    threading.Timer(0.05, zero.abort, ("the user left",)).start()
    with pytest.raises(PartyFailed, match="the user left"):
        receives(one, 0, "t", 5)


def test_silence_is_noticed() -> None:
    _, one = couple(0.3)
    with pytest.raises(PartyFailed, match="party 0 was silent"):
        receives(one, 0, "t", 5)


def test_clients_and_endpoints_with_turns_have_objects() -> None:
    mesh, turns = LocalMesh(2), LocalMesh(2, at_once=1)
    assert isinstance(mesh.links[(0, 1)].items, MemoryLink)
    assert not mesh.transport(0).ends(CLIENT)
    assert not mesh.transport(0).ends(7)
    assert isinstance(mesh.links[(0, CLIENT)].items, ObjectLink)
    assert all(isinstance(link.items, ObjectLink) for link in turns.links.values())
    assert not turns.transport(0).ends(1)


def test_without_a_counter_left_there_are_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("os.eventfd", none)
    assert isinstance(new_link(lent=True), ObjectLink)


def test_links_end_with_their_session() -> None:
    """Without a search for circles: counters are few."""
    mesh = LocalMesh(3)
    other = mesh.parallel_session(1)
    links = [weakref.ref(link.items) for each in (mesh, other) for link in each.links.values()]
    assert mesh.parallel_session(1) is other
    assert other.parallel_session(0) is mesh
    sends(mesh.transport(0), 1, "t", numbers(3))  # type: ignore[arg-type]
    assert all(link() is not None for link in links)
    del mesh, other
    assert all(link() is None for link in links)


def test_any_timeout() -> None:
    link = MemoryLink()
    threading.Timer(0.05, link.wake).start()
    assert link.get(1e9) is None


@pytest.mark.parametrize("kind", [MemoryLink, ObjectLink])
def test_a_link_alone(kind: type[MemoryLink] | type[ObjectLink]) -> None:
    link = kind()
    item = ("t", torch.arange(3), False, None)
    assert link.empty()
    with pytest.raises(queue.Empty):
        link.get(0.01)
    link.put(item)
    link.wait()
    link.wait()
    assert not link.empty()
    assert link.get(0.01) is item
    assert link.empty()
    threading.Timer(0.05, link.wake).start()
    assert link.get() is None


def test_the_limit_of_running_ahead_counts_objects_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_MAX_AHEAD", 10_000)
    zero, one = couple(0.4)
    for _ in range(5):
        sends(zero, 1, "t", numbers(1000))
    zero.send(1, "t", numbers(2000))
    with pytest.raises(PartyFailed, match="took nothing"):
        zero.send(1, "t", numbers(2000))
    del one
