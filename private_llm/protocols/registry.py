"""The protocols there are: one `ProtocolSpec` each, which sessions, model owners and clients read.

`register` adds a protocol to those of this library, for this process: parties that run as processes, or on other
machines, must register it, too (`PrivateConfig.plugins`). What settings and texts say of it is its `ProtocolFacts`
(protocol_facts.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError
from private_llm.net.transport import Transport
from private_llm.protocol_facts import ProtocolFacts, add_facts, protocol_facts, protocol_names, remove_facts
from private_llm.protocols.adder import Adder
from private_llm.protocols.client_end import ClientEnd
from private_llm.protocols.dealer import cost as dealer_cost
from private_llm.protocols.dealer.party import ExactDealer, TwoPartyDealer
from private_llm.protocols.plain.checked import CheckedPlain
from private_llm.protocols.plain.party import Plain, PlainClient, open_plain
from private_llm.protocols.prices import Prices
from private_llm.protocols.protocol import Protocol
from private_llm.protocols.quad import cost as quad_cost
from private_llm.protocols.quad.bits import ExactQuad, Quad
from private_llm.protocols.quad.client import QuadClient, open_quad, share_of
from private_llm.protocols.quad.transcript_mac import GROUPS, meet_groups
from private_llm.protocols.share import Share, cleartext
from private_llm.protocols.trio import cost as trio_cost
from private_llm.protocols.trio.client import TrioClient, open_trio
from private_llm.protocols.trio.party import ExactTrio, Trio
from private_llm.protocols.trio.piecewise import agree_on_ciphers
from private_llm.ring.prg import Seed
from private_llm.ring.ring import Ring

__all__ = ["PartySetup", "ProtocolSpec", "protocol_names", "protocol_spec", "register", "unregister"]


@dataclass(frozen=True)
class PartySetup:
    """What a party has when it joins a session.

    pair_seeds: a fresh seed with each other endpoint. input_keys: of the masks of inputs that it holds, in order.
    counting: costs are only counted; nothing may be sent, and all seeds and keys are zero.
    """

    config: PrivateConfig
    party: int
    transport: Transport
    pair_seeds: dict[int, Seed]
    input_keys: list[Seed]
    counting: bool = False

    @property
    def ring(self) -> Ring:
        """The ring of arithmetic shares, Z/2^64 or Z/2^32."""
        return Ring(self.config.ring)

    @property
    def exact(self) -> bool:
        """Whether every division must be the floor (`ExactTruncation`)."""
        return self.config.truncation == "exact"

    @property
    def adder(self) -> Adder:
        """The adders of comparisons that were asked for."""
        return Adder(self.config.adder, self.config.bandwidth_mbit, self.config.latency_ms)


@dataclass(frozen=True)
class ProtocolSpec:
    """One protocol: facts, both ends, and how weights are shared. Raises ConfigError for holders that are no parties.

    party: makes one party's end, with exact divisions if setup.exact; with setup.counting nothing may be sent.
    client: makes the client's end.
    open: receives ring elements of a shape at an endpoint outside that needs no key of the parties'.
    hold: a party's share from the masks that it holds, in order, and from what it received: the elements plus those
    masks that it lacks. A party that holds all masks receives nothing, and its share is those masks.
    mask_holders: of each mask of a value (inputs and weights alike) who holds its key; () if values are not masked.
    cost: the prices of its primitives; None if it sends nothing.
    """

    facts: ProtocolFacts
    party: Callable[[PartySetup], Protocol]
    client: Callable[[Transport, Ring], ClientEnd]
    open: Callable[[Transport, Ring, tuple[int, ...]], Tensor]
    hold: Callable[[PrivateConfig, int, tuple[Tensor, ...], Tensor], Share]
    mask_holders: tuple[tuple[int, ...], ...] = ()
    cost: Prices | None = None

    def __post_init__(self) -> None:
        if any(party not in range(self.facts.parties) for holders in self.mask_holders for party in holders):
            raise ConfigError(
                f"protocol {self.facts.name!r}: got mask_holders {self.mask_holders}; want parties of 0 to "
                f"{self.facts.parties - 1}"
            )

    def masks_of(self, party: int) -> tuple[int, ...]:
        """Numbers of the masks whose keys a party holds."""
        return tuple(mask for mask, holders in enumerate(self.mask_holders) if party in holders)

    def receives_values(self, party: int) -> bool:
        """Whether a party receives something for every value, one element of it, besides keys."""
        return not self.mask_holders or len(self.masks_of(party)) < len(self.mask_holders)


def protocol_spec(name: str) -> ProtocolSpec:
    """A registered protocol. Raises ConfigError, with the names there are, for any other."""
    return _SPECS[protocol_facts(name).name]


def register(spec: ProtocolSpec) -> None:
    """Offer a protocol in this process, under its name. Raises ConfigError for a name that is taken."""
    add_facts(spec.facts)
    _SPECS[spec.facts.name] = spec


def unregister(name: str) -> None:
    """Take a protocol away again. Raises ConfigError for an unknown one."""
    remove_facts(name)
    del _SPECS[name]


def _trio_party(setup: PartySetup) -> Trio:
    kind = ExactTrio if setup.exact else Trio
    return kind(
        setup.party, setup.transport, setup.ring, setup.pair_seeds, setup.input_keys, setup.adder,
        comparing=_comparing(setup),
    )  # fmt: skip


def _comparing(setup: PartySetup) -> Seed | None:
    """The seed of the ciphers of comparison keys, if the parties may take such keys."""
    if not setup.adder.may_take_keys:
        return None
    return Seed(bytes(32)) if setup.counting else agree_on_ciphers(setup.transport, setup.party)


def _dealer_party(setup: PartySetup) -> TwoPartyDealer:
    kind = ExactDealer if setup.exact else TwoPartyDealer
    return kind(
        setup.party, setup.transport, setup.ring, setup.pair_seeds, setup.input_keys, setup.adder,
        comparing=_comparing(setup), remask=setup.config.matmul == "remask",
    )  # fmt: skip


def _quad_party(setup: PartySetup) -> Quad:
    """Parties 0 to 3 first agree on a seed for each three of them."""
    if setup.counting:
        zero = Seed(bytes(32))
        groups = [zero if setup.party in group else None for group in GROUPS]
    else:
        met = meet_groups(setup.transport, setup.party, setup.input_keys)
        cipher = next(iter(setup.pair_seeds.values())).cipher
        groups = [group and Seed(group.raw(), cipher) for group in met]
    kind = ExactQuad if setup.exact else Quad
    return kind(setup.party, setup.transport, setup.ring, setup.pair_seeds, groups, setup.input_keys, setup.adder)


def _plain_party(setup: PartySetup) -> Plain:
    checked = setup.config.debug_ranges and not setup.counting
    return (CheckedPlain if checked else Plain)(setup.party, setup.transport, setup.ring)


def _masked_part_first(config: PrivateConfig, party: int, masks: tuple[Tensor, ...], part: Tensor) -> Share:
    return Share((part, *masks))


def _quad_share(config: PrivateConfig, party: int, masks: tuple[Tensor, ...], part: Tensor) -> Share:
    return share_of(party, masks, part)


def _plain_share(config: PrivateConfig, party: int, masks: tuple[Tensor, ...], part: Tensor) -> Share:
    return cleartext(part, config.debug_ranges)


_TRIO = ProtocolSpec(
    protocol_facts("trio"), party=_trio_party, client=TrioClient, open=open_trio, hold=_masked_part_first,
    mask_holders=TrioClient.mask_holders, cost=trio_cost,
)  # fmt: skip
_QUAD = ProtocolSpec(
    protocol_facts("quad"), party=_quad_party, client=QuadClient, open=open_quad, hold=_quad_share,
    mask_holders=QuadClient.mask_holders, cost=quad_cost,
)  # fmt: skip
_DEALER = ProtocolSpec(
    protocol_facts("dealer"), party=_dealer_party, client=partial(TrioClient, one_hot=True), open=open_trio,
    hold=_masked_part_first, mask_holders=TrioClient.mask_holders, cost=dealer_cost,
)  # fmt: skip
_PLAIN = ProtocolSpec(
    protocol_facts("plain"), party=_plain_party, client=PlainClient, open=open_plain, hold=_plain_share
)
_SPECS = {spec.facts.name: spec for spec in (_TRIO, _QUAD, _DEALER, _PLAIN)}
