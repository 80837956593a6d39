"""Starting the parties: threads of this process, processes of this machine, or hosts that run already."""

from __future__ import annotations

import threading

from private_llm.config import PrivateConfig
from private_llm.net.local import LocalHub
from private_llm.net.transport import CLIENT
from private_llm.protocols.session import join_as_client
from private_llm_hf.client import Parties
from private_llm_hf.party import run_party


def start_parties(config: PrivateConfig) -> Parties:
    """Start the parties that `config` asks for, or connect to them, and agree on settings and keys."""
    return _start_threads(config)


def _start_threads(config: PrivateConfig) -> Parties:
    """Parties as daemon threads: they end with the session or with this process."""
    hub = LocalHub(config.parties, timeout=config.timeout_s)
    threads = [
        threading.Thread(
            target=run_party, args=(config, number, hub.transport(number)), name=f"party {number}", daemon=True
        )
        for number in range(config.parties)
    ]
    for thread in threads:
        thread.start()
    transport = hub.transport(CLIENT)

    def shutdown() -> None:
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(timeout=5.0)

    return Parties(config, transport, join_as_client(config, transport), shutdown)
