"""Compiled programs write and read the same frames as Python does, and leave to it what is not as usual."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from private_llm.errors import PartyFailed, TransportError
from private_llm.net import connection, outgoing, wire
from private_llm.net.direct import Direct, Row
from private_llm.net.incoming import Incoming
from private_llm.net.parallel_sessions import RoleTransport
from private_llm.net.sockets import SocketTransport
from private_llm.replay import runner
from private_llm.replay.events import Receive, Send
from private_llm.replay.program import Arena, Event, Memory, Operand, Program
from private_llm.replay.transports import LiveTransport

from .mesh import SESSION, couple, raw_peer

pytestmark = pytest.mark.skipif(not connection.HERE, reason="connections are lent on Linux only")


@pytest.fixture(autouse=True, scope="module")
def _compiled() -> None:
    """Before anything has to answer in time."""
    runner.run(0, 0, 0, 0, 0, 0)


def sends(transport: SocketTransport | RoleTransport, to: int, tag: str, *payloads: Tensor) -> None:
    """A program that sends these."""
    places = [Memory(8 * each.numel(), 0, len(payloads)) for each in payloads]
    whole = [Operand(place, 0, each.shape, each.stride()) for place, each in zip(places, payloads, strict=True)]
    events: list[Event] = [Send(to, tag, each) for each in whole]
    Program(events, whole, [], [], []).ready(LiveTransport(transport, []), Arena(), payloads, ())(None)


def receives(transport: SocketTransport | RoleTransport, frm: int, tag: str, *sizes: int) -> list[Tensor]:
    """What a program receives."""
    whole = [Operand(Memory(8 * size, 0, len(sizes)), 0, (size,), (1,)) for size in sizes]
    return Program([Receive(frm, tag, each) for each in whole], [], whole, [], []).ready(
        LiveTransport(transport, []), Arena(), [], ()
    )(None)


def together(first: Callable[[], object], second: Callable[[], list[Tensor]]) -> list[Tensor]:
    """What the second gives, while the first runs in another thread."""
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(first)
        made = second()
        done.result()
    return made


def numbers(size: int, seed: int = 0) -> Tensor:
    return torch.randint(-(1 << 62), 1 << 62, (size,), generator=torch.Generator().manual_seed(seed))


def frame(payload: Tensor, sequence: int = 0, tag: str = "t") -> bytes:
    head = wire.encode(wire.FrameKind.DATA, 1, SESSION, sequence, tag, torch.int64, payload.numel())
    return head + payload.numpy().tobytes()


def note(kind: wire.FrameKind, body: bytes, sequence: int) -> bytes:
    return wire.encode(kind, 1, SESSION, sequence, "note", torch.uint8, len(body)) + body


class Refusing:
    """Stands for Python's `_send` and `_recv` where a program has to do without."""

    def __init__(self, transport: SocketTransport) -> None:
        self._kept = transport._send, transport._recv
        self._transport = transport

    def __enter__(self) -> None:
        def refuse(*_: object) -> Tensor:
            raise AssertionError("a message of Python")

        self._transport._send = self._transport._recv = refuse  # type: ignore[method-assign, assignment]

    def __exit__(self, *_: object) -> None:
        self._transport._send, self._transport._recv = self._kept  # type: ignore[method-assign]


SIZES = (1, 7, 64, 129, 8191, 8192, 3)


def slices(transport: SocketTransport, peer: int, seconds: float) -> None:
    """Programs that wait for this peer give up after so long, whatever the timeout."""
    transport._in[peer]._slice = seconds


def test_programs_on_both_ends_need_no_python() -> None:
    zero, one = couple()
    slices(one, 0, 60.0)
    payloads = [numbers(size, size) for size in SIZES]
    for _ in range(3):
        with Refusing(zero), Refusing(one):
            got = together(lambda: sends(zero, 1, "t", *payloads), lambda: receives(one, 0, "t", *SIZES))
        assert all(map(torch.equal, got, payloads))
    assert zero.wire_bytes == 3 * sum(wire.HEADER_BYTES + 8 * size for size in SIZES)


