"""Starting the parties: threads of this process, processes of this machine, or hosts that run already.

Threads and processes on one machine protect nobody from that machine's owner; hosts of different owners do.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, TransportError, undoing
from private_llm.kernels.address import trim_allocator
from private_llm.kernels.devices import device_for
from private_llm.kernels.parallel import nodes_at_once, threads_per_node, threads_per_party
from private_llm.net.children import start_children
from private_llm.net.local import LocalMesh
from private_llm.net.rendezvous import connect, open_acceptor
from private_llm.net.roles import called, named, named_errors
from private_llm.net.transport import CLIENT
from private_llm.protocol_facts import ASSISTED
from private_llm.replay.ahead import compile_ahead
from private_llm_hf.checkpoint.share_files import ShareFile
from private_llm_hf.client.open_weights import open_weights
from private_llm_hf.client.parallel_sessions import join_parallel_sessions
from private_llm_hf.client.parties import Parties
from private_llm_hf.models.sparse_blocks import adopted
from private_llm_hf.party.node import NodeCheckpoint
from private_llm_hf.party.party import Stored, in_threads, run_party

_FOREVER_S = 1e8  # seconds that a serving party waits for its next client: three years
_EXIT_S = 5.0  # seconds that threads may take to end
_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
"""Seconds before a serving party listens again after its links could not be made: at first, and at most."""

_LOG = logging.getLogger("private_llm")


def start_parties(config: PrivateConfig, mesh: LocalMesh | None = None) -> Parties:
    """Start the parties that `config` asks for, or connect to them, and agree on settings and keys.

    mesh carries the frames of parties that are threads (default: a new `LocalMesh`); for measuring and recording.
    Raises ConfigError for a mesh with parties that are no threads, for settings that differ between endpoints and for
    ranks that do not fit; TransportError (PartiesBusy, PartyFailed) for parties that do not answer.
    """
    with named_errors(config):
        mode = choose_mode(config)
        if mesh is not None and mode != "threads":
            raise ConfigError(f"mesh: got one for party_mode={mode!r}; only parties that are threads use a mesh")
        if mode == "threads":
            at_once = None if config.plan is None else nodes_at_once(config.endpoints)
            return _start_threads(config, mesh or LocalMesh(config.endpoints, config.timeout_s, at_once))
        if mode == "processes":  # over sockets of this machine; they end when this process does
            transport, stop = start_children(config, "private_llm_hf.party.party:run_party", {})
            with undoing(stop):
                return join_parallel_sessions(config, transport, stop)
        if mode == "distributed":
            return _start_distributed(config)
        transport = connect(config, CLIENT)
        return join_parallel_sessions(config, transport, transport.close)


def choose_mode(config: PrivateConfig) -> str:
    """Resolve party_mode="auto": remote with hosts, distributed if a launcher started the right number of ranks."""
    if config.party_mode != "auto":
        return config.party_mode
    if config.hosts:
        return "remote"
    ranks = int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1
    return "distributed" if ranks > 1 and ranks in (config.endpoints, config.endpoints + 1) else "threads"


def serve_party(
    config: PrivateConfig,
    number: int,
    share_file: Path | None = None,
    sessions: int | None = None,
    notice: Callable[[str], None] = lambda line: None,
    checkpoint: str | None = None,
) -> None:
    """Be party or node `number` of config.hosts for one client session after the other (`sessions` of them, or all).

    `notice` is told when a session begins and why it ended. share_file: this party's share of a model. checkpoint:
    folder or hub id of the public model that a CompNode, or a server of 'assisted', reads itself, so that clients need
    not send it.
    The address is kept between sessions: a second client is told that the party is busy, and waits if it wants to.
    Raises ConfigError, ShareFileError and PatchMismatch before listening; an error inside a session, or while others
    connect, ends that session only.
    """
    config = replace(config, party_mode="remote")
    if not 0 <= number < config.endpoints:
        raise ConfigError(f"party: got {number}; want 0 to {config.endpoints - 1} for {config.protocol!r}")
    device_for(config.device, number)
    compile_ahead(config, party=True)
    stored = _stored(config, number, share_file, checkpoint)
    if isinstance(stored, ShareFile):
        config = adopted(config, stored.description.config)
    served = failed = 0
    with closing(open_acceptor(config, number)) as acceptor:
        while sessions is None or served < sessions:
            awaited = "a client" if config.protocol == ASSISTED else "the others"
            notice(f"{called(config, number)} waits for {awaited} at {config.hosts[number]}")
            try:
                transport = connect(config, number, wait_s=_FOREVER_S, acceptor=acceptor)
            except (ConfigError, TransportError, OSError) as error:  # another's doing: it may be right the next time
                if isinstance(error, ConfigError) and not served and not failed:
                    raise ConfigError(named(config, str(error))) from None
                pause = min(_PAUSE_S * 2**failed, _LONGEST_PAUSE_S)  # longer each time: nobody is served meanwhile
                notice(f"no session: {named(config, str(error))}; trying again in {pause:g} s")
                time.sleep(pause)
                failed += 1
                continue
            failed = 0
            try:
                with closing(transport):
                    reason = run_party(config, number, transport, stored)
            except Exception as error:  # noqa: BLE001 - the end of a session: no client ends the party
                _LOG.exception("%s: a session did not end in order", called(config, number))
                reason = f"{called(config, number)}: {type(error).__name__}"
            served += 1
            notice(f"session {served} ended" + (f": {reason}" if reason else ""))


def _stored(config: PrivateConfig, number: int, share_file: Path | None, checkpoint: str | None) -> Stored | None:
    if checkpoint is not None and config.protocol == ASSISTED:
        return open_weights(checkpoint, device_for(config.device, number), config.weight_bits)
    if checkpoint is not None:
        if config.plan is None or config.protocol != "cascade" or number >= config.plan.alpha:
            raise ConfigError(
                f"model: {called(config, number)} reads no checkpoint; CompNodes of protocol='cascade' and "
                "servers of 'assisted' do"
            )
        return NodeCheckpoint.open(checkpoint)
    if share_file is not None and config.facts is None:
        raise ConfigError(f"shares: protocol {config.protocol!r} has public weights; leave the share file out")
    return None if share_file is None else ShareFile.open(share_file, config, number)


class _Cores:
    """Torch's threads while sessions compute in this process; as they were once the last one ends, in any order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._before, self._open = 0, list[int]()

    def share(self, threads: int) -> None:
        """A session begins whose parties take so many threads each."""
        with self._lock:
            if not self._open:
                self._before = torch.get_num_threads()
            self._open.append(threads)
            torch.set_num_threads(min(self._open))

    def give_back(self, threads: int) -> None:
        """A session ends that began with so many."""
        with self._lock:
            self._open.remove(threads)
            torch.set_num_threads(min(self._open, default=self._before))


