"""One process per party under `torchrun` or Accelerate's launchers, over torch.distributed.

Ranks 0..n-1 are the parties; the client is rank n, or shares the process of rank 0 when there are n ranks.
Every message is a fixed-size block over gloo (the header of `wire.py`, and the payload if it is small); a
larger payload follows. The receiver checks the header before it posts the second receive, because gloo ends
the process when a message is longer than its buffer.

Gloo does not encrypt: processes on several machines are refused unless the network is declared trusted.
Parties that distrust each other use `rendezvous.connect` with TLS.

Faults: gloo closes a process's connections when one of its receives times out, so its peers stop as well; the
reason travels through the launcher's key-value store. Those who run out of patience within half a second agree
on whom to blame. `accelerate launch --cpu` starts a single process and
is no launcher for this; `torchrun`, `accelerate launch --multi_gpu` and `debug_launcher` are.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import socket
import time
import uuid
from collections import deque
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from private_llm.errors import ConfigError, PartyFailed, TransportError
from private_llm.net import wire
from private_llm.net.local import LocalMesh
from private_llm.net.outgoing import MAX_AHEAD
from private_llm.net.transport import CLIENT, Transport, disagreement, endpoint_name
from private_llm.net.wire import HEADER_BYTES, FrameKind

_BLOCK = 4096
"""Bytes of the first part of every message."""
_INLINE = _BLOCK - HEADER_BYTES
_PENDING = 1024
"""Messages a sender may run ahead of its receiver before it waits."""
_SESSION = bytes(8)
_GATHER_S = 0.5
"""Seconds in which the failures of several endpoints count as one."""
_REASON_S = 2.0
"""Seconds to wait for the reason of an endpoint that failed earlier."""
_FOREVER = datetime.timedelta(days=3650)
_NO_TAG = 1 << 30
"""A gloo tag on which nobody sends."""


class DistMesh:
    """This process's endpoints; every rank creates one, at the same time.

    Joins the default process group, or makes it from the launcher's environment.
    Raises ConfigError when no launcher set the environment, the number of ranks fits neither with nor without
    a rank for the client, or ranks run on several machines without `trusted_network`.
    """

    def __init__(self, parties: int, timeout: float, *, trusted_network: bool = False) -> None:
        if not dist.is_available():
            raise ConfigError("this PyTorch has no torch.distributed; use party_mode 'processes'")
        self.parties, self.timeout = parties, timeout
        self._owner = not dist.is_initialized()
        if self._owner:
            _initialise(timeout)
        self.rank, world = dist.get_rank(), dist.get_world_size()
        if world not in (parties, parties + 1):
            raise ConfigError(
                f"ranks: got {world}; want {parties + 1} (parties and client) or {parties} (client with party 0)"
            )
        self._client = parties if world > parties else 0
        span = datetime.timedelta(seconds=timeout)
        self.gloo: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=span)
        self.store = PrefixStore(f"private-llm/{self.gloo.group_name}", _get_default_store())
        self.local = LocalMesh(parties, timeout)
        if not trusted_network:
            self._demand_one_machine(world)

    @property
    def endpoints(self) -> list[int]:
        """The endpoints of this process: one, or party 0 and the client."""
        here = [party for party in range(self.parties) if party == self.rank]
        return here + ([CLIENT] if self._client == self.rank else [])

    def rank_of(self, endpoint: int) -> int:
        """The rank on which an endpoint runs."""
        return self._client if endpoint == CLIENT else endpoint

    def transport(self, me: int) -> DistTransport:
        """The transport of one of this process's endpoints. Raises ConfigError for an endpoint elsewhere."""
        if me not in self.endpoints:
            raise ConfigError(f"{endpoint_name(me)} runs on rank {self.rank_of(me)}, not on rank {self.rank}")
        return DistTransport(self, me)

    def close(self) -> None:
        """Leave the process group, if this mesh made it; nothing in a fork."""
        if self._owner and self.local.origin.here and dist.is_initialized():
            dist.destroy_process_group()

    def _demand_one_machine(self, world: int) -> None:
        """Refuse to send anything over a network that nobody declared trusted."""
        here = hashlib.sha256(f"{socket.gethostname()} {uuid.getnode()}".encode()).digest()
        mine = torch.frombuffer(bytearray(here), dtype=torch.uint8)
        all_of_them = [torch.empty_like(mine) for _ in range(world)]
        dist.all_gather(all_of_them, mine, group=self.gloo)
        if any(not torch.equal(mine, other) for other in all_of_them):
            raise ConfigError(
                "the ranks run on several machines, and torch.distributed does not encrypt; use hosts and tls, or "
                "pass trusted_network=True if all machines and the network between them belong to one owner"
            )


