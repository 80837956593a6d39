"""Nodes and parties as processes whose links measure (`private_llm.net.timed`), for benchmarks."""

from __future__ import annotations

from private_llm.config import PrivateConfig
from private_llm.net.children import start_children
from private_llm.net.local import LocalMesh
from private_llm.net.timed import TimedTransport
from private_llm.net.transport import Transport
from private_llm_hf.client.parallel_sessions import join_parallel_sessions
from private_llm_hf.client.parties import Parties
from private_llm_hf.party.party import run_party


def run_timed(config: PrivateConfig, number: int, transport: Transport) -> str | None:
    """One party or node."""
    return run_party(config, number, TimedTransport(transport))


class TimedParties:
    """Starts all parties as processes of this machine. client: this process's end of their links."""

    client: TimedTransport

    def __call__(self, config: PrivateConfig, mesh: LocalMesh | None = None) -> Parties:
        """As `launch.start_parties`; a mesh is of no use."""
        transport, stop = start_children(config, "private_llm_hf.party.timed:run_timed", {})
        try:
            self.client = TimedTransport(transport)
            return join_parallel_sessions(config, self.client, stop)
        except BaseException:
            stop()
            raise
