"""1/x and x^(-1/2) as lines between the thresholds of a geometric grid, all in one round of comparison keys.

    f(x) = line_last(x) + sum_k [x < end_k] (line_k - line_(k+1))(x)

Relative errors are the same in every cell. A range of up to REACH octaves has room in the ring: x needs 15 significant
bits where it is smallest, and slopes need some where it is largest. Twice as many octaves take `WideLines`: x and
x / 2^s go through one table side by side,

    x^(-1/2) = T(x) + 2^(-s/2) T(x / 2^s)

T is x^(-1/2) between 2a and t = a 2^s, rises from 0 at a, falls to 0 at 2t, and is 0 elsewhere; where one copy falls
the other rises by as much, so a comparison that is a little off at an end does no harm. Rows of real models need it:
where entries are massive, sums of squares span 40 octaves.

Thresholds and coefficients are the same at all parties: decimal arithmetic, and no logarithm of the machine's library.
"""

import itertools
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_HALF_EVEN, Context, Decimal, localcontext
from functools import lru_cache

from private_llm.net.ledger import Cost
from private_llm.protocols.one_step import Pieces, PiecesShape
from private_llm.tensor.fixed import Fixed

CELLS = {-1.0: 33, -0.5: 24}  # cells an octave, by exponent: relative errors of 5.6e-5 and 4e-5
REACH = 24.5  # most octaves of a range of `Lines`
MOST_APART = 22  # largest s of `WideLines`, which is even. The range has 2 s - 1 octaves

DECIMAL = Context(prec=40, rounding=ROUND_HALF_EVEN, traps=[])
"""Not that of the program around, which may round otherwise."""

_LARGEST = 60
_SLACK, _WIDE_SLACK = 11, 13
"""A coarse comparison may be off by 2^-11 of the smallest argument, a fortieth of a cell; of `WideLines` by 2^-13 of a,
by which T is wrong there."""


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

    def line(self, low: Decimal, high: Decimal) -> tuple[int, int]:
        """The line whose relative error between low and high is smallest."""
        exponent, gain = Decimal(self.exponent), Decimal(self.gain)
        left, right = gain * low**exponent, gain * high**exponent
        slope = (right - left) / (high - low)
        deepest = (slope / (gain * exponent)) ** (1 / (exponent - 1))
        above = left + slope * (deepest - low) - gain * deepest**exponent
        middle = (low + high) / 2
        return _encoded(self, middle, left + slope * (middle - low) - above / 2, slope)


