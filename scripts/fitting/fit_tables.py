"""Fit the constants of `private_llm/approx/tables.py` and write, or check, that file.

    python scripts/fitting/fit_tables.py               # write it
    python scripts/fitting/fit_tables.py SILU          # of this function alone, which may be new
    python scripts/fitting/fit_tables.py --check       # fail unless the committed file is what this script makes
    python scripts/fitting/fit_tables.py --check SILU  # of these functions alone
    python scripts/fitting/fit_tables.py --tiny        # fit one function coarsely, write nothing
    python scripts/fitting/fit_tables.py --search gelu_erf --seconds 60   # look for a better starting point of a chain

`FUNCTIONS` has one entry a function. A record with `FromTables` in private_llm/nn/activations.py needs none: it says
what to fit. Each has a curve (comparison keys) and a chain of products, some a sum of waves:

- curves: each quadratic through three Chebyshev nodes of its piece and 1/64 beyond, as far as a coarse comparison may
  let it go; pieces are made as long as their error allows, in steps of 1/64.
- chains: `chain_fitting.py`, from starting points that `--search` found, or the best of a few without one.
- waves: a linear program finds the coefficients of least largest error on a grid from 2^-resolution below 0 to as much
  above the top, and at the top, where arguments saturate, also as the zero that the function is beyond it. Near 0,
  where most arguments are, an error counts as if it were larger.

Everything is deterministic on one machine; linear algebra that rounds differently may lead to other numbers of the same
quality, which `--check` accepts. Parties read the numbers from the file, so that all have the same.
"""

import argparse
import math
import re
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from chain_fitting import Array, ChainSpec, best_rounding, cubic, exact, grid, starting_points
from scipy.optimize import linprog

from private_llm.approx.activations import FromTables
from private_llm.approx.bump import WaveSum
from private_llm.nn.activations import ACTIVATIONS, Activation

TARGET = Path(__file__).resolve().parents[2] / "private_llm" / "approx" / "tables.py"
NUMBER = r"-?\d+(?:\.\d+)?(?:e-?\d+)?"
HEADER = '''"""Fitted constants, written by `scripts/fitting/fit_tables.py` (do not edit; run the script)."""

from private_llm.approx.bump import Fitted, WaveSum
from private_llm.approx.chain import Chain, Cubic, Form, Step
from private_llm.approx.curves import Curve

# fmt: off

'''
STEP = 1 / 64
"""How far a coarse comparison lets an argument pass a threshold; ends of pieces are multiples of it."""
CURVE_ERROR, TAIL = 4e-5, 5e-5
"""Largest error of a curve; how far a function without an entry may be from x, 0 or 1 beyond its top."""
LARGEST_WAVE = 1.0
"""Largest coefficient of a wave: larger ones would need more bits."""


def ones(x: Array) -> Array:
    """Errors count alike everywhere."""
    return np.ones_like(x)


@dataclass(frozen=True)
class Function:
    """What to fit.

    whole: the function, of x. tail: of t = 2^log2_scale (z + 1): what the chain computes. top: |x| beyond which the
    function counts as simple. start: of the chain, found by `--search`. size, linear, above: as in `Curve`, and what
    the function is above the top, if not x. products: of the chain. bits: of its argument.
    waves: top, factor of arguments and its fractional bits, log2 of the period of multiplied arguments, resolution of
    comparisons in bits, number of waves, and the part of the largest error that is allowed near 0.
    """

    about: str
    whole: Callable[[Array], Array]
    tail: Callable[[Array], Array]
    top: float
    log2_scale: int
    size: int
    start: tuple[float, ...]
    linear: bool = True
    above: float | None = None
    products: int = 4
    waves: tuple[float, int, int, int, int, int, float] | None = None
    low: float | None = None
    curve_weight: Callable[[Array], Array] = ones


def _erf(x: Array) -> Array:
    return np.array([math.erf(v) for v in x])


def _tanh_part(t: Array) -> Array:
    return np.asarray(np.tanh(math.sqrt(2 / math.pi) * (t + 0.044715 * t**3)))


