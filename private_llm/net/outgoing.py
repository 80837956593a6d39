"""The sending end of a one-way connection: writes frames.

Each ordered pair of endpoints has a connection of its own, so that two threads never use one TLS object at once. Both
ends (`incoming.py`) are non-blocking sockets. Small frames leave at once, from the caller's thread; what the kernel
does not take waits for a writer thread, so that two endpoints may send each other any amount at the same time.
"""

import contextlib
import ctypes
import select
import socket
import ssl
import threading
import time
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from private_llm.errors import PartyFailed
from private_llm.net import connection, wire
from private_llm.net.direct import Row
from private_llm.net.roles import endpoint_name, legible
from private_llm.net.wire import BLOCKED, HEADER_BYTES, FrameKind, cause

MAX_AHEAD = 256 << 20  # bytes a sender may run ahead of its receiver before it waits (bounds memory)
_DRAIN_S = 0.5  # how long programs wait until what is queued was written once; a peer that reads takes less
_LOOK_S = 2e-3  # how often it looks whether something has come meanwhile
_POLL_MS = 200  # how often a blocked writer looks whether the link was closed under it

_NOBODY = memoryview(b"")


@dataclass
class _Queued:
    """A frame that waits for the writer thread: what is left of it, in pieces."""

    sequence: int
    pieces: deque[memoryview]
    started: bool

    @property
    def size(self) -> int:
        return sum(map(len, self.pieces))