def test_python_and_programs_take_turns() -> None:
    zero, one = couple()
    for turn in range(4):
        x, y = numbers(500, turn), numbers(70_000, turn + 9)
        sends(zero, 1, "t", x, x[:3]) if turn % 2 else [zero.send(1, "t", each) for each in (x, x[:3])]
        got = receives(one, 0, "t", 500, 3) if turn < 2 else [one.recv(0, "t", (n,), torch.int64) for n in (500, 3)]
        assert torch.equal(got[0], x)
        assert torch.equal(got[1], x[:3])
        more = together(lambda y=y, x=x: sends(zero, 1, "large", y, x), lambda: receives(one, 0, "large", 70_000))
        assert torch.equal(more[0], y), "more than a program writes itself"
        assert torch.equal(one.recv(0, "large", (500,), torch.int64), x)
    zero.close()


@pytest.mark.parametrize("room", [4096, 60_000])
def test_what_a_full_connection_did_not_take_leaves_later(room: int) -> None:
    zero, one = couple(room=room)
    payloads = [numbers(6000, seed) for seed in range(8)]
    sends(zero, 1, "t", *payloads)
    zero.send(1, "t", payloads[0])
    got = receives(one, 0, "t", *[6000] * 8)
    assert all(map(torch.equal, got, payloads))
    assert torch.equal(one.recv(0, "t", (6000,), torch.int64), payloads[0])
    assert zero.wire_bytes == 9 * (wire.HEADER_BYTES + 48_000)
    zero.close()


@pytest.mark.parametrize(("size", "count"), [(20, 200), (6000, 8)], ids=["whole frames", "parts of frames"])
def test_a_full_connection_is_waited_for(size: int, count: int) -> None:
    zero, one = couple(room=4096)
    slices(zero, 1, 60.0)
    slices(one, 0, 60.0)
    payloads = [numbers(size, seed) for seed in range(count)]
    with Refusing(zero):
        got = together(lambda: sends(zero, 1, "t", *payloads), lambda: receives(one, 0, "t", *[size] * count))
    assert all(map(torch.equal, got, payloads))
    assert zero._out[1]._writer is None, "no thread of Python's had to write"


def test_a_full_connection_is_not_waited_for_while_there_is_something_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its peer may be waiting for room as well: the rest is Python's, at once."""
    zero, one = couple(room=4096)
    slices(zero, 1, 2.0)
    waited: list[int] = []
    end = Incoming.take_back

    def take_back(self: Incoming, row: Row) -> None:
        waited.append(int(row[connection.WAITED]))
        end(self, row)

    monkeypatch.setattr(Incoming, "take_back", take_back)
    payloads = [numbers(20, seed) for seed in range(200)]
    one.send(0, "back", payloads[0])
    sends(zero, 1, "t", *payloads)
    assert max(waited) < 2_000_000_000, "it did not wait its time out"
    assert all(map(torch.equal, receives(one, 0, "t", *[20] * 200), payloads))
    assert torch.equal(zero.recv(1, "back", (20,), torch.int64), payloads[0])


def test_what_is_queued_is_waited_for() -> None:
    zero, one = couple(room=4096)
    slices(zero, 1, 60.0)
    zero.send(1, "t", numbers(70_000))
    assert not zero._out[1].drained(0)

    def program() -> None:
        with Refusing(zero):
            sends(zero, 1, "t", *[numbers(20, seed) for seed in range(9)])

    got = together(program, lambda: receives(one, 0, "t", 70_000, *[20] * 9))
    assert all(map(torch.equal, got, [numbers(70_000), *(numbers(20, seed) for seed in range(9))]))


def test_what_is_queued_is_not_waited_for_while_there_is_something_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two whose queues wait for each other's readers."""
    monkeypatch.setattr(outgoing, "_DRAIN_S", 1e9)
    zero, one = couple(room=4096)
    one._out[0]._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    for each in (zero, one):
        each.send(1 - each.me, "t", numbers(70_000, each.me))
        assert not each._out[1 - each.me].drained(0)

    def exchanged(each: SocketTransport) -> list[Tensor]:
        sends(each, 1 - each.me, "t", numbers(5))
        return receives(each, 1 - each.me, "t", 70_000, 5)

    got = together(lambda: exchanged(zero), lambda: exchanged(one))
    assert all(map(torch.equal, got, [numbers(70_000, 0), numbers(5)]))


