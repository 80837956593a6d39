"""Top-k by searching the k-th largest entry digit by digit, from the highest digit on.

Bits are made of every entry once (`a2b`). Two bits an entry are then kept: whether it is larger than the digits found
so far (G), and whether it begins with them (C). For a digit of b bits and its values j = 1 .. 2^b - 1:

1. y_j = C and [digit >= j]: a gate. G or y_j are the entries that reach the digits found so far followed by j.
2. Count them in each row: bits in binary for some layers of gates, the rest as ring elements, whose sums are local.
3. d_j = [count >= k]: a comparison of a row's count, log2 n bits. The next digit is how many d_j are set.
4. C becomes y_d less y_(d+1), G becomes G or y_(d+1): one step of gates with the d_j.

At the end C are the entries equal to the k-th largest, of which the first k - |G| count: a sum over those before.
Nothing is opened, and what is sent depends on the shape alone. A comparison of each entry with several thresholds in
place of steps 1 and 4 takes 24 bytes and more an entry and digit (trio) where two gates take one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from private_llm.net.ledger import Cost
from private_llm.oblivious import counting
from private_llm.oblivious.counting import DEPTHS, column_sums, copies, each, joined, xor_all
from private_llm.protocols.protocol import Protocol
from private_llm.protocols.registry import Pricing
from private_llm.protocols.share import BitShare, packed, unpacked, words_for
from private_llm.tensor.fixed import Fixed

_DIGITS = (1, 2, 3, 4)
_FOLDS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class SearchPlan:
    """How rows of public shape are searched; all parties take the same.

    rows, width: of the entries. bits: of an entry, a multiple of `digit`, the bits found at once. depth: layers of
    gates that add bits up before they become ring elements. folds: how many entries of a row share a lane when they are
    counted; bits lie as [folds, lanes], lanes of whole words.
    """

    rows: int
    width: int
    bits: int
    digit: int
    depth: int
    folds: int

    @property
    def across(self) -> int:
        """Lanes of one row: its entries over `folds`."""
        return -(-self.width // self.folds)

    @property
    def lanes(self) -> int:
        """Lanes of all rows, up to whole words."""
        return 64 * words_for(self.rows * self.across)

    @property
    def size(self) -> int:
        """Entries with those that fill up rows and words."""
        return self.folds * self.lanes

    @property
    def count_bits(self) -> int:
        """Of a row's count minus k, with its sign."""
        return (self.width - 1).bit_length() + 1

    @property
    def thresholds(self) -> int:
        """Values of a digit but 0."""
        return (1 << self.digit) - 1

    def spread(self, part: Tensor) -> Tensor:
        """[rows, width] to [size], zeros where there is no entry."""
        filled = torch.nn.functional.pad(part, (0, self.folds * self.across - self.width))
        lanes = filled.view(self.rows, self.folds, self.across).transpose(0, 1).reshape(self.folds, -1)
        return torch.nn.functional.pad(lanes, (0, self.lanes - lanes.shape[1])).reshape(-1)

    def gather(self, words: Tensor) -> Tensor:
        """Words of [.., size] bits to those of [.., rows * width]."""
        bits = unpacked(words, self.size).view(-1, self.folds, self.lanes)[..., : self.rows * self.across]
        rows = bits.unflatten(-1, (self.rows, self.across)).transpose(1, 2).flatten(2)[..., : self.width]
        return packed(rows.reshape(-1, self.rows * self.width))

    def repeat(self, words: Tensor, vectors: int) -> Tensor:
        """Words of [vectors * rows] bits, one for each row, to [vectors, size / 64]: the same for each entry."""
        bits = unpacked(words, vectors * self.rows).view(vectors, self.rows, 1).expand(-1, -1, self.across)
        lanes = torch.nn.functional.pad(bits.reshape(vectors, -1), (0, self.lanes - self.rows * self.across))
        return packed(lanes).repeat(1, self.folds)


def largest_bits(x: Fixed, k: int, plan: SearchPlan) -> BitShare:
    """The k largest of each row of x [rows, n], 0 < k < n, as one row of bits [rows * n]. Of equals the first ones."""
    proto = x.proto
    # not negative, so that what fills up is below every entry and reaches no digit but 0
    lifted = proto.add_public(x.share, 1 << (plan.bits - 1)).map(plan.spread)
    bits = proto.a2b(lifted, plan.bits)
    larger = proto.xor(bits.row(0), bits.row(0))
    equal = proto.invert(larger)
    known = True  # before the first digit C is all entries
    for at_least in _digits(proto, bits, plan.digit):
        reached = at_least if known else proto.and_(copies(equal, plan.thresholds), at_least)
        larger, equal = _step(x, k, plan, reached, larger, equal)
        known = False
    return _first_of_equals(x, k, plan, larger, equal)


def _step(
    x: Fixed, k: int, plan: SearchPlan, reached: BitShare, larger: BitShare, equal: BitShare
) -> tuple[BitShare, BitShare]:
    """Steps 2 to 4 for one digit, with all y_j: G and C afterwards."""
    proto, rows = x.proto, plan.thresholds
    counts = _count(x, plan, proto.xor(copies(larger, rows), reached))
    enough = proto.invert(counts.less_than([float(k)], bits=plan.count_bits))
    found = BitShare(tuple(plan.repeat(part, rows) for part in enough.parts), plan.size)
    # entries whose digit is j - 1, for j = 1 .. 2^b
    exactly = proto.xor(joined(equal, reached), joined(reached, proto.xor(equal, equal)))
    chosen = proto.and_(joined(found, found), joined(exactly.some(0, rows), exactly.some(1, rows)))
    from_d = xor_all(proto, equal, chosen.some(0, rows))
    above_d = xor_all(proto, reached.row(0), chosen.some(rows, rows))
    return proto.xor(larger, above_d), proto.xor(from_d, above_d)


