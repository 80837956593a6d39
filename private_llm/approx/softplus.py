"""Softplus: log(1 + e^x)."""

from __future__ import annotations

from private_llm.approx.bump import Bump, rectified_minus
from private_llm.approx.coefficients import SOFTPLUS
from private_llm.approx.curve_tables import SOFTPLUS as CURVE
from private_llm.tensor.fixed import Fixed

TOP = 10.0
"""Beyond it softplus is x or 0 up to 4.6e-5."""

_BUMP = Bump(None, SOFTPLUS, TOP, 3, CURVE)


def softplus(x: Fixed) -> Fixed:
    """Softplus of x (any shape), for |x| < 2^20 - 2^10; 64-bit ring only, else DomainError.

    relu(x) - g(|x|) with g(t) = -log(1 + e^-t), a polynomial of degree 12 in four products (bump.py). Absolute error at
    most 1e-4; exactly x or 0 beyond 10.02. 243 bytes an element, 13 rounds (18 fractional bits); by
    comparison keys 2 rounds.
    """
    return rectified_minus(x, _BUMP)
