"""x^(-1/2) over twice as many octaves as lines of one table have room for: x and x / 2^s go through it side by side.

    f(x) = T(x) + 2^(-s/2) T(x / 2^s)

T is f between 2a and t = a 2^s, rises from 0 at a, falls to 0 at 2t, and is 0 elsewhere; where one copy falls the
other rises by as much, so a comparison that is a little off at an end does no harm. Rows of real models need it: where
entries are massive, sums of squares span 40 octaves.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from decimal import Decimal, localcontext
from functools import lru_cache

from private_llm.approx.power_lines import CELLS, DECIMAL, bits_above, bits_below, whole
from private_llm.protocols.one_step import Pieces, PiecesShape
from private_llm.tensor.fixed import Fixed

MOST_APART = 22
"""Largest s, the octaves between the copies, which is even. The range has 2 s - 1."""

_LARGEST = 60
_SLACK = 13
"""A coarse comparison may be off by 2^-13 of a, by which T is wrong there."""


@dataclass(frozen=True)
class WideLines:
    """gain * x^(-1/2) for 2^(log2_high - 2 apart + 1) <= x <= 2^log2_high, x with `own` fractional bits.

    apart: s, even, at most MOST_APART.
    """

    own: int
    log2_high: int
    frac: int
    gain: float = 1.0
    apart: int = MOST_APART

    @property
    def log2_low(self) -> int:
        """a: where the rising starts; the range begins an octave above."""
        return self.log2_high - 2 * self.apart

    @property
    def total(self) -> int:
        """Fractional bits before the truncation."""
        largest = self.gain * 2.0 ** (-self.log2_low / 2)
        return _LARGEST - max(0, bits_above(largest))

    @property
    def shift(self) -> int:
        """Bits that the truncation drops: each copy leaves apart / 2 fractional bits less than the result."""
        return self.total - (self.frac - self.apart // 2)

    @property
    def fit(self) -> bool:
        """Whether the ring has room for x and for the result."""
        return self.own + self.log2_high <= _LARGEST and self.own >= 0 and self.shift >= 0

    @property
    def shape(self) -> PiecesShape:
        """Public sizes of the one step."""
        bits, low = self.own + self.log2_high + 2, max(0, self.log2_low + self.own - _SLACK)
        return PiecesShape(CELLS[-0.5] * (self.apart + 1) + 1, 1, bits, low, (self.shift,))


def power_by_wide_lines(x: Fixed, lines: WideLines) -> Fixed:
    """gain * x^(-1/2) in the range of `lines`, of the shape of x, with `lines.frac` fractional bits.

    3 rounds; bytes: a truncation, and `piecewise` for two elements each (protocols/prices.py). Relative error 1e-4
    and the precision of x; 2e-4 where the copies meet: the lines' and what a coarse comparison is off by. Below the
    range too small, not garbage. Raises UnsupportedOp under a protocol without comparison keys.
    """
    far = x.coarser(lines.own - lines.apart)
    both = x.stack(far.with_share(far.share, x.frac))
    (made,) = x.proto.piecewise(both.share, _pieces(lines))
    near, far = x.with_share(made.map(lambda part: part[0])), x.with_share(made.map(lambda part: part[1]))
    total = near.scale_int(1 << (lines.apart // 2)) + far
    return total.with_share(total.share, lines.frac)


@lru_cache(maxsize=64)
def _pieces(lines: WideLines) -> Pieces:
    own, total, shape, cells = lines.own, lines.total, lines.shape, CELLS[-0.5]
    with localcontext(DECIMAL):
        ratio, low = Decimal(2) ** (Decimal(1) / cells), Decimal(2) ** lines.log2_low
        ends = [low * ratio**cell for cell in range(cells * (lines.apart + 1) + 1)]
        fitted = [_line(lines, *pair, own, total) for pair in itertools.pairwise(ends)]
        offsets = tuple(-whole(end, own) for end in ends)
    lines_of = [(0, 0), *fitted, (0, 0)]
    steps = tuple((a[0] - b[0], a[1] - b[1]) for a, b in itertools.pairwise(lines_of))
    return Pieces(offsets, (steps,), ((0, 0),), shape.bits, shape.low, shape.shifts)


def _line(lines: WideLines, low: Decimal, high: Decimal, own: int, total: int) -> tuple[int, int]:
    """The line through T at both ends, moved by half of what it misses in the middle; of x with `own` bits."""
    middle = (low + high) / 2
    left, right = _value(lines, low), _value(lines, high)
    steep = whole((right - left) / (high - low), total - own)
    value = (left + right) / 4 + _value(lines, middle) / 2
    return whole(value, total) - steep * whole(middle, own), steep


def _value(lines: WideLines, x: Decimal) -> Decimal:
    """T(x), for a <= x <= 2t."""
    rising, falling = Decimal(2) ** lines.log2_low, Decimal(2) ** (lines.log2_low + lines.apart)
    share = min(Decimal(1), x / rising - 1, 2 - x / falling)
    return Decimal(lines.gain) * share / x.sqrt()


def octaves_apart(least: float, log2_high: int) -> int | None:
    """The smallest s whose range reaches from 2^log2_high down to `least`; None if none does."""
    apart = max(2, -(-(log2_high + 1 - bits_below(least)) // 2))
    apart += apart % 2
    return apart if apart <= MOST_APART else None
