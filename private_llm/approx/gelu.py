"""GELU in both spellings: x Phi(x), and its approximation by tanh (Hendrycks and Gimpel 2016)."""

from __future__ import annotations

from private_llm.approx import curve_tables
from private_llm.approx.bump import rectified_minus
from private_llm.approx.coefficients import GELU_ERF, GELU_TANH
from private_llm.errors import UnsupportedOp
from private_llm.tensor.fixed import Fixed

TOP = 4.0
"""Beyond it GELU is x or 0 up to 1.3e-4 (erf form), 7e-5 (tanh form)."""


def gelu(x: Fixed, approximate: str = "none") -> Fixed:
    """GELU of x (any shape), for |x| < 2^20 - 2^10; 64-bit ring only, else DomainError.

    relu(x) - g(|x|): g even, here a polynomial of degree 8 in three products (bump.py). Absolute error at most 2e-4,
    both spellings; exactly x or 0 beyond 4.02. 202 bytes an element, 11 rounds (18 fractional bits); by
    comparison keys 2 rounds. Raises
    UnsupportedOp for another spelling.
    """
    if approximate not in ("none", "tanh"):
        raise UnsupportedOp(f"gelu: got approximate={approximate!r}; want 'none' or 'tanh'")
    if approximate == "none":
        return rectified_minus(x, GELU_ERF, TOP, 1, curve_tables.GELU_ERF)
    return rectified_minus(x, GELU_TANH, TOP, 1, curve_tables.GELU_TANH)
