"""Tensors over real connections: what is sent arrives, and disagreement is an error on all sides."""

import struct
import threading
import time

import pytest
import torch

from private_llm.errors import DomainError, PartyFailed, TransportError
from private_llm.net import outgoing, wire
from private_llm.net.transport import CLIENT

from .mesh import ENDPOINTS, SESSION, couple, open_mesh, raw_peer, run_threads


def frame(body=b"", **changes):
    values = {"kind": wire.FrameKind.DATA, "sender": 1, "session": SESSION, "sequence": 0, "tag": "mul"}
    values |= {"dtype": torch.uint8, "count": len(body)}
    return wire.encode(**(values | changes)) + body


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (7, 13), (65537,)])
def test_all_shapes_and_dtypes_arrive(shape, dtype):
    zero, one = couple()
    info = torch.iinfo(dtype)
    payload = torch.arange(torch.Size(shape).numel(), dtype=dtype).view(shape)
    if payload.numel():
        payload.view(-1)[0] = info.min
        payload.view(-1)[-1] = info.max
    zero.send(1, "t", payload)
    got = one.recv(0, "t", shape, dtype)
    assert got.dtype == dtype
    assert torch.equal(got, payload)
    assert zero.ledger.cost().sent == {(0, 1): payload.numel() * dtype.itemsize}
    assert zero.wire_bytes == payload.numel() * dtype.itemsize + wire.HEADER_BYTES


def test_a_strided_tensor_arrives_in_its_logical_order():
    zero, one = couple()
    payload = torch.arange(12).view(3, 4).t()
    zero.send(1, "t", payload)
    assert torch.equal(one.recv(0, "t", (4, 3), torch.int64), payload)


def test_64_mb_both_ways_between_all_endpoints_at_once():
    """Every endpoint sends to everybody before it receives anything."""
    transports = open_mesh()
    count = (64 << 20) // 8

    def work(t):
        pair = {0: 1, 1: 0}.get(t.me)
        for peer in ENDPOINTS:
            if peer not in (t.me, pair):
                t.send(peer, "small", torch.full((1001,), t.me))
        if pair is not None:
            t.send(pair, "large", torch.full((count,), t.me))
            got = t.recv(pair, "large", (count,), torch.int64)
            assert got.eq(pair).all()
        for peer in ENDPOINTS:
            if peer not in (t.me, pair):
                assert t.recv(peer, "small", (1001,), torch.int64).eq(peer).all()
        t.close()
        return t.ledger.cost().total

    results = run_threads(transports, dict.fromkeys(ENDPOINTS, work))
    assert results == {0: (64 << 20) + 16016, 1: (64 << 20) + 16016, 2: 24024, CLIENT: 24024}


def test_many_small_frames_keep_their_order_across_a_full_queue():
    """More than the kernel holds, so that inline and queued frames alternate."""
    zero, one = couple()
    sizes = [0, 1, 5000, 70000, 8191, 100000, 3] * 30
    for i, size in enumerate(sizes):
        zero.send(1, "t", torch.full((size,), i % 251, dtype=torch.uint8))
    for i, size in enumerate(sizes):
        assert one.recv(0, "t", (size,), torch.uint8).eq(i % 251).all()


def test_a_sender_waits_when_it_is_too_far_ahead(monkeypatch):
    monkeypatch.setattr(outgoing, "MAX_AHEAD", 1 << 20)
    zero, one = couple(timeout=1.0)
    block = torch.zeros(1 << 20, dtype=torch.uint8)

    def send():
        for _ in range(20):
            zero.send(1, "m", block)

    def receive():
        for _ in range(20):
            one.recv(0, "m", (1 << 20,), torch.uint8)

    with pytest.raises(PartyFailed, match=r"party 1 was silent for 1 s, while 'm' was sent to party 1"):
        send()
    with pytest.raises(PartyFailed, match="party 0: party 1 was silent"):
        receive()


