"""Rows that a secret bit marks, taken out of a table and put back, in one of two ways.

    one-hot     a secret matrix [kept, rows] with a one at each marked row. Taking and putting back are products with
                it and its transpose, whose traffic is that of their outputs; making it costs kept x rows bits.
    shuffled    the rows move in a fresh secret order, in which the marks are opened: a uniform choice of `kept` places,
                whatever is marked. Taking and putting back are a shuffle each; taking ends with the chosen rows alone.
                Where their old order counts (`compact`), a number is opened for each row in place of the mark: 0 for
                one that goes, and for one that stays which of those it is, 1 .. kept: a uniform arrangement of these.

Neither opens anything that depends on secrets, as long as each block has `kept` marks. Of values that left their range
another number of rows may be marked: then any `kept` rows are moved, and the call's verdict says that its answer is
wrong (`RangeChecks.ranked_wrong`). Either may be used for any number of tables (other layers' too), but nothing else
may be opened in the order of a shuffle: to each party the places are independent of the marks as long as nothing is.
Source: shuffle-based indexing (Comet, section 4.2), with ranks for bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from private_llm.errors import DomainError
from private_llm.net.ledger import Cost
from private_llm.oblivious.budget import shuffled_back
from private_llm.protocols.prices import Prices
from private_llm.protocols.share import BitShare, Permutation, words_for
from private_llm.ring.ring import Ring
from private_llm.tensor.fixed import Fixed, arithmetic

_LANES = 64


@dataclass(frozen=True, eq=False)
class OneHotRows:
    """`kept` of `rows` rows of each of `blocks` blocks: secret zeros and ones [blocks, kept, rows], not scaled."""

    matrix: Fixed

    @property
    def kept(self) -> int:
        """Chosen rows of a block."""
        return self.matrix.shape[1]

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return self.matrix.shape[2]

    def take(self, x: Fixed, frac: int | None = None) -> Fixed:
        """The chosen rows of x [blocks, rows, P]: [blocks, kept, P], with `frac` fractional bits (default: of x).

        One product: 24 bytes an output and 1 round in trio; 30.75 and 2 where 18 bits are dropped. Of x that is right
        in `width` bits, one bit less is right: (3 width - 1) / 8 bytes.
        """
        frac, matrix = x.frac if frac is None else frac, self._on(x)
        if x.width is None:
            return matrix.matmul(x, frac=frac)
        return matrix.finer(1).matmul(x, frac=frac, width=x.width - 1)  # divided by 2, which leaves bits nobody reads

    def put_back(self, y: Fixed) -> Fixed:
        """Rows y [blocks, kept, P] where `take` found them, zeros elsewhere: [blocks, rows, P]. One product."""
        return self._on(y).view(lambda part: part.transpose(1, 2)).matmul(y, frac=y.frac)

    def within(self, outer: OneHotRows) -> OneHotRows:
        """This choice among the groups of rows that `outer` took, as one: 24 bytes an entry, 1 round in trio."""
        inner = self.rows // outer.kept
        own = self.matrix.view(lambda part: part.unflatten(2, (outer.kept, inner)).transpose(2, 3).flatten(1, 2))
        made = own.matmul(outer.matrix, frac=0).view(
            lambda part: part.unflatten(1, (-1, inner)).transpose(2, 3).flatten(2)
        )
        return OneHotRows(made)

    def _on(self, like: Fixed) -> Fixed:
        where = like.share.parts[0].device
        return self.matrix if self.matrix.share.parts[0].device == where else self.matrix.view(lambda p: p.to(where))


@dataclass(frozen=True, eq=False)
class ShuffledRows:
    """The same by shuffles. places: of the chosen rows in the secret order, int64 [blocks, kept], public."""

    order: Permutation
    places: Tensor
    rows: int

    @property
    def kept(self) -> int:
        """Chosen rows of a block."""
        return self.places.shape[1]

    def take(self, x: Fixed, frac: int | None = None) -> Fixed:
        """As `OneHotRows.take`, by one shuffle of all rows, in which the chosen ones alone end.

        16 bytes an element, 24 more a chosen one and 2 rounds in trio, and a truncation of what is chosen.
        """
        flat = x.view(lambda part: part.flatten(0, 1)).share
        moved = x.with_share(x.proto.shuffle(flat, self.order, places=self.places.view(-1)))
        taken = moved.view(lambda part: part.unflatten(0, self.places.shape))
        return taken if frac is None else taken.rescale(frac)

    def put_back(self, y: Fixed) -> Fixed:
        """As `OneHotRows.put_back`, by one shuffle of all rows, undone: 40 bytes an element and 3 rounds in trio."""
        back = shuffled_back(y, self.order, self.places)
        return back.view(lambda part: part.unflatten(0, (len(self.places), self.rows)))


ChosenRows = OneHotRows | ShuffledRows


def one_hot_rows(marks: Fixed, kept: int) -> OneHotRows:
    """The way of products. marks: 0 or 1 (no fractional bits), [blocks, rows], `kept` ones in each block.

    Row j of the matrix is a difference of neighbours of [before < j], before: how many marks there are up to a row.
    `kept` comparisons with public thresholds share one mask; each bit is injected (`one_hot_cost`).
    """
    blocks, rows = marks.shape
    total = blocks * rows
    spare = -total % _LANES
    before = marks.view(lambda part: torch.constant_pad_nd(part.cumsum(1, dtype=part.dtype).view(-1), (0, spare)))
    bits = before.less_than([float(j) for j in range(1, kept + 1)], bits=rows.bit_length() + 2)
    flat = BitShare(tuple(part.reshape(1, -1) for part in bits.parts), kept * (total + spare))
    less = arithmetic(marks.session, flat, [1.0], 0)

    def differences(part: Tensor) -> Tensor:
        table = part.view(kept, -1)[:, :total].view(kept, blocks, rows).transpose(0, 1)
        shifted = torch.constant_pad_nd(table[..., :-1], (1, 0))
        return shifted - table

    matrix = less.view(differences)
    ones = torch.zeros_like(matrix.share.parts[0], memory_format=torch.contiguous_format)
    ones[..., 0] = 1  # before the first row there are no marks: less than any j
    return OneHotRows(matrix.with_share(matrix.proto.add_public(matrix.share, ones)))


def shuffled_rows(marks: Fixed, bits: BitShare, kept: int) -> ShuffledRows:
    """The way of shuffles. marks and bits: the same zeros and ones, [blocks, rows] and one vector of their flat order.

    A shuffle of a bit a row, and its opening (`shuffled_cost`). If another number of marks is opened, any rows and
    `RangeChecks.ranked_wrong`.
    """
    blocks, rows = marks.shape
    proto = marks.proto
    order = proto.permutation(blocks * rows, blocks=blocks)
    opened = proto.open_shuffled(proto.shuffle_bits(bits, order))
    places, found = first_places(blocks, rows, kept), opened[0].view(blocks, rows)
    if not opened.is_meta:
        if bool((found.sum(1) == kept).all()):
            places = found.flatten().nonzero()[:, 0].view(blocks, kept).cpu()
        else:
            marks.session.checks.ranked_wrong = True
    return ShuffledRows(order, places, rows)


def compact(marks: Fixed, kept: int) -> ShuffledRows:
    """Marked rows in their old order: marks [blocks, rows] are 0 or 1 (no fractional bits), `kept` ones in each block.

    With m bits for kept + 1: m comparisons of m + 1 bits for each row, m gates, a shuffle of m bits a row and their
    opening. Raises DomainError for marks of another shape and for kept outside 1 .. rows.
    """
    if len(marks.shape) != 2 or not 0 < kept <= marks.shape[1]:
        raise DomainError(f"compact: got marks {tuple(marks.shape)} and kept={kept}; want [blocks, rows], 1 to rows")
    blocks, rows = marks.shape
    proto = marks.proto
    before = marks.view(lambda part: part.cumsum(1, dtype=part.dtype))
    ranks = before.mul(marks, frac=0)
    # of 0 .. kept + 1: one row too many must not wrap to 0 and look like a row that goes
    bits = number_bits(ranks, (kept + 1).bit_length())
    order = proto.permutation(blocks * rows, reuse=True, blocks=blocks)
    opened = proto.open_shuffled(proto.shuffle_bits(bits, order))
    places = _places(opened, blocks, kept)
    if places is None:
        marks.session.checks.ranked_wrong = True
        places = first_places(blocks, rows, kept)
    return ShuffledRows(order, places, rows)


def first_places(blocks: int, rows: int, kept: int) -> Tensor:
    """The first `kept` rows of each block, int64 [blocks, kept]."""
    return torch.arange(blocks)[:, None] * rows + torch.arange(kept)


def _places(opened: Tensor, blocks: int, kept: int) -> Tensor | None:
    """int64 [blocks, kept]: flat places of the numbers 1 .. kept in each block; None if they are not there."""
    rows = opened.shape[1] // blocks
    if opened.is_meta:
        return first_places(blocks, rows, kept)
    weights = 1 << torch.arange(len(opened), device=opened.device)
    numbers = (opened * weights[:, None]).sum(0).view(blocks, rows).cpu()
    ordered, places = numbers.sort(dim=1, descending=True)
    if not torch.equal(ordered[:, :kept], torch.arange(kept, 0, -1).expand(blocks, kept)) or bool(
        ordered[:, kept:].any()
    ):
        return None
    return places[:, :kept].flip(1) + torch.arange(blocks)[:, None] * rows


def number_bits(x: Fixed, count: int) -> BitShare:
    """Bits of numbers 0 <= x < 2^count, lowest first: [count rows, numel], by `count` comparisons of count + 1 bits."""
    shape = (x.numel() + -x.numel() % _LANES,)

    def moved(part: Tensor) -> Tensor:
        flat = torch.constant_pad_nd(part.reshape(-1), (0, shape[0] - part.numel()))
        steps = 1 << torch.arange(count, 0, -1, device=part.device)
        # bit j is bit `count` of x 2^(count - j); bits above it do not matter
        return flat * steps[:, None].to(part.dtype)

    with x.proto.may_wrap():
        signs = x.proto.msb(x.view(moved).share, bits=count + 1)
    return BitShare(tuple(part.view(count, -1) for part in signs.parts), x.numel())


def one_hot_cost(prices: Prices, ring: Ring, blocks: int, rows: int, kept: int) -> Cost:
    """What `one_hot_rows` sends and waits for."""
    lanes = _LANES * words_for(blocks * rows)
    made = prices.msb(lanes, rows.bit_length() + 2, thresholds=kept)
    return made + prices.inject(ring, kept * lanes, 1, 0, 0)


def shuffled_cost(prices: Prices, blocks: int, rows: int) -> Cost:
    """What `shuffled_rows` sends and waits for."""
    total = blocks * rows
    return prices.permutation(total) + prices.shuffle_bits(total) + prices.open_shuffled(total)
