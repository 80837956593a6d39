"""Callers of a party with TLS that say half of what they should, or say it slowly: cut off, and nobody is kept out.

So are peers of a session that send a message byte by byte.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from private_llm.config import PrivateConfig
from private_llm.errors import PartyFailed
from private_llm.net import admission as acceptors
from private_llm.net import connection, incoming, wire
from private_llm.net.addresses import hosts_of, open_listeners
from private_llm.net.authority import make_certificates
from private_llm.net.rendezvous import connect
from private_llm.net.sockets import SocketPair, SocketTransport
from private_llm.net.transport import CLIENT
from private_llm.replay import runner
from private_llm.tls_config import TLSConfig

from .mesh import SESSION, TOKEN, raw_peer, run_threads
from .test_direct import receives


def context(tls: TLSConfig) -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.check_hostname = False
    made.load_verify_locations(tls.ca)
    made.load_cert_chain(tls.certificate, tls.key)
    return made


def greeting(tls: TLSConfig) -> bytes:
    """What a client of TLS says first."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context(tls).wrap_bio(incoming, outgoing).do_handshake()
    return outgoing.read()


def ended(sock: socket.socket, pieces: Iterator[bytes]) -> bool:
    """Whether the party hangs up while these pieces are said, one each twentieth of a second, or behind them."""
    sock.settimeout(0.05)
    for piece in pieces:
        try:
            sock.sendall(piece)
            if sock.recv(1 << 14) == b"":
                return True
        except TimeoutError:
            continue
        except OSError:
            return True
    sock.settimeout(20)
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while sock.recv(1 << 14):
            pass
    return True


def bare(tls: TLSConfig, address: tuple[str, int]) -> socket.socket:
    return socket.create_connection(address)


def secured(tls: TLSConfig, address: tuple[str, int]) -> socket.socket:
    return context(tls).wrap_socket(socket.create_connection(address))


def header(_: TLSConfig) -> bytes:
    return b"P" * (wire.HEADER_BYTES - 1)


Way = tuple[Callable[[TLSConfig, tuple[str, int]], socket.socket], Callable[[TLSConfig], bytes], bool]
WAYS: dict[str, Way] = {
    "silence": (bare, lambda _: b"", False),
    "half a greeting": (bare, lambda tls: greeting(tls)[:100], False),
    "a greeting byte by byte": (bare, lambda tls: greeting(tls)[:-1], True),
    "silence behind TLS": (secured, lambda _: b"", False),
    "half a header": (secured, header, False),
    "a header byte by byte": (secured, header, True),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_slow_caller_is_cut_off_and_a_client_comes_in(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptors, "HANDSHAKE_S", 1.0)
    certificates = make_certificates(tmp_path, 1)
    listeners = open_listeners(1)
    hosts, address = hosts_of(listeners), listeners[0].getsockname()
    shared = {"protocol": "plain", "insecure": True, "timeout_s": 30}
    gone = threading.Event()

    def serve(_: None) -> object:
        config = PrivateConfig(**shared, tls=certificates[0])
        return connect(config, 0, hosts=hosts, token=TOKEN, listener=listeners[0])

    def call(_: None) -> object:
        opening, says, slowly = WAYS[way]
        tls = certificates[CLIENT]
        said = says(tls)
        with opening(tls, address) as sock:
            assert ended(sock, iter([said[at : at + 1] for at in range(len(said))] if slowly else [said]))
        gone.set()
        return connect(PrivateConfig(**shared, tls=tls), CLIENT, hosts=hosts, token=TOKEN)

    results = run_threads({0: None, CLIENT: None}, {0: serve, CLIENT: call})
    assert gone.is_set(), results
    for transport in results.values():
        transport.close()


# -- peers of a session -----------------------------------------------------------------------------------------------
COUNT = 200


def frame(kind: wire.FrameKind = wire.FrameKind.DATA, count: int = COUNT) -> bytes:
    dtype = torch.int64 if kind is wire.FrameKind.DATA else torch.uint8
    return wire.encode(kind, 1, SESSION, 0, "mul", dtype, count) + bytes(count * dtype.itemsize)


@contextmanager
def slowly(send: Callable[[bytes], object], raw: bytes, size: int = 1, pause: float = 0.03) -> Iterator[None]:
    """Meanwhile say `raw` in pieces."""
    done = threading.Event()

    def run() -> None:
        for at in range(0, len(raw), size):
            send(raw[at : at + size])
            if done.wait(pause):
                return

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield
    done.set()
    thread.join()


def by_python(zero: SocketTransport) -> object:
    return zero.recv(1, "mul", (COUNT,), torch.int64)


def by_program(zero: SocketTransport) -> object:
    return receives(zero, 1, "mul", COUNT)


@pytest.mark.parametrize("receive", [by_python, by_program] if connection.HERE else [by_python])
@pytest.mark.parametrize(("begin", "rest"), [(b"", frame()), (frame()[:64], frame()[64:])], ids=["header", "payload"])
def test_a_message_byte_by_byte_ends_the_session(
    begin: bytes, rest: bytes, receive: Callable[[SocketTransport], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incoming, "_LEAST_RATE", 1 << 20)
    runner.run(0, 0, 0, 0, 0, 0)  # is compiled before anything has to end in time
    zero, peer, _ = raw_peer(timeout=0.3)
    peer.sendall(begin)
    told, began = r"party 1 sends too slowly: a message took 0\.6 s longer than at 1048576 bytes/s", time.monotonic()
    with slowly(peer.sendall, rest), pytest.raises(PartyFailed, match=told):
        receive(zero)
    assert time.monotonic() - began < 0.03 * 64, "before its header would be whole"


def test_so_does_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incoming, "_LEAST_RATE", 1 << 20)
    zero, peer, _ = raw_peer(timeout=0.3)
    with slowly(peer.sendall, frame(wire.FrameKind.ABORT)), pytest.raises(PartyFailed, match="sends too slowly"):
        by_python(zero)


def test_a_slow_link_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incoming, "_LEAST_RATE", 200)
    zero, peer, _ = raw_peer(timeout=0.3)
    began = time.monotonic()
    with slowly(peer.sendall, frame(), size=32):
        assert by_python(zero) is not None
    assert time.monotonic() - began > 1.0, "which is longer than any wait for one that says nothing"


def test_a_tls_record_byte_by_byte_ends_the_session(tmp_path: Path) -> None:
    """Nothing of it can be read before it is whole."""
    tls = make_certificates(tmp_path, 1)[0]
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(tls.certificate, tls.key)
    (mine, far), (near, theirs) = socket.socketpair(), socket.socketpair()
    slow = threading.Event()

    def carry(frm: socket.socket, to: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while raw := frm.recv(1 << 14):
                size = 1 if slow.is_set() else len(raw)
                for at in range(0, len(raw), size):
                    to.sendall(raw[at : at + size])
                    time.sleep(0.03 if slow.is_set() else 0)

    for ends in ((far, near), (near, far)):
        threading.Thread(target=carry, args=ends, daemon=True).start()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(serving.wrap_socket, theirs, server_side=True)
        inn = context(tls).wrap_socket(mine)
        peer = other.result()
    zero = SocketTransport(0, {1: SocketPair(socket.socketpair()[0], SESSION, inn, SESSION)}, 0.3)
    slow.set()
    peer.sendall(frame())
    with pytest.raises(PartyFailed, match=r"party 1 was silent for 0\.3 s, while 'mul' of party 1 was awaited"):
        by_python(zero)
    far.close()
    near.close()
