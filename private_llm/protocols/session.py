"""A session: one party's identity, protocol and settings; passed explicitly, never global."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, DomainError
from private_llm.kernels.devices import device_for
from private_llm.net.placed import PlacedTransport
from private_llm.net.roles import named
from private_llm.net.transport import CLIENT, MetaTransport, Transport
from private_llm.protocols.adder import Adder
from private_llm.protocols.checked_plain import CheckedPlain
from private_llm.protocols.dealer.party import TwoPartyDealer
from private_llm.protocols.dealing import keys_held
from private_llm.protocols.exact import Exact
from private_llm.protocols.plain import Plain
from private_llm.protocols.protocol import Protocol
from private_llm.protocols.quad.bits import Quad
from private_llm.protocols.quad.client import QuadClient, deal_quad, open_quad
from private_llm.protocols.quad.views import GROUPS, meet_groups
from private_llm.protocols.share import Share, cleartext
from private_llm.protocols.trio.client import TrioClient, deal_trio, open_trio, receive_input_keys
from private_llm.protocols.trio.party import Trio
from private_llm.ranges import Ranges
from private_llm.ring.prg import Seed
from private_llm.ring.ring import Ring


class Known:
    """The ranges that a session works with, set once when its model is loaded, and the checks that a call owes.

    owed: (signed sums of rows, bits that they may have), see tensor/range_check.py. pending: a secret tensor, and the
    bits that its sums may have, to be checked unless the operation on it checks it anyway.
    """

    def __init__(self) -> None:
        self.ranges = Ranges()
        self.owed: list[tuple[Share, int]] = []
        self.pending: tuple[Any, int] | None = None


@dataclass(frozen=True, eq=False)
class Session:
    """Everything an operation of one party needs.

    `device` is where inputs arrive, "meta" when only costs are counted. `known` are the ranges of the loaded model.
    """

    config: PrivateConfig
    protocol: Protocol
    device: str = "cpu"
    known: Known = field(default_factory=Known)

    @property
    def ring(self) -> Ring:
        """The ring of arithmetic shares."""
        return self.protocol.ring

    @property
    def frac(self) -> int:
        """Default fractional bits of secret values."""
        return self.config.frac_bits

    @property
    def party(self) -> int:
        """This party's number."""
        return self.protocol.party

    def exponent(self, quantity: str) -> int | None:
        """What calibration tells of the module that is being computed (`ranges.QUANTITIES`), or None."""
        return self.known.ranges.of(self.protocol.ledger.scope_name, quantity)

    def __repr__(self) -> str:
        return f"Session({self.protocol.name}, party {self.party}, ring {self.ring.bits}, f={self.frac})"


class PlainClient:
    """Client end of `plain`."""

    def __init__(self, transport: Transport, ring: Ring) -> None:
        self.transport, self.ring = transport, ring

    def share(self, elements: Tensor) -> None:
        """Hand ring elements to the party."""
        self.transport.send(0, "input", elements.contiguous())

    def share_index(self, indices: Tensor, domain: int) -> None:
        """Hand indices below `domain` to the party."""
        if indices.numel() and (int(indices.min()) < 0 or int(indices.max()) >= domain):
            raise DomainError(f"an index lies outside 0 .. {domain - 1}")
        self.transport.send(0, "index", indices.reshape(-1).contiguous())

    def open(self, shape: tuple[int, ...]) -> Tensor:
        """Ring elements that the party reveals."""
        return self.transport.recv(0, "reveal", shape, self.ring.dtype)


ClientEnd = PlainClient | TrioClient


def join(config: PrivateConfig, party: int, transport: Transport) -> Session:
    """Agree with all other endpoints on settings and keys, and return this party's session.

    Raises ConfigError when another endpoint runs other settings or another version, or a device is not here.
    """
    ring, device = Ring(config.ring), device_for(config.device, party)
    if config.protocol == "plain":
        _meet(config, transport, [CLIENT])
        return _placed(config, (CheckedPlain if config.debug_ranges else Plain)(party, transport, ring), device)
    others = [p for p in range(config.parties) if p != party]
    seeds = _meet(config, transport, [*others, CLIENT])
    keys = receive_input_keys(transport, keys_held(config, party))
    met = meet_groups(transport, party, keys) if config.protocol == "quad" else []
    groups = [group and Seed(group.raw(), config.prg) for group in met]
    return _placed(config, _masked(config, party, transport, seeds, keys, groups), device)