_CORES = _Cores()


def _start_threads(config: PrivateConfig, mesh: LocalMesh) -> Parties:
    """Parties as daemon threads: they end with the session or with this process."""
    shared = threads_per_party(config.endpoints, config.parallel_sessions)
    if config.protocol == "cascade" and config.plan is not None:
        shared = threads_per_node(config.plan.alpha)
    _CORES.share(shared)

    def run(number: int) -> None:
        with mesh.turn():
            run_party(config, number, mesh.transport(number))

    threads = in_threads("party", range(config.endpoints), run)
    transport = mesh.transport(CLIENT)

    def shutdown() -> None:
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(timeout=_EXIT_S)
        _CORES.give_back(shared)
        trim_allocator()

    return join_parallel_sessions(config, transport, shutdown)


def _start_distributed(config: PrivateConfig) -> Parties:
    """The same script on every rank: those of parties serve until the client stops, and end. With as many ranks as
    parties the client shares party 0's process, which sees its values (for tests).
    """
    from private_llm.net.distributed import DistMesh  # torch.distributed is slow to import and rarely wanted

    mesh = DistMesh(config)
    facts = config.facts
    if facts is not None and facts.dealer and mesh.rank_of(CLIENT) == mesh.rank_of(0):
        mesh.close()
        raise ConfigError(
            f"ranks: got {config.endpoints}, which would put the client into the dealer's process; want "
            f"{config.endpoints + 1} (the dealer, {config.parties - 1} parties, nodes of a split, client)"
        )
    if CLIENT not in mesh.endpoints:
        reason = run_party(config, mesh.rank, mesh.transport(mesh.rank))
        mesh.close()
        raise SystemExit(reason)
    parties = [number for number in mesh.endpoints if number != CLIENT]
    threads = in_threads("party", parties, lambda number: run_party(config, number, mesh.transport(number)))
    transport = mesh.transport(CLIENT)

    def shutdown() -> None:
        for thread in threads:
            thread.join(timeout=_EXIT_S)
        mesh.close()

    return join_parallel_sessions(config, transport, shutdown)
