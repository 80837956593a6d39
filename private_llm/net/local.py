"""Parties as threads of one process: queues between endpoints, the same interface as the wire.

For tests, notebooks and one-machine runs. It protects nobody from the owner of the machine.
"""

import copy
import functools
import math
import queue
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from private_llm.errors import PartyFailed, TransportError
from private_llm.forks import Origin, forked, process
from private_llm.net.direct import Barrier, BarrierEnd, End
from private_llm.net.memory_link import MemoryLink, Reader, Writer, new_link
from private_llm.net.roles import endpoint_name
from private_llm.net.transport import CLIENT, Ready, Transport, awaiting, disagreement

_MAX_AHEAD = 256 << 20  # bytes a sender may run ahead of its receiver before it waits (bounds preprocessing's memory)

_PARTIES = 3  # endpoints below run programs, as parties of trio and dealer; each of their links takes a descriptor

_SMALL = 1024  # bytes of payloads that are not counted


class _Link:
    def __init__(self, *, lent: bool) -> None:
        self.items = new_link(lent=lent)
        self.lock = threading.Lock()
        self.room = threading.Condition(self.lock)
        self.ahead = self.held_up = 0  # bytes that were not read, and writers that wait for room


class _SessionMeshes:
    """The meshes of all parallel sessions of one session, and why it ended."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.meshes: weakref.WeakValueDictionary[int, LocalMesh] = weakref.WeakValueDictionary()
        self.failure: str | None = None


@contextmanager
def _given_up(turns: threading.Semaphore) -> Iterator[None]:
    """Inside, another thread may compute; then wait for a turn again."""
    turns.release()
    try:
        yield
    finally:
        turns.acquire()


_NO_TURNS: AbstractContextManager[Any] = nullcontext()


class LocalMesh:
    """Creates the transports of all endpoints of one session. lends: whether programs may use its links themselves."""

    lends = True

    def __init__(self, parties: int, timeout: float = 60.0, at_once: int | None = None) -> None:
        """at_once: how many parties compute at a time, each inside `turn` and in one thread (None: all may).

        One that waits for a message lets another one compute meanwhile. Without this, many threads fight for Python's
        lock and for cores. Nothing but messages may make one wait for another.
        """
        self.endpoints = [*range(parties), CLIENT]
        self.timeout = timeout
        self.turns = None if at_once is None else threading.Semaphore(at_once)
        self.number, self.origin = 0, Origin()
        self.parallel_sessions = _SessionMeshes()
        self.parallel_sessions.meshes[0] = self
        self.others: list[LocalMesh] = []  # of this session, made here; no circle, so that links end with the mesh
        self.clear()

    def clear(self) -> None:
        """New links, for this parallel session alone."""
        self.waiting: dict[int, int] = {}
        self.barrier = Barrier(len(self.endpoints) - 1)
        pairs = [(a, b) for a in self.endpoints for b in self.endpoints if a != b]
        lent = self.lends and self.turns is None
        self.links = {pair: _Link(lent=lent and max(pair) < _PARTIES) for pair in pairs}
        self.on_devices: set[int] = set()  # endpoints that take tensors of a GPU as they are

    def turn(self) -> AbstractContextManager[Any]:
        """Around all that a party does."""
        return self.turns or _NO_TURNS

    def parallel_session(self, number: int) -> "LocalMesh":
        """The mesh of another parallel session of the same session."""
        with self.parallel_sessions.lock:
            found = self.parallel_sessions.meshes.get(number)
            if found is None:
                found = self.parallel_sessions.meshes[number] = copy.copy(self)
                found.number, found.others = number, []
                found.clear()
                self.others.append(found)
            return found

    def transport(self, me: int) -> "LocalTransport":
        """The transport of endpoint `me`."""
        return LocalTransport(self, me)

    def abort(self, reason: str) -> None:
        """Wake all waiting endpoints of all parallel sessions by PartyFailed; nothing in a fork, which has none."""
        if not self.origin.here:
            return
        with self.parallel_sessions.lock:
            if self.parallel_sessions.failure is None:
                self.parallel_sessions.failure = reason
            meshes = list(self.parallel_sessions.meshes.values())
        for link in [link for mesh in meshes for link in mesh.links.values()]:
            link.items.wake()
            with link.room:
                link.room.notify_all()

    def silent(self, me: int, peer: int) -> str:
        """Who is really silent when `me` has waited too long for `peer`: the end of the chain of waits."""
        seen = [me]
        while peer not in seen and (awaited := self.waiting.get(peer)) is not None:
            seen.append(peer)
            peer = awaited
        if peer in seen:
            return f"{' and '.join(map(endpoint_name, seen))} wait for each other (they disagree on the computation)"
        return f"{endpoint_name(peer)} was silent for {self.timeout:g} s"


class LocalTransport(Transport):
    """One endpoint of a `LocalMesh`."""

    def __init__(self, mesh: LocalMesh, me: int) -> None:
        super().__init__(me)
        self._mesh, self._session = mesh, mesh.parallel_sessions
        self._origin = mesh.origin

    def ends(self, endpoint: int) -> Sequence[End]:
        """Both, but for an endpoint that gives up its turn when it waits."""
        there, back = (self._mesh.links.get(pair) for pair in ((self.me, endpoint), (endpoint, self.me)))
        if there is None or back is None:
            return ()
        if isinstance(there.items, MemoryLink) and isinstance(back.items, MemoryLink):
            return Writer(there.items), Reader(back.items)
        return ()

    def accept_device_tensors(self) -> None:
        """Let others send to this endpoint what lies on a GPU as it is."""
        self._mesh.on_devices.add(self.me)

    def carries_device_tensors(self, to: int) -> bool:
        """Whether that endpoint takes them."""
        return to in self._mesh.on_devices

    def barrier_end(self) -> BarrierEnd | None:
        """That of this endpoint."""
        mesh = self._mesh
        silent = functools.partial(mesh.silent, self.me)
        return BarrierEnd(mesh.barrier, self.me, lambda: self._session.failure, mesh.timeout, self._aside_for, silent)

    @contextmanager
    def _aside_for(self, peer: int) -> Iterator[None]:
        """`aside` at a barrier, while all know for whom this endpoint waits."""
        self._mesh.waiting[self.me] = peer
        try:
            with self.aside():
                yield
        finally:
            del self._mesh.waiting[self.me]

    def aside(self) -> AbstractContextManager[None]:
        """While this endpoint waits: another may compute. The client has no turns."""
        turns = self._mesh.turns
        return _NO_TURNS if turns is None or self.me == CLIENT else _given_up(turns)

    def _send(self, to: int, tag: str, payload: Tensor) -> None:
        if self._origin.forks != process.forks:  # as `demand` does; a call less for each message
            raise forked("this connection")
        link = self._mesh.links[(self.me, to)]
        size = payload.numel() * payload.element_size()
        counted = size > _SMALL
        if counted:
            if link.ahead > _MAX_AHEAD:
                self._make_room(link, to)
            with link.lock:
                link.ahead += size
        if self._session.failure is not None:
            raise PartyFailed(self._session.failure)
        link.items.put((tag, payload, counted, Ready(payload) if payload.is_cuda else None))

    def _make_room(self, link: _Link, to: int) -> None:
        with self.aside(), link.room:
            link.held_up += 1
            there = link.room.wait_for(
                lambda: link.ahead <= _MAX_AHEAD or self._session.failure is not None, self._mesh.timeout
            )
            link.held_up -= 1
        if not there:
            raise self._fail(PartyFailed(f"{endpoint_name(to)} took nothing for {self._mesh.timeout:g} s"))

    def _recv(self, frm: int, tag: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        got, payload = self._next(frm, tag)
        if got != tag or payload.dtype != dtype or payload.numel() != math.prod(shape):
            raise self._other(frm, got, payload, f"'{tag}' with {math.prod(shape)} x {dtype}")
        return payload if payload.shape == shape else payload.view(shape)

    def _recv_bytes(self, frm: int, tag: str, most: int) -> bytes:
        got, payload = self._next(frm, tag)
        if got != tag or payload.dtype != torch.uint8 or payload.numel() > most:
            raise self._other(frm, got, payload, f"'{tag}' with at most {most} x {torch.uint8}")
        return bytes(payload.contiguous().numpy().data)

    def _other(self, frm: int, tag: str, payload: Tensor, want: str) -> TransportError:
        """The end of the session because another message came than `want`."""
        return self._fail(disagreement(frm, f"'{tag}' with {payload.numel()} x {payload.dtype}", want))

    def wait(self, frm: int) -> None:
        """Block until a frame from `frm` is there, however long it takes."""
        self._origin.demand("this connection")
        link = self._mesh.links[(frm, self.me)]
        if link.items.empty():
            with self.aside():
                link.items.wait()
        if self._session.failure is not None:
            raise PartyFailed(self._session.failure)

    def parallel_session(self, number: int) -> "LocalTransport":
        """The transport of the same endpoint in another parallel session."""
        mesh = self._mesh.parallel_session(number)
        return self if mesh is self._mesh else mesh.transport(self.me)

    def abort(self, reason: str) -> None:
        """Stop the whole session."""
        self._mesh.abort(reason)

    def _next(self, frm: int, tag: str) -> tuple[str, Tensor]:
        """The next tag and payload from `frm`, which is no more ahead by them."""
        if self._origin.forks != process.forks:
            raise forked("this connection")
        link = self._mesh.links[(frm, self.me)]
        if self._session.failure is not None:
            raise PartyFailed(self._session.failure)
        self._mesh.waiting[self.me] = frm
        try:
            if self._mesh.turns is None or not link.items.empty():  # nobody else takes from this link
                item = link.items.get(self._mesh.timeout)
            else:
                with self.aside():
                    item = link.items.get(self._mesh.timeout)
        except queue.Empty:
            who = self._mesh.silent(self.me, frm)
            raise self._fail(PartyFailed(f"{who}, {awaiting(frm, tag)}")) from None
        finally:
            del self._mesh.waiting[self.me]
        if self._session.failure is not None:
            raise PartyFailed(self._session.failure)
        if item is None:
            raise PartyFailed(f"{endpoint_name(frm)} stopped")
        got, payload, counted, ready = item
        if ready is not None:
            ready.wait(payload)
        if counted:
            with link.lock:
                link.ahead -= payload.numel() * payload.element_size()
                if link.held_up:
                    link.room.notify()
        return got, payload

    def _fail(self, error: TransportError) -> TransportError:
        slow = "restart the session, or raise timeout_s (--timeout) if machines are slow"
        reason = f"{endpoint_name(self.me)}: {error}; {slow}"
        self._mesh.abort(reason)
        return type(error)(self._session.failure)
