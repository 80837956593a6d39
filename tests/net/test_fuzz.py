"""Arbitrary bytes on a connection: nothing but TransportError (PartyFailed is one), whatever the bytes and cuts."""

import contextlib
import socket

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from private_llm.errors import TransportError
from private_llm.net import wire
from private_llm.net.hello import answer, greet
from private_llm.net.transport import CLIENT
from private_llm.net.wire import FrameKind

from .mesh import SESSION, raw_peer


def valid(kind, sequence, body):
    return wire.encode(kind, 1, SESSION, sequence, "mul", torch.uint8, len(body)) + body


STREAMS = st.one_of(
    st.binary(max_size=300),
    st.builds(lambda tail: b"PLLM\x01" + tail, st.binary(max_size=300)),
    st.lists(
        st.builds(valid, st.sampled_from(list(FrameKind)), st.integers(0, 3), st.binary(max_size=80)),
        max_size=4,
    ).map(b"".join),
)


@settings(max_examples=150, deadline=None)
@given(STREAMS, st.integers(0, 200), st.binary(max_size=3))
def test_a_transport_reads_arbitrary_bytes(stream, cut, noise):
    stream = stream[:cut] + noise + stream[cut:]
    transport, peer, taken = raw_peer(5.0)
    peer.sendall(stream)
    peer.close()
    received = []

    def read_all():
        while True:
            received.append(transport.recv(1, "mul", (16,), torch.uint8))

    with pytest.raises(TransportError):  # at the latest because the connection ends
        read_all()
    assert len(received) * 80 <= len(stream)
    with contextlib.closing(taken):
        transport.close()


@settings(max_examples=100, deadline=None)
@given(STREAMS)
def test_an_acceptor_reads_arbitrary_bytes(stream):
    near, far = socket.socketpair()
    with near, far:
        far.sendall(stream)
        far.shutdown(socket.SHUT_WR)
        near.settimeout(5)
        with pytest.raises((TransportError, ConnectionResetError)):
            answer(near, 0, b"token", lambda caller: None)


@settings(max_examples=100, deadline=None)
@given(STREAMS)
def test_a_connector_reads_arbitrary_bytes(stream):
    near, far = socket.socketpair()
    with near, far:
        far.sendall(stream)
        far.shutdown(socket.SHUT_WR)
        near.settimeout(5)
        with pytest.raises((TransportError, ConnectionResetError)):
            greet(near, CLIENT, 1, True, b"token", bytes(16))


FORGED = "gone\n2026-11-23 INFO party 0 admitted everybody \x1b[2J\u202e"


def test_a_callers_words_forge_no_line_of_a_log():
    near, far = socket.socketpair()
    with near, far:
        note = FORGED.encode()
        hello = (
            wire.encode(FrameKind.HELLO, CLIENT, bytes(8), 0, "hello", torch.uint8, 52)
            + bytes([0, 1, 0, 1])
            + bytes(48)
        )
        far.sendall(hello + wire.encode(FrameKind.ABORT, CLIENT, bytes(8), 1, "x", torch.uint8, len(note)) + note)
        near.settimeout(5)
        with pytest.raises(TransportError, match="the client refused: gone ") as caught:
            answer(near, 0, b"token", lambda caller: None)
        assert str(caught.value).isprintable()
