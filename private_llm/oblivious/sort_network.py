"""Batcher's odd-even merge network on secrets, cut down to the comparators that wanted places depend on.

Which entries meet is public; who wins is not. Entries are in a strict order: larger ones first, of equal ones that
with the smaller index, so the outcome is that of a stable sort. Value and index are one number where they fit the ring
(value 2^L + n - 1 - index, L the bits of an index): one comparison and, where only this number is wanted, one moved
element a comparator. Otherwise values and indices are compared apart, and a gate joins the three bits.

(a, b) becomes (a - s (a - b), b + s (a - b)), s = [a comes after b]: one comparison, one injection.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from private_llm.exact.maximum import times, whole_words
from private_llm.net.ledger import Cost
from private_llm.protocols.registry import Pricing
from private_llm.protocols.share import BitShare, Share
from private_llm.tensor.fixed import Fixed

Layer = tuple[Tensor, Tensor]  # comparators that run at once, int64 places: of what comes first, and of the other


@dataclass(frozen=True, eq=False)
class SortNetwork:
    """Comparators in order, and where the wanted places are found at the end, best first: int64 [wanted]."""

    layers: tuple[Layer, ...]
    wanted: Tensor


@lru_cache(maxsize=64)
def network(width: int, start: int, stop: int) -> SortNetwork:
    """What places start .. stop - 1 of the sorted row of `width` entries depend on. Public."""
    found, ends = _met(width, start, stop)
    needed = torch.zeros(width, dtype=torch.bool)
    needed[ends] = True
    kept = []
    for first, second in reversed(found):
        used = needed[first] | needed[second]
        first, second = first[used], second[used]
        needed[first] = needed[second] = True
        if len(first):
            kept.append((first, second))
    return SortNetwork(tuple(reversed(kept)), ends)


_BEFORE, _OPEN, _BEHIND = 2, 1, 0


def _met(width: int, start: int, stop: int) -> tuple[list[Layer], Tensor]:
    """Who meets whom, and where places start .. stop - 1 are at the end.

    Sorted runs of 1, 2, 4, .. are merged, as if entries that come last filled up the row. An entry whose place in its
    run says that it ends before `start`, or after `stop`, meets nobody any more.
    """
    holder, state, places = torch.arange(width), torch.full((width,), _OPEN), torch.arange(width)
    found = []
    for level in range((width - 1).bit_length()):
        run = 1 << level
        for step in (run >> less for less in range(level + 1)):
            place = torch.arange(width - step)
            met = (place >= step % run) & ((place - step % run) // step % 2 == 0)
            met &= place // (2 * run) == (place + step) // (2 * run)
            a, b = place[met], place[met] + step
            both = (state[a] == _OPEN) & (state[b] == _OPEN)
            found.append((holder[a[both]], holder[b[both]]))
            a, b = (each[state[b] > state[a]] for each in (a, b))
            for known in (holder, state):
                known[a], known[b] = known[b], known[a]
        inside = places % (2 * run)
        length = (width - places + inside).clamp(max=2 * run)
        state[inside >= stop] = _BEHIND
        state[inside < start - (width - length)] = _BEFORE
    return found, holder[start:stop]


@dataclass(frozen=True)
class Order:
    """The order of rows of `width` entries, |ring element| < 2^(bits - 1), in a ring of `ring` bits."""

    width: int
    bits: int
    ring: int

    @property
    def index_bits(self) -> int:
        """Bits of an index."""
        return (self.width - 1).bit_length()

    @property
    def joined(self) -> bool:
        """Whether value and index are compared as one number."""
        return self.bits + self.index_bits + 1 <= self.ring

    def entries(self, x: Fixed, moved: bool = False) -> list[Fixed]:
        """What moves for each of x [rows, width]: one ordering number, or value and index (always if `moved`)."""
        counting = torch.arange(self.width, dtype=x.session.ring.dtype, device=x.share.parts[0].device)
        index = x.with_share(x.proto.public(counting.expand(x.shape)), 0)
        apart = [x.with_share(x.share, 0), index]
        return apart if moved or not self.joined else [self._key(apart)]

    def _key(self, entry: Sequence[Fixed]) -> Fixed:
        if len(entry) == 1:
            return entry[0]
        value, index = entry
        return value.scale_int(1 << self.index_bits) - index + float(self.width - 1)

    def after(self, a: Sequence[Fixed], b: Sequence[Fixed]) -> BitShare:
        """[a comes after b], elementwise, for entries that differ in their index; lanes up to whole words are shared.

        One comparison; where value and index do not fit the ring together three, two of which share a mask, and a gate.
        """
        if self.joined:
            gap = whole_words(self._key(a) - self._key(b))
            return gap.less_than([0.0], bits=self.bits + self.index_bits + 1)
        gaps = [whole_words(x - y) for x, y in zip(a, b, strict=True)]
        smaller = gaps[0].less_than([0.0, 1.0], bits=self.bits + 1)  # and [at most equal]
        later = (-gaps[1]).less_than([0.0], bits=self.index_bits + 1)
        proto = gaps[0].proto
        return proto.xor(smaller.row(0), proto.and_(proto.xor(smaller.row(0), smaller.row(1)), later))

    def cost(self, pricing: Pricing, count: int) -> Cost:
        """Of `after` for `count` entries."""
        if self.joined:
            return pricing.comparison(count, self.bits + self.index_bits + 1)
        apart = pricing.comparison(count, self.bits + 1, 2) + pricing.comparison(count, self.index_bits + 1)
        return apart + pricing.prices.gate(count)


def sort(entries: Sequence[Fixed], order: Order, start: int, stop: int) -> list[Fixed]:
    """Places start .. stop - 1 of sorted `order.entries` [rows, width]: two steps a layer, (log2 n)^2 / 2 layers."""
    plan = network(order.width, start, stop)
    for first, second in plan.layers:
        entries = _exchanged(entries, order, first, second)
    return [each.view(lambda part: part[:, plan.wanted.to(part.device)]) for each in entries]


def _exchanged(entries: Sequence[Fixed], order: Order, first: Tensor, second: Tensor) -> list[Fixed]:
    device = entries[0].share.parts[0].device
    first, second = first.to(device), second.to(device)
    a = [each.view(lambda part: part[:, first]) for each in entries]
    b = [each.view(lambda part: part[:, second]) for each in entries]
    moved = times(order.after(a, b), [x - y for x, y in zip(a, b, strict=True)])

    def put(part: Tensor, move: Tensor) -> Tensor:
        return part.index_add(1, first, -move).index_add(1, second, move)

    return [
        each.with_share(Share(tuple(map(put, each.share.parts, move.share.parts))))
        for each, move in zip(entries, moved, strict=True)
    ]


def sort_cost(pricing: Pricing, order: Order, rows: int, start: int, stop: int, moved: bool = False) -> Cost:
    """Of `sort` for these rows; moved as in `Order.entries`."""
    tracks = 2 if moved or not order.joined else 1
    total = Cost()
    for first, _ in network(order.width, start, stop).layers:
        count = rows * len(first)
        lanes = count if tracks == 1 else tracks * 64 * -(-count // 64)
        total += order.cost(pricing, count) + pricing.prices.inject(pricing.ring, lanes, 1, 1, 0)
    return total


def largest_bits(x: Fixed, k: int, bits: int) -> BitShare:
    """The k of x [rows, n], 0 < k < n, as a row of bits [rows * n]: the last one that counts, then a comparison."""
    order = Order(x.shape[-1], bits, x.session.ring.bits)
    entries = order.entries(x)
    last = sort(entries, order, k - 1, k)
    after = order.after(entries, [each.view(lambda part: part.expand(x.shape)) for each in last])
    return x.proto.invert(BitShare(after.parts, x.numel()))


def cost(pricing: Pricing, rows: int, width: int, k: int, bits: int) -> Cost:
    """Of `largest_bits`."""
    order = Order(width, bits, pricing.ring.bits)
    return sort_cost(pricing, order, rows, k - 1, k) + order.cost(pricing, rows * width)
