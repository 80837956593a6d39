"""Parties as threads: the same promises as the wire."""

import threading
import time

import pytest
import torch

from private_llm.errors import DomainError, PartyFailed, TransportError
from private_llm.net import local
from private_llm.net.local import LocalMesh
from private_llm.net.transport import CLIENT, MetaTransport

from .mesh import run_threads


def transports(timeout=5.0):
    mesh = LocalMesh(3, timeout)
    return {me: mesh.transport(me) for me in mesh.endpoints}


def test_exchange_books_bytes_and_one_round():
    t = transports()
    work = {me: lambda x: x.exchange(1 - x.me, "mul", torch.full((3,), x.me)).tolist() for me in (0, 1)}
    assert run_threads(t, work) == {0: [1, 1, 1], 1: [0, 0, 0]}
    assert t[0].ledger.cost().sent == {(0, 1): 24}
    assert t[0].ledger.cost().rounds == 1


@pytest.mark.parametrize(
    ("tag", "shape", "dtype"),
    [("add", (4,), torch.int64), ("mul", (5,), torch.int64), ("mul", (4,), torch.int32)],
)
def test_disagreement_stops_the_session(tag, shape, dtype):
    t = transports()
    t[0].send(1, "mul", torch.tensor([4242424242] * 4))
    with pytest.raises(TransportError, match="got 'mul' with 4 x") as caught:
        t[1].recv(0, tag, shape, dtype)
    assert "4242424242" not in str(caught.value)
    with pytest.raises(PartyFailed, match="got 'mul' with 4 x"):
        t[2].recv(1, "m", (1,), torch.int64)


def test_the_silent_endpoint_is_named_by_all_who_wait_for_each_other():
    t = transports(0.5)
    chain = {CLIENT: 0, 0: 1, 1: 2}
    results = run_threads(t, dict.fromkeys(chain, lambda x: x.recv(chain[x.me], "m", (1,), torch.int64)))
    assert {type(result) for result in results.values()} == {PartyFailed}
    assert all("party 2 was silent for 0.5 s" in str(result) for result in results.values())


def test_a_circle_of_waits_ends():
    t = transports(0.5)
    circle = {0: 1, 1: 2, 2: 0}
    results = run_threads(t, dict.fromkeys(circle, lambda x: x.recv(circle[x.me], "m", (1,), torch.int64)))
    assert {type(result) for result in results.values()} == {PartyFailed}
    assert all("wait for each other" in str(result) for result in results.values())


def test_an_abort_wakes_all_and_is_final():
    t = transports(60.0)
    started = threading.Barrier(3)

    def wait(x):
        started.wait()
        (x.wait if x.me == 1 else lambda frm: x.recv(frm, "m", (1,), torch.int64))(0)

    def stop(x):
        started.wait()
        x.abort("layer 3 overflowed")

    results = run_threads(t, {0: stop, 1: wait, 2: wait})
    assert [str(results[me]) for me in (1, 2)] == ["layer 3 overflowed"] * 2
    for operation in (lambda: t[1].wait(2), lambda: t[1].recv(2, "m", (1,), torch.int64)):
        with pytest.raises(PartyFailed, match="layer 3"):
            operation()


def test_waiting_leaves_the_frame():
    t = transports()
    t[0].send(1, "m", torch.tensor([5]))
    t[1].wait(0)
    t[1].wait(0)
    assert t[1].recv(0, "m", (1,), torch.int64).item() == 5


def test_floats_never_travel():
    for transport in (transports()[0], MetaTransport(0)):
        with pytest.raises(DomainError, match="int64, int32 or uint8"):
            transport.send(1, "m", torch.zeros(1))


# -- many endpoints, few at a time --------------------------------------------------------------------------------
class Crowd:
    """Counts who computes, and how many did at once."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.now = self.most = 0

    def compute(self) -> None:
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
        time.sleep(0.002)
        with self.lock:
            self.now -= 1


@pytest.mark.parametrize("at_once", [1, 2])
def test_so_many_endpoints_compute_at_a_time(at_once: int) -> None:
    """Five in a ring pass a number on: with one turn, whoever waits must let the others go on."""
    mesh, crowd = LocalMesh(5, 20.0, at_once), Crowd()
    found: list[int] = []

    def party(me: int) -> None:
        links = mesh.transport(me)
        with mesh.turn():
            for _ in range(4):
                crowd.compute()
                links.send((me + 1) % 5, "x", torch.tensor([me]))
                links.wait((me - 1) % 5)
                found.append(int(links.recv((me - 1) % 5, "x", (1,), torch.int64)))

    threads = [threading.Thread(target=party, args=(me,)) for me in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(found) == sorted([0, 1, 2, 3, 4] * 4)
    assert crowd.most <= at_once


def test_a_sender_that_is_too_far_ahead_lets_its_receiver_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_MAX_AHEAD", 4096)
    mesh = LocalMesh(2, 5.0, 1)
    received = []

    def receive() -> None:
        links = mesh.transport(1)
        with mesh.turn():
            received.extend(int(links.recv(0, "x", (1024,), torch.int64)[0]) for _ in range(4))

    thread = threading.Thread(target=receive)
    with mesh.turn():
        thread.start()
        links = mesh.transport(0)
        for number in range(4):
            links.send(1, "x", torch.full((1024,), number))
    thread.join(10)
    assert received == [0, 1, 2, 3]


def test_the_client_waits_without_a_turn() -> None:
    mesh = LocalMesh(1, 5.0, 1)
    with mesh.turn():
        mesh.transport(0).send(CLIENT, "x", torch.tensor([7]))
        assert int(mesh.transport(CLIENT).recv(0, "x", (1,), torch.int64)) == 7
        assert not mesh.turns.acquire(blocking=False)  # type: ignore[union-attr]
