"""Frames whose length the receiver does not know: one frame each, and a limit that holds before memory is taken."""

import threading
import tracemalloc

import pytest
import torch
from timed_nodes import TimedTransport

from private_llm.errors import PartyFailed, TransportError
from private_llm.net import wire
from private_llm.net.local import LocalMesh
from private_llm.net.parallel_sessions import parallel_session_links
from private_llm.net.transport import CLIENT, MetaTransport
from tests.recording import RecordingTransport

from .mesh import couple, raw_peer
from .test_distributed import ranks
from .test_sockets import frame

HUGE = 1 << 33
"""8 GiB: below what a frame may announce."""


def threads():
    mesh = LocalMesh(2, 5.0)
    return mesh.transport(0), mesh.transport(1)


PAIRS = pytest.mark.parametrize("pair", [threads, couple])


@PAIRS
@pytest.mark.parametrize("size", [1, 2, 1023, 1025, 70_000, 1 << 20])
def test_one_frame_carries_any_length_up_to_the_limit(pair, size):
    zero, one = pair()
    raw = bytes(i % 251 for i in range(size))
    zero.send_bytes(1, "control", raw)
    zero.send(1, "next", torch.tensor([7]))
    assert one.recv_bytes(0, "control", size) == raw
    assert one.recv(0, "next", (1,), torch.int64).tolist() == [7]
    assert zero.ledger.cost().sent == {(0, 1): size + 8}


@PAIRS
@pytest.mark.parametrize(("tag", "most"), [("control", 9), ("mul", 10)])
def test_too_many_bytes_or_another_tag_end_the_session(pair, tag, most):
    zero, one = pair()
    zero.send_bytes(1, "control", b"4242424242")
    with pytest.raises(TransportError, match=rf"got 'control' with 10 x .*want '{tag}' with at most {most}") as caught:
        one.recv_bytes(0, tag, most)
    assert "4242424242" not in str(caught.value)
    with pytest.raises(PartyFailed, match="got 'control' with 10 x"):
        zero.recv(1, "answer", (1,), torch.int64)


@PAIRS
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_tensors_are_no_bytes(pair, dtype):
    zero, one = pair()
    zero.send(1, "control", torch.zeros(2, dtype=dtype))
    with pytest.raises(TransportError, match=r"got 'control' with 2 x .*at most 100"):
        one.recv_bytes(0, "control", 100)


def peak(work):
    """The most memory that Python held while `work` ran, in bytes."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_huge_announcement_is_refused_before_there_is_memory_for_it():
    zero, sock, _ = raw_peer()
    sock.sendall(frame(tag="control", count=HUGE))  # and nothing behind it

    def receive():
        with pytest.raises(TransportError, match=f"with {HUGE} x uint8; want 'control' with at most 1048576"):
            zero.recv_bytes(1, "control", 1 << 20)

    assert peak(receive) < 1 << 20


def test_a_huge_frame_between_threads_is_not_copied():
    zero, one = threads()
    zero.send(1, "control", torch.zeros(1, dtype=torch.uint8).expand(HUGE))  # as a changed sender: one byte, so often

    def receive():
        with pytest.raises(TransportError, match=f"with {HUGE} x"):
            one.recv_bytes(0, "control", 1 << 20)

    assert peak(receive) < 1 << 20


def test_a_frame_that_announces_more_than_any_may():
    zero, sock, _ = raw_peer()
    sock.sendall(frame(tag="control", count=wire.MAX_PAYLOAD + 1))
    with pytest.raises(TransportError, match="oversized frame"):
        zero.recv_bytes(1, "control", wire.MAX_PAYLOAD * 2)


@pytest.mark.parametrize("sequence", [1, 7])
def test_a_repeated_frame(sequence):
    zero, sock, _ = raw_peer()
    sock.sendall(frame(b"ab", tag="control", sequence=sequence))
    with pytest.raises(TransportError, match="lost or repeated"):
        zero.recv_bytes(1, "control", 9)


def test_links_in_between_pass_bytes_on():
    mesh = LocalMesh(3, 5.0)
    ends = {
        me: parallel_session_links(mesh.transport(me), 3, 1, rotate_roles=True) for me in (0, 1)
    }  # 0 plays role 2, 1 plays role 0
    assert {me: end.me for me, end in ends.items()} != {0: 0, 1: 1}
    listener = RecordingTransport(TimedTransport(ends[1]), payloads=True)
    ends[0].send_bytes(ends[1].me, "control", b"abc")
    assert listener.recv_bytes(ends[0].me, "control", 3) == b"abc"
    assert [message.outline[:3] for message in listener.messages] == [("received", ends[0].me, "control")]
    assert set(listener.ledger.seconds) == {"waiting", "serialising"}


def test_who_waits_for_bytes_hears_why_they_do_not_come():
    zero, one = threads()
    said = []

    def wait():
        with pytest.raises(PartyFailed) as caught:
            one.recv_bytes(0, "control", 9)
        said.append(str(caught.value))

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    zero.abort("party 0: it rains")
    waiting.join(5)
    assert said == ["party 0: it rains"]


def test_links_without_bytes_say_so():
    with pytest.raises(TransportError, match="tensors of known shapes only"):
        MetaTransport(0).recv_bytes(CLIENT, "control", 9)


def test_ranks_of_a_launcher():
    assert ranks("bytes_to_everybody") == dict.fromkeys([0, 1, 2, CLIENT], 3 * (5 + 4032 + 4033 + 70_000))


def test_a_rank_that_sends_too_many_bytes():
    results = ranks("too_many_bytes")
    assert len(results) == 4
    assert all("got 'control' with 5000 x uint8" in result for result in results.values())
