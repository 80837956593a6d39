"""Fit the sums of waves of `private_llm/approx/wave_tables.py` and write, or check, that file.

    python scripts/fitting/fit_waves.py            # write it
    python scripts/fitting/fit_waves.py --check    # fail unless the committed file fits as this script does
    python scripts/fitting/fit_waves.py --tiny     # one coarse sum, write nothing

A linear program finds the coefficients of least largest error on the points of a grid: from 2^-resolution below 0 to as
much above the top, as far as a coarse comparison may let it go, and at the top, where arguments saturate (from
2^-resolution below it on), also as the zero that the function is beyond it. Near 0, where most arguments are, an error
counts as if it were larger. Parties read the numbers from the file, so that all have the same.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from scipy.optimize import linprog
from scipy.special import erfc

from private_llm.approx import wave_tables
from private_llm.approx.wave_sums import WaveSum

TARGET = Path(__file__).resolve().parents[2] / "private_llm" / "approx" / "wave_tables.py"
LARGEST = 1.0
"""Largest coefficient: larger ones would need more bits."""
HEADER = '''"""Fitted sums of waves, written by `scripts/fitting/fit_waves.py` (do not edit; run the script)."""

from private_llm.approx.wave_sums import WaveSum

# fmt: off

'''

Array = np.ndarray[tuple[int], np.dtype[np.float64]]
Function = Callable[[Array], Array]


def _silu(t: Array) -> Array:
    return np.asarray(t / (1 + np.exp(t)))


def _gelu(t: Array) -> Array:
    return np.asarray(t * erfc(t / math.sqrt(2)) / 2)


def _gelu_tanh(t: Array) -> Array:
    return np.asarray(t * (1 - np.tanh(math.sqrt(2 / math.pi) * (t + 0.044715 * t**3))) / 2)


FUNCTIONS: dict[str, tuple[str, Function, float, int, int, int, int, int, float]] = {
    "SILU": ("t / (1 + e^t)", _silu, 10.75, 13, 3, 5, 3, 6, 0.2),
    "GELU_ERF": ("t erfc(t / 2^(1/2)) / 2", _gelu, 4.0, 1, 0, 3, 3, 5, 0.5),
    "GELU_TANH": ("t (1 - tanh(...)) / 2, the other half of GELU by tanh", _gelu_tanh, 4.0, 1, 0, 3, 3, 5, 0.5),
}
"""By name: what it is, the function, its top, the factor of arguments and its fractional bits, log2 of the period of
multiplied arguments, the resolution of comparisons in bits, the number of waves, and the part of the largest error that
is allowed near 0, where most arguments in a language model are."""


def points(top: float, resolution: int, count: int) -> Array:
    """A grid that is finer at its ends."""
    beyond = 2.0**-resolution
    return (1 - np.cos(np.linspace(0, np.pi, count))) / 2 * (top + 2 * beyond) - beyond


def allowed(t: Array, top: float, near: float) -> Array:
    """The part of the largest error that is allowed at t: `near` up to 3/16 of the top, all from 2/3 on."""
    return np.asarray(near + (1 - near) * np.clip((t / top - 3 / 16) / (2 / 3 - 3 / 16), 0, 1))


def basis(t: Array, period: float, waves: int) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """1, and the cosine and sine of each wave: [points, 1 + 2 waves]."""
    angles = [2 * math.pi * k * t / period for k in range(1, waves + 1)]
    return np.stack([np.ones_like(t), *(f(angle) for angle in angles for f in (np.cos, np.sin))], 1)


def fit(
    function: Function, top: float, resolution: int, period: float, waves: int, count: int, near: float
) -> Array:  # fmt: skip
    """Coefficients of `basis`."""
    t = points(top, resolution, count)
    columns = np.concatenate([basis(t, period, waves), basis(np.array([top]), period, waves)])
    wanted = np.concatenate([function(t), [0.0]])
    error = -allowed(np.concatenate([t, [top]]), top, near)[:, None]
    found = linprog(
        [0.0] * columns.shape[1] + [1.0],
        A_ub=np.block([[columns, error], [-columns, error]]),
        b_ub=np.concatenate([wanted, -wanted]),
        bounds=[(-LARGEST, LARGEST)] * columns.shape[1] + [(0, None)],
        method="highs",
    )
    made: Array = found.x[:-1]
    return made


def error_of(made: WaveSum, function: Function) -> float:
    """The largest error, between the points of the fit as well."""
    t = points(made.top, made.resolution, 20_011)
    beyond, early = float(made.value(np.array([made.top]))[0]), np.array([made.top - 2.0**-made.resolution])
    saturated = max(abs(beyond), abs(beyond - float(function(early)[0])))
    return max(float(np.abs(made.value(t) - function(t)).max()), saturated)


def summed(name: str, count: int, waves: int | None = None) -> WaveSum:
    """The fitted sum."""
    _, function, top, factor, factor_bits, period_log2, resolution, usual, near = FUNCTIONS[name]
    period = 2.0**period_log2 * 2**factor_bits / factor
    constant, *pairs = fit(function, top, resolution, period, waves or usual, count, near)
    rounded = tuple((float(f"{c:.12g}"), float(f"{s:.12g}")) for c, s in zip(pairs[::2], pairs[1::2], strict=True))
    made = WaveSum(top, factor, factor_bits, period_log2, resolution, float(f"{constant:.12g}"), rounded, 0.0)
    return replace(made, error=float(f"{1.01 * error_of(made, function):.2e}"))


def source(name: str, made: WaveSum) -> str:
    """The sum as source text."""
    waves = "\n".join(f"        {pair!r}," for pair in made.waves)
    return (
        f"{name} = WaveSum(\n    top={made.top}, factor={made.factor}, factor_bits={made.factor_bits},"
        f" period_log2={made.period_log2}, resolution={made.resolution},\n"
        f"    constant={made.constant!r},\n    waves=(\n{waves}\n    ),\n"
        f'    error={made.error!r},\n)\n"""{FUNCTIONS[name][0]}"""\n'
    )


def main() -> None:
    """Write the file, compare it, or fit one coarse sum."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="compare with the committed file, write nothing")
    parser.add_argument("--tiny", action="store_true", help="one coarse sum, write nothing")
    arguments = parser.parse_args()
    if arguments.tiny:
        print(source("GELU_ERF", summed("GELU_ERF", 40, 4)))
        return
    made = {name: summed(name, 700) for name in FUNCTIONS}
    if arguments.check:
        for name, each in made.items():
            held = getattr(wave_tables, name)
            if held.error > 1.05 * each.error or error_of(held, FUNCTIONS[name][1]) > held.error:
                sys.exit(f"{name}: the committed sum is off by more than {each.error}")
        return
    TARGET.write_text(HEADER + "\n".join(source(name, each) for name, each in made.items()))
    print(f"wrote {TARGET.name}: errors {', '.join(f'{name} {each.error}' for name, each in made.items())}")


if __name__ == "__main__":
    main()
