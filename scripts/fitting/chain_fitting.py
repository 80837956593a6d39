"""Fitting of chains (`private_llm/approx/chain.py`) in float64, their rounding to integers, and cubics.

A chain is fitted by Levenberg-Marquardt steps on a weighted least squares problem whose weights are raised where
the error is large (Lawson's algorithm), which tends to the smallest maximum error. Then its coefficients are rounded
one after the other, the remaining ones refitted each time, and the integers polished by moves of one or two units.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class ChainSpec:
    """What to fit: `function` of z on [low, high], with error weights `weight`.

    `zero`: point at which the chain must vanish exactly. `forms`: fractional bits of the left and right form of each
    step; `fracs`: those of each product. The argument has `argument` bits.
    """

    name: str
    function: Callable[[Array], Array]
    weight: Callable[[Array], Array]
    low: float
    high: float
    argument: int
    forms: tuple[tuple[int, int], ...]
    fracs: tuple[int, ...]
    start: tuple[float, ...]
    zero: float | None = None


@dataclass
class Model:
    """The free and fixed coefficients of a chain; `forms[i][side]` is (constant, weight of v_0, ..., of v_i)."""

    spec: ChainSpec
    forms: list[list[Array]]
    free: list[list[NDArray[np.bool_]]]
    vanishing: tuple[int, int] | None = None

    def vector(self) -> Array:
        """All free coefficients."""
        pairs = [(form, mask) for step, masks in zip(self.forms, self.free, strict=True)
                 for form, mask in zip(step, masks, strict=True)]  # fmt: skip
        return np.concatenate([form[mask] for form, mask in pairs])

    def load(self, vector: Array) -> None:
        """Set all free coefficients."""
        at = 0
        for step, masks in zip(self.forms, self.free, strict=True):
            for form, mask in zip(step, masks, strict=True):
                count = int(mask.sum())
                form[mask] = vector[at : at + count]
                at += count

    def run(self, z: Array) -> tuple[list[Array], Array]:
        """Values of all v_i at z, and the derivatives of the last by the free coefficients.

        A vanishing form measures every v_j from its value at the spec's zero, appended as the last point.
        """
        total = sum(int(mask.sum()) for masks in self.free for mask in masks)
        pinned = self.spec.zero is not None
        if self.spec.zero is not None:
            z = np.append(z, self.spec.zero)
        ones = np.ones_like(z)
        values, slopes = [ones, z], [np.zeros((z.size, total))] * 2
        at = 0
        for index, (step, masks) in enumerate(zip(self.forms, self.free, strict=True)):
            made = []
            for side in range(2):
                value, slope = np.zeros_like(z), np.zeros((z.size, total))
                for k, weight in enumerate(step[side]):
                    if pinned and self.vanishing == (index, side):
                        base, turn = values[k] - values[k][-1], slopes[k] - slopes[k][-1]
                    else:
                        base, turn = values[k], slopes[k]
                    value = value + weight * base
                    slope = slope + weight * turn
                    if masks[side][k]:
                        slope[:, at] += base
                        at += 1
                made.append((value, slope))
            (left, dleft), (right, dright) = made
            values.append(left * right)
            slopes.append(dleft * right[:, None] + dright * left[:, None])
        cut = slice(None, -1) if pinned else slice(None)
        return [v[cut] for v in values[1:]], slopes[-1][cut]


def shape(spec: ChainSpec) -> Model:
    """Steps z*z, v1*(v1 + p z), and then products of general forms; the last left form vanishes where asked to."""
    forms, free = [], []
    for index in range(len(spec.forms)):
        size = index + 2
        left, right = np.zeros(size), np.zeros(size)
        lmask, rmask = np.zeros(size, dtype=bool), np.zeros(size, dtype=bool)
        if index == 0:
            left[1] = right[1] = 1.0
        elif index == 1:
            left[2] = right[2] = 1.0
            rmask[1] = True
        else:
            lmask[:] = rmask[:] = True
            if index == 2:
                left[3], lmask[3] = 1.0, False
        forms.append([left, right])
        free.append([lmask, rmask])
    model = Model(spec, forms, free)
    if spec.zero is not None:
        last = len(spec.forms) - 1
        model.vanishing = (last, 0)
        free[last][0][0] = False
        free[last][0][4:] = False  # later products at the zero are not exact in fixed point
    return model


def descend(model: Model, z: Array, y: Array, w: Array, steps: int) -> None:
    """Levenberg-Marquardt on sum of (w (chain - y))^2."""

    def residual(vector: Array) -> tuple[Array, Array]:
        model.load(vector)
        values, slope = model.run(z)
        return (values[-1] - y) * w, slope * w[:, None]

    here = model.vector()
    if not here.size:
        return
    r, jac = residual(here)
    damping = 1e-3
    for _ in range(steps):
        normal, gradient = jac.T @ jac, jac.T @ r
        trace = float(np.trace(normal))
        for _ in range(14):
            scaled = normal + damping * np.diag(np.diag(normal)) + 1e-13 * trace * np.eye(here.size)
            tried = here - np.linalg.solve(scaled, gradient)
            r2, jac2 = residual(tried)
            if r2 @ r2 < r @ r:
                break
            damping *= 4
        else:
            break
        gain = 1 - (r2 @ r2) / (r @ r)
        here, r, jac, damping = tried, r2, jac2, max(damping / 5, 1e-12)
        if gain < 1e-9:
            break
    model.load(here)


def lawson(model: Model, z: Array, y: Array, w: Array, rounds: int, steps: int = 8) -> float:
    """Leave the coefficients with the smallest maximum weighted error met, and return that error."""
    emphasis = np.ones_like(z)
    best, kept = math.inf, model.vector()
    for index in range(rounds):
        descend(model, z, y, w * np.sqrt(emphasis), 200 if index == 0 else steps)
        error = np.abs((model.run(z)[0][-1] - y) * w)
        if not error.max() < math.inf:
            break
        if error.max() < best:
            best, kept = float(error.max()), model.vector()
        emphasis = emphasis * (error / error.max() + 0.02)
        emphasis /= emphasis.mean()
    model.load(kept)
    return best


def grid(spec: ChainSpec, count: int) -> tuple[Array, Array, Array]:
    """Chebyshev points of the domain, the function and the error weights there."""
    z = spec.low + (spec.high - spec.low) * (1 - np.cos(np.linspace(0, np.pi, count))) / 2
    return z, spec.function(z), spec.weight(z)


Integers = list[list[tuple[int, list[int]]]]
"""(constant, weights) of each step's left and right form."""

