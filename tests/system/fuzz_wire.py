"""What `fuzz.py` does to the wire format, the handshake and control messages, in this process.

frames     headers and streams of frames, changed, cut and mixed, read by every way of reading
handshake  both sides of a handshake against a partner that knows the token or not and changes what it says
messages   valid messages of every class (made from its annotations), changed as JSON and as text
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import types
from random import Random
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import private_llm_hf.token_sharding.commands
import private_llm_hf.wire.answers
import private_llm_hf.wire.commands  # noqa: F401 - its messages are among `KINDS`
import torch
from fuzz_mutators import any_text, any_value, changed, edited, edits, encoded
from private_llm_hf.wire.codec import Between, Dims, Message, OneOf, ShapeOf, message_of, text_of
from torch import Tensor

from private_llm.errors import ConfigError, DomainError, PartyFailed, TransportError
from private_llm.net import hello, wire
from private_llm.net.hello import CALLER_BYTES, answer, greet
from private_llm.net.incoming import Incoming
from private_llm.net.transport import CLIENT
from private_llm.net.wire import MAX_NOTE, FrameKind

_SESSION, _TOKEN, _PEER = b"sessionx", b"a token of one fuzzed session", 1
_DTYPES = (torch.uint8, torch.int32, torch.int64)
_TAGS = ("mul", "", "control", "ü" * 16, "x" * 32)
MOST_TEXT = 5000
"""Characters of an error; one that repeats what arrived would fill a log."""


class Failure(Exception):
    """A case that was not handled as it must be."""


def fit_to_print(error: Exception) -> None:
    """Raise Failure for an error that would break or fill a log."""
    text = str(error)
    if not text.isprintable() or len(text) > MOST_TEXT:
        raise Failure(f"an error that no log should hold: {text[:300]!r}")


class Frames:
    """Streams of frames, read by `Incoming`, and headers, read by `decode`."""

    def make(self, random: Random) -> dict[str, Any]:
        """Pieces of a stream, what is done in between, and whether the connection ends."""
        pieces, sequence = [], 0
        for _ in range(random.randrange(1, 5)):
            kind, tag = random.choice((FrameKind.DATA, FrameKind.DATA, *FrameKind)), random.choice(_TAGS)
            dtype = random.choice(_DTYPES) if kind is FrameKind.DATA else torch.uint8
            count = (
                random.choice((0, 1, 4, 16, 1000)) if kind is FrameKind.DATA else random.choice((0, 1, 1, 30, MAX_NOTE))
            )
            sender = _PEER if random.random() < 0.95 else random.randrange(256)
            raw = wire.encode(kind, sender, _SESSION, sequence, tag, dtype, count)
            raw += bytes(random.randrange(256) for _ in range(min(count, 4))) * (count * dtype.itemsize // 4 + 1)
            raw = raw[: wire.HEADER_BYTES + count * dtype.itemsize]
            pieces.append(edited(raw, edits(random) if random.random() < 0.4 else []).hex())
            sequence += random.random() < 0.95
        if random.random() < 0.1:
            pieces = [random.randbytes(random.randrange(300)).hex()]
        acts = ["send"] * len(pieces) + random.choices(("receive", "bytes", "wait", "glance"), k=random.randrange(1, 6))
        if random.random() < 0.5:
            random.shuffle(acts)
        wants = [[random.choice(_TAGS), random.choice((0, 1, 4, 16, 1000)), random.randrange(3)] for _ in acts]
        most = random.choice((0, 16, 4096, wire.MAX_PAYLOAD))
        return {"pieces": pieces, "acts": acts, "wants": wants, "most": most, "ends": random.random() < 0.9}

    def run(self, case: dict[str, Any]) -> None:
        """Every read ends in a payload as wanted, or in TransportError."""
        pieces = [bytes.fromhex(piece) for piece in case["pieces"]]
        for piece in pieces:
            self._decode(piece, case["most"])
        near, far = socket.socketpair()
        with near, far:
            incoming = Incoming(near, _PEER, _SESSION, 0.001, 5.0)
            got, left = 0, list(pieces)
            for act, (tag, count, dtype) in zip(case["acts"], case["wants"], strict=True):
                if act == "send":
                    far.sendall(left.pop(0))
                    if not left and case["ends"]:
                        far.shutdown(socket.SHUT_WR)
                    continue
                try:
                    got += self._read(incoming, act, tag, count, _DTYPES[dtype], case["most"])
                except TransportError as error:
                    fit_to_print(error)
        if got > sum(map(len, pieces)) // wire.HEADER_BYTES:
            raise Failure(f"{got} payloads came out of {sum(map(len, pieces))} bytes")

    def _decode(self, piece: bytes, most: int) -> None:
        try:
            frame = wire.decode(piece, most)
        except TransportError as error:
            fit_to_print(error)
            return
        if frame.nbytes > most or not frame.tag.isprintable():
            raise Failure(f"decoded {frame}")

    def _read(self, incoming: Incoming, act: str, tag: str, count: int, dtype: torch.dtype, most: int) -> int:
        if act == "receive":
            found = incoming.receive(tag, (count,), dtype, _no_patience)
            if found.shape != (count,) or found.dtype is not dtype:
                raise Failure(f"got {found.shape} of {found.dtype}")
        elif act == "bytes":
            if len(incoming.receive_bytes(tag, most, _no_patience)) > most:
                raise Failure("more bytes than wanted")
        elif act == "wait":
            incoming.wait(_no_patience)
            return 0
        else:
            incoming.glance()
            return 0
        return 1


def _no_patience(_: Incoming, silence: float) -> None:
    if silence:
        raise PartyFailed("silence")


class _Line:
    """A socket whose other end says its next line whenever this one has spoken."""

    def __init__(self, near: socket.socket, far: socket.socket, lines: list[Any]) -> None:
        self._near, self._far, self._lines = near, far, lines
        self.heard = b""

    def recv(self, count: int) -> bytes:
        """As a socket."""
        return self._near.recv(count)

    def sendall(self, data: bytes) -> None:
        """As a socket; then the other end answers."""
        self._near.sendall(data)
        self.heard = self._far.recv(1 << 16)
        self.speak()

    def speak(self) -> None:
        """Let the other end say its next line, and hang up behind the last one."""
        if self._lines:
            self._far.sendall(self._lines.pop(0)(self.heard))
        if not self._lines:
            self._far.shutdown(socket.SHUT_WR)


class Handshake:
    """`answer` against callers, `greet` against those who are called."""

    def make(self, random: Random) -> dict[str, Any]:
        """Who speaks, whether it knows the token, and what it changes of each line."""
        lines = [edits(random) if random.random() < 0.4 else [] for _ in range(2)]
        kinds = [
            random.choice((FrameKind.HELLO, *FrameKind)) if random.random() < 0.2 else FrameKind.HELLO for _ in range(2)
        ]
        says = any_text(random, 60).encode("utf-8", "replace" if random.random() < 0.5 else "surrogatepass")
        return {
            "side": random.choice(("answer", "greet")), "knows": random.random() < 0.7, "lines": lines,
            "kinds": [int(kind) for kind in kinds], "says": says.hex(), "tag": random.choice(("hello", "busy", "x")),
            "hello": [random.choice((0, 0, 0, 1, 255)), random.choice((0, 1, 1, 2)), random.choice((0, 0, 3)),
                      random.choice((1, 1, 1, 4, 0))],
            "caller": random.choice((CLIENT, 1, 2)),
        }  # fmt: skip

    def run(self, case: dict[str, Any]) -> None:
        """Only who knows the token comes in; every refusal is one of the library's own, or a broken connection."""
        near, far = socket.socketpair()
        with near, far:
            near.settimeout(0.002)
            try:
                (self._answer if case["side"] == "answer" else self._greet)(case, near, far)
            except TransportError as error:
                fit_to_print(error)
            except OSError:
                pass  # the connection broke, or the caller was too slow

    def _frame(self, case: dict[str, Any], line: int, sender: int, body: bytes) -> bytes:
        kind = FrameKind(case["kinds"][line])
        body = body if kind is FrameKind.HELLO else bytes.fromhex(case["says"])
        tag = "hello" if kind is FrameKind.HELLO else case["tag"]
        raw = wire.encode(kind, sender, bytes(8), line, tag, torch.uint8, len(body)) + body
        return edited(raw, case["lines"][line])

    def _answer(self, case: dict[str, Any], near: socket.socket, far: socket.socket) -> None:
        token, body, proofs = _TOKEN if case["knows"] else b"another", bytes(case["hello"]) + bytes(48), []
        first = self._frame(case, 0, case["caller"], body)

        def prove(heard: bytes) -> bytes:
            seen = bytes([first[7] if len(first) > 7 else 0]) + first[wire.HEADER_BYTES :]
            proof = hello._proof(token, b"connector", seen + heard[wire.HEADER_BYTES :][:32])
            sent = self._frame(case, 1, case["caller"], proof)
            proofs.append(proof in sent)
            return sent

        line = _Line(near, far, [lambda _: first, prove])
        line.speak()
        greeted = answer(line, 0, _TOKEN, lambda caller: None)  # type: ignore[arg-type]
        if not (case["knows"] and proofs == [True] and len(greeted.caller) == CALLER_BYTES):
            raise Failure("somebody who does not know the token came in")

    def _greet(self, case: dict[str, Any], near: socket.socket, far: socket.socket) -> None:
        token, nonce = _TOKEN if case["knows"] else b"another", bytes(range(32))

        def challenge(heard: bytes) -> bytes:
            seen = bytes([CLIENT]) + heard[wire.HEADER_BYTES :] + nonce
            return self._frame(case, 0, _PEER, nonce + hello._proof(token, b"acceptor", seen))

        line = _Line(near, far, [challenge, lambda _: self._frame(case, 1, _PEER, b"")])
        greet(line, CLIENT, _PEER, True, _TOKEN, bytes(CALLER_BYTES))  # type: ignore[arg-type]
        if not case["knows"]:
            raise Failure("a party that does not know the token was believed")


