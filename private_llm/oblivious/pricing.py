"""What whole algorithms cost: sums of a protocol's prices, and the seconds they take on the configured network."""

from __future__ import annotations

from dataclasses import dataclass

from private_llm.config import PrivateConfig
from private_llm.net.ledger import Cost
from private_llm.protocols.prices import Adder, Prices
from private_llm.protocols.registry import protocol_spec
from private_llm.ring.ring import Ring

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
        prices = protocol_spec(config.protocol).cost or protocol_spec("trio").cost
        if prices is None:
            raise TypeError("trio states no prices")
        return cls(prices, Ring(config.ring), Adder.of(config))

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
