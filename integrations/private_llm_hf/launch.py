"""Starting the parties: threads of this process, processes of this machine, or hosts that run already.

Threads and processes on one machine protect nobody from that machine's owner; hosts of different owners do.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, PartyFailed
from private_llm.net.hub import connect, hosts_of, open_listeners
from private_llm.net.local import LocalHub
from private_llm.net.transport import CLIENT
from private_llm.protocols.session import join_as_client
from private_llm_hf.client import Parties
from private_llm_hf.party import run_party
from private_llm_hf.party_process import READY
from private_llm_hf.share_files import ShareFile

_CHILD = "import sys; from private_llm_hf.party_process import main; sys.exit(main())"
_EXIT_S = 5.0
"""Seconds a party may take to end before it is killed."""


def start_parties(config: PrivateConfig, hub: LocalHub | None = None) -> Parties:
    """Start the parties that `config` asks for, or connect to them, and agree on settings and keys.

    hub carries the frames of parties that are threads (default: a new `LocalHub`); for measuring and recording.
    """
    mode = choose_mode(config)
    if hub is not None and mode != "threads":
        raise ConfigError(f"hub: got one for party_mode={mode!r}; only parties that are threads use a hub")
    if mode == "threads":
        return _start_threads(config, hub or LocalHub(config.parties, timeout=config.timeout_s))
    if mode == "processes":
        return _start_processes(config)
    transport = connect(config, CLIENT)
    return Parties(config, transport, join_as_client(config, transport), transport.close)


def choose_mode(config: PrivateConfig) -> str:
    """What party_mode="auto" means: remote if hosts are given, else threads."""
    if config.party_mode != "auto":
        return config.party_mode
    return "remote" if config.hosts else "threads"


def serve_party(
    config: PrivateConfig,
    number: int,
    share_file: Path | None = None,
    sessions: int | None = None,
    notice: Callable[[str], None] = lambda line: None,
) -> None:
    """Be party `number` of config.hosts for one client session after the other (`sessions` of them, or for ever).

    `notice` is told when a session begins and why it ended. Raises ConfigError and ShareFileError before listening;
    an error inside a session ends that session only.
    """
    if config.party_mode != "remote":
        config = replace(config, party_mode="remote")
    if not 0 <= number < config.parties:
        raise ConfigError(f"party: got {number}; want 0 to {config.parties - 1} for {config.protocol!r}")
    held = None if share_file is None else ShareFile.open(share_file, config, number)
    served = 0
    while sessions is None or served < sessions:
        notice(f"party {number} waits for the others at {config.hosts[number]}")
        transport = connect(config, number)
        try:
            reason = run_party(config, number, transport, held)
        finally:
            transport.close()
        served += 1
        notice(f"session {served} ended" + (f": {reason}" if reason else ""))


def _start_threads(config: PrivateConfig, hub: LocalHub) -> Parties:
    """Parties as daemon threads: they end with the session or with this process."""
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
                thread.join(timeout=_EXIT_S)

    return Parties(config, transport, join_as_client(config, transport), shutdown)


def _start_processes(config: PrivateConfig) -> Parties:
    """Parties as child processes over loopback sockets; they end when this process does."""
    listeners = open_listeners(config.parties)
    hosts = hosts_of(listeners)
    token = secrets.token_bytes(32)
    threads = max(1, (os.cpu_count() or 1) // config.parties)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": str(threads)}
    children: list[subprocess.Popen[bytes]] = []

    def shutdown() -> None:
        for child in children:
            if child.stdin is not None:
                child.stdin.close()
        for child in children:
            try:
                child.wait(_EXIT_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()

    try:
        for number, listener in enumerate(listeners):
            child = subprocess.Popen(
                [sys.executable, "-c", _CHILD],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # an interrupt at the terminal is the parent's to handle
                pass_fds=[listener.fileno()],
                env=environment,
            )
            children.append(child)
            order = {
                "config": config.to_dict(),
                "party": number,
                "hosts": hosts,
                "token": token.hex(),
                "listener": listener.fileno(),
            }
            if child.stdin is not None:
                child.stdin.write(json.dumps(order).encode() + b"\n")
                child.stdin.flush()
            listener.close()
        for number, child in enumerate(children):
            if child.stdout is None or child.stdout.readline() != READY:
                raise PartyFailed(f"party {number} did not start; its own message is on standard error")
        transport = connect(config, CLIENT, hosts=hosts, token=token)
        end = join_as_client(config, transport)
    except BaseException:
        shutdown()
        raise

    def stop() -> None:
        shutdown()
        transport.close()

    return Parties(config, transport, end, stop)
