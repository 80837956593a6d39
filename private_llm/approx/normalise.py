"""Powers of a positive secret over a wide public range: 1/x and x^(-1/2), with relative error.

1. Compare x with a public geometric grid (one comparison call, all thresholds at once).
2. The bits select a weight w with y = x w in a narrow interval above 1: one injection of the bits on x itself.
3. p(y) ~ y^q by a cubic in one protocol step (tables.py), |relative error| at most the cubic's.
4. x^q = y^q w^(-q): the same bits select w^(-q), by an injection on p(y).

These functions run on rows, not on elements: rounds count, bytes hardly. Per element and threshold: 4 bytes (1/x of 1
to 64 with 18 fractional bits) to 14 (norms) of comparison, 16 for an injection, less for the first where the protocol
sends no more bits than it needs. Garbage outside [low, high].
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from private_llm.approx.chain import Cubic, need_wide_ring
from private_llm.approx.lines import Lines, power_by_lines, takes_lines
from private_llm.approx.tables import RECIPROCAL, RSQRT
from private_llm.errors import DomainError
from private_llm.net.ledger import Cost
from private_llm.protocols.prices import Prices
from private_llm.protocols.share import BitShare, BitWidths
from private_llm.ring.ring import Ring
from private_llm.tensor.fixed import Fixed, less_than_price, narrows

Y_BITS = 18  # fractional bits of y; a cubic of it carries three times as many
CUBIC_BITS = 6  # fractional bits of the cubic's leading coefficient (the fit rounds it to them)


@dataclass(frozen=True)
class Cells:
    """One octave in cells: x 2^-octave mantissas[i] / 2^bits lies in [1, top] for x up to ends[i] in cell i."""

    bits: int
    mantissas: tuple[int, ...]
    ends: tuple[float, ...]


QUARTERS = Cells(6, (64, 54, 45, 38), (1.194, 1.4235, 1.7, 2.0))  # four cells an octave: y in [1, 1.2032]
THIRDS = Cells(4, (16, 13, 10), (1.265, 1.6, 2.0))  # three cells an octave: y in [1, 1.3]


def grid(cells: Cells, low: float, high: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(thresholds, weights): weights[i] serves x up to thresholds[i], the last weight everything above.

    len(cells.ends) thresholds an octave from low to high; weight * x lies in the cells' interval above 1.
    """
    octaves = range(math.floor(math.log2(low)), math.ceil(math.log2(high)) + 1)
    ends = [end * 2.0**octave for octave in octaves for end in cells.ends]
    weights = [m * 2.0 ** (-octave - cells.bits) for octave in octaves for m in cells.mantissas]
    first = next(i for i, end in enumerate(ends) if end > low)
    last = next(i for i, end in enumerate(ends) if end >= high)
    return tuple(ends[first:last]), tuple(weights[first : last + 1])


@dataclass(frozen=True)
class Powers:
    """`value` is the power; row i of `below` says of each argument (flattened) whether it is below thresholds[i]."""

    value: Fixed
    below: BitShare
    thresholds: tuple[float, ...]


def power(
    x: Fixed, cells: Cells, cubic: Cubic, low: float, high: float, frac: int | None = None, gain: float = 1.0
) -> Fixed:
    """gain * x^cubic.power for low <= x <= high, with `frac` fractional bits (default: as many as step 4 leaves).

    The shape of x. Relative error: the cubic's, and the rounding of y and of the result. Rounds: the comparison's (3 or
    4), 2 for y, 2 for the cubic, 1 for step 4 and 1 more if `frac` makes it truncate; 2 by comparison keys (lines.py),
    with a relative error of 6e-5. Raises DomainError for an empty range, one too wide for x, or a 32-bit ring.
    """
    if "piecewise" in x.session.protocol.primitives and 0 < low < high:
        plan = _plan(cells, cubic, low, high, gain, cells.bits + math.ceil(math.log2(high)))
        lines = Lines(cubic.power, x.frac, low, high, Y_BITS + plan.factor_bits if frac is None else frac, gain)
        if takes_lines(x, x.numel(), lines, price, x.session.ring, x.frac, x.numel(), cells, low, high):
            return power_by_lines(x, lines)
    return powers(x, cells, cubic, low, high, frac, gain).value


def price(prices: Prices, ring: Ring, frac: int, count: int, cells: Cells, low: float, high: float) -> Cost:
    """What `powers` costs for `count` elements with `frac` fractional bits. Local and public."""
    thresholds = len(grid(cells, low, high)[0])
    bits, skipped = frac + math.ceil(math.log2(high)) + 2, max(0, math.floor(math.log2(low / 128) + frac))
    return (
        less_than_price(prices, count, bits, thresholds, min(skipped, bits - 2))
        + prices.inject(ring, count, thresholds, thresholds, Y_BITS).times(2)
        + prices.poly(ring, count, 3, Y_BITS)
    )