FUNCTIONS: dict[str, Function] = {
    "GELU_ERF": Function(
        "GELU, x Phi(x). Beyond the top it is x or 0 up to 1.3e-4.",
        lambda x: x * (1 + _erf(x / math.sqrt(2))) / 2, lambda t: np.asarray(t * (1 - _erf(t / math.sqrt(2))) / 2),
        top=4.0, log2_scale=1, size=3, waves=(4.0, 1, 0, 3, 3, 5, 0.5), products=3,
        start=(-1.909642, 1.909875, -0.071405, -0.048939, 0.0842, -0.057586, 0.021208),
    ),
    "GELU_TANH": Function(
        "GELU by tanh. Beyond the top it is x or 0 up to 7e-5.",
        lambda x: np.asarray(x * (1 + _tanh_part(x)) / 2), lambda t: np.asarray(t * (1 - _tanh_part(t)) / 2),
        top=4.0, log2_scale=1, size=3, waves=(4.0, 1, 0, 3, 3, 5, 0.5), products=3,
        start=(-1.90953, 1.909732, -0.081489, -0.049368, 0.08595, -0.053875, 0.020521),
    ),
    "SILU": Function(
        "x / (1 + e^-x). Beyond the top it is x or 0 up to 1.2e-5.",
        lambda x: x / (1 + np.exp(-x)), lambda t: np.asarray(t / (1 + np.exp(t))),
        top=14.0, log2_scale=3, size=4, waves=(10.75, 13, 3, 5, 3, 6, 0.2), products=5,
        start=(
            -1.123304, -0.2055, 1.692176, -0.184672, -0.57943, 0.191823, 0.762835, -0.430556, -0.391249,
            0.236415, 0.44135, 0.231098, 1.374295, -1.063835, 2.046212, -1.32423, 1.637641, 0.804339,
            -0.063277, 0.092963, 0.354048, 0.257594, 0.638056, -1.167171, 0.614867, 0.104094, -0.986938,
        ),
    ),
    "SOFTPLUS": Function(
        "log(1 + e^x). Beyond the top it is x or 0 up to 4.6e-5.",
        lambda x: np.logaddexp(0.0, x), lambda t: -np.log1p(np.exp(-t)),
        top=10.0, log2_scale=3, size=4,
        start=(
            0.109415, 0.588842, -0.620336, -0.419774, 1.096294, 1.305399, -0.72327, 10.249047,
            0.710608, 0.584601, 0.019296, -0.157756, -0.028708, 0.457465, -1.777715, 0.246942,
        ),
    ),
    "LOGISTIC": Function(
        "1 / (1 + e^-x); the chain is that of -x. Beyond the top it is 0 or 1 up to 4.6e-5.",
        lambda x: 1 / (1 + np.exp(-x)), lambda t: 1 / (1 + np.exp(t)),
        top=10.0, log2_scale=3, size=1, linear=False, above=1.0,
        start=(
            0.5978082, 1.6151256, -1.5804666, -2.6927605, 0.6302386, 0.5796624, 1.7426707, 7.6189568,
            0.1704605, 0.0819347, -0.8296973, 0.6080014, -0.011692, -0.2534376, 2.9975931, -0.6053461,
        ),
    ),
    "EXP": Function(
        "e^x for x up to the top, 0 below -14; the chain is e^(8 (z - 1)).", np.exp, lambda t: np.exp(t - 16),
        top=0.25, log2_scale=3, size=1, linear=False, low=-14.0,
        curve_weight=lambda x: 1 / (np.exp(x / 2) + 4e-3),
        start=(
            -0.153535, -0.147145, 1.888602, -0.420514, 1.362172, 0.364127, 1.336975, 1.562012,
            0.083198, -0.182152, 0.453707, 0.314795, 0.170087, 0.014966, -0.081993, 0.059615,
            0.080356, 0.040636,
        ),
    ),
}  # fmt: skip


def read(made: Activation) -> Function:
    """What to fit of a record: f tends to x and 0, with f(x) - f(-x) = x, or to 1 and 0, with f(x) + f(-x) = 1."""

    def whole(x: Array) -> Array:
        return np.asarray(made.ops[0](torch.tensor(x)))  # type: ignore[operator]

    linear = bool(whole(np.array([64.0]))[0] > 2)

    def tail(t: Array) -> Array:
        return whole(-t) if not linear else t - whole(t)

    t = np.arange(0, 64, STEP)
    if np.abs(whole(t) - t - whole(-t) if linear else whole(t) - 1 + whole(-t)).max() > 1e-8 or tail(t[-1:])[0] > TAIL:
        raise SystemExit(f"{made.name}: no tables; want f(x) - f(-x) = x, or f(x) + f(-x) = 1, and 0 far below 0")
    top = next(n / 4 for n in range(4, 256) if np.abs(tail(t[16 * n :])).max() < TAIL)
    scale = math.ceil(math.log2(top)) - 1
    return Function(
        f"{made.name}. Beyond the top it is simple up to {TAIL}.", whole, tail, top, scale,
        size=math.frexp(top if linear else 1)[1], start=(), linear=linear, above=None if linear else 1.0,
        products=3 if scale < 2 else 4,
    )  # fmt: skip


