"""The receiving end of a one-way connection: reads frames (`outgoing.py` writes them).

After each slice of silence a receiver calls `idle`, and `sockets.py` decides whether the peer counts as dead.
"""

import contextlib
import ctypes
import math
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from private_llm.errors import PartyFailed, TransportError
from private_llm.net import connection, wire
from private_llm.net.direct import Row
from private_llm.net.roles import PASSES_ON, attributed, endpoint_name, legible
from private_llm.net.transport import disagreement, room
from private_llm.net.wire import BLOCKED, HEADER_BYTES, FrameKind, cause

_PROGRAM_S = 30.0  # how long the end of a connection waits for a program that has it, which may compute meanwhile
_LEAST_RATE = 8 << 10  # bytes a second of a frame that has begun: 64 kbit/s, for one of several sessions on a slow line
_BUFFER = 64 << 10  # bytes an incoming link reads ahead; the rest of a larger payload goes straight into its tensor

Idle = Callable[["Incoming", float], None]
"""Called with the seconds of silence after each slice of time, and with 0 when the peer said for whom it waits;
raises PartyFailed when the silence was too long."""


class Allowance:
    """So many at once, and one more every `each_s` seconds. Of one thread."""

    def __init__(self, each_s: float, at_once: int) -> None:
        self._each, self._most = each_s, at_once * each_s
        self._full_at = 0.0

    def lacks(self) -> float:
        """Take one; how many seconds too early that is, 0 if it is not."""
        now = time.monotonic()
        self._full_at = max(self._full_at, now) + self._each
        return max(0.0, self._full_at - now - self._most)


