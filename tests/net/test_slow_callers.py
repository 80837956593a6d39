"""Callers of a party with TLS that say half of what they should, or say it slowly: cut off, and nobody is kept out."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from private_llm.config import PrivateConfig
from private_llm.net import admission as acceptors
from private_llm.net import wire
from private_llm.net.addresses import hosts_of, open_listeners
from private_llm.net.authority import make_certificates
from private_llm.net.rendezvous import connect
from private_llm.net.transport import CLIENT
from private_llm.tls_config import TLSConfig

from .mesh import TOKEN, run_threads


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
