"""x^(-1/2) on a public range of positive numbers."""

from __future__ import annotations

from private_llm.approx.coefficients import RSQRT
from private_llm.approx.normalise import THIRDS, power
from private_llm.tensor.fixed import Fixed


def rsqrt(x: Fixed, low: float, high: float, frac: int | None = None) -> Fixed:
    """x^(-1/2) for low <= x <= high (public, low > 0), any shape; 64-bit ring only. Method: normalise.py.

    `frac`: fractional bits of the result (default: the session's). Relative error 3e-5, plus 2^-frac absolute and half
    the relative precision of x itself. 3 thresholds an octave; 9 or 10 rounds; 602 bytes an element for 1 to 64. Raises
    DomainError as `normalise.power`.
    """
    return power(x, THIRDS, RSQRT, low, high, x.session.frac if frac is None else frac)
