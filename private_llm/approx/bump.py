"""Functions of the form relu(x) - g(|x|) with a bump g that has died out at |x| = top.

1. Rows [x < 0], [x < -top], [x < top] from one coarse comparison.
2. x_minus = [x < 0] x; relu = x - x_minus, |x| = x - 2 x_minus.
3. t = min(|x|, top): one injection of the exclusive or of the last two rows.
4. g(t) by a chain that vanishes exactly at t = top, so saturated results are exactly x or 0.
A wrong bit less than 2^-6 above a threshold changes nothing: both branches are the same analytic function there.
"""

from __future__ import annotations

from private_llm.approx.chain import Chain, evaluate, price
from private_llm.approx.curves import Curve, takes_curve
from private_llm.approx.curves import evaluate as by_keys
from private_llm.exact.comparisons import coarse_bits, coarse_span
from private_llm.net.ledger import Cost
from private_llm.protocols.prices import Prices
from private_llm.protocols.share import BitShare
from private_llm.ring.ring import Ring
from private_llm.tensor.fixed import Fixed


def rectified_minus(x: Fixed, chain: Chain, top: float, log2_scale: int, curve: Curve) -> Fixed:
    """relu(x) - chain(z) at z = min(|x|, top) / 2^log2_scale - 1, for |x| < 2^20 - 2^10; shape and bits of x.

    33 bytes an element for the comparison, 64 for two injections, and the chain's; 3 + 2 rounds and the chain's. Error:
    the chain's and the rounding of its result. By comparison keys `curve` instead: the whole function in 2 rounds.
    Raises DomainError in a 32-bit ring.
    """
    if takes_curve(curve, x, x.frac, _price, x.session.ring, x.numel(), chain, *coarse_span(x)):
        return by_keys(curve, x, x.frac)
    rows = coarse_bits(x, [0.0, -top, top])
    inside = x.proto.xor(rows.row(1), rows.row(2))
    minus = x.choose(rows.row(0), [1], [0.0])
    relu = x - minus
    z = folded(relu - minus, inside, [1], [-top], chain, top, log2_scale)
    return relu - evaluate(chain, z, frac=x.frac)


def _price(prices: Prices, ring: Ring, count: int, chain: Chain, bits: int, low: int) -> Cost:
    """Of the comparison, two injections and the chain."""
    twice = prices.inject(ring, count, 1, 1, 0).times(2)
    return prices.msb(count, bits, 3, low) + twice + price(chain, ring, count, prices)


def folded(
    x: Fixed, rows: BitShare, weights: list[int], constants: list[float], chain: Chain, top: float, log2_scale: int
) -> Fixed:
    """The chain's argument (top + sum_k row_k (weights_k x + constants_k)) / 2^log2_scale - 1, in the shape of x.

    It has the chain's fractional bits; one injection (1 round), and a truncation if that drops bits.
    """
    away = x.choose(rows, weights, constants)
    z = away.with_share(away.share, away.frac + log2_scale) + (top / 2.0**log2_scale - 1)
    return z.at(chain.argument)
