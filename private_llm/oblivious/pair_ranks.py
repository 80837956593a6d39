"""Top-k by ranks: every pair of a row is compared once, so the depth is that of two comparisons, whatever n is.

n (n - 1) / 2 comparisons a row: for rows of some tens of entries. What runs is `exact.topk.bits_of_largest`.
"""

from __future__ import annotations

from private_llm.net.ledger import Cost
from private_llm.oblivious.pricing import Pricing


def cost(pricing: Pricing, rows: int, width: int, bits: int) -> Cost:
    """Of the k largest of each row, for any 0 < k < width: two comparisons, and a bit made a number between them."""
    pairs = rows * width * (width - 1) // 2
    ranked = pricing.comparison(rows * width, (width - 1).bit_length() + 1)
    return pricing.comparison(pairs, bits + 1) + pricing.numbers(pairs) + ranked
