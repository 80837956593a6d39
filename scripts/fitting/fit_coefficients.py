"""Fit the constants of `private_llm/approx/coefficients.py` and write, or check, that file.

    python scripts/fitting/fit_coefficients.py            # write it
    python scripts/fitting/fit_coefficients.py --check    # fail unless the committed file is what this script makes
    python scripts/fitting/fit_coefficients.py --tiny     # fit one chain only, write nothing
    python scripts/fitting/fit_coefficients.py --search gelu_erf --seconds 60   # look for a better starting point

Chains are fitted by `chain_fitting.py` from the starting points below, which `--search` found, cubics by Lawson's
algorithm. Everything is deterministic on one machine; linear algebra that rounds differently may lead to other integers
of the same quality, which `--check` accepts.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from chain_fitting import Array, ChainSpec, best_rounding, exact, grid, lawson, shape

TARGET = Path(__file__).resolve().parents[2] / "private_llm" / "approx" / "coefficients.py"
NUMBER = r"-?\d+(?:\.\d+)?(?:e-?\d+)?"
HEADER = '''"""Fitted constants, written by `scripts/fitting/fit_coefficients.py` (do not edit; run the script)."""

from private_llm.approx.chain import Chain, Form, Step
from private_llm.approx.cubic import Cubic

# fmt: off
'''


def table(spec: ChainSpec, trials: int, count: int) -> tuple[str, float]:
    """The chain as source text, and its largest error; checks that no product leaves the ring."""
    forms = best_rounding(spec, np.array(spec.start), trials, count, seed=0)
    z, y, _ = grid(spec, 40 * count)
    values = exact(spec, forms, z)
    for index, bits in enumerate(spec.forms):
        largest = math.log2(np.abs(values[index + 1]).max()) + sum(bits)
        if largest > 61:
            raise SystemExit(f"{spec.name}: step {index + 1} reaches 2^{largest:.1f}; lower its forms' bits")
    error = float(np.abs(values[-1] - y).max())
    lines = [f"{spec.name} = Chain(", f"    argument={spec.argument}, error={error * 1.005:.2e},", "    steps=("]
    for sides, bits, frac in zip(forms, spec.forms, spec.fracs, strict=True):
        left, right = (
            f"Form({b}, {constant}, ({', '.join(map(str, weights))},))"
            for b, (constant, weights) in zip(bits, sides, strict=True)
        )
        lines += [
            "        Step(",
            f"            {left},",
            f"            {right},",
            f"            {frac},",
            "        ),",
        ]
    about = f'"""{spec.about}"""'
    return "\n".join([*lines, "    ),", ")", about, ""]), error


def cubic(name: str, exponent: float, top: float, slack: float) -> str:
    """The cubic in x - centre with the smallest maximum relative error as an approximation of x^exponent.

    On [1 - slack, top (1 + slack)], by Lawson's algorithm; the leading coefficient is a multiple of 2^-6.
    """
    low, high = 1 - slack, top * (1 + slack)
    centre = (1 + top) / 2
    x = low + (high - low) * (1 - np.cos(np.linspace(0, np.pi, 400))) / 2
    basis = np.stack([(x - centre) ** k for k in range(4)], 1) / (x**exponent)[:, None]
    kept: Array = np.zeros(4)
    best = math.inf
    lead: float | None = None
    for _ in range(2):  # first free, then with the leading coefficient rounded
        emphasis, best = np.ones_like(x), math.inf
        columns = basis if lead is None else basis[:, :3]
        goal = np.ones_like(x) if lead is None else 1 - lead * basis[:, 3]
        for _ in range(80):
            root = np.sqrt(emphasis)
            c = np.linalg.lstsq(columns * root[:, None], goal * root, rcond=None)[0]
            error = np.abs(columns @ c - goal)
            if error.max() < best:
                best = float(error.max())
                kept = np.asarray(c if lead is None else np.append(c, lead), dtype=np.float64)
            emphasis = emphasis * (error / error.max() + 0.02)
            emphasis /= emphasis.mean()
        lead = round(float(kept[3]) * 64) / 64
    numbers = ", ".join(f"{v:.9f}" for v in kept)
    return (
        f"{name} = Cubic(\n    power={exponent}, centre={centre}, slack={slack}, error={best * 1.005:.2e},\n"
        f"    coefficients=({numbers}),\n)\n"
    )


def _erf(x: Array) -> Array:
    return np.array([math.erf(v) for v in x])


def _gelu_tail_erf(z: Array) -> Array:
    t: Array = 2 * (z + 1)
    return np.asarray(t * (1 - _erf(t / math.sqrt(2))) / 2)


def _gelu_tail_tanh(z: Array) -> Array:
    t: Array = 2 * (z + 1)
    return np.asarray(t * (1 - np.tanh(math.sqrt(2 / math.pi) * (t + 0.044715 * t**3))) / 2)


def _silu_tail(z: Array) -> Array:
    t: Array = 8 * (z + 1)
    return np.asarray(t / (1 + np.exp(t)))


def _logistic_tail(z: Array) -> Array:
    return 1 / (1 + np.exp(8 * (z + 1)))


def _softplus_tail(z: Array) -> Array:
    return -np.log1p(np.exp(-8 * (z + 1)))


def _exp(z: Array) -> Array:
    return np.exp(8 * (z - 1))


def _exp_weight(z: Array) -> Array:
    return 1 / (np.exp(4 * (z - 1)) + 4e-3)


SLACK = 2.0**-6
"""How far a coarse comparison lets an argument pass a threshold."""
STARTS: dict[str, tuple[float, ...]] = {
    "GELU_ERF": (
        -1.909642, 1.909875, -0.071405, -0.048939, 0.0842, -0.057586, 0.021208,
    ),
    "GELU_TANH": (
        -1.90953, 1.909732, -0.081489, -0.049368, 0.08595, -0.053875, 0.020521,
    ),
    "SILU": (
        -1.123304, -0.2055, 1.692176, -0.184672, -0.57943, 0.191823, 0.762835, -0.430556, -0.391249,
        0.236415, 0.44135, 0.231098, 1.374295, -1.063835, 2.046212, -1.32423, 1.637641, 0.804339,
        -0.063277, 0.092963, 0.354048, 0.257594, 0.638056, -1.167171, 0.614867, 0.104094, -0.986938,
    ),
    "LOGISTIC": (
        0.5978082, 1.6151256, -1.5804666, -2.6927605, 0.6302386, 0.5796624, 1.7426707, 7.6189568,
        0.1704605, 0.0819347, -0.8296973, 0.6080014, -0.011692, -0.2534376, 2.9975931, -0.6053461,
    ),
    "SOFTPLUS": (
        0.109415, 0.588842, -0.620336, -0.419774, 1.096294, 1.305399, -0.72327, 10.249047,
        0.710608, 0.584601, 0.019296, -0.157756, -0.028708, 0.457465, -1.777715, 0.246942,
    ),
    "EXP": (
        -0.153535, -0.147145, 1.888602, -0.420514, 1.362172, 0.364127, 1.336975, 1.562012,
        0.083198, -0.182152, 0.453707, 0.314795, 0.170087, 0.014966, -0.081993, 0.059615,
        0.080356, 0.040636,
    ),
}  # fmt: skip
"""Where each fit starts, found by `--search`."""


def specs() -> list[ChainSpec]:
    """Every chain of the library."""
    return [
        _bump("GELU_ERF", "t Phi(-t) at t = 2 (z + 1), zero at t = 4.", _gelu_tail_erf),
        _bump("GELU_TANH", "t (1 - tanh(sqrt(2/pi) (t + 0.044715 t^3))) / 2 at t = 2 (z + 1), zero at t = 4.",
              _gelu_tail_tanh),
        _wide("SILU", "t / (1 + e^t) at t = 8 (z + 1), zero at t = 14.", _silu_tail, 0.75, products=5),
        _wide("LOGISTIC", "1 / (1 + e^t) at t = 8 (z + 1), zero at t = 10.", _logistic_tail, 0.25),
        _wide("SOFTPLUS", "-log(1 + e^-t) at t = 8 (z + 1), zero at t = 10.", _softplus_tail, 0.25),
        ChainSpec(
            "EXP", "e^x at x = 8 (z - 1), -14 <= x <= 1/4.", _exp, _exp_weight, low=-0.75, high=1 + 1 / 32,
            argument=21, forms=((21, 21), (20, 28), (29, 30), (29, 31)), fracs=(20, 20, 20, 26), start=STARTS["EXP"],
        ),
    ]  # fmt: skip


def _bump(name: str, about: str, function: Callable[[Array], Array]) -> ChainSpec:
    return ChainSpec(
        name, about, function, np.ones_like, low=-1 - SLACK / 2, high=1 + SLACK / 2, zero=1.0, argument=19,
        forms=((19, 19), (17, 25), (28, 31)), fracs=(17, 17, 18), start=STARTS[name],
    )  # fmt: skip


def _wide(name: str, about: str, function: Callable[[Array], Array], zero: float, products: int = 4) -> ChainSpec:
    middle = products - 3
    return ChainSpec(
        name, about, function, np.ones_like, low=-1 - SLACK / 8, high=zero + SLACK / 8, zero=zero, argument=21,
        forms=((21, 21), (20, 28), *[(30, 30)] * middle, (29, 31)), fracs=(*[20] * (products - 1), 18),
        start=STARTS[name],
    )  # fmt: skip


def search(spec: ChainSpec, seconds: float, seed: int) -> None:
    """Print starting points whose rounded chains have smaller and smaller errors."""
    rng = np.random.default_rng(seed)
    z, y, w = grid(spec, 250)
    best, smooth, began = math.inf, math.inf, time.monotonic()
    while time.monotonic() - began < seconds:
        model = shape(spec)
        model.load(rng.normal(size=model.vector().size) * 0.7)
        try:
            if lawson(model, z, y, w, 1) > max(40 * smooth, 2e-3):
                continue
            smooth = min(smooth, lawson(model, z, y, w, 25))
            start = model.vector()
            integers = best_rounding(spec, start, 4, 150, seed=0)
        except np.linalg.LinAlgError:
            continue
        found = float(np.abs((exact(spec, integers, z)[-1] - y) * w).max())
        if found < best:
            best = found
            print(f"# {spec.name}: {smooth:.3g}, rounded {found:.3g}")
            print(tuple(round(float(v), 6) for v in start), flush=True)


def generate(trials: int, count: int, names: list[str]) -> str:
    """The file's text."""
    parts = [HEADER]
    for spec in specs():
        if spec.name in names:
            text, error = table(spec, trials, count)
            print(f"{spec.name}: error {error:.2e}")
            parts.append(text)
    parts.append(cubic("RECIPROCAL", -1.0, 1.203125, 2.0**-8))
    parts.append(cubic("RSQRT", -0.5, 1.3, 2.0**-7))
    return "\n".join(parts)