class DistTransport(Transport):
    """One endpoint of a `DistMesh`. Whatever waits raises TransportError (PartyFailed) when a connection ends."""

    def __init__(self, mesh: DistMesh, me: int) -> None:
        super().__init__(me)
        self._mesh = mesh
        self._neighbour = mesh.local.transport(me)
        self._sequences: dict[tuple[int, int], int] = {}
        self._peeked: dict[int, Tensor] = {}
        self._pending: deque[tuple[int, int, Tensor, dist.Work]] = deque()
        self._ahead = 0
        self._failure: str | None = None
        self._origin = mesh.local.origin

    def _send(self, to: int, tag: str, payload: Tensor) -> None:
        if self._is_here(to):
            self._neighbour._send(to, tag, payload)  # raises only when the whole session has stopped
            return
        self._check()
        payload = payload.contiguous().view(-1)
        size = payload.numel() * payload.element_size()
        sequence = self._count(self.me, to)
        head = wire.encode(FrameKind.DATA, self.me, _SESSION, sequence, tag, payload.dtype, payload.numel())
        block = torch.zeros(_BLOCK, dtype=torch.uint8)
        block[:HEADER_BYTES] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        if 0 < size <= _INLINE:
            block[HEADER_BYTES : HEADER_BYTES + size] = payload.view(torch.uint8)
        try:
            self._post(to, block)
            if size > _INLINE:
                self._post(to, payload)
            while self._ahead > MAX_AHEAD or len(self._pending) > _PENDING:
                self._reap()
        except RuntimeError as error:
            raise self._fail(error, to, f"while '{tag}' was sent") from None

    def _recv(self, frm: int, tag: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self._is_here(frm):
            with self._neighbours():
                return self._neighbour._recv(frm, tag, shape, dtype)
        out = torch.empty(shape, dtype=dtype)
        with self._awaiting(frm, f"'{tag}' of {endpoint_name(frm)} was awaited"):
            block = self._next_block(frm)
            self._check_header(frm, block, tag, dtype, out.numel())
            if out.nbytes > _INLINE:
                self._get(frm, out.view(-1))
            elif out.numel():
                out.view(-1).view(torch.uint8).copy_(block[HEADER_BYTES : HEADER_BYTES + out.nbytes])
        return out

    def _recv_bytes(self, frm: int, tag: str, most: int) -> bytes:
        if self._is_here(frm):
            with self._neighbours():
                return self._neighbour._recv_bytes(frm, tag, most)
        with self._awaiting(frm, f"'{tag}' of {endpoint_name(frm)} was awaited"):
            block = self._next_block(frm)
            count = min(wire.decode(_head(block)).count, most)  # more than `most` is no frame that is due
            self._check_header(frm, block, tag, torch.uint8, count)
            out = block[HEADER_BYTES : HEADER_BYTES + count]
            if count > _INLINE:
                out = torch.empty(count, dtype=torch.uint8)
                self._get(frm, out)
        return bytes(out.numpy().data)

    @contextlib.contextmanager
    def _neighbours(self) -> Iterator[None]:
        """Around what is received in this process: its failure is the whole session's."""
        try:
            yield
        except TransportError as error:
            self.abort(str(error))
            raise

    @contextlib.contextmanager
    def _awaiting(self, frm: int, what: str) -> Iterator[None]:
        """Around what waits for an endpoint, whose failure stops the session."""
        self._check()
        try:
            yield
        except (RuntimeError, TransportError) as error:
            raise self._fail(error, frm, f"while {what}") from None

    def wait(self, frm: int) -> None:
        """Block, however long, until a frame from `frm` is there; PartyFailed if its connection ends."""
        if self._is_here(frm):
            self._neighbour.wait(frm)
        elif frm not in self._peeked:
            with self._awaiting(frm, f"the next request of {endpoint_name(frm)} was awaited"):
                self._peeked[frm] = self._block(frm, _FOREVER)

    def abort(self, reason: str) -> None:
        """Leave the reason in the store and hang up, so that all peers stop; nothing in a fork."""
        if self._failure is None and self._origin.here:
            self._failure = reason
            with contextlib.suppress(RuntimeError):  # the store may have gone with its process
                self._mesh.store.compare_set("failure", "", reason)
            self._mesh.local.abort(reason)
            # gloo has no other way to close its connections than a receive that times out
            peer = next(rank for rank in range(dist.get_world_size()) if rank != self._mesh.rank)
            with contextlib.suppress(RuntimeError):
                self._get_tagged(peer, torch.empty(1, dtype=torch.uint8), _NO_TAG, datetime.timedelta(milliseconds=1))

    def close(self) -> None:
        """Wait until the receivers have taken what was sent; nothing in a fork."""
        if self._failure is None and self._origin.here:
            try:
                while self._pending:
                    self._reap()
            except RuntimeError as error:
                raise self._fail(error, self._pending[0][0], "while the session was closed") from None
            self._failure = "this endpoint has closed the session"

    # -- messages -------------------------------------------------------------------------------------
    def _is_here(self, endpoint: int) -> bool:
        return self._mesh.rank_of(endpoint) == self._mesh.rank

    def _count(self, frm: int, to: int) -> int:
        """The next sequence number of a direction."""
        number = self._sequences.get((frm, to), 0)
        self._sequences[(frm, to)] = number + 1
        return number

    def _post(self, to: int, data: Tensor) -> None:
        work = dist.isend(data, self._mesh.rank_of(to), group=self._mesh.gloo, tag=self.me * 256 + to)
        if work is None:
            raise TransportError("torch.distributed: this rank is not in the group")
        size = data.numel() * data.element_size()
        self._pending.append((to, size, data, work))
        self._ahead += size

    def _reap(self) -> None:
        """Wait for the oldest message to be taken."""
        _, size, _, work = self._pending[0]
        work.wait(datetime.timedelta(seconds=self._mesh.timeout))
        self._pending.popleft()
        self._ahead -= size

    def _next_block(self, frm: int) -> Tensor:
        """The first part of the next message from `frm`."""
        block = self._peeked.pop(frm, None)
        return self._block(frm) if block is None else block

    def _block(self, frm: int, span: datetime.timedelta | None = None) -> Tensor:
        block = torch.empty(_BLOCK, dtype=torch.uint8)
        self._get(frm, block, span)
        return block

    def _get(self, frm: int, out: Tensor, span: datetime.timedelta | None = None) -> None:
        """Fill `out`, within the timeout unless another time is named."""
        span = span or datetime.timedelta(seconds=self._mesh.timeout)
        self._get_tagged(self._mesh.rank_of(frm), out, frm * 256 + self.me, span)

    def _get_tagged(self, rank: int, out: Tensor, tag: int, span: datetime.timedelta) -> None:
        work = dist.irecv(out, rank, group=self._mesh.gloo, tag=tag)
        if work is None:
            raise TransportError("torch.distributed: this rank is not in the group")
        work.wait(span)

    def _check_header(self, frm: int, block: Tensor, tag: str, dtype: torch.dtype, count: int) -> None:
        """Raise TransportError unless the block starts with the header that the next message from `frm` must have."""
        want = wire.Frame(FrameKind.DATA, frm, _SESSION, self._count(frm, self.me), tag, dtype, count)
        got = wire.decode(_head(block))
        if got != want:
            raise disagreement(frm, f"{got.what}, number {got.sequence}", f"{want.what}, number {want.sequence}")

    # -- failures -------------------------------------------------------------------------------------
    def _check(self) -> None:
        self._origin.demand("this connection")
        if self._failure is not None:
            raise PartyFailed(self._failure)

    def _fail(self, error: Exception, peer: int, what: str) -> TransportError:
        """Stop the session because of `error`, unless somebody else's reason is in the store."""
        kind: type[TransportError] = PartyFailed
        told = None
        if isinstance(error, TransportError):
            kind, cause = type(error), str(error)
        else:
            silent = f"was silent for {self._mesh.timeout:g} s"
            closed = "stopped: its connection closed"
            cause = f"{endpoint_name(peer)} {silent if 'imed out' in str(error) else closed}"
            told = self._told(0.0 if self._is_root(peer) else _REASON_S)
        reason = told or f"{endpoint_name(self.me)}: {cause}, {what}; restart the session"
        self.abort(reason)
        return PartyFailed(reason) if told else kind(reason)

    def _is_root(self, peer: int) -> bool:
        """Whether `peer` itself failed, rather than waited for another: all who fail say for whom they waited."""
        with contextlib.suppress(RuntimeError):  # the store may have gone with its process
            self._mesh.store.set(f"awaited/{self.me}", str(peer))
            time.sleep(min(_GATHER_S, self._mesh.timeout / 4))
            return not self._mesh.store.check([f"awaited/{peer}"])
        return True

    def _told(self, seconds: float) -> str | None:
        """The reason another endpoint left in the store, within some seconds."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(RuntimeError):  # the store may have gone with its process
            while True:
                if self._mesh.store.check(["failure"]):
                    return bytes(self._mesh.store.get("failure")).decode(errors="replace")
                if time.monotonic() >= deadline:
                    break
                time.sleep(0.05)
        return None


def _head(block: Tensor) -> bytes:
    return block[:HEADER_BYTES].numpy().tobytes()


def _initialise(timeout: float) -> None:
    """Make the default process group from the launcher's environment."""
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} not set: start one process per party with torchrun --nproc-per-node N, or with "
            "accelerate launch --multi_gpu --num_processes N (accelerate launch --cpu starts a single process)"
        )
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout))
