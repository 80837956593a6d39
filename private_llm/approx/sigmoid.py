"""The logistic function 1 / (1 + e^-x)."""

from __future__ import annotations

from private_llm.approx.bump import folded
from private_llm.approx.chain import evaluate, price
from private_llm.approx.coefficients import LOGISTIC
from private_llm.approx.curve_tables import LOGISTIC as CURVE
from private_llm.approx.curves import evaluate as by_keys
from private_llm.approx.curves import takes_curve
from private_llm.exact.comparisons import coarse_bits, coarse_span
from private_llm.net.ledger import Cost
from private_llm.protocols.prices import Prices
from private_llm.ring.ring import Ring
from private_llm.tensor.fixed import Fixed

TOP = 10.0
"""Beyond it the function is 0 or 1 up to 4.6e-5."""


def sigmoid(x: Fixed) -> Fixed:
    """The logistic function of x (any shape), for |x| < 2^20 - 2^10; 64-bit ring only, else DomainError.

    Absolute error at most 1e-4; exactly 0 or 1 beyond 10.02. 275 bytes an element, 13 rounds (18 fractional bits).
    By comparison keys 2 rounds, error 5e-5.
    """
    return logistic(x, x.frac)


def logistic(x: Fixed, frac: int) -> Fixed:
    """The same with `frac` fractional bits.

    s(t) = 1 / (1 + e^t) at t = min(|x|, 10) by a polynomial of degree 12 in four products; s itself where x < 0,
    else 1 - s. The fold to t takes one comparison of three rows and one injection; choosing the side another.
    """
    if takes_curve(CURVE, x, frac, _price, x.session.ring, x.numel(), *coarse_span(x)):
        return by_keys(CURVE, x, frac)
    rows = coarse_bits(x, [0.0, -TOP, TOP])
    z = folded(x, rows, [-2, 1, 1], [0.0, TOP, -TOP], LOGISTIC, TOP, 3)
    tail = evaluate(LOGISTIC, z, frac=frac)
    return tail + tail.select(x.proto.invert(rows.row(0)), [-2], [1.0])


def _price(prices: Prices, ring: Ring, count: int, bits: int, low: int) -> Cost:
    """Of the comparison, two injections and the chain."""
    fold = prices.msb(count, bits, 3, low) + prices.inject(ring, count, 3, 3, 0)
    return fold + price(LOGISTIC, ring, count, prices) + prices.inject(ring, count, 1, 1, 0)