def same(committed: str, made: str) -> bool:
    """Whether two files are equal, or the same fit made by another linear algebra library.

    Such a fit takes other roundings of equal quality: only numbers differ, and no stated error by more than 3 %.
    """
    if committed == made:
        return True
    if re.sub(NUMBER, "#", committed) != re.sub(NUMBER, "#", made):
        return False
    errors = [[float(e) for e in re.findall(f"error=({NUMBER})", text)] for text in (committed, made)]
    return all(abs(a - b) <= 0.03 * b for a, b in zip(*errors, strict=True))


def part_of(committed: str, name: str) -> str:
    """What the file says of one chain."""
    start = committed.index(f"{name} = Chain(")
    about = committed.index('"""', start)
    return committed[start : committed.index('"""', about + 3) + 4]


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", nargs="*", metavar="NAME", help="compare these chains (default: all) with the file")
    parser.add_argument("--tiny", action="store_true", help="one chain, few rounds, write nothing")
    parser.add_argument("--search", metavar="NAME", help="look for a starting point of this chain")
    parser.add_argument("--seconds", type=float, default=60.0, help="time for --search")
    parser.add_argument("--seed", type=int, default=0, help="seed of --search")
    args = parser.parse_args(argv)
    names = [spec.name for spec in specs()]
    if args.search:
        if args.search.upper() not in names:
            print(f"no chain {args.search!r}; there are {', '.join(names)}")
            return 2
        search(next(spec for spec in specs() if spec.name == args.search.upper()), args.seconds, args.seed)
        return 0
    if args.tiny:
        generate(1, 60, names[:1])
        return 0
    if args.check and not {*args.check} <= {*names}:
        print(f"no chains {', '.join(sorted({*args.check} - {*names}))}; there are {', '.join(names)}")
        return 2
    committed = TARGET.read_text(encoding="utf-8")
    if args.check:
        found = [table(spec, 24, 150)[0] for spec in specs() if spec.name in args.check]
        text, committed = "\n".join(found), "\n".join(part_of(committed, name) for name in names if name in args.check)
    else:
        text = generate(24, 150, names)
    if args.check is None:
        TARGET.write_text(text, encoding="utf-8")
        return 0
    if not same(committed, text):
        print(f"{TARGET} is not what this script makes: run it without --check and commit the result")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