def test_a_late_reader_gets_everything_from_a_sender_that_had_to_wait(monkeypatch):
    monkeypatch.setattr(outgoing, "MAX_AHEAD", 1 << 20)
    zero, one = couple()

    def send(t):
        for i in range(12):
            t.send(1, "m", torch.full((1 << 20,), i, dtype=torch.uint8))

    def receive(t):
        t.wait(0)
        return [int(t.recv(0, "m", (1 << 20,), torch.uint8)[-1]) for _ in range(12)]

    results = run_threads({0: zero, 1: one}, {0: send, 1: receive})
    assert results == {0: None, 1: list(range(12))}


@pytest.mark.parametrize(
    ("tag", "shape", "dtype"),
    [
        ("add", (4,), torch.int64),
        ("mul", (5,), torch.int64),
        ("mul", (4,), torch.int32),
        ("mul", (8,), torch.int32),
    ],
)
def test_disagreement_is_a_transport_error_that_shows_both_sides(tag, shape, dtype):
    zero, one = couple()
    zero.send(1, "mul", torch.tensor([4242424242] * 4))
    with pytest.raises(TransportError, match="got 'mul' with 4 x int64; want") as caught:
        one.recv(0, tag, shape, dtype)
    assert not isinstance(caught.value, PartyFailed)
    assert "4242424242" not in str(caught.value)
    with pytest.raises(PartyFailed, match="got 'mul' with 4 x int64; want"):
        zero.recv(1, "next", (1,), torch.int64)
    with pytest.raises(PartyFailed, match="want"):
        zero.send(1, "next", torch.zeros(1, dtype=torch.int64))


def test_out_of_order_tags():
    zero, one = couple()
    zero.send(1, "first", torch.zeros(2, dtype=torch.int64))
    zero.send(1, "second", torch.zeros(2, dtype=torch.int64))
    with pytest.raises(TransportError, match=r"got 'first'.*want 'second'.*disagree"):
        one.recv(0, "second", (2,), torch.int64)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"GET / HTTP/1.1\r\n" * 8, "want a frame of private-llm"),
        (b"\x16\x03\x01" + bytes(100), "want a frame of private-llm"),
        (frame(bytes(4), sequence=1), "got frame 1; want 0"),
        (frame(bytes(4), session=b"sessiony"), "another endpoint or session"),
        (frame(bytes(4), sender=2), "another endpoint or session"),
        (frame(bytes(3)), "got 'mul' with 3 x uint8; want 'mul' with 4 x uint8"),
        (frame(kind=wire.FrameKind.HELLO), "out of place"),
        (frame(kind=wire.FrameKind.WAITING), "out of place"),
        (frame(count=2**63), "oversized"),
        (frame()[:4] + b"\x01" + frame()[5:], "wire version: got 1; want 2"),
    ],
)
def test_malformed_frames(raw, message):
    zero, peer, _ = raw_peer()
    peer.sendall(raw)
    with pytest.raises(TransportError, match=message):
        zero.recv(1, "mul", (4,), torch.uint8)


@pytest.mark.parametrize("cut", [0, 1, 63, 64, 65, 1000])
def test_a_connection_that_ends_in_the_middle(cut):
    zero, peer, _ = raw_peer()
    peer.sendall(frame(bytes(2000))[:cut])
    peer.close()
    with pytest.raises(PartyFailed, match="party 1 stopped: its connection closed, while 'mul' of party 1 was awaited"):
        zero.recv(1, "mul", (2000,), torch.uint8)


def test_a_frame_that_arrives_byte_by_byte():
    zero, peer, _ = raw_peer()
    raw = frame(bytes(range(10))) + frame(b"\x07" * 10, sequence=1)

    def dribble(_):
        for i in range(len(raw)):
            peer.sendall(raw[i : i + 1])

    def receive(t):
        return [t.recv(1, "mul", (10,), torch.uint8).tolist() for _ in range(2)]

    results = run_threads({0: zero, 1: None}, {1: dribble, 0: receive})
    assert results[0] == [list(range(10)), [7] * 10]


