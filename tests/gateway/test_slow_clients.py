"""Clients that are slow, or say half of what they should: each is ended in its time, and keeps nobody out."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from private_llm_gateway import guard as connections
from private_llm_gateway.app import server_of
from private_llm_gateway.guard import Guard
from private_llm_gateway.settings import GatewaySettings

GET = b"GET /%s HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
POST = b"POST /2 HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n"
LIMIT_S = 0.5
"""HEAD_S, READ_S and body_s here."""
LONG = 4 << 20
"""Bytes of an answer that fills what the system keeps for a connection."""


async def answering(scope: Any, receive: Any, send: Any) -> None:
    """/N answers N bytes, in pieces of 16 KiB."""
    count = int(scope["path"].strip("/") or 2)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % count)]})
    while count:
        piece = min(count, 1 << 14)
        count -= piece
        await send({"type": "http.response.body", "body": b"x" * piece, "more_body": count > 0})


@contextlib.contextmanager
def serving(**limits: Any) -> Iterator[uvicorn.Server]:
    settings = GatewaySettings(body_s=LIMIT_S, **limits)
    listening = socket.create_server(("127.0.0.1", 0))
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # connections inherit it
    app: Any = Guard(answering, settings)
    app.state = SimpleNamespace(runner=SimpleNamespace(stop=lambda: None))
    server = server_of(app, settings)
    server.config.lifespan = "off"
    server.address = listening.getsockname()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.should_exit = True
        thread.join(30)
        listening.close()
    assert not thread.is_alive()


@pytest.fixture(autouse=True)
def _limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_S", LIMIT_S)
    monkeypatch.setattr(connections, "READ_S", LIMIT_S)


def call(server: uvicorn.Server, said: bytes = b"") -> socket.socket:
    line = socket.create_connection(server.address)
    line.settimeout(20)
    line.sendall(said)
    return line


def answered(server: uvicorn.Server) -> bool:
    with call(server, GET % b"2") as line:
        return line.recv(100).startswith(b"HTTP/1.1 200")


def rest(line: socket.socket) -> bytes:
    """All until the other end closes; TimeoutError if it does not."""
    got = bytearray()
    with contextlib.suppress(ConnectionError):
        while piece := line.recv(1 << 16):
            got += piece
    return bytes(got)


def drip(line: socket.socket, byte: bytes) -> bytes:
    """Say one byte now and then until the other end closes, and return what it said."""
    line.settimeout(0.05)
    got = b""
    with contextlib.suppress(ConnectionError):
        for _ in range(400):
            line.sendall(byte)
            with contextlib.suppress(TimeoutError):
                piece = line.recv(4096)
                if not piece:
                    return got
                got += piece
        raise AssertionError("it listened to the end")
    return got


def left(server: uvicorn.Server) -> int:
    """Connections that the server has still, once there are none, or after ten seconds."""
    until = time.monotonic() + 10
    while server.server_state.connections and time.monotonic() < until:
        time.sleep(0.02)
    return len(server.server_state.connections)


@pytest.mark.parametrize("said", [b"", b"GE", (GET % b"2")[:-3], GET % b"2" + b"GET"])
def test_half_a_head_is_not_waited_for(said: bytes) -> None:
    with serving() as server, call(server, said) as line:
        assert answered(server)
        assert rest(line).count(b"HTTP/1.1") == said.count(b"\r\n\r\n")
        assert answered(server)
        assert left(server) == 0


def test_one_byte_now_and_then_does_not_prolong_a_head() -> None:
    with serving() as server, call(server, (GET % b"2")[:-2] + b"X: ") as line:
        assert drip(line, b"x") == b""


@pytest.mark.parametrize("begun", [POST, POST + b"x" * 99])
def test_half_a_body_is_answered_and_ended(begun: bytes) -> None:
    with serving() as server, call(server, begun) as line:
        assert rest(line).startswith(b"HTTP/1.1 408")
        assert left(server) == 0


def test_one_byte_now_and_then_does_not_prolong_a_body() -> None:
    whole = POST.replace(b"100", b"100000")
    with serving() as server, call(server, whole) as line:
        assert drip(line, b"x").startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("count", [b"%d" % LONG, b"60000"])
def test_who_does_not_read_its_answer_is_ended(count: bytes) -> None:
    """60000: all of the answer is written, but not all has left this machine's program."""
    with serving() as server:
        line = socket.socket()
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        with line:
            line.connect(server.address)
            line.sendall(GET % count)
            assert answered(server)
            assert left(server) == 0
            line.settimeout(20)
            assert len(rest(line)) < int(count)


def test_who_reads_slowly_gets_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "READ_S", 30.0)
    with serving() as server, call(server, GET % b"%d" % (1 << 20)) as line:
        got = 0
        while got < 1 << 20:
            got += len(line.recv(1 << 15))
            time.sleep(0.005)


def test_silent_connections_make_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 60.0)
    with serving(connections=8) as server, contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(call(server))
        assert answered(server)
