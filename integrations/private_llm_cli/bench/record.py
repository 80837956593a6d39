"""Parties as threads whose waiting and sending is recorded: when did whom wait for a frame of whom?"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from private_llm.net.ledger import CONTROL
from private_llm_cli.bench.link import LinkSpeed, SlowMesh, SlowTransport

_WIRES = LinkSpeed(float("inf"), 0.0)


@dataclass(frozen=True)
class Waiting:
    """One endpoint's wait for a frame: from when to when (seconds of time.perf_counter), for whom, for what."""

    endpoint: int
    peer: int
    tag: str
    start: float
    end: float
    parallel_session: int = 0


@dataclass(frozen=True)
class Sending:
    """A frame on its way over a wire of limited speed."""

    endpoint: int
    peer: int
    tag: str
    start: float
    end: float
    parallel_session: int = 0


class RecordingMesh(SlowMesh):
    """A `SlowMesh` (by default without any delay) that keeps every wait in `waits`, every frame in `sent`."""

    def __init__(self, parties: int, timeout: float, speed: LinkSpeed = _WIRES) -> None:
        self.waits: list[Waiting] = []
        self.sent: list[Sending] = []
        super().__init__(parties, timeout, speed, "bench")
        self.instant = frozenset(["bench", CONTROL])

    def transport(self, me: int) -> SlowTransport:
        """The transport of endpoint `me`."""
        return _TimedTransport(self, me)

    def occupy(self, link: tuple[int, int], tag: str, count: int) -> float:
        """Queue `count` bytes on a wire: when the last of them has left."""
        end = super().occupy(link, tag, count)
        self.sent.append(Sending(*link, tag, end - self.speed.seconds(count), end, self.number))
        return end


class _TimedTransport(SlowTransport):
    def __init__(self, mesh: RecordingMesh, me: int) -> None:
        super().__init__(mesh, me)
        self._waits, self._parallel_session = mesh.waits, mesh.number

    def _recv(self, frm: int, tag: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        started = time.perf_counter()
        payload = super()._recv(frm, tag, shape, dtype)
        self._waits.append(Waiting(self.me, frm, tag, started, time.perf_counter(), self._parallel_session))
        return payload

    def _recv_bytes(self, frm: int, tag: str, most: int) -> bytes:
        started = time.perf_counter()
        raw = super()._recv_bytes(frm, tag, most)
        self._waits.append(Waiting(self.me, frm, tag, started, time.perf_counter(), self._parallel_session))
        return raw

    def wait(self, frm: int) -> None:
        """Between two calls."""
        started = time.perf_counter()
        super().wait(frm)
        self._waits.append(Waiting(self.me, frm, "next call", started, time.perf_counter(), self._parallel_session))
