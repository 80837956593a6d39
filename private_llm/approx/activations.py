"""The pointwise smooth functions: GELU, tanh, e^x, and those that their tables (tables.py) make: SiLU, softplus.

Tanh is Lambert's continued fraction u / (1 + u^2 / (3 + u^2 / (5 + ...))), cut at 13: odd over even powers,

    tanh u ~ u (135135 + 17325 u^2 + 378 u^4 + u^6) / (135135 + 62370 u^2 + 3150 u^4 + 28 u^6),

so the error is relative: small scores stay as exact as if there were no soft cap (Gemma's, which multiply it by 30 or
50). Written in z = u^2 / 32 its coefficients are numbers up to 24.
"""

import math
from dataclasses import dataclass

from private_llm.approx import tables
from private_llm.approx.bump import Fitted, folded, rectified_minus
from private_llm.approx.chain import evaluate, need_wide_ring, price
from private_llm.approx.curves import evaluate as by_keys
from private_llm.approx.curves import takes_curve
from private_llm.approx.normalise import reciprocal
from private_llm.approximations import approximations_of
from private_llm.errors import UnsupportedOp
from private_llm.exact.comparisons import coarse_bits, coarse_span
from private_llm.net.ledger import Cost
from private_llm.protocols import one_step
from private_llm.protocols.prices import Prices
from private_llm.ring.ring import Ring
from private_llm.tensor.fixed import Fixed, less_than_price


def gelu(x: Fixed, approximate: str = "none") -> Fixed:
    """GELU of x (any shape) by erf or "tanh" (Hendrycks and Gimpel 2016), for |x| < 2^20 - 2^10.

    64-bit ring only, else DomainError. relu(x) - g(|x|), g five waves (bump.py). Without waves (quad, plain, exact
    divisions) a polynomial of degree 8 in three products: exactly x or 0 beyond 4.02, 11 rounds. Where
    `PrivateConfig.approximations` names another system's GELU, that one, which has one formula for both spellings.
    Absolute error at most 2e-4. Raises UnsupportedOp for another spelling.
    """
    other = approximations_of(x.session.config.approximations)
    if other is not None:
        theirs: Fixed = other.gelu(x)
        return theirs
    if approximate not in ("none", "tanh"):
        raise UnsupportedOp(f"gelu: got approximate={approximate!r}; want 'none' or 'tanh'")
    return rectified_minus(x, tables.GELU_ERF if approximate == "none" else tables.GELU_TANH)


@dataclass(frozen=True)
class FromTables:
    """The function that tables.py has under this name, of x (any shape), |x| < 2^20 - 2^10; as `rectified_minus`.

    One with f(-x) = 1 - f(x), the logistic function among them, is s(t) = f(-t) at t = min(|x|, top) by a chain; s
    itself where x < 0, else 1 - s. The fold to t takes a comparison of three rows and an injection; the side another.
    """

    name: str

    def __call__(self, x: Fixed) -> Fixed:
        """Domain, error and price: the function's record (nn/activations.py)."""
        made: Fitted = getattr(tables, self.name)
        return rectified_minus(x, made) if made.curve.linear else _rising(x, made)


def _rising(x: Fixed, made: Fitted) -> Fixed:
    if takes_curve(made.curve, x, x.frac, _price, x.session.ring, x.numel(), made, *coarse_span(x)):
        return by_keys(made.curve, x, x.frac)
    rows = coarse_bits(x, [0.0, -made.top, made.top])
    z = folded(x, rows, [-2, 1, 1], [0.0, made.top, -made.top], made)
    tail = evaluate(made.chain, z, frac=x.frac)
    return tail + tail.select(x.proto.invert(rows.row(0)), [-2], [1.0])


def _price(prices: Prices, ring: Ring, count: int, made: Fitted, bits: int, low: int) -> Cost:
    fold = less_than_price(prices, count, bits, 3, low) + prices.inject(ring, count, 3, 3, 0)
    return fold + price(made.chain, ring, count, prices) + prices.inject(ring, count, 1, 1, 0)


_TOP = 4.97  # where the quotient reaches 1; beyond it the argument is clipped

_ABOVE = tuple(c * 32.0**k / 135135 for k, c in enumerate((135135, 17325, 378, 1)))
_BELOW = tuple(c * 32.0**k / 135135 for k, c in enumerate((135135, 62370, 3150, 28)))
_BITS = 16
_FRAC = 24


