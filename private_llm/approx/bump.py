"""Functions of the form relu(x) - g(|x|) with a bump g that has died out at |x| = top.

1. Rows [x < 0], [x < -top], [x < top] from one coarse comparison.
By waves, where the protocol has them (trio, dealer):
2. t = min(|x|, top) times a public number, modulo a turn: one narrow injection of two rows, the intervals below and
   above 0, which are exclusive ors of rows.
3. relu(x) - g(t) by `relu_minus_waves`.
By a chain elsewhere (quad, plain, exact divisions):
2. x_minus = [x < 0] x; relu = x - x_minus, |x| = x - 2 x_minus.
3. t: one injection of the exclusive or of the last two rows.
4. g(t) by a chain that vanishes exactly at t = top, so saturated results are exactly x or 0.
A wrong bit a little above a threshold changes nothing: both branches are the same analytic function there.
"""

from __future__ import annotations

from dataclasses import dataclass

from private_llm.approx.chain import Chain, evaluate, need_wide_ring, price
from private_llm.approx.curves import Curve, takes_curve
from private_llm.approx.curves import evaluate as by_keys
from private_llm.approx.wave_sums import WaveSum, angle_frac, waves_of
from private_llm.exact.comparisons import coarse_bits, coarse_span
from private_llm.net.ledger import Cost
from private_llm.protocols.one_step import Waves
from private_llm.protocols.prices import Prices
from private_llm.protocols.share import BitShare
from private_llm.ring.ring import Ring
from private_llm.tensor.fixed import Fixed


@dataclass(frozen=True, eq=False)
class Bump:
    """g as waves, if it has them, and as a chain of z = min(|x|, top) / 2^log2_scale - 1; and the whole as a curve."""

    waves: WaveSum | None
    chain: Chain
    top: float
    log2_scale: int
    curve: Curve


def rectified_minus(x: Fixed, bump: Bump) -> Fixed:
    """relu(x) - g(|x|), for |x| < 2^20 - 2^10; shape and bits of x, right in as many of them as x by waves.

    By waves some 140 bytes an element and 6 rounds in all; error: the sum's and 2^-14. Else 33 for the comparison, and
    by the chain 64 for two injections, and the chain's, 3 + 2 rounds and the chain's; error: the chain's and the
    rounding of its result. By comparison keys the whole function in 2 rounds. Raises DomainError in a 32-bit ring.
    """
    waves = bump.waves if x.session.protocol.has_waves else None
    if waves is not None and x.width is not None and x.width < _read(waves, x.frac):
        x = x.restore_high_bits()
    plan = None if waves is None else waves_of(waves, x.frac, x.session.ring.bits if x.width is None else x.width)
    span = coarse_span(x) if waves is None else coarse_span(x, resolution=waves.resolution)
    if takes_curve(bump.curve, x, x.frac, _price, x.session.ring, x.numel(), bump, plan, *span):
        return by_keys(bump.curve, x.restore_high_bits(), x.frac)
    need_wide_ring(x, "this approximation")
    if waves is not None and plan is not None:
        return _by_waves(x, waves, plan)
    x = x.restore_high_bits()
    chain, top, log2_scale = bump.chain, bump.top, bump.log2_scale
    rows = coarse_bits(x, [0.0, -top, top])
    inside = x.proto.xor(rows.row(1), rows.row(2))
    minus = x.select(rows.row(0), [1], [0.0])
    relu = x - minus
    z = folded(relu - minus, inside, [1], [-top], chain, top, log2_scale)
    return relu - evaluate(chain, z, frac=x.frac)


def _by_waves(x: Fixed, made: WaveSum, plan: Waves) -> Fixed:
    """The same by waves."""
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


def _price(
    prices: Prices, ring: Ring, count: int, bump: Bump, plan: Waves | None, bits: int, low: int
) -> Cost:  # fmt: skip
    """Of the comparison, and of the waves and their narrow injection; or of two injections and the chain."""
    compared = prices.msb(count, bits, 3, low)
    if plan is not None:
        turned = prices.inject(ring, count, 2, 2, 0, plan.angle_bits)
        return compared + turned + prices.relu_minus_waves(ring, count, plan)
    twice = prices.inject(ring, count, 1, 1, 0).times(2)
    return compared + twice + price(bump.chain, ring, count, prices)


def folded(
    x: Fixed, rows: BitShare, weights: list[int], constants: list[float], chain: Chain, top: float, log2_scale: int
) -> Fixed:
    """The chain's argument (top + sum_k row_k (weights_k x + constants_k)) / 2^log2_scale - 1, in the shape of x.

    It has the chain's fractional bits; one injection (1 round), and a truncation if that drops bits.
    """
    away = x.select(rows, weights, constants)
    z = away.with_share(away.share, away.frac + log2_scale) + (top / 2.0**log2_scale - 1)
    return z.rescale(chain.argument)
