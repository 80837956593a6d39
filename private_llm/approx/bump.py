"""Functions of the form relu(x) - g(|x|) with a bump g that has died out at |x| = top; the record of a fitted function.

1. Rows [x < 0], [x < -top], [x < top] from one coarse comparison.
By waves, where the protocol has them (trio, dealer), as a sum that is computed without a round:
    g(t) = constant + sum over k of c_k cos(k a) + s_k sin(k a),  a = 2 pi t / period,  0 <= t <= top
2. t = min(|x|, top) times a public number, modulo a turn: one narrow injection of two rows, the intervals below and
   above 0, which are exclusive ors of rows. The number makes the period a power of two, which divides the ring.
3. relu(x) - g(t) by `relu_minus_waves`.
By a chain elsewhere (quad, plain, exact divisions):
2. x_minus = [x < 0] x; relu = x - x_minus, |x| = x - 2 x_minus.
3. t: one injection of the exclusive or of the last two rows.
4. g(t) by a chain that vanishes exactly at t = top, so saturated results are exactly x or 0.
A wrong bit a little above a threshold changes nothing: both branches are the same analytic function there.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

from private_llm.approx.chain import Chain, evaluate, need_wide_ring, price
from private_llm.approx.curves import Curve, takes_curve
from private_llm.approx.curves import evaluate as by_keys
from private_llm.exact.comparisons import coarse_bits, coarse_span
from private_llm.net.ledger import Cost
from private_llm.protocols.one_step import PUBLIC_BITS, Wave, Waves
from private_llm.protocols.prices import Prices
from private_llm.protocols.share import BitShare
from private_llm.ring.ring import Ring
from private_llm.tensor.fixed import Fixed, less_than_price

SECRET_BITS = 17  # fractional bits of a wave's secret numbers, less those by which its coefficients are below 1

ANGLE_BITS = 15  # fractional bits of arguments that angles keep: they are less than 2^-14 off, sums half of that


@dataclass(frozen=True)
class WaveSum:
    """A fitted sum; waves are the pairs (c_k, s_k).

    |g| stays below 1/2. Comparisons of arguments may be wrong up to 2^-resolution above a threshold. `error` bounds the
    sum's distance from its function, and at `top` from zero and from what the function is 2^-resolution below it.
    """

    top: float
    factor: int
    factor_bits: int
    period_log2: int
    resolution: int
    constant: float
    waves: tuple[tuple[float, float], ...]
    error: float


def angle_frac(frac: int) -> int:
    """How many of an argument's fractional bits its angle keeps."""
    return min(frac, ANGLE_BITS)


@lru_cache(maxsize=64)
def waves_of(made: WaveSum, frac: int, bits: int = 64) -> Waves:
    """The public side for results with `frac` fractional bits (`bits` are read), of arguments that come multiplied."""
    whole = 1 << PUBLIC_BITS
    bits_of = [max(1, SECRET_BITS - 1 + math.frexp(abs(c) + abs(s))[1]) for c, s in made.waves]
    waves = tuple(Wave(round(c * whole), round(s * whole), n) for (c, s), n in zip(made.waves, bits_of, strict=True))
    return Waves(frac, angle_frac(frac) + made.factor_bits + made.period_log2, made.constant, waves, bits)


@dataclass(frozen=True, eq=False)
class Fitted:
    """One function's tables (tables.py): a curve of x, and a chain of z.

    Of activations z = t / 2^log2_scale - 1, t = min(|x|, top), and the chain is g, or for the logistic function its
    tail 1 / (1 + e^t); waves: g as waves, if it has them.
    """

    top: float
    log2_scale: int
    chain: Chain
    curve: Curve
    waves: WaveSum | None = None


def rectified_minus(x: Fixed, bump: Fitted) -> Fixed:
    """relu(x) - g(|x|), for |x| < 2^20 - 2^10; shape and bits of x, right in as many of them as x by waves.

    By waves some 140 bytes an element and 6 rounds in all; error: the sum's and 2^-14. Else 33 for the comparison, and
    by the chain 64 for two injections, and the chain's, 3 + 2 rounds and the chain's; error: the chain's and the
    rounding of its result. By comparison keys the whole function in 2 rounds. Raises DomainError in a 32-bit ring.
    """
    waves = bump.waves if "relu_minus_waves" in x.session.protocol.primitives else None
    x = x if waves is None else x.right_in(_read(waves, x.frac))
    plan = None if waves is None else waves_of(waves, x.frac, x.session.ring.bits if x.width is None else x.width)
    span = coarse_span(x) if waves is None else coarse_span(x, resolution=waves.resolution)
    if takes_curve(bump.curve, x, x.frac, _price, x.session.ring, x.numel(), bump, plan, *span):
        return by_keys(bump.curve, x.restore_high_bits(), x.frac)
    need_wide_ring(x, "this approximation")
    if waves is not None and plan is not None:
        return _by_waves(x, waves, plan)
    x = x.restore_high_bits()
    rows = coarse_bits(x, [0.0, -bump.top, bump.top])
    inside = x.proto.xor(rows.row(1), rows.row(2))
    minus = x.select(rows.row(0), [1], [0.0])
    relu = x - minus
    return relu - evaluate(bump.chain, folded(relu - minus, inside, [1], [-bump.top], bump), frac=x.frac)


def _by_waves(x: Fixed, made: WaveSum, plan: Waves) -> Fixed:
    top, factor = made.top, made.factor
    rows = coarse_bits(x, [-top, 0.0, top], resolution=made.resolution)
    proto, negative, sides = x.proto, rows.row(1), x.proto.xor(rows.some(0, 2), rows.some(1, 2))
    # Each interval adds what t differs by from the top: -x - top on the left, x - top on the right.
    kept = angle_frac(x.frac)
    reach = round(top * (1 << kept)) * factor
    short = x.local_truncate(kept, _read(made, x.frac) - (x.frac - kept))
    angle = proto.inject(sides, short.share, [-factor, factor], [-reach, -reach], low=plan.angle_bits)
    angle = proto.add_public(angle, reach)
    return x.with_share(proto.relu_minus_waves(x.share, negative, angle, plan))


def _read(made: WaveSum, frac: int) -> int:
    """Lowest bits of an argument that its angle is made of."""
    return frac + made.factor_bits + made.period_log2


def _price(prices: Prices, ring: Ring, count: int, bump: Fitted, plan: Waves | None, bits: int, low: int) -> Cost:
    compared = less_than_price(prices, count, bits, 3, low)
    if plan is not None:
        turned = prices.inject(ring, count, 2, 2, 0, plan.angle_bits)
        return compared + turned + prices.relu_minus_waves(ring, count, plan)
    twice = prices.inject(ring, count, 1, 1, 0).times(2)
    return compared + twice + price(bump.chain, ring, count, prices)


def folded(x: Fixed, rows: BitShare, weights: list[int], constants: list[float], made: Fitted) -> Fixed:
    """The chain's argument, in the shape of x: one injection (1 round), and a truncation if that drops bits."""
    away = x.select(rows, weights, constants)
    z = away.with_share(away.share, away.frac + made.log2_scale) + (made.top / 2.0**made.log2_scale - 1)
    return z.rescale(made.chain.argument)
