"""1/x on a public range of positive numbers."""

from __future__ import annotations

from private_llm.approx.coefficients import RECIPROCAL
from private_llm.approx.normalise import QUARTERS, power
from private_llm.tensor.fixed import Fixed

PRODUCT_BITS = 61
"""Most bits of a product of at most 1 before its truncation."""


def reciprocal(x: Fixed, low: float, high: float, frac: int | None = None) -> Fixed:
    """1/x for low <= x <= high (public, low > 0), any shape; 64-bit ring only. Method: normalise.py.

    `frac`: fractional bits of the result (default: 24 + ceil(log2 high), which saves a round). Relative error 2e-5,
    plus 2^-frac absolute. 4 thresholds an octave; 8 or 9 rounds, 1 more with `frac`; 767 bytes an element for 1 to 64.
    Raises DomainError as `normalise.power`.
    """
    return power(x, QUARTERS, RECIPROCAL, low, high, frac)


def fitting(factor: Fixed, frac: int) -> Fixed:
    """A factor whose products with values of `frac` bits are at most 1, with no more bits than these have room for.

    Local, or one truncation (1 round) if it has more.
    """
    return factor.rescale(min(factor.frac, PRODUCT_BITS - frac))
