"""Fit the quadratics of `private_llm/approx/curve_tables.py` and write, or check, that file.

    python scripts/fitting/fit_curves.py            # write it
    python scripts/fitting/fit_curves.py --check    # fail unless the committed file is what this script makes
    python scripts/fitting/fit_curves.py --tiny     # one curve with a coarse error, write nothing

Each piece is made as long as its error allows, in steps of 1/64: the quadratic through three Chebyshev nodes of the
piece and 1/64 beyond it, as far as a coarse comparison may let it go. Parties read the numbers from the file, so that
all have the same.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

TARGET = Path(__file__).resolve().parents[2] / "private_llm" / "approx" / "curve_tables.py"
STEP = 1 / 64
HEADER = '''"""Fitted quadratics, written by `scripts/fitting/fit_curves.py` (do not edit; run the script)."""

from private_llm.approx.curves import Curve, Piece

# fmt: off

'''

Array = np.ndarray[tuple[int], np.dtype[np.float64]]


def fit(
    function: Callable[[Array], Array], weight: Callable[[Array], Array], low: float, high: float
) -> tuple[tuple[float, ...], float]:
    """Coefficients around the middle, and the largest weighted error, on low to high and STEP beyond."""
    centre, half = (low + high) / 2, (high + STEP - low) / 2
    nodes = half + low + half * np.cos((np.arange(3) + 0.5) * math.pi / 3)
    powers = np.stack([(nodes - centre) ** k for k in range(3)], 1)
    coefficients = np.linalg.solve(powers, function(nodes))
    x = np.linspace(low, high + STEP, 400)
    error = np.abs((sum(c * (x - centre) ** k for k, c in enumerate(coefficients)) - function(x)) * weight(x)).max()
    return tuple(float(f"{c:.12g}") for c in coefficients), float(error)


def curve(
    name: str, about: str, function: Callable[[Array], Array], low: float, high: float, error: float, *, size: int,
    linear: bool, weight: Callable[[Array], Array] = np.ones_like, above: float | None = None,
) -> str:  # fmt: skip
    """The curve as source text: zero below `low`; above `high` x itself (linear), `above`, or the last piece."""
    ends, pieces, worst = [low], ["Piece(0.0, (0.0, 0.0, 0.0))"], 0.0
    at = low
    while at < high:
        steps = int((high - at) / STEP)
        lower, upper = 1, steps
        while lower < upper:  # the longest piece whose error is small enough
            middle = (lower + upper + 1) // 2
            if fit(function, weight, at, at + middle * STEP)[1] <= error:
                lower = middle
            else:
                upper = middle - 1
        end = at + lower * STEP
        coefficients, found = fit(function, weight, at, end)
        worst = max(worst, found)
        pieces.append(f"Piece({(at + end) / 2!r}, {coefficients!r})")
        ends.append(end)
        at = end
    if linear or above is not None:
        pieces.append(f"Piece(0.0, ({above or 0.0!r}, 0.0, 0.0))")
    else:
        ends.pop()
    rows = "\n".join(f"        {piece}," for piece in pieces)
    numbers = "\n        ".join(", ".join(map(repr, ends[at : at + 10])) + "," for at in range(0, len(ends), 10))
    return (
        f"{name} = Curve(\n    ends=(\n        {numbers}\n    ),\n    pieces=(\n{rows}\n    ),\n"
        f'    size={size}, error={worst * 1.005:.2e}, linear={linear},\n)\n"""{about}"""\n'
    )


def _gelu(x: Array) -> Array:
    return x * np.array([1 + math.erf(v / math.sqrt(2)) for v in x]) / 2


def _gelu_tanh(x: Array) -> Array:
    return np.asarray(x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2)


def _silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def _logistic(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def _softplus(x: Array) -> Array:
    return np.logaddexp(0.0, x)


def _exp_weight(x: Array) -> Array:
    """Small errors matter where e^x is small: a row has many such entries."""
    return 1 / (np.exp(x / 2) + 4e-3)


def generate(error: float, names: tuple[str, ...]) -> str:
    """The file's text."""
    made = {
        "EXP": lambda: curve("EXP", "e^x for x up to 1/4, 0 below -14.", np.exp, -14.0, 0.25, error, size=1,
                             linear=False, weight=_exp_weight),
        "GELU_ERF": lambda: curve("GELU_ERF", "GELU, 0 below -4 and x above 4.", _gelu, -4.0, 4.0, error, size=3,
                                  linear=True),
        "GELU_TANH": lambda: curve("GELU_TANH", "GELU by tanh, 0 below -4 and x above 4.", _gelu_tanh, -4.0, 4.0, error,
                                   size=3, linear=True),
        "LOGISTIC": lambda: curve("LOGISTIC", "1 / (1 + e^-x), 0 below -10, 1 above 10.", _logistic, -10.0, 10.0, error,
                                  size=1, linear=False, above=1.0),
        "SOFTPLUS": lambda: curve("SOFTPLUS", "Softplus, 0 below -10 and x above 10.", _softplus, -10.0, 10.0, error,
                                  size=4, linear=True),
        "SILU": lambda: curve("SILU", "SiLU, 0 below -14 and x above 14.", _silu, -14.0, 14.0, error, size=4,
                              linear=True),
    }  # fmt: skip
    return HEADER + "\n".join(made[name]() for name in names)


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the committed file")
    parser.add_argument("--tiny", action="store_true", help="one curve, write nothing")
    args = parser.parse_args(argv)
    if args.tiny:
        print(generate(1e-2, ("EXP",)))
        return 0
    text = generate(4e-5, ("EXP", "GELU_ERF", "GELU_TANH", "SILU", "SOFTPLUS", "LOGISTIC"))
    if args.check:
        same = TARGET.read_text(encoding="utf-8") == text
        print("the committed file is what this script makes" if same else f"{TARGET} differs; run this script")
        return 0 if same else 1
    TARGET.write_text(text, encoding="utf-8")
    print(f"wrote {TARGET.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