def powers(
    x: Fixed, cells: Cells, cubic: Cubic, low: float, high: float, frac: int | None = None, gain: float = 1.0
) -> Powers:
    """As `power`, with the comparisons that it made. Arguments outside the range give garbage, no error."""
    if not 0 < low < high:
        raise DomainError(f"got a range of {low:g} to {high:g}; want 0 < low < high")
    need_wide_ring(x, "a reciprocal or reciprocal square root")
    proto, x = x.proto, x.restore_high_bits()
    weight_bits = cells.bits + math.ceil(math.log2(high))
    if x.frac + weight_bits > 60 or weight_bits < 0:
        raise DomainError(
            f"a range up to 2^{weight_bits - cells.bits} with {x.frac} fractional bits leaves the ring: truncate first"
        )
    plan = _plan(cells, cubic, low, high, gain, weight_bits)
    thresholds, zeros = plan.thresholds, (0,) * len(plan.thresholds)
    below = x.less_than(
        thresholds,
        bits=x.frac + math.ceil(math.log2(high)) + 2,
        low=max(0, math.floor(math.log2(cubic.slack * low) + x.frac)),
    )
    flat = x.view(lambda part: part.reshape(-1)).share
    given = x.frac + weight_bits + 4  # y stays below 2 in the range, and a narrow division wants two bits more
    widths = BitWidths(given, x.session.ring.bits) if given < x.session.ring.bits and narrows(x.session) else None
    picked = proto.inject(below, flat, plan.weight_steps, zeros, low=None if widths is None else given)
    scaled = proto.add(picked, proto.mul_public(flat, plan.last_weight))
    y = x.with_share(proto.truncate(scaled, x.frac + weight_bits - Y_BITS, widths), Y_BITS)
    p = (y - cubic.centre).poly(cubic.coefficients, frac=Y_BITS, bits=CUBIC_BITS)
    out = proto.inject(below, p.share, plan.factor_steps, zeros)
    out = proto.add(out, proto.mul_public(p.share, plan.last_factor))
    shape = x.shape
    result = x.with_share(out.map(lambda part: part.reshape(shape)), Y_BITS + plan.factor_bits)
    return Powers(result if frac is None else result.rescale(frac), below, thresholds)


@dataclass(frozen=True)
class _ScalePlan:
    """Public integers of steps 2 and 4: of the last cell, and from each cell to the next."""

    thresholds: tuple[float, ...]
    weight_steps: tuple[int, ...]
    last_weight: int
    factor_steps: tuple[int, ...]
    last_factor: int
    factor_bits: int


@lru_cache(maxsize=256)
def _plan(cells: Cells, cubic: Cubic, low: float, high: float, gain: float, weight_bits: int) -> _ScalePlan:
    thresholds, weights = grid(cells, low, high)
    factors = [gain * w ** (-cubic.power) for w in weights]
    factor_bits = weight_bits if cubic.power == -1 and gain == 1 else Y_BITS - math.floor(math.log2(min(factors)))
    *_, last_weight = integers = [round(w * 2.0**weight_bits) for w in weights]
    *_, last_factor = scaled = [round(c * 2.0**factor_bits) for c in factors]
    return _ScalePlan(thresholds, _differences(integers), last_weight, _differences(scaled), last_factor, factor_bits)


def _differences(steps: Sequence[int]) -> tuple[int, ...]:
    return tuple(a - b for a, b in itertools.pairwise(steps))


PRODUCT_BITS = 61  # most bits of a product of at most 1 before its truncation


def reciprocal(x: Fixed, low: float, high: float, frac: int | None = None) -> Fixed:
    """1/x for low <= x <= high (public, low > 0), any shape; 64-bit ring only. Method: normalise.py.

    `frac`: fractional bits of the result (default: 24 + ceil(log2 high), which saves a round). Relative error 2e-5,
    plus 2^-frac absolute. 4 thresholds an octave; 8 or 9 rounds, 1 more with `frac`; 767 bytes an element for 1 to 64.
    Raises DomainError as `normalise.power`.
    """
    return power(x, QUARTERS, RECIPROCAL, low, high, frac)


def fitting(factor: Fixed, frac: int) -> Fixed:
    """A factor with no more bits than its products (<= 1, `frac` bits) have room for: local or 1 round (truncation)."""
    return factor.rescale(min(factor.frac, PRODUCT_BITS - frac))


def rsqrt(x: Fixed, low: float, high: float, frac: int | None = None) -> Fixed:
    """x^(-1/2) for low <= x <= high (public, low > 0), any shape; 64-bit ring only. Method: normalise.py.

    `frac` fractional bits (the session's). Relative error 3e-5 and half that of x itself, plus 2^-frac. 3 thresholds an
    octave; 9 or 10 rounds; 602 bytes an element for 1 to 64. Raises DomainError as `normalise.power`.
    """
    return power(x, THIRDS, RSQRT, low, high, x.session.frac if frac is None else frac)
