"""Rows that a secret bit marks, brought together in their order; where they lay is not learned.

All rows move in a fresh secret order. Beside them moves a number for each: 0 for a row that goes, and for one that
stays which of those it is, 1 .. kept. These numbers are opened in the secret order. They are a uniform arrangement of
1 .. kept and zeros, whatever is marked, so opening them says nothing; and rows that they mark can be picked, and put
back in their old order, in the clear. Of values that left their range another number of rows may be marked: then any
`kept` rows are moved, and the call's verdict says that its answer is wrong (`NumericContext.ranked_wrong`). Source:
shuffle-based indexing (Comet, section 4.2), with ranks for bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from private_llm.errors import DomainError, ProtocolAbort
from private_llm.net.ledger import Cost
from private_llm.protocols.permutation import Permutation
from private_llm.protocols.prices import Prices
from private_llm.protocols.share import BitShare, words_for
from private_llm.ring.ring import Ring
from private_llm.tensor.fixed import Fixed

_LANES = 64


@dataclass(frozen=True, slots=True)
class Compaction:
    """Marked rows of equal blocks.

    order: of the rows of all blocks, each block in an order of its own. places: where the marked ones lie in it, in
    their old order, int64 [blocks, kept], public. rows: of a block. Nothing else may be opened in this order: to each
    party the places are independent of the marks as long as nothing is.
    """

    order: Permutation
    places: Tensor
    rows: int

    def take(self, x: Fixed) -> Fixed:
        """The marked rows of x [blocks * rows, ..]: [blocks * kept, ..]. One shuffle of x, in which these alone end.

        Any number of tensors may be taken: nothing is opened. Raises DomainError for another number of rows.
        """
        return x.with_share(x.proto.shuffle(x.share, self.order, places=self.places.view(-1)))


def compact(marks: Fixed, kept: int) -> Compaction:
    """Where the marked rows will lie: marks [blocks, rows] are 0 or 1 (no fractional bits), `kept` ones in each block.

    With m bits for kept + 1: m comparisons of m + 1 bits for each row, m gates, a shuffle of m bits a row and their
    opening (`compaction_cost`). Raises DomainError for marks of another shape and for kept outside 1 .. rows,
    ProtocolAbort if this party is not told.
    """
    if len(marks.shape) != 2 or not 0 < kept <= marks.shape[1]:
        raise DomainError(f"compact: got marks {tuple(marks.shape)} and kept={kept}; want [blocks, rows], 1 to rows")
    blocks, rows = marks.shape
    proto = marks.proto
    before = marks.view(lambda part: part.cumsum(1, dtype=part.dtype))
    ranks = before.mul(marks, frac=0)
    bits = number_bits(ranks, _bits(kept))
    order = proto.permutation(blocks * rows, reuse=True, blocks=blocks)
    opened = proto.open_shuffled(proto.shuffle_bits(bits, order))
    if opened is None:
        raise ProtocolAbort("compact: this party is not told what is opened; want an order that nobody knows")
    places = _places(opened, blocks, kept)
    if places is None:
        marks.session.numerics.ranked_wrong = True
        places = first_places(blocks, rows, kept)
    return Compaction(order, places, rows)


def _bits(kept: int) -> int:
    """Of 0 .. kept + 1: one row too many must not wrap to 0 and look like a row that goes."""
    return (kept + 1).bit_length()


def first_places(blocks: int, rows: int, kept: int) -> Tensor:
    """The first `kept` rows of each block, int64 [blocks, kept]."""
    return torch.arange(blocks)[:, None] * rows + torch.arange(kept)


def _places(opened: Tensor, blocks: int, kept: int) -> Tensor | None:
    """int64 [blocks, kept]: flat places of the numbers 1 .. kept in each block; None if what is opened is no such
    arrangement.
    """
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
    """Bits of whole numbers 0 <= x < 2^count, least significant first: [count rows, numel].

    `count` comparisons of count + 1 bits for each number, at once (and for lanes that fill the last word).
    """
    shape = (x.numel() + -x.numel() % _LANES,)

    def moved(part: Tensor) -> Tensor:
        flat = torch.constant_pad_nd(part.reshape(-1), (0, shape[0] - part.numel()))
        steps = 1 << torch.arange(count, 0, -1, device=part.device)
        # bit j is bit `count` of x 2^(count - j); bits above it do not matter
        return flat * steps[:, None].to(part.dtype)

    with x.proto.may_wrap():
        signs = x.proto.msb(x.view(moved).share, bits=count + 1)
    return BitShare(tuple(part.view(count, -1) for part in signs.parts), x.numel())


def compaction_cost(prices: Prices, ring: Ring, blocks: int, rows: int, kept: int) -> Cost:
    """What `compact` sends and waits for."""
    total, bits = blocks * rows, _bits(kept)
    return (
        prices.product(ring, total, 0)
        + prices.msb(bits * _LANES * words_for(total), bits + 1)
        + prices.permutation(total)
        + prices.shuffle_bits(total, bits)
        + prices.open_shuffled(total, bits)
    )
