"""What ways of attending to chosen clusters send and wait for, by formula, so that the cheapest is taken.

All counts are public. With e bytes of a ring element, f fractional bits and products of e' = 3 (e + f/8) bytes an
output with truncation, 3 e without (trio: 30.75 and 24), for `blocks` pairs of row and key head, `shared` query heads
each, n entries of D and Dv elements, and k chosen ones in clusters of s:

    likeness and choice    clusters e' + top-k + the making of rows
    scores                 n shared 3 e, or narrower by what softmax does not read
    taken, put back        (k + n) shared 3 e         one-hot, of all levels together; else two shuffles of n shared
    softmax                (first + k + tail) shared entries, instead of n shared
    values                 Dv shared e'
    keys gathered instead  k (D + Dv) 3 e, and neither `taken` nor n scores
"""

from functools import lru_cache
from typing import Literal

from private_llm.kv_cache.policies.policy import ClusterShape
from private_llm.net.ledger import Cost
from private_llm.oblivious.chosen_rows import one_hot_cost, shuffled_cost
from private_llm.protocols.registry import Pricing
from private_llm.protocols.session import Session
from private_llm.protocols.share import BitWidths
from private_llm.ranges import REACH

Gather = Literal["scores", "shuffled-scores", "keys"]
LIKENESS_BITS = 8  # fractional bits of likeness: ranking needs no more
LIKENESS_REACH = REACH + 4  # bits of its magnitude: scores without their scale, of several query heads

GATHERS: tuple[Gather, ...] = ("scores", "shuffled-scores", "keys")


def gather_cost(
    pricing: Pricing, shape: ClusterShape, blocks: int, shared: int, depth: int, value_size: int, gather: str
) -> Cost:
    """What a way to bring chosen entries together costs by itself: `rows_cost` and `moving_cost`."""
    moving = moving_cost(pricing, shape, blocks, shared, depth, value_size, gather)
    return rows_cost(pricing, shape, blocks, gather, composes(shape, shared, depth, value_size, gather)) + moving


def composes(shape: ClusterShape, shared: int, depth: int, value_size: int, gather: str) -> bool:
    """Whether one-hot rows of several levels become one matrix, with fewer entries than outer levels move. Public."""
    if gather == "shuffled-scores" or len(shape.sizes) == 1:
        return False
    moved, back = (depth + value_size, 0) if gather == "keys" else (shared, shared)
    outer = sum(kept * size for kept, size in zip(shape.kept[:-1], shape.sizes, strict=False))
    return sum(_composed(shape)) <= outer * (moved + back)


def _composed(shape: ClusterShape) -> list[int]:
    """Entries of the matrices of composed levels, from the second on."""
    return [kept * (shape.clustered // size) for kept, size in list(zip(shape.kept, shape.sizes, strict=True))[1:]]


def rows_cost(pricing: Pricing, shape: ClusterShape, blocks: int, gather: str, composed: bool = False) -> Cost:
    """Making the rows of each level, and taking the likenesses of the clusters within those that are left."""
    prices, ring = pricing.prices, pricing.ring
    total = Cost()
    for count in _composed(shape) if composed else ():
        total += prices.product(ring, blocks * count, 0)
    shuffled = gather == "shuffled-scores"
    for place, (there, kept, size) in enumerate(zip(shape.there, shape.kept, shape.sizes, strict=True)):
        total += shuffled_cost(prices, blocks, there) if shuffled else one_hot_cost(prices, ring, blocks, there, kept)
        for smaller in shape.sizes[place + 1 :]:
            inner = blocks * (size // smaller)
            taken = prices.shuffle(ring, there * inner, left=kept * inner)
            total += taken if shuffled else prices.product(ring, kept * inner, 0)
    return total


def moving_cost(
    pricing: Pricing, shape: ClusterShape, blocks: int, shared: int, depth: int, value_size: int, gather: str,
    column: bool = False, weigh: bool = False, width: int | None = None, shift: int = 0,
) -> Cost:  # fmt: skip
    """Scores, taking, putting back. A layer that uses the choices of another pays this and no `rows_cost`.

    column: one more is taken, of what scores are less (keys: at padding or under a secret mask; scores: if they are
    capped as well). weigh: keys' way puts masses back, too. width: bits of scores that softmax reads, with `shift` bits
    dropped from products; None: all, and those are dropped later.
    """
    prices, ring = pricing.prices, pricing.ring
    keys = gather == "keys"
    left = shape.first + (shape.chosen if keys else shape.clustered) + shape.tail
    moved, back = (depth + value_size if keys else shared) + column, int(weigh) if keys else shared
    levels = list(zip(shape.there, shape.kept, shape.sizes, strict=True))
    if composes(shape, shared, depth, value_size, gather):
        levels = [(shape.clustered // shape.sizes[-1], shape.kept[-1], shape.sizes[-1])]
    right = 0 if width is None else width + (0 if keys else len(levels))
    widths = BitWidths(min(ring.bits, right + shift), right) if right else None
    total = prices.product(ring, blocks * shared * left, shift if widths else 0, widths)
    for there, kept, size in levels:
        entries = blocks * size
        if gather == "shuffled-scores":
            total += prices.shuffle(ring, there * entries * moved, left=kept * entries * moved)
            total += prices.shuffle(ring, there * entries * back, undo=True)
            continue
        if right and not keys:
            total += prices.product(ring, kept * entries * moved, 1, BitWidths(right, right - 1))
            right -= 1
        else:
            total += prices.product(ring, kept * entries * moved, 0)
        total += prices.product(ring, there * entries * back, 0) if back else Cost()
    return total


@lru_cache(maxsize=1024)
def _cheapest(
    pricing: Pricing, shape: ClusterShape, blocks: int, shared: int, depth: int, value_size: int,
    ways: tuple[Gather, ...],
) -> Gather:  # fmt: skip
    return min(ways, key=lambda way: gather_cost(pricing, shape, blocks, shared, depth, value_size, way).total)


def cheapest_gather(
    session: Session, shape: ClusterShape, blocks: int, shared: int, depth: int, value_size: int
) -> Gather:
    """The way of the fewest bytes; in calls whose helping party runs ahead without shuffles. Public and local."""
    ways: tuple[Gather, ...] = ("scores", "keys") if session.protocol.runs_ahead else GATHERS
    return _cheapest(Pricing.of(session.config), shape, blocks, shared, depth, value_size, ways)