def _first_of_equals(x: Fixed, k: int, plan: SearchPlan, larger: BitShare, equal: BitShare) -> BitShare:
    """G, and of C the first ones as far as k goes, as bits of [rows * width]."""
    proto, count = x.proto, plan.rows * plan.width
    above = _count(x, plan, larger)
    kept, tied = (BitShare(tuple(map(plan.gather, bits.parts)), count) for bits in (larger, equal))
    ones = x.with_share(proto.inject(tied, None, [0], [1]), 0)
    upto = ones.view(lambda part: part.view(plan.rows, plan.width).cumsum(1, dtype=part.dtype))
    place = upto + above.view(lambda part: part.view(plan.rows, 1))
    within = place.less_than([k + 1.0], bits=plan.count_bits)
    return proto.xor(kept, proto.and_(tied, within))


# -- digits -----------------------------------------------------------------------------------------------------------
def _digits(proto: Protocol, bits: BitShare, digit: int) -> Iterator[BitShare]:
    """Rows [digit >= 1 .. 2^b - 1] for each digit of b bits, the highest digit first: b - 1 steps of gates for all.

    With a bit t above lower ones, [>= j] is t or [lower >= j], then t, then t and [lower >= j].
    """
    count, numbers = bits.count, bits.rows // digit
    at = [each(bits, lambda part, low=low: part[low::digit]) for low in range(digit)]  # type: ignore[misc]
    rows = [at[0]]  # one entry for each value, of as many rows as there are digits
    for top in at[1:]:
        both = proto.and_(copies(top, len(rows)), joined(*rows))
        under = [both.some(start, numbers) for start in range(0, both.rows, numbers)]
        rows = [proto.xor(proto.xor(top, row), low) for row, low in zip(rows, under, strict=True)] + [top, *under]
    for number in reversed(range(numbers)):
        yield BitShare(joined(*(row.row(number) for row in rows)).parts, count)


def _digits_cost(pricing: Pricing, plan: SearchPlan) -> Cost:
    total = Cost()
    for level in range(1, plan.digit):
        total += pricing.prices.gate(plan.size, plan.bits // plan.digit * ((1 << level) - 1))
    return total


# -- counting ---------------------------------------------------------------------------------------------------------
def _count(x: Fixed, plan: SearchPlan, bits: BitShare) -> Fixed:
    """How many bits of each row are set: bits of [vectors, size] to whole numbers [vectors, rows]."""
    vectors, words, rows, across = bits.rows, plan.lanes // 64, plan.rows, plan.across

    def folded(part: Tensor) -> Tensor:
        return part.view(vectors, plan.folds, words).transpose(0, 1).reshape(plan.folds, vectors * words)

    sums = column_sums(x, BitShare(tuple(map(folded, bits.parts)), vectors * plan.lanes), plan.depth)

    def summed(part: Tensor) -> Tensor:
        return (
            part.view(vectors, plan.lanes)[:, : rows * across].reshape(vectors, rows, across).sum(2, dtype=part.dtype)
        )

    return sums.view(summed)


def _count_cost(pricing: Pricing, plan: SearchPlan, vectors: int) -> Cost:
    return counting.cost(pricing, plan.folds, vectors * plan.lanes, plan.depth)


# -- the price, and the plan that it chooses --------------------------------------------------------------------------
def plan_cost(pricing: Pricing, plan: SearchPlan) -> Cost:
    """Of `largest_bits` with this plan, for every k."""
    prices, digits, rows = pricing.prices, plan.bits // plan.digit, plan.thresholds
    chosen = pricing.comparison(rows * plan.rows, plan.count_bits) + prices.gate(plan.size, 2 * rows)
    total = prices.a2b(pricing.ring, plan.size, plan.bits) + _digits_cost(pricing, plan)
    total += (_count_cost(pricing, plan, rows) + chosen).times(digits)
    total += prices.gate(plan.size, rows).times(digits - 1)
    count = plan.rows * plan.width
    total += _count_cost(pricing, plan, 1) + pricing.numbers(count)
    return total + pricing.comparison(count, plan.count_bits) + prices.gate(count)


@lru_cache(maxsize=1024)
def plan_for(pricing: Pricing, rows: int, width: int, bits: int) -> SearchPlan:
    """The plan that takes least time by its cost, of digits of 1 to 4 bits and all ways to count. Public."""
    # least entries with those that fill up, counting a lane as four of them: it becomes a ring element each way
    folds = min(_FOLDS, key=lambda each: 64 * words_for(rows * -(-width // each)) * (each + 4))
    plans = [
        SearchPlan(rows, width, -(-bits // digit) * digit, digit, depth, folds) for digit in _DIGITS for depth in DEPTHS
    ]
    fitting = [plan for plan in plans if plan.bits < pricing.ring.bits]
    return min(fitting, key=lambda plan: pricing.seconds(plan_cost(pricing, plan)))


def cost(pricing: Pricing, rows: int, width: int, bits: int) -> Cost:
    """Of the cheapest plan."""
    return plan_cost(pricing, plan_for(pricing, rows, width, bits))