KINDS: tuple[type[Message], ...] = tuple(
    sorted(
        (kind for kind in Message.__subclasses__() if dataclasses.is_dataclass(kind)), key=lambda kind: kind.__name__
    )
)
"""Every class of messages, from the modules that are imported above."""


class Messages:
    """Texts that are almost messages."""

    def make(self, random: Random) -> dict[str, Any]:
        """A valid message, changed in up to three places."""
        value = facts(random)
        for _ in range(random.choice((0, 1, 1, 1, 2, 3))):
            value = changed(random, value)
        if random.random() < 0.03:
            return {"raw": random.randbytes(random.randrange(200)).hex()}
        return {"raw": encoded(random, value).hex()}

    def run(self, case: dict[str, Any]) -> None:
        """A message that says the same when it is written again, or TransportError."""
        raw = bytes.fromhex(case["raw"])
        try:
            found = message_of(raw, KINDS, "the client")
        except TransportError as error:
            fit_to_print(error)
            return
        if json.loads(text_of(found)) != json.loads(raw):
            raise Failure("a message was read as another one")


def facts(random: Random) -> Any:
    """A valid message of any class, as JSON."""
    while True:
        with contextlib.suppress(DomainError):
            return json.loads(text_of(valid(random.choice(KINDS), random)))