def precise_tanh(x: Fixed) -> Fixed:
    """Tanh of x (any shape), for |x| < 2^19; 64-bit ring only, else DomainError.

    Error at most 4e-5 |tanh x| + 2^-18 for |x| < 3.5 (the reciprocal's 2e-5, the coefficients' 2^-17), 1.1e-4 beyond
    (the quotient's own). A coarse comparison, an injection, five products, two truncations at once, a reciprocal.
    """
    need_wide_ring(x, "tanh")
    u = x.select(coarse_bits(x, [_TOP, -_TOP]), [1, -1], [-_TOP, -_TOP]) + _TOP
    square = u.mul(u, frac=_FRAC - 5)
    z = square.with_share(square.share, _FRAC)
    z2 = z.mul(z, frac=_FRAC)
    powers = (z, z2, z2.mul(z, frac=_FRAC))
    both = _polynomial(powers, _ABOVE).stack(_polynomial(powers, _BELOW)).rescale(_FRAC)
    above, below = both.view(lambda part: part[0]), both.view(lambda part: part[1])
    return u.mul(above, frac=_FRAC).mul(reciprocal(below, 0.99, 31.0), frac=x.frac)


def _polynomial(powers: tuple[Fixed, Fixed, Fixed], coefficients: tuple[float, ...]) -> Fixed:
    """1 + c1 z + c2 z^2 + c3 z^3 with `_BITS` more fractional bits. Local."""
    terms = [power.scale_int(round(c * (1 << _BITS))) for power, c in zip(powers, coefficients[1:], strict=True)]
    total = terms[0] + terms[1] + terms[2]
    return Fixed(total.session, total.share, _FRAC + _BITS) + coefficients[0]


# -- e^x ---------------------------------------------------------------------------------------------------------------
BOTTOM = 14.0  # arguments below -14 count as -14: e^-14 = 8e-7


def exp(x: Fixed, frac: int = 24) -> Fixed:
    """e^x with `frac` fractional bits, for -2^21 + 2^10 < x <= 1/4, any shape; 64-bit ring only, else DomainError.

    Under trio and dealer one coarse comparison, then the masks' own exponentials (protocols/one_step.py): error
    3e-5, and 4e-6 below -8; zero below -15, maybe from -14 on. 78 bytes an element, 5 rounds. Else (quad, plain) clip
    at -14 (a coarse comparison, an injection), then a polynomial of degree 16 in four products (chain.py) whose error
    shrinks with e^(x/2): 5e-5, 2e-6 below -8. 12 rounds. By comparison keys (curves.py) 2 rounds, error 5e-5.
    """
    own = "exponential" in x.session.protocol.primitives
    span = coarse_span(x, extra=1, resolution=0 if own else 2)
    if takes_curve(tables.EXP.curve, x, frac, _exp_price, x.session.ring, x.numel(), frac, own, *span):
        return by_keys(tables.EXP.curve, x, frac)
    need_wide_ring(x, "exp")
    if own:
        keep = x.proto.invert(x.less_than([one_step.TOP - one_step.SPAN], *span))
        # SAFE: of x only the lowest frac + 5 bits count, and the comparison looked at more.
        made = x.proto.exponential(x.share, keep, one_step.Exponential(x.frac, one_step.TOTAL_BITS - frac))
        return Fixed(x.session, made, frac)
    keep = x.proto.invert(coarse_bits(x, [-BOTTOM], extra=1, resolution=2))
    above = x.select(keep, [1], [BOTTOM])
    z = above.with_share(above.share, above.frac + 3) + (1 - BOTTOM / 8)
    return evaluate(tables.EXP.chain, z.rescale(tables.EXP.chain.argument), frac=frac)


def _exp_price(prices: Prices, ring: Ring, count: int, frac: int, own: bool, bits: int, low: int) -> Cost:
    compared = prices.msb(count, bits, 1, low)
    if own:
        return compared + prices.exponential(ring, count, one_step.TOTAL_BITS - frac)
    return compared + prices.inject(ring, count, 1, 1, 0) + price(tables.EXP.chain, ring, count, prices)


WIDE_TOP = 12.0  # largest argument of `wide_exp`


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
