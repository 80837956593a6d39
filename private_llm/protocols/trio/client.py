"""Trio's edges: how a client shares inputs and opens outputs, and how a model owner splits weights.

A secret x is masked by a1 + a2. Party 0 holds (a1, a2), party 1 (x + a2, a1), party 2 (x + a1, a2):
one party alone sees uniform numbers; two together could open x (honest majority).
Inputs: a1 comes from a key of client, party 0 and party 1, a2 from one of client, party 0 and party 2, so party 0
receives nothing and the evaluators one element each. Outputs: the evaluators send one element each.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from private_llm.errors import DomainError
from private_llm.net.transport import Transport
from private_llm.protocols.ends import ClientEnd
from private_llm.ring.dpf import make_keys
from private_llm.ring.prg import Seed
from private_llm.ring.ring import Ring


class TrioClient(ClientEnd):
    """The client's end: 32 bytes of key to each of `mask_holders` at the start. `one_hot`: see `TrioArithmetic`."""

    mask_holders: tuple[tuple[int, ...], ...] = ((0, 1), (0, 2))  # who knows the masks a1 and a2 of inputs
    key_holders: tuple[tuple[tuple[int, int], ...], ...] = (((0, 0), (1, 0)), ((0, 1), (2, 0)), ((1, 1), (2, 1)))
    """Which keys each party gets for an index (`TrioArithmetic.lookup`): (pair, end), pairs (0, 1), (0, 2), (1, 2)."""

    def __init__(self, transport: Transport, ring: Ring, one_hot: bool = False) -> None:
        super().__init__(transport, ring)
        self._one_hot, self._apart = one_hot, False
        self._keys = keys = [Seed.fresh() for _ in self.mask_holders]
        for key, parties in zip(keys, self.mask_holders, strict=True):
            for party in parties:
                payload = torch.frombuffer(bytearray(key.raw()), dtype=torch.uint8)
                transport.send(party, "input key", payload)
        self._roots = Seed.fresh().stream("index keys")
        self._masks = [key.stream("client input") for key in keys]

    @contextmanager
    def section(self, label: str) -> Iterator[None]:
        """As `TrioParty.section`, which sees to it that no label is used twice."""
        kept = self._masks, self._one_hot, self._apart
        self._masks = [key.stream(f"client input/{label}") for key in self._keys]
        self._one_hot = self._apart = True
        try:
            yield
        finally:
            self._masks, self._one_hot, self._apart = kept

    def share(self, elements: Tensor) -> None:
        """1 element to each evaluator."""
        a1, a2 = (mask.elements(elements.numel(), self.ring).view(elements.shape) for mask in self._masks)
        self.transport.send(1, "input", (elements + a2).contiguous())
        self.transport.send(2, "input", (elements + a1).contiguous())

    def share_index(self, indices: Tensor, domain: int) -> None:
        """Keys of point functions from OS entropy, for each of `key_holders`, or one-hot rows [T, domain]."""
        if self._one_hot:
            self.share(one_hot(indices, domain, self.ring))
            return
        pairs = len({pair for held in self.key_holders for pair, _ in held})
        made = torch.stack(make_keys(indices.repeat(pairs), domain, self._roots)).view(2, pairs, indices.numel(), -1)
        for party, held in enumerate(self.key_holders):
            self.transport.send(party, "index", torch.stack([made[end, pair] for pair, end in held]))

    def open(self, shape: tuple[int, ...]) -> Tensor:
        """1 element from each evaluator."""
        return open_trio(self.transport, self.ring, shape)


def open_trio(transport: Transport, ring: Ring, shape: tuple[int, ...]) -> Tensor:
    """Ring elements of `shape` that the parties reveal to this endpoint right now: 1 element from each evaluator."""
    masked = transport.recv(1, "reveal", shape, ring.dtype)
    mask = transport.recv(2, "reveal", shape, ring.dtype)
    return masked - mask


def one_hot(indices: Tensor, domain: int, ring: Ring) -> Tensor:
    """Rows [T, domain] of ring elements: 1 at the index, else 0. Raises DomainError for an index outside."""
    if indices.device.type == "meta":
        return torch.empty((indices.numel(), domain), dtype=ring.dtype, device="meta")
    if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < domain:
        raise DomainError(f"an index lies outside 0 .. {domain - 1}")
    rows = torch.zeros((indices.numel(), domain), dtype=ring.dtype)
    return rows.scatter_(1, indices.reshape(-1, 1), 1)