@dataclass(frozen=True)
class WideLines:
    """gain x^(-1/2), 2^(log2_high - 2 apart + 1) <= x <= 2^log2_high, x with `own` fractional bits; `apart` is even."""

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
        return _LARGEST - max(0, bits_above(self.gain * 2.0 ** (-self.log2_low / 2)))

    @property
    def shift(self) -> int:
        """Bits that the truncation drops: each copy leaves apart / 2 fractional bits less than the result."""
        return self.total - (self.frac - self.apart // 2)

    @property
    def cells(self) -> int:
        """Number of lines."""
        return CELLS[-0.5] * (self.apart + 1)

    @property
    def fit(self) -> bool:
        """Whether the ring has room for x and for the result."""
        return self.own + self.log2_high <= _LARGEST and self.own >= 0 and self.shift >= 0

    @property
    def shape(self) -> PiecesShape:
        """Public sizes of the one step."""
        bits, low = self.own + self.log2_high + 2, max(0, self.log2_low + self.own - _WIDE_SLACK)
        return PiecesShape(self.cells + 1, 1, bits, low, (self.shift,))

    def line(self, low: Decimal, high: Decimal) -> tuple[int, int]:
        """The line through T at both ends, moved by half of what it misses in the middle."""
        middle = (low + high) / 2
        left, right = self._value(low), self._value(high)
        return _encoded(self, middle, (left + right) / 4 + self._value(middle) / 2, (right - left) / (high - low))

    def _value(self, x: Decimal) -> Decimal:
        """T(x), for a <= x <= 2t."""
        rising, falling = Decimal(2) ** self.log2_low, Decimal(2) ** (self.log2_low + self.apart)
        share = min(Decimal(1), x / rising - 1, 2 - x / falling)
        return Decimal(self.gain) * share / x.sqrt()


def takes_lines(x: Fixed, count: int, lines: Lines | WideLines, other: Callable[..., Cost], *facts: Hashable) -> bool:
    """Whether lines pay for `count` elements against other(prices, *facts); x: any value of the session. Local."""
    return x.session.ring.bits == 64 and lines.fit and x.proto.takes_keys(count, lines.shape, other, *facts)


def power_by_lines(x: Fixed, lines: Lines | WideLines) -> Fixed:
    """gain * x^exponent in the range of `lines`, of the shape of x, with `lines.frac` fractional bits.

    2 rounds; bytes: `piecewise_price`. Relative error 7e-5 (1/x) or 5e-5, 2^-frac absolute, half to
    all of the relative precision of x, and x 2^(own - total) / 180 absolute, by which slopes are rounded (2^-26 for 1/x
    at 2^16 with 24 bits, there a relative 7e-4). Below the range the first line goes on, so the result is too small,
    not garbage. Of `WideLines` 3 rounds; a truncation, and `piecewise` for two elements each; relative error 1e-4 and
    the precision of x, 2e-4 where the copies meet. Raises UnsupportedOp without comparison keys.
    """
    x = x.restore_high_bits()
    if isinstance(lines, Lines):
        (made,) = x.proto.piecewise(x.share, _pieces(lines))
        return x.with_share(made, lines.frac)
    far = x.coarser(lines.own - lines.apart)
    both = x.stack(far.with_share(far.share, x.frac))
    (made,) = x.proto.piecewise(both.share, _pieces(lines))
    near, far = x.with_share(made.map(lambda part: part[0])), x.with_share(made.map(lambda part: part[1]))
    total = near.scale_int(1 << (lines.apart // 2)) + far
    return total.with_share(total.share, lines.frac)


@lru_cache(maxsize=256)
def _cells(low: float, high: float, octave: int) -> int:
    """`octave` times the octaves of the range, rounded up; what is less than a billionth too many is the last one's."""
    with localcontext(DECIMAL):
        octaves = (Decimal(high) / Decimal(low)).ln() / Decimal(2).ln()
        return int((octaves * octave - Decimal("1e-9")).to_integral_value(ROUND_CEILING))


@lru_cache(maxsize=64)
def _pieces(lines: Lines | WideLines) -> Pieces:
    """Thresholds and differences of lines; T is zero before the first and after the last threshold."""
    wide, shape = isinstance(lines, WideLines), lines.shape
    with localcontext(DECIMAL):
        low = Decimal(2) ** lines.log2_low if isinstance(lines, WideLines) else Decimal(lines.low)
        ratio = Decimal(2) ** (Decimal(1) / CELLS[-0.5 if isinstance(lines, WideLines) else lines.exponent])
        ends = [low * ratio**cell for cell in range(lines.cells + 1)]
        fitted = [lines.line(*pair) for pair in itertools.pairwise(ends)]
        offsets = tuple(-whole(end, lines.own) for end in (ends if wide else ends[1:-1]))
    fitted = [(0, 0), *fitted, (0, 0)] if wide else fitted
    steps = tuple((a[0] - b[0], a[1] - b[1]) for a, b in itertools.pairwise(fitted))
    return Pieces(offsets, (steps,), (fitted[-1],), shape.bits, shape.low, shape.shifts)


def _encoded(lines: Lines | WideLines, middle: Decimal, value: Decimal, slope: Decimal) -> tuple[int, int]:
    """A line by its value in the middle of a cell: constant with `total` fractional bits, slope for an x with `own`."""
    steep = whole(slope, lines.total - lines.own)
    return whole(value, lines.total) - steep * whole(middle, lines.own), steep


def whole(value: Decimal, frac: int) -> int:
    """The ring element of a public number with `frac` fractional bits."""
    return int((value * (Decimal(2) ** frac)).to_integral_value())


def octaves_apart(least: float, log2_high: int) -> int | None:
    """The smallest s whose range reaches from 2^log2_high down to `least`; None if none does."""
    apart = max(2, -(-(log2_high + 1 - bits_below(least)) // 2))
    apart += apart % 2
    return apart if apart <= MOST_APART else None