FUNCTIONS |= {
    made.compute.name: read(made) for made in ACTIVATIONS
    if isinstance(made.compute, FromTables) and made.compute.name not in FUNCTIONS
}  # fmt: skip


# -- curves ----------------------------------------------------------------------------------------------------------
def quadratic(made: Function, low: float, high: float) -> tuple[tuple[float, ...], float]:
    """Coefficients around the middle, and the largest weighted error, on low to high and STEP beyond."""
    centre, half = (low + high) / 2, (high + STEP - low) / 2
    nodes = half + low + half * np.cos((np.arange(3) + 0.5) * math.pi / 3)
    powers = np.stack([(nodes - centre) ** k for k in range(3)], 1)
    coefficients = np.linalg.solve(powers, made.whole(nodes))
    x = np.linspace(low, high + STEP, 400)
    found = sum(c * (x - centre) ** k for k, c in enumerate(coefficients))
    error = np.abs((found - made.whole(x)) * made.curve_weight(x)).max()
    return tuple(float(f"{c:.12g}") for c in coefficients), float(error)


def curve(made: Function, error: float) -> str:
    """The curve as source text: zero below; above x itself (linear), `above`, or the last piece."""
    low, high = -made.top if made.low is None else made.low, made.top
    ends, pieces, worst = [low], list[str](), 0.0
    at = low
    while at < high:
        lower, upper = 1, int((high - at) / STEP)
        while lower < upper:  # the longest piece whose error is small enough
            middle = (lower + upper + 1) // 2
            if quadratic(made, at, at + middle * STEP)[1] <= error:
                lower = middle
            else:
                upper = middle - 1
        end = at + lower * STEP
        coefficients, found = quadratic(made, at, end)
        worst = max(worst, found)
        pieces.append(repr(coefficients))
        ends.append(end)
        at = end
    above = "linear=True" if made.linear else f"above={made.above!r}"
    numbers = "\n            ".join(", ".join(map(repr, ends[at : at + 10])) + "," for at in range(0, len(ends), 10))
    return (
        f"    curve=Curve(\n        ends=(\n            {numbers}\n        ),\n        pieces=(\n{filled(pieces)}\n"
        f"        ),\n        size={made.size}, error={worst * 1.005:.2e}, {above},\n    ),\n"
    )


def filled(items: Iterable[str]) -> str:
    """Lines of items with commas, as many in each as have room."""
    rows = [""]
    for item in items:
        rows = [*rows[:-1], f"{rows[-1]} {item},"] if len(rows[-1]) + len(item) < 108 else [*rows, f" {item},"]
    return "\n".join(f"           {row}" for row in rows)


# -- chains ----------------------------------------------------------------------------------------------------------
def chain_of(name: str) -> ChainSpec:
    """What `chain_fitting` fits of a function."""
    made = FUNCTIONS[name]
    scale = 2.0**made.log2_scale

    def tail(z: Array) -> Array:
        return made.tail(scale * (z + 1))

    if name == "EXP":
        return ChainSpec(
            name, tail, lambda z: 1 / (np.exp(4 * (z - 1)) + 4e-3), low=-0.75, high=1 + 1 / 32, argument=21,
            forms=((21, 21), (20, 28), (29, 30), (29, 31)), fracs=(20, 20, 20, 26), start=made.start,
        )  # fmt: skip
    zero, slack = made.top / scale - 1, STEP / scale
    if made.products == 3:
        forms: tuple[tuple[int, int], ...] = ((19, 19), (17, 25), (28, 31))
        fracs: tuple[int, ...] = (17, 17, 18)
    else:
        forms = ((21, 21), (20, 28), *[(30, 30)] * (made.products - 3), (29, 31))
        fracs = (*[20] * (made.products - 1), 18)
    return ChainSpec(name, tail, ones, low=-1 - slack, high=zero + slack, zero=zero, argument=forms[0][0],
                     forms=forms, fracs=fracs, start=made.start)  # fmt: skip


