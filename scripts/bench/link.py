"""Parties as threads behind a slow link: every frame arrives when a wire of that speed would deliver it.

A link (one direction between two endpoints) sends one frame after the other at `bandwidth`, and each frame takes
`latency` more to arrive. The sender never waits; the receiver sleeps until the frame is due. So two frames that
cross each other cost one latency, as on a real full-duplex wire.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from private_llm_cli.commands.estimate_plans import LinkSpeed as LinkSpeed
from torch import Tensor

from private_llm.net.ledger import CONTROL
from private_llm.net.local import LocalMesh, LocalTransport


def link_speed(bandwidth: float | None, latency: float | None) -> LinkSpeed | None:
    """The emulated link of --bandwidth and --latency; one alone leaves the other unlimited."""
    if bandwidth is None and latency is None:
        return None
    return LinkSpeed(1e6 if bandwidth is None else bandwidth, latency or 0.0)


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

    def transport(self, me: int) -> "SlowTransport":
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


@dataclass(frozen=True)
class TimeSpan:
    """One endpoint's wait for a frame of a peer, or a frame on its way to it (seconds of time.perf_counter)."""

    endpoint: int
    peer: int
    tag: str
    start: float
    end: float
    parallel_session: int = 0


class RecordingMesh(SlowMesh):
    """A `SlowMesh` (by default without any delay) that keeps every wait in `waits`, every frame in `sent`."""

    def __init__(self, parties: int, timeout: float, speed: LinkSpeed | None = None) -> None:
        self.waits: list[TimeSpan] = []
        self.sent: list[TimeSpan] = []
        super().__init__(parties, timeout, speed or LinkSpeed(float("inf"), 0.0), "bench")
        self.instant = frozenset(["bench", CONTROL])

    def transport(self, me: int) -> SlowTransport:
        """The transport of endpoint `me`."""
        return _TimedTransport(self, me)

    def occupy(self, link: tuple[int, int], tag: str, count: int) -> float:
        """Queue `count` bytes on a wire: when the last of them has left."""
        end = super().occupy(link, tag, count)
        self.sent.append(TimeSpan(*link, tag, end - self.speed.seconds(count), end, self.number))
        return end


class _TimedTransport(SlowTransport):
    """Notes waits; frames are noted as their wires carry them."""

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
        self._waits.append(TimeSpan(self.me, frm, tag, started, time.perf_counter(), self._parallel_session))
