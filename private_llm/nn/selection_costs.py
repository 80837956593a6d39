"""What a policy of the KV cache sends and waits for, by formula: an eviction, a choice of clusters, a step's attention.

All counts are public. With e bytes of a ring element, f fractional bits and products of e' = 3 (e + f/8) bytes an
output with truncation, 3 e without (trio: 30.75 and 24), for `blocks` pairs of row and key head, `shared` query heads
each, n entries of D and Dv elements, and k chosen ones in clusters of s:

    likeness and choice    clusters e' + top-k + the making of rows
    scores                 n shared 3 e
    taken, put back        (k + n) shared 3 e         one-hot; two shuffles of n shared elements where they are shuffled
    softmax                (first + k + tail) shared entries, instead of n shared
    values                 Dv shared e'
    keys gathered instead  k (D + Dv) 3 e, and neither `taken` nor n scores
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

from private_llm.kv_policies.policy import ClusterShape
from private_llm.net.ledger import Cost
from private_llm.oblivious.chosen_rows import one_hot_cost, shuffled_cost
from private_llm.oblivious.compaction import compaction_cost
from private_llm.oblivious.pricing import Pricing
from private_llm.oblivious.topk import cost as topk_cost
from private_llm.protocols.session import Session

Gather = Literal["scores", "shuffled-scores", "keys"]
GATHERS: tuple[Gather, ...] = ("scores", "shuffled-scores", "keys")


def gather_cost(
    pricing: Pricing, shape: ClusterShape, blocks: int, shared: int, depth: int, value_size: int, gather: str
) -> Cost:
    """What the way of bringing chosen entries together decides about: rows, taking, scores, putting back.

    Without likeness, top-k, softmax and the product with values, which are alike for all ways; masses are not put back.
    """
    prices, ring = pricing.prices, pricing.ring
    total = Cost()
    entries = shape.first + shape.clustered + shape.tail
    moved = depth + value_size + 1 if gather == "keys" else shared
    left = shape.first + shape.chosen + shape.tail
    for there, kept, size in zip(shape.there, shape.kept, shape.sizes, strict=True):
        width, inner = size * moved, size // shape.sizes[-1] if size != shape.sizes[-1] else 0
        if gather == "shuffled-scores":
            total += shuffled_cost(prices, blocks, there) + prices.shuffle(ring, blocks * there * width)
            total += prices.shuffle(ring, blocks * there * width, undo=True)
            total += prices.shuffle(ring, blocks * there * inner) if inner else Cost()
        else:
            total += one_hot_cost(prices, ring, blocks, there, kept)
            total += prices.product(ring, blocks * kept * width, 0)
            total += prices.product(ring, blocks * kept * inner, 0) if inner else Cost()
            if gather == "scores":
                total += prices.product(ring, blocks * there * width, 0)
    return total + prices.product(ring, blocks * shared * (left if gather == "keys" else entries), 0)


@lru_cache(maxsize=1024)
def _cheapest(pricing: Pricing, shape: ClusterShape, blocks: int, shared: int, depth: int, value_size: int) -> Gather:
    made = {
        gather: sum(gather_cost(pricing, shape, blocks, shared, depth, value_size, gather).sent.values())
        for gather in GATHERS
    }
    return min(GATHERS, key=lambda gather: made[gather])


def cheapest_gather(
    session: Session, shape: ClusterShape, blocks: int, shared: int, depth: int, value_size: int
) -> Gather:
    """The way of the fewest bytes. Public and local."""
    return _cheapest(Pricing.of(session.config), shape, blocks, shared, depth, value_size)


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
        + prices.shuffle(ring, blocks * ranked * element_count)
    )
