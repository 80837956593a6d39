"""SiLU (swish): x / (1 + e^-x)."""

from __future__ import annotations

from private_llm.approx.bump import rectified_minus
from private_llm.approx.coefficients import SILU
from private_llm.tensor.fixed import Fixed

TOP = 12.0
"""Beyond it SiLU is x or 0 up to 7.4e-5."""


def silu(x: Fixed) -> Fixed:
    """SiLU of x (any shape), for |x| < 2^20 - 2^10; 64-bit ring only.

    relu(x) - g(|x|) with g(t) = t / (1 + e^t), a polynomial of degree 12 in four products (bump.py). Absolute error
    at most 2e-4; exactly x or 0 beyond 12.02. 244 bytes an element, 13 rounds (18 fractional bits).
    """
    return rectified_minus(x, SILU, TOP, 3)
