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
from private_llm.protocols.dealer import DealerArithmetic, DealerParty, DealerShuffles
from private_llm.protocols.ends import ClientEnd, PartySetup
from private_llm.protocols.exact import exact
from private_llm.protocols.one_step import PiecesShape
from private_llm.protocols.plain import CheckedPlain, Plain, PlainClient, open_plain
from private_llm.protocols.prices import Adder, Prices
from private_llm.protocols.protocol import DECLARED, Protocol
from private_llm.protocols.quad.arithmetic import QuadArithmetic
from private_llm.protocols.quad.bits import QuadBits
from private_llm.protocols.quad.client import QuadClient, open_quad, share_of
from private_llm.protocols.quad.records import QuadParty
from private_llm.protocols.quad.shuffle import QuadShuffles
from private_llm.protocols.share import Share, cleartext
from private_llm.protocols.trio.arithmetic import TrioArithmetic
from private_llm.protocols.trio.bits import TrioBits
from private_llm.protocols.trio.client import TrioClient, open_trio
from private_llm.protocols.trio.division import Family, TrioDivision, TrioParty
from private_llm.protocols.trio.one_step import ComparisonKeys, OneStep
from private_llm.protocols.trio.shuffle import TrioShuffles
from private_llm.ring.ring import Ring

__all__ = ["PartySetup", "Pricing", "ProtocolSpec", "protocol_names", "protocol_spec", "register", "unregister"]


@dataclass(frozen=True)
class ProtocolSpec:
    """One protocol: facts, both ends, and how weights are shared. Raises ConfigError for holders that are no parties.

    party, client: make an end, with exact divisions if setup.exact; with setup.counting nothing may be sent.
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


class Primitives:
    """The table of a protocol: what its parties are, and the families of primitives, with prices, that they compute by.

    What it lists, the protocol has; what it lacks, the protocol does not have.
    """

    def __init__(self, party: type[TrioParty], *families: type[Family]) -> None:
        """Raises ConfigError for methods of families that no session would call."""
        taken = {*dir(Protocol)} - {*DECLARED} | party.primitives
        for family in families:
            if odd := {name for name in taken & {*dir(family)} if not name.startswith("_")}:
                raise ConfigError(f"{family.__name__}: got {', '.join(sorted(odd))}; {party.__name__} has its own")
        self.party, self.families = party, families
        self.prices = Prices(party, *families)

    def __call__(self, setup: PartySetup) -> TrioParty:
        """One party's end, with exact divisions if the setup asks for them; its primitives are bound here, once."""
        end = self.party(setup)
        end.prices = self.prices
        taken = [each for each in self.families if each is not ComparisonKeys or setup.config.may_take_keys]
        end.take(*(family(end, setup) for family in taken))
        return exact(end) if setup.exact else end


# Quad's arithmetic and bits are Trio's with a check (they inherit from those families), its shuffles are its own.
TRIO = Primitives(TrioParty, TrioArithmetic, TrioDivision, TrioBits, TrioShuffles, ComparisonKeys, OneStep)
DEALER = Primitives(DealerParty, DealerArithmetic, TrioDivision, TrioBits, DealerShuffles, ComparisonKeys, OneStep)
QUAD = Primitives(QuadParty, QuadArithmetic, QuadBits, QuadShuffles)

trio_prices, dealer_prices, quad_prices = TRIO.prices, DEALER.prices, QUAD.prices


def _plain_party(setup: PartySetup) -> Plain:
    checked = setup.config.debug_ranges and not setup.counting
    return (CheckedPlain if checked else Plain)(setup.party, setup.transport, setup.ring)


def _masked_part_first(config: PrivateConfig, party: int, masks: tuple[Tensor, ...], part: Tensor) -> Share:
    return Share((part, *masks))


_SPECS = {
    spec.facts.name: spec
    for spec in (
        ProtocolSpec(
            protocol_facts("trio"), party=TRIO, client=TrioClient, open=open_trio,
            hold=_masked_part_first, mask_holders=TrioClient.mask_holders, cost=TRIO.prices,
        ),
        ProtocolSpec(
            protocol_facts("quad"), party=QUAD, client=QuadClient, open=open_quad,
            hold=lambda config, party, masks, part: share_of(party, masks, part),
            mask_holders=QuadClient.mask_holders, cost=QUAD.prices,
        ),
        ProtocolSpec(
            protocol_facts("dealer"), party=DEALER,
            client=partial(TrioClient, one_hot=True), open=open_trio, hold=_masked_part_first,
            mask_holders=TrioClient.mask_holders, cost=DEALER.prices,
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
        adder = Adder(config.adder, config.bandwidth_mbit, config.latency_ms)
        return cls(protocol_spec(config.protocol).cost or TRIO.prices, Ring(config.ring), adder)

    def comparison(self, count: int, bits: int, thresholds: int = 1) -> Cost:
        """`msb` of `count` elements of `bits` bits, by the adder that it will choose."""
        if not count:
            return Cost()
        prefix, ripple = (
            self.prices.msb(count, bits, thresholds),
            partial(self.prices.msb_ripple, count, bits, thresholds),
        )
        return ripple() if self.adder.ripples(lambda: prefix, ripple) else prefix

    def sign_seconds(self, keys: bool, count: int, bits: int) -> float:
        """What `msb` of `count` elements of `bits` bits takes, or where `keys` may, comparison keys for it if less."""
        shape, circuit = PiecesShape(1, 1, bits), self.seconds(self.comparison(count, bits))
        made = self.prices.piecewise(self.ring, count, shape) if keys else None
        by_keys = None if made is None else self.adder.key_seconds(made, shape.cipher_blocks(count))
        return circuit if by_keys is None else min(circuit, by_keys)

    def numbers(self, count: int, rows: int = 1) -> Cost:
        """Sums of `rows` bits as `count` ring elements."""
        return self.prices.inject(self.ring, count, rows, 0, 0)

    def seconds(self, cost: Cost) -> float:
        """What a cost takes on the configured network; at ASSUMED_MBIT where its bandwidth is not given."""
        return self.adder.seconds(cost, self.adder.bandwidth_mbit or ASSUMED_MBIT)