class Outgoing:
    """The sending end towards `peer`. plain: whether what is written goes to a socket as it is."""

    def __init__(self, sock: socket.socket, me: int, peer: int, session: bytes) -> None:
        sock.setblocking(False)
        self.peer = peer
        self.plain = not isinstance(sock, ssl.SSLSocket)
        self.wire_bytes = 0
        self.failure: str | None = None
        self.moved = 0
        self._sock, self._me, self._session = sock, me, session
        self._sequence = 0
        self._queue: deque[_Queued] = deque()
        self._queued = 0
        self._closing = False
        self._lock = threading.RLock()
        self._room = threading.Condition(self._lock)
        self._writer: threading.Thread | None = None
        self._head = np.zeros(connection.HEADER_WORDS, np.int64)
        head = wire.encode(FrameKind.DATA, me, session, 0, "", torch.int64, 0)
        self._head.view(np.uint8)[:] = np.frombuffer(head, np.uint8)
        self._head_place = int(self._head.ctypes.data)
        self._foregone: tuple[int, bytes] | None = None
        self._patience = _DRAIN_S
        self._ending = self._lending = False

    def send(self, kind: FrameKind, tag: str, dtype: torch.dtype, count: int, body: memoryview) -> None:
        """Send one frame now, or queue it. Raises PartyFailed when the connection is broken."""
        with self._lock:
            head = wire.encode(kind, self._me, self._session, self._sequence, tag, dtype, count)
            self._check()
            inline = not self._queue and len(body) <= connection.INLINE
            if inline:
                whole = head + body
                done = self._write(whole)
                self._check()
                pieces = deque([memoryview(whole)[done:]] if done < len(whole) else [])
            else:
                pieces = deque([memoryview(head), body] if len(body) else [memoryview(head)])
            if pieces:
                # A TLS write that was tried must be repeated with the same bytes: it counts as started.
                self._enqueue(_Queued(self._sequence, pieces, started=inline))
            self._sequence += 1
            self.wire_bytes += HEADER_BYTES + len(body)

    def send_payload(self, tag: str, payload: Tensor | bytes | bytearray) -> None:
        """Send a tensor, of any device, or bytes, as `send` does."""
        foregone, self._foregone = self._foregone, None
        if not isinstance(payload, Tensor):
            self.send(FrameKind.DATA, tag, torch.uint8, len(payload), memoryview(payload))
            return
        count = payload.numel()
        if foregone is not None:
            number, head = foregone
            if head == wire.encode(FrameKind.DATA, self._me, self._session, number, tag, payload.dtype, count):
                return
        payload = payload.contiguous()
        if not payload.is_cpu:
            payload = payload.cpu()
        self.send(FrameKind.DATA, tag, payload.dtype, count, payload.numpy().data.cast("B") if count else _NOBODY)

    def lend(self, row: Row) -> None:
        """Let a compiled program write frames, until `take_back`; nobody else writes meanwhile.

        What is queued is waited for a little, unless there is something to read from the same peer (lent before): a
        party that is ahead of its peer would else queue all that it sends.
        """
        self._lending = True  # first: whatever interrupts this, `take_back` releases
        self._room.acquire()
        self._empty(row)
        if self._queue or self.failure is not None or self._ending:
            self._release()
            return
        row[connection.KIND], row[connection.OUT_HEAD] = connection.SOCKET, self._head_place
        row[connection.SENT], row[connection.WRITTEN], row[connection.OUT_PART] = self._sequence, 0, 0
        row[connection.OUT] = self._sock.fileno()

    def _empty(self, row: Row) -> None:
        """Wait until nothing is queued, while nothing comes, and for at most `_DRAIN_S` until it was empty once."""
        if not self._queue:
            self._patience = _DRAIN_S
            return
        if row[connection.IN] < 0 or row[connection.START] < row[connection.END] or self._patience <= 0:
            return
        poll, began = select.poll(), time.monotonic()
        poll.register(int(row[connection.IN]), select.POLLIN)
        while self._queue and self.failure is None and not self._ending:
            if poll.poll(0) or time.monotonic() > began + self._patience:
                break
            self._room.wait(_LOOK_S)
        self._patience = self._patience - (time.monotonic() - began) if self._queue else _DRAIN_S

    def end_lending(self) -> None:
        """A program that has it now is the last one; callable from any thread."""
        self._ending = True

    def take_back(self, row: Row) -> None:
        """End `lend`: finish a frame that was cut off, for its `send_payload`. Raises PartyFailed if no thread can."""
        if not self._lending:
            return
        try:
            if row[connection.OUT] < 0:
                return
            row[connection.OUT] = -1
            written, part = int(row[connection.WRITTEN]), int(row[connection.OUT_PART])
            self._sequence = int(row[connection.SENT])
            self.wire_bytes += written
            self.moved += written + part
            if part:
                body = ctypes.string_at(int(row[connection.OUT_PLACE]), int(row[connection.OUT_SIZE]))
                rest = memoryview(self._head.tobytes() + body)[part:]
                self.wire_bytes += HEADER_BYTES + len(body)
                self._sequence += 1
                with contextlib.suppress(PartyFailed):
                    self._enqueue(_Queued(self._sequence - 1, deque([rest]), started=True))
                    self._foregone = self._sequence - 1, self._head.tobytes()
        finally:
            self._release()

    def _release(self) -> None:
        with contextlib.suppress(RuntimeError):  # it was not acquired yet, or is released already
            self._room.release()
        self._lending = False

    def drained(self, seconds: float) -> bool:
        """Wait at most `seconds` until nothing waits to be written; whether that is so."""
        if not self._queue:
            return True
        with self._room:
            return self._room.wait_for(lambda: not self._queue, seconds)

    def has_room(self, seconds: float) -> bool:
        """Wait at most `seconds` until the queue may take another frame."""
        if self._queued <= MAX_AHEAD:
            return True
        with self._room:
            return self._room.wait_for(lambda: self._queued <= MAX_AHEAD or self.failure is not None, seconds)

    def abort(self, reason: str) -> None:
        """Drop what is queued, except a frame that is half written, and send the reason."""
        self.end_lending()
        with self._room:
            while self._queue and not self._queue[-1].started:
                dropped = self._queue.pop()
                self._sequence = dropped.sequence
                self._queued -= dropped.size
        self.note(FrameKind.ABORT, legible(reason).encode()[: wire.MAX_NOTE])

    def note(self, kind: FrameKind, text: bytes) -> None:
        """Send a short message that is not data; nothing happens on a broken connection."""
        try:
            self.send(kind, kind.name.lower(), torch.uint8, len(text), memoryview(text))
        except PartyFailed:
            return  # the failure is recorded, and whoever needs this peer will meet it

    def close(self, seconds: float) -> None:
        """Say goodbye, write what is queued for at most `seconds`, and close the connection."""
        self.end_lending()
        self.note(FrameKind.BYE, b"")
        with self._room:
            self._room.wait_for(lambda: not self._queue, seconds)
            self._closing = True
            self._queue.clear()
            self._room.notify_all()
        with contextlib.suppress(OSError):
            # SAFE: the plain method, because SSLSocket.shutdown would first forget the encryption while the
            # writer thread may still be sending.
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)
        if self._writer is not None:
            self._writer.join()
        self._sock.close()

    def _check(self) -> None:
        if self.failure is not None or self._closing:
            raise PartyFailed(self.failure or "this endpoint has closed the session")

    def _write(self, data: bytes | memoryview) -> int:
        """Bytes the kernel took at once; a broken connection is recorded in `failure`."""
        done = 0
        try:
            while done < len(data):
                done += self._sock.send(data[done:])
        except BLOCKED:
            pass
        except OSError as error:
            self.failure = f"{endpoint_name(self.peer)} stopped: its connection broke ({cause(error)})"
        self.moved += done
        return done

    def _enqueue(self, frame: _Queued) -> None:
        self._queue.append(frame)
        self._queued += frame.size
        if self._writer is None:
            name = f"to {endpoint_name(self.peer)}"
            writer = threading.Thread(target=self._drain, name=name, daemon=True)
            try:
                writer.start()
            except RuntimeError:  # no more threads: this connection fails, and nothing else
                self._queue.clear()
                self._queued = 0
                self.failure = f"this machine has no thread left to write to {endpoint_name(self.peer)}"
                self._check()
            self._writer = writer
        self._room.notify_all()

    def _drain(self) -> None:
        """The writer thread: empties the queue, one frame after the other."""
        poll = select.poll()
        poll.register(self._sock, select.POLLOUT)
        while True:
            with self._room:
                self._room.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return
                frame = self._queue[0]
                frame.started = True
            piece = frame.pieces[0]
            done = self._write(piece)
            with self._room:
                if self.failure is not None:
                    self._queue.clear()
                if not self._queue:
                    self._queued = 0
                else:
                    self._queued -= done
                    frame.pieces[0] = piece[done:]
                    if done == len(piece):
                        frame.pieces.popleft()
                    if not frame.pieces:
                        self._queue.popleft()
                self._room.notify_all()
            if done < len(piece):
                poll.poll(_POLL_MS)