def test_header_on_the_wire():
    zero, _, reader = raw_peer()
    zero.send(1, "mul", torch.tensor([1, -1]))
    raw = reader.recv(1000)
    assert raw == wire.encode(wire.FrameKind.DATA, 0, SESSION, 0, "mul", torch.int64, 2) + struct.pack("<qq", 1, -1)


def test_floats_never_travel():
    zero, _ = couple()
    with pytest.raises(DomainError, match="int64, int32 or uint8; got"):
        zero.send(1, "t", torch.zeros(1))
    assert zero.ledger.cost().total == 0


def test_an_abort_reaches_everybody_with_its_reason_past_unread_data():
    transports = open_mesh()

    def fail(t):
        t.send(1, "m", torch.zeros(8 << 20, dtype=torch.uint8))
        t.abort("layer 3 overflowed")
        t.close()

    def wait_for_another(t):
        t.recv(CLIENT if t.me == 2 else 2, "m", (1,), torch.int64)

    results = run_threads(transports, {0: fail, 1: wait_for_another, 2: wait_for_another, CLIENT: wait_for_another})
    assert {str(results[me]) for me in (1, 2, CLIENT)} == {"layer 3 overflowed"}
    assert all(isinstance(results[me], PartyFailed) for me in (1, 2, CLIENT))


def test_waiting_has_no_time_limit_but_ends_with_the_session():
    zero, one = couple(timeout=0.4)

    def request(t):
        time.sleep(1.0)
        t.send(1, "request", torch.tensor([5]))

    assert run_threads({0: zero, 1: one}, {0: request, 1: lambda t: t.wait(0)}) == {0: None, 1: None}
    assert one.recv(0, "request", (1,), torch.int64).item() == 5
    zero.close()
    with pytest.raises(PartyFailed, match="party 0 has closed the session"):
        one.wait(0)


def test_those_who_have_finished_may_leave():
    """A closed connection is no failure for an endpoint that waits for somebody else."""
    transports = open_mesh(timeout=2.0)
    transports[0].close()
    transports[CLIENT].close()

    def late(t):
        time.sleep(1.0)
        t.send(2, "m", torch.tensor([1]))

    results = run_threads(transports, {1: late, 2: lambda t: t.recv(1, "m", (1,), torch.int64).item()})
    assert results == {1: None, 2: 1}


def test_the_silent_endpoint_is_named_by_all_who_wait_for_each_other():
    """Client waits for 0, 0 for 1, 1 for 2; party 2 says nothing: it is blamed, not the one next in line."""
    transports = open_mesh(timeout=2.0)
    chain = {CLIENT: 0, 0: 1, 1: 2}

    def wait(t):
        t.recv(chain[t.me], "m", (1,), torch.int64)

    results = run_threads(transports, dict.fromkeys(chain, wait))
    expected = "party 1: party 2 was silent for 2 s, while 'm' of party 2 was awaited; restart the session"
    assert {type(results[me]) for me in chain} == {PartyFailed}
    assert {str(results[me]) for me in chain} == {expected}


def test_a_circle_of_waits_ends():
    transports = open_mesh(timeout=1.0)
    circle = {0: 1, 1: 2, 2: 0}
    results = run_threads(transports, dict.fromkeys(circle, lambda t: t.recv(circle[t.me], "m", (1,), torch.int64)))
    assert {type(result) for result in results.values()} == {PartyFailed}
    assert all("was silent for 1 s" in str(result) for result in results.values())


