"""SiLU (swish): x / (1 + e^-x)."""

from __future__ import annotations

from private_llm.approx.bump import Bump, rectified_minus
from private_llm.approx.coefficients import SILU
from private_llm.approx.curve_tables import SILU as CURVE
from private_llm.approx.wave_tables import SILU as WAVES
from private_llm.tensor.fixed import Fixed

TOP = 14.0
"""Beyond it SiLU is x or 0 up to 1.2e-5."""

_BUMP = Bump(WAVES, SILU, TOP, 3, CURVE)


def silu(x: Fixed) -> Fixed:
    """SiLU of x (any shape), for |x| < 2^20 - 2^10; 64-bit ring only, else DomainError.

    relu(x) - g(|x|) with g(t) = t / (1 + e^t), six waves (bump.py): absolute error at most 2e-4, 143.8 bytes an
    element, 6 rounds (18 fractional bits). Without waves (quad, plain, exact divisions) a polynomial of degree 20 in
    five products: exactly x or 0 beyond 14.02, 15 rounds. By comparison keys 2 rounds. Both with an error of 5e-5.
    """
    return rectified_minus(x, _BUMP)
