"""SiLU (swish): x / (1 + e^-x)."""

from __future__ import annotations

from private_llm.approx.bump import rectified_minus
from private_llm.approx.coefficients import SILU
from private_llm.approx.curve_tables import SILU as CURVE
from private_llm.tensor.fixed import Fixed

TOP = 13.0
"""Beyond it SiLU is x or 0 up to 2.9e-5."""

RESOLUTION = 4
"""Comparisons are right except up to 2^-4 above a threshold; the polynomial fits as far."""


def silu(x: Fixed) -> Fixed:
    """SiLU of x (any shape), for |x| < 2^20 - 2^10; 64-bit ring only, else DomainError.

    relu(x) - g(|x|) with g(t) = t / (1 + e^t), a polynomial of degree 12 in four products (bump.py). Absolute error at
    most 1.6e-4 (rivals: 2.6e-3 and more); exactly x or 0 beyond 13.07. 239 bytes an element, 13 rounds (18 fractional
    bits). By comparison keys 2 rounds, error 5e-5.
    """
    return rectified_minus(x, SILU, TOP, 3, CURVE, RESOLUTION)
