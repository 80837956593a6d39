"""1/x and x^(-1/2) as lines between the thresholds of a geometric grid, all in one round of comparison keys.

    f(x) = line_last(x) + sum_k [x < end_k] (line_k - line_(k+1))(x)

Relative errors are the same in every cell. A range of up to REACH octaves has room in the ring: x needs 15 significant
bits where it is smallest, and slopes need some where it is largest. Thresholds and coefficients are computed in decimal
arithmetic, sizes without logarithms of the machine's own library, so that all parties have the same.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_HALF_EVEN, Context, Decimal, localcontext
from functools import lru_cache
from typing import Protocol

from private_llm.net.ledger import Cost
from private_llm.protocols.one_step import Pieces, PiecesShape
from private_llm.tensor.fixed import Fixed

CELLS = {-1.0: 33, -0.5: 24}
"""Cells an octave, by exponent: relative errors of 5.6e-5 and 4e-5."""

REACH = 24.5
"""Most octaves of a range."""

DECIMAL = Context(prec=40, rounding=ROUND_HALF_EVEN, traps=[])
"""Not that of the program around, which may round otherwise."""

_LARGEST = 60
_SLACK = 11
"""A coarse comparison may be off by 2^-11 of the smallest argument: a fortieth of a cell."""


def bits_above(value: float) -> int:
    """The least n with value <= 2^n, exactly, for value > 0."""
    mantissa, exponent = math.frexp(value)
    return exponent - (mantissa == 0.5)


def bits_below(value: float) -> int:
    """The largest n with 2^n <= value, exactly, for value > 0."""
    return math.frexp(value)[1] - 1


@dataclass(frozen=True)
class Lines:
    """gain * x^exponent (-1 or -1/2) for low <= x <= high, x with `own` fractional bits, the result with `frac`."""

    exponent: float
    own: int
    low: float
    high: float
    frac: int
    gain: float = 1.0

    @property
    def fit(self) -> bool:
        """Whether the ring has room for them."""
        if self.exponent not in CELLS or not 0 < self.low < self.high:
            return False
        return self.cells <= math.ceil(REACH * CELLS[self.exponent]) and self.shift >= 0

    @property
    def total(self) -> int:
        """Fractional bits before the truncation."""
        largest = self.gain / (self.low if self.exponent == -1.0 else math.sqrt(self.low))
        return _LARGEST - max(0, bits_above(largest))

    @property
    def shift(self) -> int:
        """Bits that the truncation drops."""
        return self.total - self.frac

    @property
    def cells(self) -> int:
        """Number of lines."""
        return _cells(self.low, self.high, CELLS[self.exponent])

    @property
    def shape(self) -> PiecesShape:
        """Public sizes of the one step."""
        bits = self.own + bits_above(self.high) + 2
        low = max(0, bits_below(self.low) + self.own - _SLACK)
        return PiecesShape(self.cells - 1, 1, bits, low, (self.shift,))


class Table(Protocol):
    """Lines of one table, or of two copies of one."""

    @property
    def fit(self) -> bool:
        """Whether the ring has room for them."""

    @property
    def shape(self) -> PiecesShape:
        """Public sizes of the one step."""


def takes_lines(x: Fixed, count: int, lines: Table, other: Callable[..., Cost], *facts: Hashable) -> bool:
    """Whether lines are the way to go for `count` elements, where another one costs other(prices, *facts).

    Local and public.

    x: any value of the session.
    """
    return x.session.ring.bits == 64 and lines.fit and x.proto.takes_keys(count, lines.shape, other, *facts)


def power_by_lines(x: Fixed, lines: Lines) -> Fixed:
    """gain * x^exponent for low <= x <= high, of the shape of x, with `lines.frac` fractional bits.

    2 rounds; bytes: `piecewise` in protocols/prices.py. Relative error 7e-5 (1/x) or 5e-5, 2^-frac absolute,
    half to all of the relative precision of x, and x 2^(own - total) / 180 absolute, by which slopes are rounded
    (2^-26 for 1/x at 2^16 with 24 bits, there a relative 7e-4). Below `low` the first line goes on, so that the result
    is too small, not garbage. Raises UnsupportedOp under a protocol without comparison keys.
    """
    (made,) = x.proto.piecewise(x.share, _pieces(lines))
    return x.with_share(made, lines.frac)


@lru_cache(maxsize=256)
def _cells(low: float, high: float, octave: int) -> int:
    """`octave` times the octaves of the range, rounded up; what is less than a billionth too many is the last one's."""
    with localcontext(DECIMAL):
        octaves = (Decimal(high) / Decimal(low)).ln() / Decimal(2).ln()
        return int((octaves * octave - Decimal("1e-9")).to_integral_value(ROUND_CEILING))


@lru_cache(maxsize=64)
def _pieces(lines: Lines) -> Pieces:
    own, total, shape = lines.own, lines.total, lines.shape
    exponent, gain, cells = Decimal(lines.exponent), Decimal(lines.gain), CELLS[lines.exponent]
    with localcontext(DECIMAL):
        ratio = Decimal(2) ** (Decimal(1) / cells)
        ends = [Decimal(lines.low) * ratio**cell for cell in range(lines.cells + 1)]
        fitted = [_line(exponent, gain, *pair, own, total) for pair in itertools.pairwise(ends)]
        offsets = tuple(-whole(end, own) for end in ends[1:-1])
    steps = tuple((a[0] - b[0], a[1] - b[1]) for a, b in itertools.pairwise(fitted))
    return Pieces(offsets, (steps,), (fitted[-1],), shape.bits, shape.low, shape.shifts)


def _line(exponent: Decimal, gain: Decimal, low: Decimal, high: Decimal, own: int, total: int) -> tuple[int, int]:
    """The line whose relative error between low and high is smallest, with `total` fractional bits, of x with `own`."""
    left, right = gain * low**exponent, gain * high**exponent
    slope = (right - left) / (high - low)
    deepest = (slope / (gain * exponent)) ** (1 / (exponent - 1))
    above = left + slope * (deepest - low) - gain * deepest**exponent
    middle = (low + high) / 2
    centre, value = whole(middle, own), left + slope * (middle - low) - above / 2
    steep = whole(slope, total - own)
    return whole(value, total) - steep * centre, steep


def whole(value: Decimal, frac: int) -> int:
    """The ring element of a public number with `frac` fractional bits."""
    return int((value * (Decimal(2) ** frac)).to_integral_value())
