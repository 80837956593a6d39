"""Hyperbolic tangents: a cheap one, and one exact enough to be multiplied by 30 or 50 (Gemma's soft caps).

The exact one is Lambert's continued fraction u / (1 + u^2 / (3 + u^2 / (5 + ...))), cut at 13, a quotient of odd over
even powers,

    tanh u ~ u (135135 + 17325 u^2 + 378 u^4 + u^6) / (135135 + 62370 u^2 + 3150 u^4 + 28 u^6),

so the error is relative: small scores stay as exact as if there were no cap. Written in z = u^2 / 32 its coefficients
are numbers up to 24.
"""

from __future__ import annotations

from private_llm.approx.chain import need_wide_ring
from private_llm.approx.normalise import reciprocal
from private_llm.approx.sigmoid import logistic
from private_llm.exact.comparisons import coarse_bits
from private_llm.tensor.fixed import Fixed

TOP = 4.97
"""Where the quotient reaches 1; beyond it the argument is clipped."""

_ABOVE = tuple(c * 32.0**k / 135135 for k, c in enumerate((135135, 17325, 378, 1)))
_BELOW = tuple(c * 32.0**k / 135135 for k, c in enumerate((135135, 62370, 3150, 28)))
_BITS = 16
_FRAC = 24


def tanh(x: Fixed) -> Fixed:
    """Tanh of x (any shape) as 2 logistic(2x) - 1, for |x| < 2^19 - 2^9; 64-bit ring only, else DomainError.

    Absolute error at most 2e-4 (measured 1e-4); exactly -1 or 1 beyond 5.01. 274 bytes an element, 13 rounds; by
    comparison keys 2 rounds.
    """
    doubled = x.with_share(x.share, x.frac - 1)
    twice = logistic(doubled, x.frac + 1)
    return twice.with_share(twice.share, x.frac) - 1.0


def precise_tanh(x: Fixed) -> Fixed:
    """Tanh of x (any shape), for |x| < 2^19; 64-bit ring only, else DomainError.

    Error at most 4e-5 |tanh x| + 2^-18 for |x| < 3.5 (the reciprocal's 2e-5, the coefficients' 2^-17), 1.1e-4 beyond
    (the quotient's own). 972 bytes an element, 23 rounds: a coarse comparison, an injection, five products, two
    truncations at once, a reciprocal.
    """
    need_wide_ring(x, "tanh")
    u = x.select(coarse_bits(x, [TOP, -TOP]), [1, -1], [-TOP, -TOP]) + TOP
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