def valid(kind: type[Message], random: Random) -> Message:
    """Any message of a class, from its annotations. Raises DomainError if none was found."""
    hints = get_type_hints(kind, include_extras=True)
    for _ in range(50):
        values = {field.name: _any_of(hints[field.name], random) for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
        try:
            return kind(**values)
        except (DomainError, ConfigError):
            continue  # fields that do not go together
    raise DomainError(f"{kind.__name__}: found no fields that go together")


def _any_of(hint: Any, random: Random) -> Any:
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        for check in inner[1:]:
            if isinstance(check, OneOf):
                return random.choice(check.names)
            if isinstance(check, Between):
                return min(check.most, check.least + random.choice((0, 1, 2, 200)))
            if isinstance(check, ShapeOf):
                return tuple(random.choice((1, 2, 5, 64)) for _ in range(random.randrange(5)))
            if isinstance(check, Dims):
                return torch.zeros([2] * check.count, dtype=check.dtype)
        return _any_of(inner[0], random)
    if origin in (Union, types.UnionType):
        return _any_of(random.choice(inner), random)
    if origin is tuple:
        inner = inner[:1] * random.randrange(3) if inner[-1:] == (Ellipsis,) else inner
        return tuple(_any_of(each, random) for each in inner)
    if origin is dict:
        return {any_text(random): _any_of(inner[1], random) for _ in range(random.randrange(3))}
    if dataclasses.is_dataclass(hint):
        return valid(hint, random)  # type: ignore[arg-type, type-var]
    makers = {
        bool: lambda: random.random() < 0.5, int: lambda: random.choice((0, 1, 7, 1 << 40)), str: lambda: "a text",
        float: random.random, Tensor: lambda: torch.ones(2, 3, dtype=torch.int64), object: lambda: any_value(random),
    }  # fmt: skip
    return makers[hint]() if hint in makers else None