def chain(name: str, trials: int, count: int) -> str:
    """The chain as source text; checks that no product leaves the ring."""
    spec = chain_of(name)
    start = spec.start or [found for _, _, found in starting_points(spec, 0, range(10 * trials))][-1]
    forms = best_rounding(spec, np.array(start), trials, count, seed=0)
    z, y, _ = grid(spec, 40 * count)
    values = exact(spec, forms, z)
    for index, bits in enumerate(spec.forms):
        largest = math.log2(np.abs(values[index + 1]).max()) + sum(bits)
        if largest > 61:
            raise SystemExit(f"{name}: step {index + 1} reaches 2^{largest:.1f}; lower its forms' bits")
    error = float(np.abs(values[-1] - y).max())
    print(f"{name}: error {error:.2e}")
    lines = ["    chain=Chain(", f"        argument={spec.argument}, error={error * 1.005:.2e},", "        steps=("]
    for sides, bits, frac in zip(forms, spec.forms, spec.fracs, strict=True):
        left, right = (
            f"Form({b}, {constant}, {tuple(weights)!r})" for b, (constant, weights) in zip(bits, sides, strict=True)
        )
        lines.append(f"            Step({left}, {right}, {frac}),")
    return "\n".join([*lines, "        ),", "    ),", ""])


def search(name: str, seconds: float, seed: int) -> None:
    """Print starting points."""
    end = time.monotonic() + seconds
    for smooth, found, start in starting_points(chain_of(name), seed, iter(lambda: time.monotonic() > end, True)):
        print(f"# {name}: {smooth:.3g}, rounded {found:.3g}")
        print(tuple(round(float(v), 6) for v in start), flush=True)


# -- waves -----------------------------------------------------------------------------------------------------------
def points(top: float, resolution: int, count: int) -> Array:
    """A grid that is finer at its ends."""
    beyond = 2.0**-resolution
    return (1 - np.cos(np.linspace(0, np.pi, count))) / 2 * (top + 2 * beyond) - beyond


def basis(t: Array, period: float, waves: int) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """1, and the cosine and sine of each wave: [points, 1 + 2 waves]."""
    angles = [2 * math.pi * k * t / period for k in range(1, waves + 1)]
    return np.stack([np.ones_like(t), *(f(angle) for angle in angles for f in (np.cos, np.sin))], 1)


def waved(made: WaveSum, t: Array) -> Array:
    """The sum of waves in float64."""
    rows = basis(t, 2.0 ** (made.factor_bits + made.period_log2) / made.factor, len(made.waves))
    return np.asarray(rows @ np.array([made.constant, *(c for wave in made.waves for c in wave)]))


def wave_error(made: WaveSum, tail: Callable[[Array], Array]) -> float:
    """The largest error, between the points of the fit as well."""
    t = points(made.top, made.resolution, 20_011)
    beyond, early = float(waved(made, np.array([made.top]))[0]), np.array([made.top - 2.0**-made.resolution])
    saturated = max(abs(beyond), abs(beyond - float(tail(early)[0])))
    return max(float(np.abs(waved(made, t) - tail(t)).max()), saturated)


def summed(made: Function, count: int, fewer: int | None = None) -> WaveSum:
    """The fitted sum of waves. An error may be `near` of the largest up to 3/16 of the top, all of it from 2/3 on."""
    if made.waves is None:
        raise SystemExit("this function has no waves")
    top, factor, factor_bits, period_log2, resolution, number, near = made.waves
    period, waves = 2.0**period_log2 * 2**factor_bits / factor, fewer or number
    t = points(top, resolution, count)
    columns = np.concatenate([basis(t, period, waves), basis(np.array([top]), period, waves)])
    wanted = np.concatenate([made.tail(t), [0.0]])
    share = np.clip((np.concatenate([t, [top]]) / top - 3 / 16) / (2 / 3 - 3 / 16), 0, 1)
    error = -(near + (1 - near) * share)[:, None]
    found = linprog(
        [0.0] * columns.shape[1] + [1.0],
        A_ub=np.block([[columns, error], [-columns, error]]),
        b_ub=np.concatenate([wanted, -wanted]),
        bounds=[(-LARGEST_WAVE, LARGEST_WAVE)] * columns.shape[1] + [(0, None)],
        method="highs",
    )
    constant, *pairs = (float(f"{value:.12g}") for value in found.x[:-1])
    rounded = tuple(zip(pairs[::2], pairs[1::2], strict=True))
    fitted = WaveSum(top, factor, factor_bits, period_log2, resolution, constant, rounded, 0.0)
    return replace(fitted, error=float(f"{1.01 * wave_error(fitted, made.tail):.2e}"))


