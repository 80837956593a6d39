"""Parties as threads of one process: queues between endpoints, the same interface as the wire.

For tests, notebooks and one-machine runs. It protects nobody from the owner of the machine.
"""

from __future__ import annotations

import queue
import threading
import time

import torch
from torch import Tensor

from private_llm.errors import PartyFailed, TransportError
from private_llm.net.transport import CLIENT, Transport, endpoint_name

_MAX_AHEAD = 256 << 20
"""Bytes a sender may run ahead of its receiver before it waits (bounds memory of the preprocessing)."""


class _Link:
    """One direction between two endpoints."""

    def __init__(self) -> None:
        self.items: queue.SimpleQueue[tuple[str, Tensor] | None] = queue.SimpleQueue()
        self.peeked: tuple[str, Tensor] | None = None
        self.ahead = 0
        self.room = threading.Condition()


class LocalHub:
    """Creates the transports of all endpoints of one session."""

    def __init__(self, parties: int, timeout: float = 60.0) -> None:
        self.endpoints = [*range(parties), CLIENT]
        self.timeout = timeout
        self.failure: str | None = None
        self.links = {(a, b): _Link() for a in self.endpoints for b in self.endpoints if a != b}

    def transport(self, me: int) -> LocalTransport:
        """The transport of endpoint `me`."""
        return LocalTransport(self, me)

    def abort(self, reason: str) -> None:
        """Wake every waiting endpoint with PartyFailed."""
        if self.failure is None:
            self.failure = reason
        for link in self.links.values():
            link.items.put(None)
            with link.room:
                link.room.notify_all()


class LocalTransport(Transport):
    """One endpoint of a `LocalHub`."""

    def __init__(self, hub: LocalHub, me: int) -> None:
        super().__init__(me)
        self._hub = hub

    def _send(self, to: int, tag: str, payload: Tensor) -> None:
        link = self._hub.links[(self.me, to)]
        size = payload.numel() * payload.element_size()
        if size > 1024:
            deadline = time.monotonic() + self._hub.timeout
            with link.room:
                while link.ahead > _MAX_AHEAD and self._hub.failure is None:
                    if not link.room.wait(deadline - time.monotonic()):
                        raise PartyFailed(f"{endpoint_name(to)} took nothing for {self._hub.timeout:g} s")
                link.ahead += size
        if self._hub.failure is not None:
            raise PartyFailed(self._hub.failure)
        link.items.put((tag, payload))

    def _recv(self, frm: int, tag: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        link = self._hub.links[(frm, self.me)]
        item, link.peeked = link.peeked, None
        try:
            if item is None:
                item = link.items.get(timeout=self._hub.timeout)
        except queue.Empty:
            raise PartyFailed(
                f"{endpoint_name(frm)} sent nothing for {self._hub.timeout:g} s (waiting for '{tag}'); "
                "restart the session, or raise timeout_s if the machine is just slow"
            ) from None
        if item is None:
            raise PartyFailed(self._hub.failure or f"{endpoint_name(frm)} stopped")
        got_tag, payload = item
        size = payload.numel() * payload.element_size()
        if size > 1024:
            with link.room:
                link.ahead -= size
                link.room.notify()
        count = 1
        for extent in shape:
            count *= extent
        if got_tag != tag or payload.dtype != dtype or payload.numel() != count:
            raise TransportError(
                f"from {endpoint_name(frm)}: got '{got_tag}' with {payload.numel()} x {payload.dtype}; "
                f"want '{tag}' with {count} x {dtype} (parties disagree on the computation)"
            )
        return payload.view(shape)

    def wait(self, frm: int) -> None:
        """Block until a frame from `frm` is there, however long it takes."""
        link = self._hub.links[(frm, self.me)]
        if link.peeked is None:
            link.peeked = link.items.get()
            if link.peeked is None:
                raise PartyFailed(self._hub.failure or f"{endpoint_name(frm)} stopped")

    def abort(self, reason: str) -> None:
        """Stop the whole session."""
        self._hub.abort(reason)
