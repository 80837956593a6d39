"""What a policy of the KV cache sends and waits for, by formula: evictions, choices of clusters, steps of attention."""

from __future__ import annotations

from private_llm.kv_cache.policies.policy import ClusterShape
from private_llm.kv_cache.selection_costs import LIKENESS_BITS, LIKENESS_REACH, composes, moving_cost, rows_cost
from private_llm.net.ledger import Cost
from private_llm.oblivious.topk import cost as topk_cost
from private_llm.protocols.registry import Pricing
from tests.oblivious.prices import compaction_cost


def ranking_cost(pricing: Pricing, shape: ClusterShape, blocks: int, depth: int, frac: int, query_shift: int) -> Cost:
    """Likenesses, the top-k of each level and its marks as numbers.

    frac: fractional bits of representatives, and of queries once `query_shift` bits of them (0: none) are truncated.
    """
    prices, ring = pricing.prices, pricing.ring
    clusters = sum(shape.clustered // size for size in shape.sizes)
    total = prices.truncate(ring, blocks * depth, query_shift) if query_shift else Cost()
    total += prices.product(ring, blocks * clusters, 2 * frac - LIKENESS_BITS)
    for there, kept in zip(shape.there, shape.kept, strict=True):
        total += topk_cost(pricing, blocks, there, kept, LIKENESS_BITS + LIKENESS_REACH + 1)
        total += prices.inject(ring, blocks * there, 1, 0, 0)
    return total


def step_cost(
    pricing: Pricing, shape: ClusterShape, blocks: int, shared: int, depth: int, value_size: int, gather: str,
    frac: int, score_shift: int, query_shift: int = 0, leads: bool = True, weigh: bool = False,
    width: int | None = None,
) -> Cost:  # fmt: skip
    """Attention of one new token, without its softmax over first, chosen and newest entries.

    score_shift: bits that are truncated from scores: frac, and j more for a scale of 2^-j. query_shift: bits of a query
    that are truncated before (once for its likeness, once for scores). leads: False for a layer that uses the choice of
    another: it neither ranks nor makes rows. width: as `moving_cost`.
    """
    prices, ring = pricing.prices, pricing.ring
    left = blocks * shared * (shape.first + shape.chosen + shape.tail)
    total = moving_cost(pricing, shape, blocks, shared, depth, value_size, gather, weigh=weigh, width=width,
                        shift=score_shift)  # fmt: skip
    if query_shift:
        total += prices.truncate(ring, blocks * shared * depth, query_shift)
    total += prices.truncate(ring, left, score_shift) if width is None else Cost()
    total += prices.product(ring, blocks * shared * value_size, frac)
    if not leads:
        return total
    choice = ranking_cost(pricing, shape, blocks, depth, frac, query_shift)
    composed = composes(shape, shared, depth, value_size, gather)
    return total + choice + rows_cost(pricing, shape, blocks, gather, composed)


def eviction_cost(pricing: Pricing, blocks: int, ranked: int, kept: int, bits: int, element_count: int) -> Cost:
    """What an eviction sends: the top `kept` of `ranked` entries for each of `blocks`, and a shuffle of these entries.

    bits: of an entry's attention with its sign, in ring elements. element_count: D + Dv, for each layer that follows
    the choice once more a shuffle (which is all that they pay).
    """
    prices, ring = pricing.prices, pricing.ring
    return (
        topk_cost(pricing, blocks, ranked, kept, bits)
        + prices.inject(ring, blocks * ranked, 1, 0, 0)
        + compaction_cost(prices, ring, blocks, ranked, kept)
        + prices.shuffle(ring, blocks * ranked * element_count, left=blocks * kept * element_count)
    )