class Incoming:
    """The receiving end from `peer`.

    Whatever waits or reads raises PartyFailed when the peer ends the session, stalls or is gone, TransportError for a
    malformed frame or another than is wanted.
    """

    def __init__(
        self, sock: socket.socket, peer: int, session: bytes, slice_s: float, patience_s: float = math.inf
    ) -> None:
        """patience_s: how long a payload is waited for, whatever the peer says about its own waiting, and how much
        longer than at `_LEAST_RATE` a frame may take.
        """
        sock.setblocking(False)
        self.peer = peer
        self.plain = not isinstance(sock, ssl.SSLSocket)
        self.pinned = False
        self._patience = patience_s
        self._left = math.inf
        self._notes: Allowance | None = None
        self.waits_for: int | None = None
        self.ended: str | None = None
        self.left = False
        self.aborted = False
        self._sock, self._session = sock, session
        self._sequence = 0
        self._slice = slice_s
        self._buffer = memoryview(bytearray(_BUFFER))
        self._start = self._end = 0
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._begun: bytes | None = None
        self._lent, self._lending = threading.RLock(), False
        head = np.frombuffer(wire.encode(FrameKind.DATA, peer, session, 0, "", torch.int64, 0), np.int64)
        buffer = np.frombuffer(self._buffer, np.uint8)
        self._constants = np.array([buffer.ctypes.data, 0, 0, buffer.size, *head[:2]], np.int64)  # BUFFER to IN_SESSION

    def receive(self, tag: str, shape: tuple[int, ...], dtype: torch.dtype, idle: Idle) -> Tensor:
        """The next payload, which must have this tag, dtype and number of elements."""
        count, begun, self._begun = math.prod(shape), self._begun, None
        if begun is None:
            head = self._data_header(idle, time.monotonic() + self._patience)
            want = wire.encode(FrameKind.DATA, self.peer, self._session, self._sequence, tag, dtype, count)
            if head != want:
                due = wire.Frame(FrameKind.DATA, self.peer, self._session, self._sequence, tag, dtype, count)
                raise disagreement(self.peer, self._checked(head).what, due.what)
            self._accept()
            end = self._start + count * dtype.itemsize
            if count and end <= self._end and not self.pinned:  # all of it is read ahead
                raw, self._start = bytearray(self._buffer[self._start : end]), end
                made = torch.frombuffer(raw, dtype=dtype)
                return made if len(shape) == 1 else made.view(shape)
        out = room(shape, dtype) if self.pinned else torch.empty(shape, dtype=dtype)
        if count:
            view = out.numpy().data.cast("B")
            if begun:
                view[: len(begun)], view = begun, view[len(begun) :]
            self._fill(view, idle)
        return out

    def lend(self, row: Row) -> None:
        """Let a compiled program read payloads, until `take_back`; this thread reads nothing else meanwhile."""
        self._lending = True  # first: whatever interrupts this, `take_back` releases
        self._lent.acquire()
        if self.ended is not None or self._begun is not None:
            self._release()
            return
        row[connection.BUFFER : connection.IN_SESSION + 1] = self._constants
        row[connection.START], row[connection.END], row[connection.TAKEN] = self._start, self._end, self._sequence
        row[connection.WAIT_MS], row[connection.WAITED] = int(self._slice * 1000), 0
        row[connection.IN_PART], row[connection.IN] = -1, self._sock.fileno()

    def take_back(self, row: Row) -> None:
        """The end of `lend`. The payload that the program began to read, the next `receive` ends."""
        if not self._lending:
            return
        try:
            if row[connection.IN] < 0:
                return
            row[connection.IN] = -1
            if row[connection.TAKEN] != self._sequence:
                self.waits_for = None
            self._sequence = int(row[connection.TAKEN])
            self._start, self._end = int(row[connection.START]), int(row[connection.END])
            if row[connection.IN_PART] >= 0:
                self._begun = ctypes.string_at(int(row[connection.PLACE]), int(row[connection.IN_PART]))
        finally:
            self._release()

    def _release(self) -> None:
        with contextlib.suppress(RuntimeError):  # it was not acquired yet, or is released already
            self._lent.release()
        self._lending = False

    def receive_bytes(self, tag: str, most: int, idle: Idle) -> bytes:
        """The next payload, which must be bytes with this tag; how many, its header says, and not above `most`."""
        head = self._data_header(idle, time.monotonic() + self._patience)
        count = wire.count_in(head)
        want = wire.encode(FrameKind.DATA, self.peer, self._session, self._sequence, tag, torch.uint8, count)
        if head != want or count > min(most, wire.MAX_PAYLOAD):
            raise disagreement(self.peer, self._checked(head).what, f"'{tag}' with at most {most} x uint8")
        self._accept()
        whole = bytearray(count)
        self._fill(memoryview(whole), idle)
        return bytes(whole)

    def _accept(self) -> None:
        """The header at the front of the buffer is read."""
        self._start += HEADER_BYTES
        self._sequence += 1
        self.waits_for = None

    def wait(self, idle: Idle) -> None:
        """Return as soon as a payload begins."""
        self._data_header(idle, math.inf)

    @property
    def first_hand(self) -> bool:
        """Whether the peer ended the session and gave a reason of its own."""
        return self.aborted and self.ended is not None and PASSES_ON not in self.ended

    def glance(self) -> None:
        """Read notes that have arrived, without waiting; raises PartyFailed on an abort or a broken connection."""
        while self.ended is None and not self._front_is_data():
            if self._has_note():
                self._take_note()
            else:
                count = self._read(self._space())
                self._end += count
                if not count:
                    break
        if self.ended is not None and not self.left:
            raise PartyFailed(self.ended)

    def bound_notes(self, each_s: float, at_once: int) -> None:
        """From now on, a peer whose notes come more often than every `each_s` seconds breaks the rules."""
        self._notes = Allowance(each_s, at_once)

    def give_up(self, reason: str) -> None:
        """Take no further byte. From any thread: the one that reads, however fast bytes come, raises PartyFailed."""
        self.ended = self.ended or reason

    def close(self) -> None:
        """Close the connection, once no program has it; one that keeps it is left with a connection that is shut."""
        self.give_up("this endpoint has closed the session")
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_RD)
        if self._lent.acquire(timeout=_PROGRAM_S):
            self._sock.close()
            self._lent.release()

    # -- frames -----------------------------------------------------------------------------------------
    def _data_header(self, idle: Idle, deadline: float) -> memoryview:
        """The header of the next payload; notes before it are acted upon, until the deadline."""
        while True:
            self._need(HEADER_BYTES, idle)
            head = self._buffer[self._start : self._start + HEADER_BYTES]
            if head[5] == FrameKind.DATA:
                return head
            frame = self._checked(head)
            self._need(HEADER_BYTES + frame.nbytes, idle)
            self._take_note()
            if time.monotonic() > deadline:
                raise PartyFailed(
                    f"{endpoint_name(self.peer)} sent nothing for {self._patience:g} s but word that it waits itself"
                )
            idle(self, 0.0)

    def _checked(self, head: memoryview) -> wire.Frame:
        """A decoded header that belongs to this connection, at this place."""
        name = endpoint_name(self.peer)
        try:
            frame = wire.decode(head)
        except TransportError as error:
            raise TransportError(f"from {name}: {error}") from None
        if (frame.sender, frame.session) != (self.peer, self._session):
            raise TransportError(f"from {name}: a frame of another endpoint or session")
        if frame.sequence != self._sequence:
            raise TransportError(f"from {name}: got frame {frame.sequence}; want {self._sequence} (lost or repeated)")
        return frame

    def _front_is_data(self) -> bool:
        return self._end - self._start >= HEADER_BYTES and self._buffer[self._start + 5] == FrameKind.DATA

    def _has_note(self) -> bool:
        if self._end - self._start < HEADER_BYTES:
            return False
        frame = self._checked(self._buffer[self._start : self._start + HEADER_BYTES])
        return self._end - self._start >= HEADER_BYTES + frame.nbytes

    def _take_note(self) -> None:
        if self._notes is not None and self._notes.lacks():
            raise TransportError(f"from {endpoint_name(self.peer)}: more notes than any endpoint has reason to send")
        frame = self._checked(self._buffer[self._start : self._start + HEADER_BYTES])
        body = bytes(self._buffer[self._start + HEADER_BYTES :][: frame.nbytes])
        self._start += HEADER_BYTES + frame.nbytes
        self._sequence += 1
        if frame.kind is FrameKind.ABORT:
            self.ended, self.aborted = attributed(self.peer, legible(body.decode(errors="replace"))), True
            raise PartyFailed(self.ended)
        if frame.kind is FrameKind.BYE:
            self.left, self.ended = True, f"{endpoint_name(self.peer)} has closed the session"
        elif frame.kind is FrameKind.WAITING and len(body) == 1:
            self.waits_for = body[0]
        else:
            raise TransportError(f"from {endpoint_name(self.peer)}: a {frame.kind.name} frame out of place")

    # -- bytes ------------------------------------------------------------------------------------------
    def _most_s(self, count: int) -> float:
        """Seconds for so many bytes of a frame that has begun, however often one of them comes."""
        return self._patience + count / _LEAST_RATE

    def _need(self, count: int, idle: Idle) -> None:
        self._left = math.inf
        while (there := self._end - self._start) < count:
            if there:
                self._left = min(self._left, self._most_s(count))
            got = self._read_some(self._space(), idle)  # moves `_end` first
            self._end += got

    def _space(self) -> memoryview:
        """The free part of the buffer, after moving what is in it to the front."""
        left = self._end - self._start
        if self._start:
            self._buffer[:left] = self._buffer[self._start : self._end]
            self._start, self._end = 0, left
        return self._buffer[left:]

    def _fill(self, view: memoryview, idle: Idle) -> None:
        """Fill `view` with the next bytes, without a copy beyond what was read ahead."""
        done = min(len(view), self._end - self._start)
        view[:done] = self._buffer[self._start : self._start + done]
        self._start += done
        self._left = self._most_s(len(view))
        while done < len(view):
            done += self._read_some(view[done:], idle)

    def _read_some(self, view: memoryview, idle: Idle) -> int:
        silence = told = 0.0
        ready = not self.plain  # TLS may have read more than was asked for
        while True:
            if ready or self.ended is not None:
                count = self._read(view)
                if count:
                    return count
                if self.ended is not None:
                    raise PartyFailed(self.ended)
            began = time.monotonic()
            ready = bool(self._poll.poll(self._slice * 1000))
            waited = min(self._slice, time.monotonic() - began) if ready else self._slice
            silence, self._left = silence + waited, self._left - waited  # a part of a TLS record is silence, too
            if self._left < 0:
                raise PartyFailed(
                    f"{endpoint_name(self.peer)} sends too slowly: a message took {self._patience:g} s longer than at "
                    f"{_LEAST_RATE} bytes/s"
                )
            if silence >= told + self._slice:
                told += self._slice
                idle(self, told)

    def _read(self, view: memoryview) -> int:
        """Bytes that are there now; the end of the connection is recorded in `ended`."""
        if self.ended is not None:
            return 0
        try:
            count = self._sock.recv_into(view)
            why = "its connection closed"
        except BLOCKED:
            return 0
        except OSError as error:
            count, why = 0, f"its connection broke ({cause(error)})"
        if not count:
            self.ended = f"{endpoint_name(self.peer)} stopped: {why}"
        return count
