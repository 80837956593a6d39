"""The fitted tables evaluated in float64: their error, their range, and how far rounding noise can grow in them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from private_llm.approx.chain import Chain


def run_table(chain: Chain, z: Tensor, noise: dict[int, float] | None = None) -> list[Tensor]:
    """Values of all steps without truncation; `noise[i]` is added to step i."""
    values = [z]
    fracs = [chain.argument]
    for index, step in enumerate(chain.steps):
        sides = []
        for form in (step.left, step.right):
            total = torch.full_like(z, form.constant * 2.0**-form.frac)
            for weight, value, frac in zip(form.weights, values, fracs, strict=False):
                total = total + weight * 2.0 ** (frac - form.frac) * value
            sides.append(total)
        values.append(sides[0] * sides[1] + (noise or {}).get(index, 0.0))
        fracs.append(step.frac)
    return values[1:]


def noise_units(chain: Chain, z: Tensor, frac: int = 18) -> float:
    """Largest change of the result, in whole units of 2^-frac, when every product is off by one unit."""
    exact = run_table(chain, z)[-1]
    total = torch.zeros_like(z)
    for index, step in enumerate(chain.steps[:-1]):
        total = total + (run_table(chain, z, {index: 2.0**-step.frac})[-1] - exact).abs()
    return math.ceil(float(total.max()) * 2.0**frac) + 1.0
