"""Rows that a secret bit marks, taken out of a table and put back, in one of two ways.

    one-hot     a secret matrix [kept, rows] with a one at each marked row. Taking and putting back are products with
                it and its transpose, whose traffic is that of their outputs; making it costs kept x rows bits.
    shuffled    the rows move in a fresh secret order, in which the marks are opened: a uniform choice of `kept` places,
                whatever is marked. Taking and putting back are a shuffle each; taking ends with the chosen rows alone.

Neither opens anything that depends on secrets, as long as each block has `kept` marks. Either may be used for any
number of tables (other layers' too).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from private_llm.errors import ProtocolAbort
from private_llm.net.ledger import Cost
from private_llm.oblivious.compaction import first_places
from private_llm.protocols.permutation import Permutation
from private_llm.protocols.prices import Prices
from private_llm.protocols.share import BitShare, words_for
from private_llm.ring.ring import Ring
from private_llm.tensor.fixed import Fixed, arithmetic

_LANES = 64


class ChosenRows(ABC):
    """`kept` of `rows` rows, in each of `blocks` blocks."""

    blocks: int
    rows: int
    kept: int

    @abstractmethod
    def take(self, x: Fixed, frac: int | None = None) -> Fixed:
        """The chosen rows of x [blocks, rows, P]: [blocks, kept, P], with `frac` fractional bits (default: of x)."""

    @abstractmethod
    def put_back(self, y: Fixed) -> Fixed:
        """Rows y [blocks, kept, P] where `take` found them, zeros elsewhere: [blocks, rows, P]."""


@dataclass(frozen=True, eq=False)
class OneHotRows(ChosenRows):
    """By products with a secret matrix [blocks, kept, rows] of zeros and ones (no fractional bits)."""

    matrix: Fixed

    @property
    def blocks(self) -> int:  # type: ignore[override]
        """Blocks."""
        return self.matrix.shape[0]

    @property
    def kept(self) -> int:  # type: ignore[override]
        """Chosen rows of a block."""
        return self.matrix.shape[1]

    @property
    def rows(self) -> int:  # type: ignore[override]
        """Rows of a block."""
        return self.matrix.shape[2]

    def take(self, x: Fixed, frac: int | None = None) -> Fixed:
        """One product: 24 bytes an output and 1 round in trio; 30.75 and 2 where 18 bits are dropped.

        Of x that is right in `width` bits, one bit less is right: (3 width - 1) / 8 bytes.
        """
        frac, matrix = x.frac if frac is None else frac, self._on(x)
        if x.width is None:
            return matrix.matmul(x, frac=frac)
        return matrix.finer(1).matmul(x, frac=frac, width=x.width - 1)  # divided by 2, which leaves bits nobody reads

    def put_back(self, y: Fixed) -> Fixed:
        """One product, 24 bytes an output and 1 round in trio."""
        return self._on(y).view(lambda part: part.transpose(1, 2)).matmul(y, frac=y.frac)

    def within(self, outer: OneHotRows) -> OneHotRows:
        """Of rows that `outer` took in groups of self.rows / outer.kept, the choice that both make together.

        One product, 24 bytes an entry of the matrix and 1 round in trio.
        """
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
class ShuffledRows(ChosenRows):
    """By shuffles. places: of the chosen rows in the secret order, int64 [blocks, kept], public."""

    order: Permutation
    places: Tensor
    rows: int

    @property
    def blocks(self) -> int:  # type: ignore[override]
        """Blocks."""
        return len(self.places)

    @property
    def kept(self) -> int:  # type: ignore[override]
        """Chosen rows of a block."""
        return self.places.shape[1]

    def take(self, x: Fixed, frac: int | None = None) -> Fixed:
        """One shuffle of all rows, in which the chosen ones alone end: 16 bytes an element, 24 more a chosen one and 2
        rounds in trio, and a truncation of what is chosen.
        """
        flat = x.view(lambda part: part.flatten(0, 1)).share
        moved = x.with_share(x.proto.shuffle(flat, self.order, places=self.places.view(-1)))
        taken = moved.view(lambda part: part.unflatten(0, self.places.shape))
        return taken if frac is None else taken.rescale(frac)

    def put_back(self, y: Fixed) -> Fixed:
        """One shuffle of all rows, undone: 40 bytes an element and 3 rounds in trio."""

        def spread(part: Tensor) -> Tensor:
            whole = part.new_zeros((self.order.size, *part.shape[2:]))
            whole[self.places.to(part.device)] = part
            return whole

        back = y.with_share(y.proto.shuffle(y.view(spread).share, self.order, undo=True))
        return back.view(lambda part: part.unflatten(0, (self.blocks, self.rows)))


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

    def first_of_row(part: Tensor) -> Tensor:
        ones = torch.zeros(part.shape, dtype=part.dtype, device=part.device)
        ones[..., 0] = 1  # before the first row there are no marks: less than any j
        return ones

    ones = first_of_row(matrix.share.parts[0])
    return OneHotRows(matrix.with_share(matrix.proto.add_public(matrix.share, ones)))


def shuffled_rows(marks: Fixed, bits: BitShare, kept: int) -> ShuffledRows:
    """The way of shuffles. marks and bits: the same zeros and ones, [blocks, rows] and one vector of their flat order.

    A shuffle of a bit a row, and its opening (`shuffled_cost`). If another number of marks is opened, any rows and
    `NumericContext.ranked_wrong`. Raises ProtocolAbort if this party is not told.
    """
    blocks, rows = marks.shape
    proto = marks.proto
    order = proto.permutation(blocks * rows, blocks=blocks)
    opened = proto.open_shuffled(proto.shuffle_bits(bits, order))
    if opened is None:
        raise ProtocolAbort("shuffled_rows: this party is not told what is opened; want an order that nobody knows")
    places, found = first_places(blocks, rows, kept), opened[0].view(blocks, rows)
    if not opened.is_meta:
        if bool((found.sum(1) == kept).all()):
            places = found.flatten().nonzero()[:, 0].view(blocks, kept).cpu()
        else:
            marks.session.numerics.ranked_wrong = True
    return ShuffledRows(order, places, rows)


def one_hot_cost(prices: Prices, ring: Ring, blocks: int, rows: int, kept: int) -> Cost:
    """What `one_hot_rows` sends and waits for."""
    lanes = _LANES * words_for(blocks * rows)
    made = prices.msb(lanes, rows.bit_length() + 2, thresholds=kept)
    return made + prices.inject(ring, kept * lanes, 1, 0, 0)


def shuffled_cost(prices: Prices, blocks: int, rows: int) -> Cost:
    """What `shuffled_rows` sends and waits for."""
    total = blocks * rows
    return prices.permutation(total) + prices.shuffle_bits(total) + prices.open_shuffled(total)
