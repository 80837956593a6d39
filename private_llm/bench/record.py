"""Parties as threads whose waiting is recorded: when did whom wait for a frame of whom?"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from private_llm.net.local import LocalHub, LocalTransport


@dataclass(frozen=True)
class Waiting:
    """One endpoint's wait for a frame: from when to when (seconds of time.perf_counter), for whom, for what."""

    endpoint: int
    peer: int
    tag: str
    start: float
    end: float


class RecordingHub(LocalHub):
    """A `LocalHub` that keeps every wait in `waits`."""

    def __init__(self, parties: int, timeout: float) -> None:
        super().__init__(parties, timeout)
        self.waits: list[Waiting] = []

    def transport(self, me: int) -> LocalTransport:
        """The transport of endpoint `me`."""
        return _RecordingTransport(self, me)


class _RecordingTransport(LocalTransport):
    def __init__(self, hub: RecordingHub, me: int) -> None:
        super().__init__(hub, me)
        self._waits = hub.waits

    def _recv(self, frm: int, tag: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        started = time.perf_counter()
        payload = super()._recv(frm, tag, shape, dtype)
        self._waits.append(Waiting(self.me, frm, tag, started, time.perf_counter()))
        return payload

    def wait(self, frm: int) -> None:
        """Between two calls."""
        started = time.perf_counter()
        super().wait(frm)
        self._waits.append(Waiting(self.me, frm, "next call", started, time.perf_counter()))