def _masked(
    config: PrivateConfig, party: int, transport: Transport, seeds: dict[int, Seed], keys: list[Seed],
    groups: list[Seed | None],
) -> Trio:  # fmt: skip
    """One endpoint of a protocol of masked shares."""
    ring, adder = Ring(config.ring), _adder(config)
    if config.protocol == "quad":
        return Quad(party, transport, ring, seeds, groups, keys, adder)
    if config.protocol == "dealer":
        return TwoPartyDealer(party, transport, ring, seeds, keys, adder, remask=config.matmul == "remask")
    return Trio(party, transport, ring, seeds, keys, adder)


def _placed(config: PrivateConfig, protocol: Protocol, device: torch.device) -> Session:
    """The session of a protocol end whose values may lie on several devices."""
    several = device.type != "cpu" or config.device_map is not None
    if several:
        protocol.transport = PlacedTransport(protocol.transport, lambda: protocol.device)
    end = _dividing(config, protocol)
    end.placed = several
    return Session(config, end.on(device), str(device))


def _dividing(config: PrivateConfig, protocol: Protocol) -> Protocol:
    """The protocol with the kind of truncation that was asked for (`plain` is exact by itself)."""
    return Exact(protocol) if config.truncation == "exact" and config.protocol != "plain" else protocol


def join_as_client(config: PrivateConfig, transport: Transport) -> ClientEnd:
    """The client's end of a session, after agreeing with every party."""
    _meet(config, transport, list(range(config.parties)))
    return client_end(config, transport)


def client_end(config: PrivateConfig, transport: Transport) -> ClientEnd:
    """The client's end once all have agreed (or for counting costs on a `MetaTransport`)."""
    ring = Ring(config.ring)
    if config.protocol == "plain":
        return PlainClient(transport, ring)
    if config.protocol == "quad":
        return QuadClient(transport, ring)
    return TrioClient(transport, ring, one_hot=config.protocol == "dealer")


def opened(config: PrivateConfig, transport: Transport, shape: tuple[int, ...]) -> Tensor:
    """Ring elements of `shape` that the parties reveal to this endpoint, which needs no key of theirs.

    Raises ProtocolAbort under quad if one of them lies.
    """
    return (open_quad if config.protocol == "quad" else open_trio)(transport, Ring(config.ring), shape)


def meta_session(config: PrivateConfig, party: int) -> Session:
    """A session that counts costs on meta tensors: no data, no weights, no other party."""
    ring = Ring(config.ring)
    transport = MetaTransport(party)
    if config.protocol == "plain":
        return Session(config, Plain(party, transport, ring), device="meta")
    zero = Seed(bytes(32))
    seeds = dict.fromkeys([*range(config.parties), CLIENT], zero)
    groups = [zero if party in group else None for group in GROUPS]
    end = _masked(config, party, transport, seeds, [zero] * keys_held(config, party), groups)
    return Session(config, _dividing(config, end).on("meta"), device="meta")


def _adder(config: PrivateConfig) -> Adder:
    return Adder(config.adder, config.bandwidth_mbit, config.latency_ms)


def deal(config: PrivateConfig, elements: Tensor, seed: Seed, label: str) -> list[Share]:
    """Split ring elements into one share per party; masks come from `seed` under `label` (use each label once)."""
    if config.protocol == "plain":
        return [cleartext(elements, config.debug_ranges)]
    if config.protocol == "quad":
        return deal_quad(elements, Ring(config.ring), seed, label)
    return deal_trio(elements, Ring(config.ring), seed, label)


def _meet(config: PrivateConfig, transport: Transport, others: list[int]) -> dict[int, Seed]:
    """Exchange settings digests and entropy with `others`; one fresh pairwise seed for each.

    Both ends contribute 32 bytes, so no seed repeats as long as one of them has fresh entropy.
    """
    mine = {other: secrets.token_bytes(32) for other in others}
    digest = config.agreement()
    for other in others:
        payload = torch.frombuffer(bytearray(digest + mine[other]), dtype=torch.uint8)
        transport.send(other, "hello", payload)
    seeds = {}
    for other in others:
        theirs = bytes(transport.recv(other, "hello", (64,), torch.uint8).numpy().tobytes())
        if theirs[:32] != digest:
            raise ConfigError(
                f"{named(config, transport.name_of(other))} runs other settings or another version; protocol, ring, "
                "frac_bits, weights, reveal, adder and the other settings of the computation must be equal at all "
                "endpoints"
            )
        low, high = sorted([transport.me, other])
        halves = {transport.me: mine[other], other: theirs[32:]}
        raw = hashlib.blake2b(halves[low] + halves[high], digest_size=32, person=b"pllm-pair").digest()
        seeds[other] = Seed(raw, config.prg)
    return seeds
