"""Nodes and parties whose links measure: how long an endpoint waits, how long messages take; the rest it computes.

A node's clock runs from a command of the client to its next wait for one. "serialising" is what messages cost apart
from waiting for them: number types and layout, copies, system calls. An endpoint that waits for a core counts as
computing, so a machine with fewer cores than busy nodes shows long computing.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from private_llm_hf.client.parallel_sessions import join_parallel_sessions
from private_llm_hf.client.parties import Parties
from private_llm_hf.party.party import run_party
from torch import Tensor

from private_llm.config import PrivateConfig
from private_llm.net.children import start_children
from private_llm.net.ledger import Ledger
from private_llm.net.local import LocalMesh
from private_llm.net.transport import PassingTransport, Transport

BUSY, WAITING, SERIALISING = "busy", "waiting", "serialising"


class TimedLedger(Ledger):
    """Adds to `seconds` what `timing` is asked to time, and "busy": from `wake` to `rest`."""

    def __init__(self, party: int) -> None:
        super().__init__(party)
        self._woke: float | None = None

    @contextmanager
    def timing(self, name: str) -> Iterator[None]:
        """Add the seconds that are spent inside to those of `name`."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - started

    def wake(self) -> None:
        """A command has arrived."""
        self._woke = time.perf_counter()

    def rest(self) -> None:
        """The command is done."""
        if self._woke is not None:
            self.seconds[BUSY] += time.perf_counter() - self._woke

    def reset(self) -> None:
        """Start counting anew, in the middle of a command, too."""
        super().reset()
        self.wake()


class TimedTransport(PassingTransport):
    """The links of `inner`, with a ledger of their own that measures."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self._clock = TimedLedger(inner.me)
        self.ledger = self._clock

    def _send(self, to: int, tag: str, payload: Tensor) -> None:
        with self._clock.timing(SERIALISING):
            self._inner._send(to, tag, payload)

    def _recv(self, frm: int, tag: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        with self._clock.timing(WAITING):
            self._inner.wait(frm)
        with self._clock.timing(SERIALISING):
            return self._inner._recv(frm, tag, shape, dtype)

    def _recv_bytes(self, frm: int, tag: str, most: int) -> bytes:
        with self._clock.timing(WAITING):
            self._inner.wait(frm)
        with self._clock.timing(SERIALISING):
            return self._inner._recv_bytes(frm, tag, most)

    def wait(self, frm: int) -> None:
        """Block between two commands."""
        self._clock.rest()
        self._inner.wait(frm)
        self._clock.wake()


def run_timed(config: PrivateConfig, number: int, transport: Transport) -> str | None:
    """One party or node."""
    return run_party(config, number, TimedTransport(transport))


class TimedParties:
    """Starts all parties as processes of this machine. client: this process's end of their links."""

    client: TimedTransport

    def __call__(self, config: PrivateConfig, mesh: LocalMesh | None = None) -> Parties:
        """As `launch.start_parties`; a mesh is of no use."""
        transport, stop = start_children(config, "timed_nodes:run_timed", {})
        try:
            self.client = TimedTransport(transport)
            return join_parallel_sessions(config, self.client, stop)
        except BaseException:
            stop()
            raise
