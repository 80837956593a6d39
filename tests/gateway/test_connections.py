"""Connections that send no request, half of one, or a body that never ends: they are closed, and keep nobody out."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import httpx
import pytest
from openai import OpenAI
from private_llm_gateway import guard as connections
from uvicorn.protocols.http.h11_impl import H11Protocol

from tests.gateway.small_gateway import TOKEN, Gateway, serving, small

HEAD_S, BODY_S, MOST = 0.5, 0.6, 12
HEAD = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {TOKEN}\r\n"
HEAD += "Content-Type: application/json\r\n"
PATIENCE_S = 20.0
"""A machine may be busy; what is waited for comes much sooner."""


@pytest.fixture(scope="module")
def short() -> Iterator[Gateway]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connections, "HEAD_S", HEAD_S)
        with serving(small(), body_s=BODY_S, connections=MOST) as made:
            yield made


def call(gateway: Gateway) -> socket.socket:
    host, port = gateway.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE_S)


def rest(sock: socket.socket) -> bytes:
    """All that comes before the end."""
    found = b""
    try:
        while part := sock.recv(4096):
            found += part
    except ConnectionResetError:
        pass
    return found


def answers(gateway: Gateway) -> bool:
    return httpx.get(f"{gateway.url}/health", timeout=PATIENCE_S).status_code == 200


@pytest.mark.parametrize("begin", ["", "P", "POST /v1/comp", HEAD, HEAD + "X: y"], ids=len)
def test_heads_that_do_not_end(short: Gateway, begin: str) -> None:
    began = time.monotonic()
    with call(short) as sock:
        sock.sendall(begin.encode())
        assert rest(sock) == b""
    assert time.monotonic() - began > HEAD_S / 2, "not before its time"
    assert answers(short)


def test_a_head_that_comes_a_byte_at_a_time(short: Gateway) -> None:
    """Each byte is no new beginning."""

    def dribble(sock: socket.socket) -> None:
        for _ in range(int(PATIENCE_S * 20)):
            sock.sendall(b"G")
            time.sleep(0.05)

    with call(short) as sock, pytest.raises(OSError, match=r"reset|[Bb]roken"):
        dribble(sock)


@pytest.mark.parametrize("length", ["Content-Length: 100\r\n\r\n", "Transfer-Encoding: chunked\r\n\r\n5\r\n"])
def test_bodies_that_do_not_end(short: Gateway, length: str) -> None:
    with call(short) as sock:
        sock.sendall((HEAD + length + '{"a"').encode())
        answer = rest(sock)
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"request_timeout" in answer
    assert answers(short)


def test_many_that_say_nothing_keep_nobody_out(short: Gateway) -> None:
    held = [call(short) for _ in range(MOST * 2)]
    try:
        assert answers(short)
    finally:
        for sock in held:
            sock.close()


def test_kept_connections_serve_again(short: Gateway) -> None:
    with OpenAI(base_url=f"{short.url}/v1", api_key=TOKEN, max_retries=0) as client:
        for _ in range(2):
            assert client.models.list().data[0].id == "small"
            time.sleep(HEAD_S / 5)


def test_bodies_are_taken_apart_some_at_a_time(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks of one byte 256 KiB, which asyncio reads at once, would hold up everybody for 0.2 s."""
    read, real = [], H11Protocol.data_received

    def received(self: H11Protocol, data: bytes) -> None:
        read.append(len(data))
        real(self, data)

    monkeypatch.setattr(H11Protocol, "data_received", received)
    with call(gateway) as sock:
        chunks = b"1\r\n \r\n" * 20_000
        sock.sendall(f"{HEAD}Transfer-Encoding: chunked\r\n\r\n".encode() + chunks + b"0\r\n\r\n")
        assert sock.recv(4096).startswith(b"HTTP/1.1 400")
    assert sum(read) > len(chunks)
    assert max(read) <= 4096


START = "HTTP/1.1\r\nHost: 127.0.0.1\r\n"
STRANGERS = {
    "behind an answer": f"GET / {START}\r\n",
    "behind a refusal": f"POST /v1/completions {START}Content-Length: 10\r\n\r\n",
    "a body where none belongs": f"POST / {START}Content-Length: 10\r\n\r\n1",
    "a body of no length": f"GET /health {START}Transfer-Encoding: chunked\r\n\r\n5\r\n1",
    "another host": "POST /v1/completions HTTP/1.1\r\nHost: other\r\nContent-Length: 10\r\n\r\n",
    "a websocket": f"GET /v1/models {START}Upgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n",
}


@pytest.mark.parametrize("begin", STRANGERS.values(), ids=STRANGERS)
def test_strangers_keep_nobody_out(short: Gateway, begin: str) -> None:
    """Without a token, by staying behind what they were told, or by never ending what they say."""
    held = []
    try:
        for _ in range(MOST * 2):
            sock = call(short)
            held.append(sock)
            sock.sendall(begin.encode())
            sock.recv(4096)
        assert answers(short)
    finally:
        for sock in held:
            sock.close()


@pytest.mark.parametrize("length", ["Content-Length: 1", "Transfer-Encoding: chunked"])
def test_bodies_for_what_needs_no_token_are_refused(short: Gateway, length: str) -> None:
    with call(short) as sock:
        sock.sendall(f"POST / {START}{length}\r\n\r\n".encode())
        assert rest(sock).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize("head", [HEAD, f"POST / {START}", f"GET /health {START}"], ids=["known", "stranger", "health"])
def test_bodies_of_two_lengths_are_refused(short: Gateway, head: str) -> None:
    """A proxy before the gateway may take the rest for a request of its own: the connection ends."""
    with call(short) as sock:
        sock.sendall(
            f"{head}Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET / {START}\r\n".encode()
        )
        answer = rest(sock)
    assert answer.startswith(b"HTTP/1.1 400")
    assert answer.count(b"HTTP/1.1") == 1


def test_a_length_of_twenty_digits_is_too_large(short: Gateway) -> None:
    with call(short) as sock:
        sock.sendall(f"{HEAD}Content-Length: {'9' * 20}\r\n\r\n".encode())
        assert rest(sock).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize("length", ["Content-Length: 4000000", "Transfer-Encoding: chunked"])
def test_no_body_is_read_behind_a_refusal(short: Gateway, length: str) -> None:
    """Of a stranger, whose bytes would otherwise be parsed as long as they come."""
    with call(short) as sock:
        sock.sendall(f"POST /v1/completions {START}{length}\r\n\r\n1\r\na\r\n".encode())
        answer = rest(sock)
    assert answer.startswith(b"HTTP/1.1 401")
    assert b"connection: close" in answer.lower()


def test_an_offer_of_http2_is_nothing_to_log(short: Gateway, caplog: pytest.LogCaptureFixture) -> None:
    with call(short) as sock:
        sock.sendall(f"GET /health {START}Connection: Upgrade, close\r\nUpgrade: h2c\r\n\r\n".encode())
        assert rest(sock).startswith(b"HTTP/1.1 200")
    assert not caplog.records


def test_a_websocket_is_no_way_in(short: Gateway) -> None:
    with call(short) as sock:
        sock.sendall(STRANGERS["a websocket"].encode())
        assert sock.recv(4096).startswith(b"HTTP/1.1 401")
