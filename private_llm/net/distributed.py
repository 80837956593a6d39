"""One process per party under `torchrun` or Accelerate's launchers, which find each other through the launcher's store.

Ranks 0..n-1 are the parties; the client is rank n, or shares the process of rank 0 when there are n ranks. Each party
says in the store of torch.distributed where it listens. Then they are connected as processes of one machine are
(`rendezvous.connect`): by sockets that know a common token, and do not encrypt.

So processes on several machines are refused unless the network is declared trusted: the store tells the token to all
who reach it. Parties that distrust each other use `rendezvous.connect` with TLS.

`accelerate launch --cpu` starts one process; take `torchrun`, `accelerate launch --multi_gpu` or `debug_launcher`.
"""

import datetime
import hashlib
import itertools
import os
import secrets
import socket
import uuid
from dataclasses import replace

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError
from private_llm.forks import Origin
from private_llm.net.addresses import hosts_of, listen, open_named_listeners
from private_llm.net.rendezvous import connect
from private_llm.net.roles import endpoint_name
from private_llm.net.sockets import SocketTransport
from private_llm.net.transport import CLIENT

_MESHES = itertools.count()  # all ranks make the same ones in the same order, so that they meet under one name


class DistMesh:
    """This process's endpoints; every rank creates one, at the same time.

    Joins the default process group, or makes it from the launcher's environment.
    Raises ConfigError when no launcher set the environment, the number of ranks fits neither with nor without
    a rank for the client, or ranks run on several machines without `trusted_network`.
    """

    def __init__(self, config: PrivateConfig) -> None:
        if not dist.is_available():
            raise ConfigError("this PyTorch has no torch.distributed; use party_mode 'processes'")
        self._config, self._origin = replace(config, party_mode="distributed", tls=None), Origin()
        self._transports: list[SocketTransport] = []
        self._owner = not dist.is_initialized()
        if self._owner:
            _initialise(config.timeout_s)
        self.rank, self._world, parties = dist.get_rank(), dist.get_world_size(), config.endpoints
        if self._world not in (parties, parties + 1):
            raise ConfigError(
                f"ranks: got {self._world}; want {parties + 1} (parties and client) or {parties} (client with party 0)"
            )
        self._store = PrefixStore(f"private-llm/{next(_MESHES)}", _get_default_store())
        machine = hashlib.sha256(f"{socket.gethostname()} {uuid.getnode()}".encode()).hexdigest()
        several = len(set(self._gathered("machine", machine))) > 1
        if several and not config.trusted_network:
            raise ConfigError(
                "the ranks run on several machines, and their links are not encrypted; use hosts and tls, or "
                "pass trusted_network=True if all machines and the network between them belong to one owner"
            )
        self._listener, address = None, ""
        if self.rank < parties:
            self._listener = listen((_own_address(), 0), anywhere=False) if several else open_named_listeners(1)[0]
            (address,) = hosts_of([self._listener])
        self._hosts = self._gathered("address", address)[:parties]
        self._token = bytes.fromhex(self._gathered("token", secrets.token_hex(32))[0])

    @property
    def endpoints(self) -> list[int]:
        """The endpoints of this process: one, or party 0 and the client."""
        return [each for each in (*range(len(self._hosts)), CLIENT) if self.rank_of(each) == self.rank]

    def rank_of(self, endpoint: int) -> int:
        """The rank on which an endpoint runs."""
        return self._config.endpoints % self._world if endpoint == CLIENT else endpoint

    def transport(self, me: int) -> SocketTransport:
        """The transport of one of this process's endpoints, once all others have asked for theirs: each in a thread.

        Raises ConfigError for an endpoint elsewhere, and what `rendezvous.connect` raises.
        """
        if me not in self.endpoints:
            raise ConfigError(f"{endpoint_name(me)} runs on rank {self.rank_of(me)}, not on rank {self.rank}")
        listener = None if me == CLIENT else self._listener
        made = connect(self._config, me, hosts=self._hosts, token=self._token, listener=listener)
        self._transports.append(made)
        return made

    def close(self) -> None:
        """Close this process's links, and leave the process group, if this mesh made it; nothing in a fork."""
        for each in self._transports:
            each.close()
        if self._owner and self._origin.here and dist.is_initialized():
            dist.destroy_process_group()

    def _gathered(self, what: str, mine: str) -> list[str]:
        self._store.set(f"{what} {self.rank}", mine)
        names = [f"{what} {rank}" for rank in range(self._world)]
        self._store.wait(names, datetime.timedelta(seconds=self._config.timeout_s))
        return [self._store.get(name).decode() for name in names]


def _own_address() -> str:
    """Of this machine, where it reaches that of rank 0."""
    where = socket.getaddrinfo(os.environ.get("MASTER_ADDR", socket.gethostname()), 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(where[0], socket.SOCK_DGRAM) as sock:
        sock.connect(where[4])  # which sends nothing
        return str(sock.getsockname()[0])


def _initialise(timeout: float) -> None:
    """Make the default process group from the launcher's environment."""
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} not set: start one process per party with torchrun --nproc-per-node N, or with "
            "accelerate launch --multi_gpu --num_processes N (accelerate launch --cpu starts a single process)"
        )
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout))