Change = tuple[tuple[int, int, int], int]
"""One integer (step, side, place; 0 is the constant) and what is added to it."""


def rounded(spec: ChainSpec, model: Model, rounds: int, count: int, rng: np.random.Generator) -> Integers:
    """Round coefficient after coefficient, coarsest first within a form, refitting all that are still free."""
    z, y, w = grid(spec, count)
    lawson(model, z, y, w, rounds)
    fracs = [spec.argument, *spec.fracs]
    result: Integers = []
    for index in range(len(spec.forms)):
        sides = []
        for side in range(2):
            _balance(model, index, side, z, 0.5 + 0.5 * rng.random())
            form, mask = model.forms[index][side], model.free[index][side]
            bits = spec.forms[index][side]
            steps = [bits] + [bits - f for f, _ in zip(fracs, form[1:], strict=False)]
            for k in sorted(range(form.size), key=lambda k: (steps[k], k)):
                form[k] = round(float(form[k]) * 2.0 ** steps[k]) * 2.0 ** -steps[k]
                if mask[k]:
                    mask[k] = False
                    lawson(model, z, y, w, max(2, rounds // 4))
            whole = [round(float(c) * 2.0**bit) for c, bit in zip(form, steps, strict=True)]
            sides.append((whole[0], whole[1:]))
        result.append(sides)
    return result


def polished(spec: ChainSpec, integers: Integers, count: int, passes: int) -> Integers:
    """Change one or two integers at a time by one while that lowers the maximum error."""
    z, y, w = grid(spec, count)
    places = [(i, side, k) for i in range(2, len(spec.forms)) for side in range(2) for k in range(i + 2)]
    places = [place for place in places if not _pinned(spec, place)]
    single = [(place, d) for place in places for d in (-1, 1)]
    moves: list[tuple[Change, ...]] = [(change,) for change in single]
    moves += [(p, q) for n, p in enumerate(single) for q in single[n + 1 :] if p[0] != q[0]]
    best = float(np.abs((exact(spec, integers, z)[-1] - y) * w).max())
    for _ in range(passes):
        before = best
        for move in moves:
            _shift(integers, move, 1)
            error = float(np.abs((exact(spec, integers, z)[-1] - y) * w).max())
            if error < best:
                best = error
            else:
                _shift(integers, move, -1)
        if best > 0.995 * before:
            break
    return integers


def _pinned(spec: ChainSpec, place: tuple[int, int, int]) -> bool:
    """A vanishing form's constant follows from its weights, and it leaves v3 and later products out."""
    index, side, k = place
    return spec.zero is not None and (index, side) == (len(spec.forms) - 1, 0) and (k == 0 or k >= 4)


def _shift(integers: Integers, move: tuple[Change, ...], sign: int) -> None:
    for (index, side, k), delta in move:
        constant, weights = integers[index][side]
        if k:
            weights[k - 1] += sign * delta
        else:
            integers[index][side] = (constant + sign * delta, weights)


def exact(spec: ChainSpec, integers: Integers, z: Array) -> list[Array]:
    """Values of all v_i with the integers as they stand; sets the constant of a vanishing form."""
    if spec.zero is not None:
        integers[-1][0] = (_vanishing_constant(spec, integers), integers[-1][0][1])
    values = [z]
    for (left, right), bits in zip(integers, spec.forms, strict=True):
        made = []
        for (constant, weights), bit in zip((left, right), bits, strict=True):
            total = np.full_like(z, constant * 2.0**-bit)
            for weight, value, f in zip(weights, values, (spec.argument, *spec.fracs), strict=False):
                if weight:
                    total = total + weight * 2.0 ** (f - bit) * value
            made.append(total)
        values.append(made[0] * made[1])
    return values


def _balance(model: Model, index: int, side: int, z: Array, maximum: float) -> None:
    """Scale a form so that its largest value is `maximum`: each scale rounds differently.

    The right form of the step, or the later forms, take up the factor; the last right form carries the result's scale.
    """
    last = index == len(model.forms) - 1
    if index < 2 or (last and side == 1):
        return
    form = model.forms[index][side]
    points = z if model.spec.zero is None else np.append(z, model.spec.zero)
    values = [np.ones_like(points), *model.run(points)[0]]
    total = np.asarray(sum(c * v for c, v in zip(form, values, strict=False)))
    if model.vanishing == (index, side):
        total = total - total[-1]
    factor = maximum / float(np.abs(total).max())
    form *= factor
    if side == 0:
        model.forms[index][1] /= factor
        return
    for step in model.forms[index + 1 :]:
        for later in step:
            later[index + 2] /= factor


def _vanishing_constant(spec: ChainSpec, integers: Integers) -> int:
    """Minus the weighted ring elements at the zero, where the first two products are exact."""
    at = spec.zero or 0.0
    p = integers[1][1][1][0] * 2.0 ** (spec.argument - spec.forms[1][1])
    real = [at, at * at, at * at * (at * at + p * at)]
    raws = [value * 2.0**bits for value, bits in zip(real, (spec.argument, *spec.fracs), strict=False)]
    if any(raw != round(raw) for raw in raws):
        raise SystemExit(f"{spec.name}: the products are not exact at z = {at}; choose another zero or more bits")
    return -sum(c * round(raw) for c, raw in zip(integers[-1][0][1], raws, strict=False))


def best_rounding(spec: ChainSpec, start: Array, trials: int, count: int, seed: int) -> Integers:
    """The best of several roundings, by maximum error on a grid four times as fine as the fit's."""
    rng = np.random.default_rng(seed)
    z, y, w = grid(spec, 4 * count)
    best, kept = math.inf, None
    for _ in range(trials):
        model = shape(spec)
        model.load(start)
        integers = polished(spec, rounded(spec, model, 12, count, rng), count, 6)
        error = float(np.abs((exact(spec, integers, z)[-1] - y) * w).max())
        if error < best:
            best, kept = error, integers
    if kept is None:
        raise SystemExit(f"{spec.name}: no rounding has a finite error")
    return polished(spec, kept, 4 * count, 12)


def starting_points(spec: ChainSpec, seed: int, tries: Iterable[object]) -> Iterator[tuple[float, float, Array]]:
    """Smaller and smaller errors of chains, before and after rounding, and where these started."""
    rng = np.random.default_rng(seed)
    z, y, w = grid(spec, 250)
    best, smooth = math.inf, math.inf
    for _ in tries:
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
            yield smooth, found, start


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
