"""What every primitive of Quad sends and waits for, as formulas of public shapes.

The main run is Trio's, with party 3 as the helper that sends; the mirror adds what parties 2 and 3 tell party 0, and
no round: nobody waits for party 0.
"""

from __future__ import annotations

from private_llm.net.ledger import Cost
from private_llm.protocols.arithmetic import BitWidths
from private_llm.protocols.carry import carry_plan
from private_llm.protocols.prices import Prices, trio_prices
from private_llm.protocols.quad.client import DIGEST_BYTES, TAG_BYTES
from private_llm.protocols.share import words_for
from private_llm.ring.ring import Ring


def main_run(cost: Cost) -> Cost:
    """Trio's price with party 3 as the helper."""
    return Cost({(3 if a == 0 else a, b): count for (a, b), count in cost.sent.items()}, cost.rounds)


def mirrored(cost: Cost) -> Cost:
    """Trio's price and its check: what the helper sends party 2 tells party 0, and what an evaluator opens party 3."""
    told = {(2, 0): cost.sent.get((0, 2), 0), (3, 0): cost.sent.get((1, 2), 0)}
    return main_run(cost) + Cost(told)


class QuadPrices(Prices):
    """Quad's prices: what differs from Trio's. Rounds as there but for shuffles and openings."""

    def finish(self, ring: Ring, count: int, shift: int, helped: bool) -> Cost:
        """From additive pieces to a checked share of `count` outputs: 5 (e + f bits) each in all.

        Without shift 5 e, or 3 e where the helper sends no piece (`helped` is False).
        """
        return mirrored(trio_prices.finish(ring, count, shift, helped))

    def product(self, ring: Ring, count: int, shift: int, widths: BitWidths | None = None) -> Cost:
        """One finish, whatever the widths."""
        return self.finish(ring, count, shift, helped=True)

    def truncate(self, ring: Ring, count: int, shift: int, widths: BitWidths | None = None) -> Cost:
        """e + f bits to each of parties 2 and 0, f bits each way and from party 3 to 0; 1 round."""
        return mirrored(trio_prices.truncate(ring, count, shift))

    def poly(self, ring: Ring, count: int, degree: int, shift: int) -> Cost:
        """degree - 1 elements to each of parties 2 and 0, then one finish."""
        return mirrored(trio_prices.poly(ring, count, degree, shift))

    def msb(self, count: int, bits: int, thresholds: int = 1, low: int = 0) -> Cost:
        """The mirror shares the monomials for every threshold, not once."""
        plan = carry_plan(bits - 1 - low)
        lanes = 8 * words_for(count) * thresholds
        told = (plan.monomial_rows + plan.products + 1) * lanes
        return main_run(trio_prices.msb(count, bits, thresholds, low)) + Cost(
            {(2, 0): told, (3, 0): plan.online_rows * lanes}
        )

    def gate(self, count: int, rows: int = 1) -> Cost:
        """1 bit pre, 1 each way, and 2 to party 0; 1 round."""
        return mirrored(trio_prices.gate(count, rows))

    def msb_ripple(self, count: int, bits: int, thresholds: int = 1, low: int = 0) -> Cost:
        """`bits` mask bits to party 2, as many bits of M per threshold to party 0, then the gates."""
        row = 8 * words_for(count)
        shared = Cost({(3, 2): row * bits, (2, 0): row * bits * thresholds})
        return shared + self.gate(count, thresholds).times(bits - 1 - low)

    def inject(self, ring: Ring, count: int, rows: int, weighted: int, shift: int, low: int | None = None) -> Cost:
        """1 element per row and per weighted row to parties 2 and 0, then one finish; the same with `low`."""
        return mirrored(trio_prices.inject(ring, count, rows, weighted, shift))

    def verify(self) -> Cost:
        """Two tags of 16 bytes to party 0, one verdict of 1 byte to each other; 2 rounds, whatever was computed."""
        return Cost({(1, 0): TAG_BYTES, (2, 0): TAG_BYTES, (0, 1): 1, (0, 2): 1, (0, 3): 1}, 2)

    def moved(self, size: int, undo: bool, left: int | None) -> Cost:
        """By four sub-permutations: 12 elements for each, and two digests; 3 rounds."""
        between = 2 * size + DIGEST_BYTES
        masks = dict.fromkeys([(3, 0), (3, 1), (3, 2), (2, 0)], 2 * size)
        return Cost({**masks, (1, 2): between, (2, 1): between}, 3)

    def open_shuffled(self, count: int, rows: int = 1) -> Cost:
        """`verify`, then to each party the component that it lacks and its digest; 3 rounds."""
        size = 8 * words_for(count) * rows
        told = dict.fromkeys([(2, 0), (2, 1), (1, 2), (1, 3)], size)
        vouched = dict.fromkeys([(3, 0), (3, 1), (3, 2), (2, 3)], DIGEST_BYTES)
        return self.verify() + Cost({**told, **vouched}, 1) + Cost({(3, 0): 1})


quad_prices = QuadPrices()
