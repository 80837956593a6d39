"""The exponential function: for softmax, of arguments at most a little above 0; and for arguments up to 12."""

from __future__ import annotations

import math

from private_llm.approx.chain import evaluate, need_wide_ring, price
from private_llm.approx.curves import evaluate as by_keys
from private_llm.approx.curves import takes_curve
from private_llm.approx.tables import EXP
from private_llm.exact.comparisons import coarse_bits, coarse_span
from private_llm.net.ledger import Cost
from private_llm.protocols.one_step import SPAN, TOTAL_BITS, Exponential
from private_llm.protocols.one_step import TOP as RANGE_TOP
from private_llm.protocols.prices import Prices
from private_llm.ring.ring import Ring
from private_llm.tensor.fixed import Fixed

BOTTOM = 14.0
"""Arguments below -14 count as -14: e^-14 = 8e-7."""


def exp(x: Fixed, frac: int = 24) -> Fixed:
    """e^x with `frac` fractional bits, for -2^21 + 2^10 < x <= 1/4, any shape; 64-bit ring only, else DomainError.

    Under trio and dealer one coarse comparison, then the masks' own exponentials (protocols/one_step.py): error
    3e-5, and 4e-6 below -8; zero below -15, maybe from -14 on. 78 bytes an element, 5 rounds. Else (quad, plain) clip
    at -14 (one coarse comparison, one injection), then a polynomial of degree 16 in four products (chain.py) whose
    error shrinks with e^(x/2): at most 5e-5, and 2e-6 below -8. 12 rounds. By comparison keys (curves.py) 2 rounds,
    error 5e-5.
    """
    own = x.session.protocol.has_exponentials
    span = _clip_span(x) if own else coarse_span(x, extra=1, resolution=2)
    if takes_curve(EXP.curve, x, frac, _price, x.session.ring, x.numel(), frac, own, *span):
        return by_keys(EXP.curve, x, frac)
    need_wide_ring(x, "exp")
    if x.session.protocol.has_exponentials:
        bits, low = _clip_span(x)
        keep = x.proto.invert(x.less_than([RANGE_TOP - SPAN], bits, low))
        # SAFE: of x only the lowest frac + 5 bits count, and the comparison looked at more.
        made = x.proto.exponential(x.share, keep, Exponential(x.frac, TOTAL_BITS - frac))
        return Fixed(x.session, made, frac)
    keep = x.proto.invert(coarse_bits(x, [-BOTTOM], extra=1, resolution=2))
    above = x.select(keep, [1], [BOTTOM])
    z = above.with_share(above.share, above.frac + 3) + (1 - BOTTOM / 8)
    return evaluate(EXP.chain, z.rescale(EXP.chain.argument), frac=frac)


def _clip_span(x: Fixed) -> tuple[int, int]:
    """Of the comparison that clears what is below the range of the exponential."""
    return coarse_span(x, extra=1, resolution=0)


def _price(prices: Prices, ring: Ring, count: int, frac: int, own: bool, bits: int, low: int) -> Cost:
    """Of the comparison and the exponential, if the protocol has its own; else of it, an injection and the chain."""
    if own:
        return prices.msb(count, bits, 1, low) + prices.exponential(ring, count, TOTAL_BITS - frac)
    return prices.msb(count, bits, 1, low) + prices.inject(ring, count, 1, 1, 0) + price(EXP.chain, ring, count, prices)


WIDE_TOP = 12.0
"""Largest argument of `wide_exp`."""


def wide_exp(x: Fixed) -> Fixed:
    """e^x with the session's fractional bits, for -2^20 < x <= 12, any shape; 64-bit ring only, else DomainError.

    e^x = (4 e^(x/8 - 2 log 2))^8: `exp` and three squares. Relative error at most 8e-4 (measured 5.5e-4) and
    absolute 2^-17. 176 bytes an element, 11 rounds (trio). Garbage above 12.25.
    """
    eighth = x.with_share(x.share, x.frac + 3) - 2 * math.log(2.0)
    root = exp(eighth, frac=24)
    y = root.with_share(root.share, 22)
    y = y.mul(y, frac=22)
    y = y.mul(y, frac=21)
    return y.mul(y)
