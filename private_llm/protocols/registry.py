"""The protocols there are: one `ProtocolSpec` each, which sessions, model owners and clients read.

`register` adds a protocol to those of this library, for this process: parties in other processes must register it, too
(`PrivateConfig.plugins`). What settings and texts say of it is its `ProtocolFacts` (protocol_facts.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError
from private_llm.net.ledger import Cost
from private_llm.net.transport import Transport
from private_llm.protocol_facts import ProtocolFacts, add_facts, protocol_facts, protocol_names, remove_facts
from private_llm.protocols.dealer import TwoPartyDealer, dealer_prices
from private_llm.protocols.ends import ClientEnd, PartySetup
from private_llm.protocols.exact import ExactTruncation
from private_llm.protocols.plain import CheckedPlain, Plain, PlainClient, open_plain
from private_llm.protocols.prices import Adder, Prices, trio_prices
from private_llm.protocols.protocol import Protocol
from private_llm.protocols.quad.bits import Quad
from private_llm.protocols.quad.client import QuadClient, open_quad, share_of
from private_llm.protocols.quad.cost import quad_prices
from private_llm.protocols.share import Share, cleartext
from private_llm.protocols.trio.client import TrioClient, open_trio
from private_llm.protocols.trio.division import TrioDivision
from private_llm.protocols.trio.party import Trio
from private_llm.ring.ring import Ring

__all__ = ["PartySetup", "Pricing", "ProtocolSpec", "protocol_names", "protocol_spec", "register", "unregister"]

MakesParty = Callable[[PartySetup], Protocol]


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
    party: MakesParty
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


def _either(usual: type[TrioDivision]) -> MakesParty:
    exact: MakesParty = type(f"Exact{usual.__name__}", (ExactTruncation, usual), {})
    return lambda setup: (exact if setup.exact else usual)(setup)


def _plain_party(setup: PartySetup) -> Plain:
    checked = setup.config.debug_ranges and not setup.counting
    return (CheckedPlain if checked else Plain)(setup.party, setup.transport, setup.ring)


def _masked_part_first(config: PrivateConfig, party: int, masks: tuple[Tensor, ...], part: Tensor) -> Share:
    return Share((part, *masks))


_SPECS = {
    spec.facts.name: spec
    for spec in (
        ProtocolSpec(
            protocol_facts("trio"), party=_either(Trio), client=TrioClient, open=open_trio,
            hold=_masked_part_first, mask_holders=TrioClient.mask_holders, cost=trio_prices,
        ),
        ProtocolSpec(
            protocol_facts("quad"), party=_either(Quad), client=QuadClient, open=open_quad,
            hold=lambda config, party, masks, part: share_of(party, masks, part),
            mask_holders=QuadClient.mask_holders, cost=quad_prices,
        ),
        ProtocolSpec(
            protocol_facts("dealer"), party=_either(TwoPartyDealer),
            client=partial(TrioClient, one_hot=True), open=open_trio, hold=_masked_part_first,
            mask_holders=TrioClient.mask_holders, cost=dealer_prices,
        ),
        ProtocolSpec(
            protocol_facts("plain"), party=_plain_party, client=PlainClient, open=open_plain,
            hold=lambda config, party, masks, part: cleartext(part, config.debug_ranges),
        ),
    )
}  # fmt: skip


# -- what algorithms cost --------------------------------------------------------------------------------------------
ASSUMED_MBIT = 1000.0
"""Mbit/s that choices of a method suppose where `bandwidth_mbit` says nothing.

Reason: docs/decisions/233-top-k-methods-are-priced-at-one-gigabit.md.
"""


@dataclass(frozen=True)
class Pricing:
    """Prices of a protocol in its ring, with the adder that its comparisons use. Public, hashable."""

    prices: Prices
    ring: Ring
    adder: Adder

    @classmethod
    def of(cls, config: PrivateConfig) -> Pricing:
        """Of a configuration; trio's prices for a protocol that states none, so that `plain` runs what trio runs."""
        return cls(protocol_spec(config.protocol).cost or trio_prices, Ring(config.ring), Adder.of(config))

    def comparison(self, count: int, bits: int, thresholds: int = 1) -> Cost:
        """`msb` of `count` elements of `bits` bits, by the adder that it will choose."""
        if not count:
            return Cost()
        prefix, ripple = (made(count, bits, thresholds) for made in (self.prices.msb, self.prices.msb_ripple))
        return ripple if self.adder.ripples(lambda: prefix, lambda: ripple) else prefix

    def numbers(self, count: int, rows: int = 1) -> Cost:
        """Sums of `rows` bits as `count` ring elements."""
        return self.prices.inject(self.ring, count, rows, 0, 0)

    def seconds(self, cost: Cost) -> float:
        """What a cost takes on the configured network; at ASSUMED_MBIT where its bandwidth is not given."""
        return self.adder.seconds(cost, self.adder.bandwidth_mbit or ASSUMED_MBIT)