@pytest.mark.parametrize("root", [0, 1])
def test_word_of_waiting_holds_nobody_for_ever(root):
    """Who says nothing but that it waits, for itself or for the one who waits for it, has failed in the end."""
    zero, peer, _ = raw_peer(timeout=0.5)
    over = threading.Event()

    def say_so():
        for sequence in range(200):
            if over.wait(0.05):
                break
            peer.sendall(frame(bytes([root]), kind=wire.FrameKind.WAITING, sequence=sequence, tag="waiting"))

    thread = threading.Thread(target=say_so, daemon=True)
    thread.start()
    with pytest.raises(PartyFailed, match=r"party 1 sent nothing for 1 s but word that it waits itself"):
        zero.recv(1, "mul", (4,), torch.uint8)
    over.set()
    thread.join(10)


def test_word_of_waiting_does_not_count_between_requests():
    zero, peer, _ = raw_peer(timeout=0.2)
    for sequence in range(8):
        peer.sendall(frame(bytes([0]), kind=wire.FrameKind.WAITING, sequence=sequence, tag="waiting"))
        time.sleep(0.1)
    peer.sendall(frame(bytes(4), sequence=8))
    zero.wait(1)
    assert zero.recv(1, "mul", (4,), torch.uint8).tolist() == [0] * 4


def test_word_of_waiting_is_not_echoed_between_two_who_wait_in_turns():
    transports = open_mesh()
    rounds = 400

    def swap(t):
        if t.me == 1:
            t._pass_on(0)
        for _ in range(rounds):
            t.exchange(3 - t.me, "m", torch.zeros(1, dtype=torch.int64))
        return t.wire_bytes

    results = run_threads(transports, {1: swap, 2: swap})
    notes = max(results.values()) // wire.HEADER_BYTES - rounds * (wire.HEADER_BYTES + 8) // wire.HEADER_BYTES
    assert notes < 20


def test_nobody_waits_for_an_endpoint_that_is_none():
    zero, peer, _ = raw_peer()
    peer.sendall(frame(bytes([77]), kind=wire.FrameKind.WAITING, tag="waiting"))
    with pytest.raises(TransportError, match="it waits for endpoint 77, and there is none"):
        zero.recv(1, "mul", (4,), torch.uint8)


def test_no_endpoint_has_a_number_that_does_not_fit():
    with pytest.raises(DomainError, match="got endpoint 256; want 0 to 255"):
        wire.encode(wire.FrameKind.DATA, 256, SESSION, 0, "t", torch.uint8, 0)


@pytest.mark.parametrize(
    ("said", "heard"),
    [
        ("party 2: DomainError: x", "party 1 passes on: party 2: DomainError: x"),
        ("the dealer: DomainError: x", "party 1 passes on: the dealer: DomainError: x"),
        ("the client stopped: x", "party 1 passes on: the client stopped: x"),
        ("well, party 2: DomainError: x", "party 1 passes on: well, party 2: DomainError: x"),
        ("party 1: DomainError: party 2 lied", "party 1: DomainError: party 2 lied"),
        ("party 1: x\x1b[2J\n[/y]", "party 1: x [2J [/y]"),
        ("party 1: \ud800", "party 1:  "),
    ],
)
def test_nobody_speaks_for_another(said, heard):
    zero, one = couple()
    one.abort(said)
    with pytest.raises(PartyFailed) as caught:
        zero.recv(1, "mul", (4,), torch.uint8)
    assert str(caught.value) == heard


def test_words_are_heard_from_whom_they_are():
    """Party 0 passes on what party 2 said before the client has looked at its link with party 2."""
    transports = open_mesh()
    transports[0].abort("party 2: DomainError: x")
    results = {}

    def listen():
        with pytest.raises(PartyFailed) as caught:
            transports[CLIENT].recv(0, "m", (1,), torch.int64)
        results["heard"] = str(caught.value)

    thread = threading.Thread(target=listen)
    thread.start()
    time.sleep(0.05)
    transports[2].abort("party 2: DomainError: x")
    thread.join(10)
    assert results["heard"] == "party 2: DomainError: x"
