"""What tournaments of cut entries send under trio, level by level."""

from private_llm.config import PrivateConfig
from private_llm.exact.maximum import _fastest
from private_llm.net.ledger import Cost
from private_llm.protocols.registry import Pricing
from private_llm.protocols.registry import trio_prices as cost
from private_llm.ring.ring import Ring
from tests.harness import TRIO


def pair_price(pairs: int, width: int) -> Cost:
    """Of a level of pairs of cut entries of `width` bits."""
    return cost.msb(pairs, width) + cost.inject(Ring(64), pairs, 1, 1, 0, low=width)


def group_price(groups: int, size: int, width: int) -> Cost:
    """Of groups of `size` cut entries that meet at once: all pairs, their bits as numbers, ranks, entries kept."""
    pairs, bits = groups * size * (size - 1) // 2, (size - 1).bit_length() + 1
    ranks = cost.msb(pairs, width) + cost.inject(Ring(64), pairs, 1, 0, 0, low=bits)
    return ranks + cost.msb(groups * size, bits) + cost.inject(Ring(64), groups * size, 1, 1, 0, low=width)


def tournament_price(rows: int, entries: int, width: int, config: PrivateConfig = TRIO) -> Cost:
    """Of rows of cut entries, by the sizes of groups that `_fastest` finds."""
    total, pricing = Cost(), Pricing.of(config)
    while entries > 1:
        size = _fastest(pricing, False, rows, entries, width, width)[1]
        groups = -(-entries // size)
        step = pair_price(rows * (entries // 2), width) if size == 2 else group_price(rows * groups, size, width)
        total, entries = total + step, groups
    return total
