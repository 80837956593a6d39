"""Parties as threads behind a slow link: every frame arrives when a wire of that speed would deliver it; and when whom
waited for a frame of whom.

A link (one direction between two endpoints) sends one frame after the other at `bandwidth`, and each frame takes
`latency` more to arrive. The sender never waits; the receiver sleeps until the frame is due. So two frames that
cross each other cost one latency, as on a real full-duplex wire.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from private_llm.errors import ConfigError
from private_llm.net.ledger import CONTROL
from private_llm.net.local import LocalMesh, LocalTransport


@dataclass(frozen=True)
class LinkSpeed:
    """Bandwidth of each direction in megabit per second, one-way latency in milliseconds."""

    bandwidth_mbit: float
    latency_ms: float

    def __post_init__(self) -> None:
        if not self.bandwidth_mbit > 0 or not 0 <= self.latency_ms < float("inf"):
            raise ConfigError(
                f"link: got {self.bandwidth_mbit:g} Mbit/s and {self.latency_ms:g} ms; want a positive bandwidth and "
                "a latency of at least 0"
            )

    def seconds(self, count: int) -> float:
        """Time that `count` bytes occupy one direction."""
        return count * 8 / (self.bandwidth_mbit * 1e6)

    @property
    def latency(self) -> float:
        """One-way latency in seconds."""
        return self.latency_ms / 1e3


class SlowMesh(LocalMesh):
    """A `LocalMesh` whose links have a speed; frames tagged `instant` (start and stop signals) are not delayed."""

    lends = False

    def __init__(
        self, parties: int, timeout: float, speed: LinkSpeed, instant: str, at_once: int | None = None
    ) -> None:
        super().__init__(parties, timeout, at_once)
        self.speed, self.instant = speed, frozenset([instant])
        self.free = dict.fromkeys(self.links, 0.0)  # the parallel sessions of a session share the wires
        self.wires = threading.Lock()

    def clear(self) -> None:
        """New links; a new parallel session sends over the same wires."""
        super().clear()
        self.due: dict[tuple[int, int], deque[float]] = {link: deque() for link in self.links}

    def occupy(self, link: tuple[int, int], tag: str, count: int) -> float:
        """Queue `count` bytes on a wire: when the last of them has left."""
        with self.wires:
            sent = max(time.perf_counter(), self.free[link]) + self.speed.seconds(count)
            self.free[link] = sent
        return sent

    def transport(self, me: int) -> SlowTransport:
        """The transport of endpoint `me`."""
        return SlowTransport(self, me)


class SlowTransport(LocalTransport):
    """Notes at sending when a frame is due, and sleeps until then at receiving."""

    def __init__(self, mesh: SlowMesh, me: int) -> None:
        super().__init__(mesh, me)
        self._slow = mesh

    def _send(self, to: int, tag: str, payload: Tensor) -> None:
        link = (self.me, to)
        if tag in self._slow.instant:
            self._slow.due[link].append(0.0)
            super()._send(to, tag, payload)
            return
        sent = self._slow.occupy(link, tag, payload.numel() * payload.element_size())
        self._slow.due[link].append(sent + self._slow.speed.latency)
        super()._send(to, tag, payload)

    def _recv(self, frm: int, tag: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        payload = super()._recv(frm, tag, shape, dtype)
        self._sleep(frm)
        return payload

    def _recv_bytes(self, frm: int, tag: str, most: int) -> bytes:
        raw = super()._recv_bytes(frm, tag, most)
        self._sleep(frm)
        return raw

    def _sleep(self, frm: int) -> None:
        """Until the frame that was taken is due."""
        delay = self._slow.due[(frm, self.me)].popleft() - time.perf_counter()
        if delay > 0:
            with self.aside():
                time.sleep(delay)


# -- recorded ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Span:
    """One endpoint's wait for a frame of a peer, or a frame on its way to it (seconds of time.perf_counter)."""

    endpoint: int
    peer: int
    tag: str
    start: float
    end: float
    parallel_session: int = 0


class RecordingMesh(SlowMesh):
    """A `SlowMesh` (by default without any delay) that keeps every wait in `waits`, every frame in `sent`."""

    def __init__(self, parties: int, timeout: float, speed: LinkSpeed = LinkSpeed(float("inf"), 0.0)) -> None:
        self.waits: list[Span] = []
        self.sent: list[Span] = []
        super().__init__(parties, timeout, speed, "bench")
        self.instant = frozenset(["bench", CONTROL])

    def transport(self, me: int) -> SlowTransport:
        """The transport of endpoint `me`."""
        return _TimedTransport(self, me)

    def occupy(self, link: tuple[int, int], tag: str, count: int) -> float:
        """Queue `count` bytes on a wire: when the last of them has left."""
        end = super().occupy(link, tag, count)
        self.sent.append(Span(*link, tag, end - self.speed.seconds(count), end, self.number))
        return end


class _TimedTransport(SlowTransport):
    def __init__(self, mesh: RecordingMesh, me: int) -> None:
        super().__init__(mesh, me)
        self._waits, self._parallel_session = mesh.waits, mesh.number

    def _recv(self, frm: int, tag: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        with self._waiting(frm, tag):
            return super()._recv(frm, tag, shape, dtype)

    def _recv_bytes(self, frm: int, tag: str, most: int) -> bytes:
        with self._waiting(frm, tag):
            return super()._recv_bytes(frm, tag, most)

    def wait(self, frm: int) -> None:
        """Between two calls."""
        with self._waiting(frm, "next call"):
            super().wait(frm)

    @contextmanager
    def _waiting(self, frm: int, tag: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._waits.append(Span(self.me, frm, tag, started, time.perf_counter(), self._parallel_session))
