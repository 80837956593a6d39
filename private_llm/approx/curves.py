"""Smooth functions as quadratics between public thresholds, all in one round of comparison keys.

    f(x) = q_last(x) + sum_k [x < end_k] (q_k - q_(k+1))(x)

Coarse comparisons do: each quadratic fits a little beyond its end. Coefficients are integers with as many fractional
bits as the ring has room for; a quadratic is written around the middle of its piece first, so that rounding its leading
coefficient costs nothing far from zero.
"""

import itertools
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import lru_cache

from private_llm.exact.comparisons import coarse_span
from private_llm.net.ledger import Cost
from private_llm.protocols.one_step import Pieces, Polynomial
from private_llm.tensor.fixed import Fixed

LARGEST = 60  # bits that a value may have before its truncation
LEADING = 17  # least fractional bits of a leading coefficient: less would cost the fit its precision


@dataclass(frozen=True, eq=False)
class Curve:
    """c0 + c1 (x - centre) + c2 (x - centre)^2 between neighbouring ends, centre the middle of both; below them zero.

    above: what f is above the last end; None: the last piece goes on, and its end is compared with nothing. linear: f
    is x there. |f| < 2^size between the ends, error included.
    """

    ends: tuple[float, ...]
    pieces: tuple[tuple[float, float, float], ...]
    size: int
    error: float
    linear: bool = False
    above: float | None = 0.0


def takes_curve(curve: Curve, x: Fixed, frac: int, other: Callable[..., Cost], *facts: Hashable) -> bool:
    """Whether `evaluate` pays against other(prices, *facts), and the ring has room for it. Local and public."""
    room = x.session.ring.bits == 64 and LARGEST - curve.size - 2 * x.frac >= LEADING
    if not room or "piecewise" not in x.session.protocol.primitives:
        return False
    return x.proto.takes_keys(x.numel(), pieces_of(curve, x, frac).shape, other, *facts)


def pieces_of(curve: Curve, x: Fixed, frac: int) -> Pieces:
    """The curve at x, |x| < 2^(reach + 1) - 2^10, with `frac` fractional bits: the quadratics, then x itself. Local."""
    return _pieces(curve, x.frac, frac, *coarse_span(x, extra=1))


@lru_cache(maxsize=256)
def _pieces(curve: Curve, own: int, frac: int, bits: int, low: int) -> Pieces:
    total = LARGEST - curve.size
    cells = zip(itertools.pairwise(curve.ends), curve.pieces, strict=True)
    whole = [(0, 0, 0), *(_integers((low + high) / 2, piece, own, total) for (low, high), piece in cells)]
    ends = curve.ends
    if curve.above is None:
        ends = ends[:-1]
    else:
        whole.append((round(curve.above * 2.0**total), 0, 0))
    steps = [tuple(tuple(a - b for a, b in zip(*pair, strict=True)) for pair in itertools.pairwise(whole))]
    rest: list[Polynomial] = [whole[-1]]
    shifts = [total - frac]
    if curve.linear:
        more = (0,) * (len(ends) - 1)
        steps.append((*((0, 0, 0) for _ in more), (0, -1, 0)))
        rest.append((0, 1, 0))
        shifts.append(0)
    offsets = tuple(-round(end * (1 << own)) for end in ends)
    return Pieces(offsets, tuple(steps), tuple(rest), bits, low, tuple(shifts))


def _integers(middle: float, piece: tuple[float, float, float], own: int, total: int) -> Polynomial:
    """The piece's coefficients of 1, x, x^2 with `total` fractional bits, for an x with `own`."""
    c0, c1, c2 = piece
    centre = round(middle * (1 << own))
    a0, a1, a2 = round(c0 * 2.0**total), round(c1 * 2.0 ** (total - own)), round(c2 * 2.0 ** (total - 2 * own))
    return a0 - a1 * centre + a2 * centre * centre, a1 - 2 * a2 * centre, a2


def evaluate(curve: Curve, x: Fixed, frac: int) -> Fixed:
    """The curve at x, of the shape of x, with `frac` fractional bits (those of x, if the curve is linear above).

    2 rounds; bytes: `piecewise_price`. Error: the curve's and
    the rounding of the result. Raises UnsupportedOp under a protocol without comparison keys.
    """
    made = x.proto.piecewise(x.restore_high_bits().share, pieces_of(curve, x, frac))
    value = x.with_share(made[0], frac)
    return value + x.with_share(made[1]) if curve.linear else value
