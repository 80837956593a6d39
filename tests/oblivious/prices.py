"""What oblivious algorithms send and wait for, by formula."""

from __future__ import annotations

from private_llm.net.ledger import Cost
from private_llm.protocols.prices import Prices
from private_llm.protocols.share import words_for
from private_llm.ring.ring import Ring


def compaction_cost(prices: Prices, ring: Ring, blocks: int, rows: int, kept: int) -> Cost:
    """Of `compact`."""
    total, bits = blocks * rows, (kept + 1).bit_length()
    return (
        prices.product(ring, total, 0)
        + prices.msb(bits * 64 * words_for(total), bits + 1)
        + prices.permutation(total)
        + prices.shuffle_bits(total, bits)
        + prices.open_shuffled(total, bits)
    )
