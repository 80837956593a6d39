"""The handshake of one connection: both ends prove that they belong to this session and say who they are.

    1. connector -> acceptor   hello: to whom, which way the connection will carry data, parallel session,
                               how many parallel sessions there are, caller (16 random bytes, the same in all
                               connections of one start of the connector: two clients are never taken for one), nonce n1
    2. acceptor  -> connector  nonce n2, HMAC(token, "acceptor" | 1 | n2)
    3. connector -> acceptor   HMAC(token, "connector" | 1 | n2)
    4. acceptor  -> connector  empty: accepted

The session's secret token itself never travels, so whoever listens on a party's port by mistake or intent
learns nothing. With TLS the certificates have spoken before, and the token may be empty. Both ends derive from
the nonces the 8-byte name that every later frame of this connection carries. A refusal is an abort frame; with the
tag "busy" it means "later". Only who has proved to belong here is told anything about others.
"""

import hmac
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass

import torch

from private_llm.errors import PartiesBusy, TransportError
from private_llm.net import wire
from private_llm.net.roles import Users, endpoint_name, legible
from private_llm.net.tls import check_name
from private_llm.net.wire import HEADER_BYTES, Frame, FrameKind

_NEW = bytes(8)  # session name of frames before there is one
_NONCE = 32
_PROOF = 32
_BUSY = "busy"
CALLER_BYTES = 16


@dataclass(frozen=True)
class Greeted:
    """What a handshake agreed upon. `inbound`: the connection carries data towards the acceptor."""

    peer: int
    inbound: bool
    session: bytes
    parallel_session: int
    parallel_sessions: int
    caller: bytes


def greet(
    sock: socket.socket,
    me: int,
    peer: int,
    inbound: bool,
    token: bytes,
    caller: bytes,
    parallel_session: int = 0,
    parallel_sessions: int = 1,
) -> Greeted:
    """The connector's side, for parallel session number `parallel session` of `parallel_sessions`.

    Raises TransportError when refused or when the peer does not know the token, PartiesBusy when asked to come later;
    OSError (TimeoutError among them) means that the connection broke.
    """
    check_name(sock, peer)
    first = bytes([peer, inbound, parallel_session, parallel_sessions]) + caller + secrets.token_bytes(_NONCE)
    _put(sock, me, 0, first)
    reply = _expect(sock, peer, 0, _NONCE + _PROOF)
    seen = bytes([me]) + first + reply[:_NONCE]
    if not hmac.compare_digest(_proof(token, b"acceptor", seen), reply[_NONCE:]):
        raise TransportError(
            f"{endpoint_name(peer)} does not know this session's token; another session, or another program, "
            "listens at its address"
        )
    _put(sock, me, 1, _proof(token, b"connector", seen))
    _expect(sock, peer, 1, 0)
    return Greeted(peer, inbound, _proof(token, b"session", seen)[:8], parallel_session, parallel_sessions, caller)


def answer(
    sock: socket.socket, me: int, token: bytes, admit: Callable[[Greeted], None], users: Users | None = None
) -> Greeted:
    """The acceptor's side. users: who may be the client, by certificate (default: all).

    `admit` is given callers that have proved who they are, and raises TransportError for one that has no business
    here, PartiesBusy for one that should come later.
    """
    try:
        frame, first = _get(sock)
        peer = frame.sender
        if frame.kind is not FrameKind.HELLO or len(first) != 4 + CALLER_BYTES + _NONCE or first[1] > 1:
            raise TransportError("got another first frame; want a hello")
        if first[0] != me:
            raise TransportError(f"this is {endpoint_name(me)}, not {endpoint_name(first[0])}; the hosts lists differ")
        if first[2] >= first[3]:
            raise TransportError("the hello names a parallel session that does not exist")
        check_name(sock, peer, users)
        nonce = secrets.token_bytes(_NONCE)
        seen = bytes([peer]) + first + nonce
        _put(sock, me, 0, nonce + _proof(token, b"acceptor", seen))
        proof = _expect(sock, peer, 1, _PROOF)
        if not hmac.compare_digest(_proof(token, b"connector", seen), proof):
            raise TransportError(f"{endpoint_name(peer)} does not know this session's token")
        session, caller = _proof(token, b"session", seen)[:8], first[4 : 4 + CALLER_BYTES]
        greeted = Greeted(peer, bool(first[1]), session, first[2], first[3], caller)
        admit(greeted)
    except TransportError as error:
        tag = _BUSY if isinstance(error, PartiesBusy) else "hello"
        _put(sock, me, 0, str(error).encode()[: wire.MAX_NOTE], FrameKind.ABORT, tag)
        raise
    _put(sock, me, 1, b"")
    return greeted


def _proof(token: bytes, role: bytes, seen: bytes) -> bytes:
    return hmac.digest(token, b"private-llm " + role + b"\0" + seen, "sha256")


def _put(
    sock: socket.socket, me: int, sequence: int, body: bytes, kind: FrameKind = FrameKind.HELLO, tag: str = "hello"
) -> None:
    sock.sendall(wire.encode(kind, me, _NEW, sequence, tag, torch.uint8, len(body)) + body)


def _get(sock: socket.socket) -> tuple[Frame, bytes]:
    frame = wire.decode(_exactly(sock, HEADER_BYTES), maximum=wire.MAX_NOTE)
    return frame, _exactly(sock, frame.nbytes)


def _expect(sock: socket.socket, peer: int, sequence: int, size: int) -> bytes:
    frame, body = _get(sock)
    if frame.kind is FrameKind.ABORT:
        refusal = PartiesBusy if frame.tag == _BUSY else TransportError
        raise refusal(f"{endpoint_name(peer)} refused: {legible(body.decode(errors='replace'))}")
    if (frame.kind, frame.sender, frame.sequence, len(body)) != (FrameKind.HELLO, peer, sequence, size):
        raise TransportError(f"{endpoint_name(peer)}: malformed handshake")
    return body


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = sock.recv(count - len(data))
        if not piece and data:
            raise TransportError("the other end speaks another language; set tls at all endpoints or at none")
        if not piece:
            raise ConnectionResetError("it closed the connection in the handshake; compare tls and the order of hosts")
        data += piece
    return bytes(data)
