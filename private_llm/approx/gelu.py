"""GELU in both spellings: x Phi(x), and its approximation by tanh (Hendrycks and Gimpel 2016)."""

from __future__ import annotations

from private_llm.approx import curve_tables, wave_tables
from private_llm.approx.bump import Bump, rectified_minus
from private_llm.approx.coefficients import GELU_ERF, GELU_TANH
from private_llm.errors import UnsupportedOp
from private_llm.tensor.fixed import Fixed

TOP = 4.0
"""Beyond it GELU is x or 0 up to 1.3e-4 (erf form), 7e-5 (tanh form)."""

_ERF = Bump(wave_tables.GELU_ERF, GELU_ERF, TOP, 1, curve_tables.GELU_ERF)
_TANH = Bump(wave_tables.GELU_TANH, GELU_TANH, TOP, 1, curve_tables.GELU_TANH)


def gelu(x: Fixed, approximate: str = "none") -> Fixed:
    """GELU of x (any shape), for |x| < 2^20 - 2^10; 64-bit ring only, else DomainError.

    relu(x) - g(|x|), g five waves (bump.py): absolute error at most 2e-4, both spellings, 130.3 bytes an element, 6
    rounds (18 fractional bits). Without waves (quad, plain, exact divisions) a polynomial of degree 8 in three
    products: error 2e-4, exactly x or 0 beyond 4.02, 11 rounds. By comparison keys 2 rounds, error 2e-4. Raises
    UnsupportedOp for another spelling.
    """
    if approximate not in ("none", "tanh"):
        raise UnsupportedOp(f"gelu: got approximate={approximate!r}; want 'none' or 'tanh'")
    return rectified_minus(x, _ERF if approximate == "none" else _TANH)