def test_a_queue_that_does_not_empty_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that reads a byte now and then would cost each message the whole wait."""
    monkeypatch.setattr(outgoing, "_DRAIN_S", 0.05)
    zero, one = couple(room=4096)
    zero._out[1]._patience = 0.05
    zero.send(1, "t", numbers(70_000))
    sends(zero, 1, "t", numbers(20))
    assert zero._out[1]._patience <= 0
    with monkeypatch.context() as patched:
        patched.setattr(outgoing.select, "poll", None)
        sends(zero, 1, "t", numbers(20))
    receives(one, 0, "t", 70_000, 20, 20)
    sends(zero, 1, "t", numbers(20))
    assert zero._out[1]._patience == 0.05


def test_another_message_than_the_one_that_was_begun_is_sent() -> None:
    """A program ended between the two by an exception."""
    zero, one = couple()
    end = zero._out[1]
    sends(zero, 1, "first", numbers(5))
    end._foregone = 0, end._head.tobytes()
    end.note(wire.FrameKind.WAITING, bytes([0]))  # of another thread
    zero.send(1, "first", numbers(5))  # the one whose rest is queued already
    end._foregone = 0, end._head.tobytes()
    zero.send(1, "second", numbers(5))
    assert torch.equal(receives(one, 0, "first", 5)[0], numbers(5))
    assert torch.equal(one.recv(0, "second", (5,), torch.int64), numbers(5))


@pytest.mark.parametrize("failure", [KeyboardInterrupt, RuntimeError])
def test_an_interrupt_while_it_waits_leaves_nothing_locked(
    failure: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def empty(*_: object) -> None:
        raise failure

    zero, one = couple()
    with monkeypatch.context() as patched:
        patched.setattr(outgoing.Outgoing, "_empty", empty)
        with pytest.raises(failure):
            sends(zero, 1, "t", numbers(5))
    sends(zero, 1, "t", numbers(5))
    assert torch.equal(receives(one, 0, "t", 5)[0], numbers(5))


@pytest.mark.parametrize("cuts", [(3,), (64,), (65, 70), (64 + 4000,), (10, 4000, 4001, 7990)])
def test_a_frame_that_comes_in_pieces(cuts: tuple[int, ...]) -> None:
    zero, peer, _ = raw_peer(timeout=20.0)
    slices(zero, 1, 0.03)
    payload = numbers(1000)
    whole = frame(payload) + frame(payload[:9], 1)

    def write() -> None:
        for begin, end in zip((0, *cuts), (*cuts, len(whole)), strict=True):
            peer.sendall(whole[begin:end])
            time.sleep(0.1)

    got = together(write, lambda: receives(zero, 1, "t", 1000, 9))
    assert torch.equal(got[0], payload)
    assert torch.equal(got[1], payload[:9])


def test_more_frames_than_are_read_ahead() -> None:
    zero, peer, _ = raw_peer()
    payloads = [numbers(size, size) for size in range(400, 500)]
    whole = b"".join(frame(each, number) for number, each in enumerate(payloads))
    writer = threading.Thread(target=peer.sendall, args=(whole,))
    writer.start()
    got = [receives(zero, 1, "t", *range(400, 450)), receives(zero, 1, "t", *range(450, 500))]
    writer.join()
    assert all(map(torch.equal, [*got[0], *got[1]], payloads))


def test_notes_between_frames() -> None:
    zero, peer, _ = raw_peer()
    x = numbers(5)
    waits = note(wire.FrameKind.WAITING, bytes([3]), 1)
    peer.sendall(frame(x) + waits + frame(x, 2))
    zero._in[3] = zero._in[1]  # there is such an endpoint
    assert all(torch.equal(each, x) for each in receives(zero, 1, "t", 5, 5))
    peer.sendall(note(wire.FrameKind.ABORT, b"party 1: out of memory", 3))
    with pytest.raises(PartyFailed, match="out of memory"):
        receives(zero, 1, "t", 5)


@pytest.mark.parametrize(
    ("whole", "what"),
    [
        (frame(numbers(5), tag="other"), "got 'other' with 5 x int64; want 't' with 5"),
        (frame(numbers(4)), "got 't' with 4 x int64; want 't' with 5"),
        (frame(numbers(5), sequence=1), "lost or repeated"),
        (frame(numbers(5)).replace(SESSION, b"SESSIONX"), "another endpoint or session"),
        (b"GET / HTTP/1.1" + bytes(60), "a frame of private-llm"),
    ],
)
def test_other_frames_are_refused_as_python_refuses_them(whole: bytes, what: str) -> None:
    zero, peer, _ = raw_peer()
    peer.sendall(whole)
    with pytest.raises(TransportError, match=what):
        receives(zero, 1, "t", 5)


def test_a_peer_that_goes_away_or_says_nothing() -> None:
    zero, peer, _ = raw_peer()
    peer.sendall(frame(numbers(5))[:80])
    peer.close()
    with pytest.raises(PartyFailed, match="connection closed"):
        receives(zero, 1, "t", 5)
    silent, _keep, _too = raw_peer(timeout=0.4)
    with pytest.raises(PartyFailed, match="was silent for 0"):
        receives(silent, 1, "t", 5)


def test_the_end_of_a_session_is_told_while_a_program_waits() -> None:
    zero, peer, taken = raw_peer(timeout=20.0)
    slices(zero, 1, 0.3)
    threading.Timer(0.1, zero.abort, ("the user left",)).start()
    with pytest.raises(PartyFailed, match="the user left"):
        receives(zero, 1, "t", 5)
    told = b""
    while b"the user left" not in told:
        told += taken.recv(1000)
    peer.close()


def test_a_peer_that_drips_does_not_keep_a_connection_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    zero, peer, _ = raw_peer(timeout=20.0)
    slices(zero, 1, 0.05)
    payload, free = numbers(1000), threading.Event()
    back = Direct.__exit__
    monkeypatch.setattr(Direct, "__exit__", lambda self, *how: (back(self, *how), free.set())[0])
    dripped: list[int] = []

    def drip() -> None:
        whole = frame(payload)
        for at in range(len(whole)):
            peer.sendall(whole[at : at + 1])
            if free.wait(0.002):
                peer.sendall(whole[at + 1 :])
                break
            dripped.append(at)

    assert torch.equal(together(drip, lambda: receives(zero, 1, "t", 1000))[0], payload)
    assert len(dripped) < 4000


def test_nothing_is_lent_after_an_abort() -> None:
    zero, one = couple()
    zero.abort("the user left")
    with pytest.raises(PartyFailed, match="the user left"):
        sends(zero, 1, "t", numbers(5))
    with pytest.raises(PartyFailed, match="the user left"):
        receives(one, 0, "t", 5)


def test_a_frame_that_no_thread_can_end(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unstartable(threading.Thread):
        """A thread of a machine that has none left."""

        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    class Threads:
        """What `outgoing` takes of `threading`."""

        Thread = Unstartable

    zero, _one = couple(room=4096)
    with monkeypatch.context() as patched:
        patched.setattr(outgoing, "threading", Threads)
        with pytest.raises(PartyFailed, match="no thread left to write to party 1"):
            sends(zero, 1, "t", *[numbers(6000)] * 4)
    zero.close()


def test_rows_have_room_for_what_the_system_wants() -> None:
    assert connection.SYSTEM + 11 <= connection.FIELDS


def test_connections_are_free_again_after_an_error() -> None:
    zero, _peer, _taken = raw_peer(timeout=0.4)
    with pytest.raises(PartyFailed):
        receives(zero, 1, "t", 5)
    closing = threading.Thread(target=zero.close)
    closing.start()
    closing.join(30)
    assert not closing.is_alive()


def test_a_connection_is_closed_once_no_program_has_it() -> None:
    zero, _peer, _taken = raw_peer(timeout=20.0)
    threading.Timer(0.1, zero._in[1].close).start()
    with pytest.raises(PartyFailed, match="this endpoint has closed the session"):
        receives(zero, 1, "t", 5)
