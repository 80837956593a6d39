"""Top-k by searching the k-th largest entry digit by digit, from the highest digit on.

Bits are made of every entry once (`a2b`). Two bits an entry are then kept: whether it is larger than the digits found
so far (G), and whether it begins with them (C). For a digit of b bits and its values j = 1 .. 2^b - 1:

1. y_j = C and [digit >= j]: a gate. G or y_j are the entries that reach the digits found so far followed by j.
2. Count them in each row: bits added up in binary for some layers of gates, the rest as ring elements, whose sums over
   the row are local.
3. d_j = [count >= k]: a comparison of a row's count, log2 n bits. The next digit is how many d_j are set.
4. C becomes y_d less y_(d+1), G becomes G or y_(d+1): one step of gates with the d_j.

At the end C are the entries equal to the k-th largest, of which the first k - |G| count: a sum over those before.
Nothing is opened, and what is sent depends on the shape alone. A comparison of each entry with several thresholds in
place of steps 1 and 4 takes 24 bytes and more an entry and digit (trio) where two gates take one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from private_llm.net.ledger import Cost
from private_llm.oblivious.pricing import Pricing
from private_llm.protocols.permutation import packed, unpacked
from private_llm.protocols.protocol import Protocol
from private_llm.protocols.share import BitShare, words_for
from private_llm.tensor.fixed import Fixed

_DIGITS = (1, 2, 3, 4)
_DEPTHS = range(8)
_FOLDS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Plan:
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
        return self.width.bit_length() + 1

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


def largest_bits(x: Fixed, k: int, plan: Plan) -> BitShare:
    """The k largest of each row of x [rows, n], 0 < k < n, as one row of bits [rows * n]. Of equals the first ones."""
    proto = x.proto
    lifted = proto.add_public(x.view(plan.spread).share, 1 << (plan.bits - 1))
    bits = proto.a2b(lifted, plan.bits)
    valid = packed(plan.spread(torch.ones(plan.rows, plan.width, dtype=torch.uint8)).view(1, -1))
    valid = valid.to(x.share.parts[0].device)
    larger = proto.xor(bits.row(0), bits.row(0))
    equal = _each(proto.invert(larger), lambda part: part & valid)
    known = True  # before the first digit C is public
    for at_least in _digits(proto, bits, plan.digit):
        if known:
            reached = _each(at_least, lambda part: part & valid)
        else:
            reached = proto.and_(_copies(equal, plan.thresholds), at_least)
        larger, equal = _step(x, k, plan, reached, larger, equal)
        known = False
    return _first_of_equals(x, k, plan, larger, equal)


def _step(
    x: Fixed, k: int, plan: Plan, reached: BitShare, larger: BitShare, equal: BitShare
) -> tuple[BitShare, BitShare]:
    """Steps 2 to 4 for one digit, with all y_j: G and C afterwards."""
    proto, rows = x.proto, plan.thresholds
    counts = _count(x, plan, proto.xor(_copies(larger, rows), reached))
    enough = proto.invert(counts.below([float(k)], bits=plan.count_bits))
    found = BitShare(tuple(plan.repeat(part, rows) for part in enough.parts), plan.size)
    # entries whose digit is j - 1, for j = 1 .. 2^b
    exactly = proto.xor(_joined(equal, reached), _joined(reached, proto.xor(equal, equal)))
    chosen = proto.and_(_joined(found, found), _joined(exactly.some(0, rows), exactly.some(1, rows)))
    from_d = _sum(proto, equal, chosen.some(0, rows))
    above_d = _sum(proto, reached.row(0), chosen.some(rows, rows))
    return proto.xor(larger, above_d), proto.xor(from_d, above_d)


def _first_of_equals(x: Fixed, k: int, plan: Plan, larger: BitShare, equal: BitShare) -> BitShare:
    """G, and of C the first ones as far as k goes, as bits of [rows * width]."""
    proto, count = x.proto, plan.rows * plan.width
    above = _count(x, plan, larger)
    kept, tied = (BitShare(tuple(map(plan.gather, bits.parts)), count) for bits in (larger, equal))
    ones = x.with_share(proto.inject(tied, None, [0], [1]), 0)
    upto = ones.view(lambda part: part.view(plan.rows, plan.width).cumsum(1, dtype=part.dtype))
    place = upto + above.view(lambda part: part.view(plan.rows, 1))
    within = place.below([k + 1.0], bits=plan.count_bits)
    return proto.xor(kept, proto.and_(tied, within))


# -- digits -----------------------------------------------------------------------------------------------------------
def _digits(proto: Protocol, bits: BitShare, digit: int) -> Iterator[BitShare]:
    """Rows [digit >= 1 .. 2^b - 1] for each digit of b bits, the highest digit first: b - 1 steps of gates for all.

    With a bit t above lower ones, [>= j] is t or [lower >= j], then t, then t and [lower >= j].
    """
    count, numbers = bits.count, bits.rows // digit
    at = [_each(bits, lambda part, low=low: part[low::digit]) for low in range(digit)]  # type: ignore[misc]
    rows = [at[0]]  # one entry for each value, of as many rows as there are digits
    for top in at[1:]:
        both = proto.and_(_copies(top, len(rows)), _joined(*rows))
        under = [both.some(start, numbers) for start in range(0, both.rows, numbers)]
        rows = [proto.xor(proto.xor(top, row), low) for row, low in zip(rows, under, strict=True)] + [top, *under]
    for number in reversed(range(numbers)):
        yield BitShare(_joined(*(row.row(number) for row in rows)).parts, count)


def _digits_cost(pricing: Pricing, plan: Plan) -> Cost:
    total = Cost()
    for level in range(1, plan.digit):
        total += pricing.prices.gate(plan.size, plan.bits // plan.digit * ((1 << level) - 1))
    return total


# -- counting ---------------------------------------------------------------------------------------------------------
@lru_cache(maxsize=256)
def _tree(rows: int, depth: int) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """How often three bits of each weight (2^0, 2^1, ..) are added up in each layer, and how many are left of each."""
    left, steps = [rows], []
    for _ in range(depth):
        triples = [many // 3 for many in left]
        if not any(triples):
            break
        steps.append(tuple(triples))
        carried = [0, *triples]
        left = [many - 2 * made + new for many, made, new in zip([*left, 0], [*triples, 0], carried, strict=True)]
        left = left if left[-1] else left[:-1]
    return tuple(steps), tuple(left)


def _count(x: Fixed, plan: Plan, bits: BitShare) -> Fixed:
    """How many bits of each row are set: bits of [vectors, size] to whole numbers [vectors, rows]."""
    proto, vectors = x.proto, bits.rows
    lanes = vectors * plan.lanes
    words = plan.lanes // 64

    def folded(part: Tensor) -> Tensor:
        return part.view(vectors, plan.folds, words).transpose(0, 1).reshape(plan.folds, vectors * words)

    weighted = [BitShare(tuple(map(folded, bits.parts)), lanes)]
    steps, _ = _tree(plan.folds, plan.depth)
    for triples in steps:
        weighted = _added(proto, weighted, triples)
    constants = [1 << weight for weight, rows in enumerate(weighted) for _ in range(rows.rows)]
    made = proto.inject(_joined(*weighted), None, [0] * len(constants), constants)
    rows, across = plan.rows, plan.across

    def summed(part: Tensor) -> Tensor:
        return (
            part.view(vectors, plan.lanes)[:, : rows * across].reshape(vectors, rows, across).sum(2, dtype=part.dtype)
        )

    return x.with_share(made.map(summed), 0)


def _added(proto: Protocol, weighted: Sequence[BitShare], triples: Sequence[int]) -> list[BitShare]:
    """Three bits of one weight to their sum and a carry of the next: (a ^ b)(a ^ c) ^ a, one gate each, one round."""
    a, b, c = (
        _joined(*(rows.some(at * many, many) for rows, many in zip(weighted, triples, strict=True) if many))
        for at in range(3)
    )
    carries = proto.xor(a, proto.and_(proto.xor(a, b), proto.xor(a, c)))
    sums = proto.xor(a, proto.xor(b, c))
    made: list[list[BitShare]] = [[] for _ in range(len(weighted) + 1)]
    at = 0
    for weight, (rows, many) in enumerate(zip(weighted, triples, strict=True)):
        made[weight] += [sums.some(at, many), rows.some(3 * many, rows.rows - 3 * many)]
        made[weight + 1].append(carries.some(at, many))
        at += many
    joined = [_joined(*pieces) for pieces in made]
    return joined if joined[-1].rows else joined[:-1]


def _count_cost(pricing: Pricing, plan: Plan, vectors: int) -> Cost:
    steps, left = _tree(plan.folds, plan.depth)
    lanes = vectors * plan.lanes
    total = pricing.numbers(lanes, sum(left))
    for triples in steps:
        total += pricing.prices.gate(lanes, sum(triples))
    return total


# -- bit vectors ------------------------------------------------------------------------------------------------------
def _each(bits: BitShare, change: Callable[[Tensor], Tensor]) -> BitShare:
    return BitShare(tuple(map(change, bits.parts)), bits.count)


def _joined(*bits: BitShare) -> BitShare:
    """Vectors one after the other."""
    return BitShare(tuple(torch.cat(parts) for parts in zip(*(b.parts for b in bits), strict=True)), bits[0].count)


def _copies(bits: BitShare, times: int) -> BitShare:
    return bits if times == 1 else BitShare(tuple(part.repeat(times, 1) for part in bits.parts), bits.count)


def _sum(proto: Protocol, first: BitShare, others: BitShare) -> BitShare:
    """Exclusive or of all vectors."""
    for row in range(others.rows):
        first = proto.xor(first, others.row(row))
    return first


# -- the price, and the plan that it chooses --------------------------------------------------------------------------
def plan_cost(pricing: Pricing, plan: Plan) -> Cost:
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
def plan_for(pricing: Pricing, rows: int, width: int, bits: int) -> Plan:
    """The plan that takes least time by its cost, of digits of 1 to 4 bits and all ways to count. Public."""
    plans = [
        Plan(rows, width, -(-bits // digit) * digit, digit, depth, _folds(rows, width))
        for digit in _DIGITS
        for depth in _DEPTHS
    ]
    fitting = [plan for plan in plans if plan.bits < pricing.ring.bits]
    return min(fitting, key=lambda plan: pricing.seconds(plan_cost(pricing, plan)))


def _folds(rows: int, width: int) -> int:
    """Least entries with those that fill up, counting a lane as four of them: it becomes a ring element each way."""
    return min(_FOLDS, key=lambda folds: 64 * words_for(rows * -(-width // folds)) * (folds + 4))


def cost(pricing: Pricing, rows: int, width: int, bits: int) -> Cost:
    """Of the cheapest plan."""
    return plan_cost(pricing, plan_for(pricing, rows, width, bits))