def waves(made: WaveSum) -> str:
    """The sum as source text."""
    pairs = filled(map(repr, made.waves))
    return (
        f"    waves=WaveSum(\n        top={made.top}, factor={made.factor}, factor_bits={made.factor_bits},"
        f" period_log2={made.period_log2}, resolution={made.resolution},\n        constant={made.constant!r},\n"
        f"        waves=(\n{pairs}\n        ),\n        error={made.error!r},\n    ),\n"
    )


# -- the file --------------------------------------------------------------------------------------------------------
def table(name: str, tiny: bool = False) -> str:
    """All tables of one function as source text."""
    made = FUNCTIONS[name]
    parts = [f"{name} = Fitted(\n    top={made.top}, log2_scale={made.log2_scale},\n"]
    parts += [chain(name, *((1, 60) if tiny else (24, 150))), curve(made, 1e-2 if tiny else CURVE_ERROR)]
    if made.waves is not None:
        parts.append(waves(summed(made, 40, 4) if tiny else summed(made, 700)))
    return "".join([*parts, f')\n"""{made.about}"""\n'])


def same(committed: str, made: str) -> bool:
    """Whether two texts are equal, or the same fit made by another linear algebra library.

    Such a fit takes other roundings of equal quality: only numbers differ, and no stated error by more than 5 %.
    """
    if re.sub(NUMBER, "#", committed) != re.sub(NUMBER, "#", made):
        return False
    errors = [[float(e) for e in re.findall(f"error=({NUMBER})", text)] for text in (committed, made)]
    return all(abs(a - b) <= 0.05 * b for a, b in zip(*errors, strict=True))


def part_of(committed: str, name: str) -> str:
    """What the file says of one function."""
    start = committed.find(f"{name} = Fitted(")
    if start < 0:
        return ""
    about = committed.index('"""', start)
    return committed[start : committed.index('"""', about + 3) + 4]


def put(names: list[str], tiny: bool = False) -> None:
    """Write these functions' tables into the file; new ones stand last, before the cubics."""
    text = TARGET.read_text(encoding="utf-8")
    for name in names:
        old = part_of(text, name) or "RECIPROCAL ="
        text = text.replace(old, table(name, tiny) + ("" if "Fitted" in old else f"\n{old}"))
    TARGET.write_text(text, encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="write these functions' tables (default: all)")
    parser.add_argument("--check", nargs="*", metavar="NAME", help="compare these (default: all) with the file")
    parser.add_argument("--tiny", action="store_true", help="one function, coarsely; write nothing")
    parser.add_argument("--search", metavar="NAME", help="look for a starting point of this function's chain")
    parser.add_argument("--seconds", type=float, default=60.0, help="time for --search")
    parser.add_argument("--seed", type=int, default=0, help="seed of --search")
    args = parser.parse_args(argv)
    asked = [args.search.upper()] if args.search else args.check or args.names
    if unknown := sorted({*asked} - {*FUNCTIONS}):
        print(f"no functions {', '.join(unknown)}; there are {', '.join(FUNCTIONS)}")
        return 2
    if args.search:
        search(asked[0], args.seconds, args.seed)
        return 0
    if args.tiny:
        table("GELU_ERF", tiny=True)
        return 0
    if args.names:
        put(asked)
        return 0
    if asked:
        committed = TARGET.read_text(encoding="utf-8")
        fine = all(same(part_of(committed, name), table(name)) for name in asked)
    else:
        cubics = [cubic("RECIPROCAL", -1.0, 1.203125, 2.0**-8), cubic("RSQRT", -0.5, 1.3, 2.0**-7)]
        text = HEADER + "\n".join([*map(table, FUNCTIONS), *cubics])
        if args.check is None:
            TARGET.write_text(text, encoding="utf-8")
        fine = same(TARGET.read_text(encoding="utf-8"), text)
    if not fine:
        print(f"{TARGET} is not what this script makes: run it without --check and commit the result")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
