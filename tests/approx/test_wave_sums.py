"""Fitted sums of waves against the functions they stand for."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from private_llm.approx.bump import WaveSum, angle_frac, waves_of
from private_llm.approx.tables import GELU_ERF, GELU_TANH, SILU

TABLES = [
    (SILU.waves, lambda t: t * torch.sigmoid(-t)),
    (GELU_ERF.waves, lambda t: -F.gelu(-t)),
    (GELU_TANH.waves, lambda t: -F.gelu(-t, approximate="tanh")),
]
each = pytest.mark.parametrize(("made", "truth"), TABLES, ids=["silu", "gelu_erf", "gelu_tanh"])


def value(made: WaveSum, t: Tensor) -> Tensor:
    angle = t * (2 * np.pi * made.factor / 2 ** (made.factor_bits + made.period_log2))
    waves = enumerate(made.waves, 1)
    return made.constant + sum(c * torch.cos(k * angle) + s * torch.sin(k * angle) for k, (c, s) in waves)


@each
def test_error_as_stated(made: WaveSum, truth: Callable[[Tensor], Tensor]) -> None:
    """As far as a coarse comparison lets arguments go, and at the top as zero and as what saturates early."""
    t = torch.linspace(-(2.0**-made.resolution), made.top + 2.0**-made.resolution, 100_001, dtype=torch.float64)
    error = float((value(made, t) - truth(t)).abs().max())
    late = float(value(made, torch.tensor([made.top], dtype=torch.float64)))
    early = late - float(truth(torch.tensor([made.top - 2.0**-made.resolution], dtype=torch.float64))[0])
    assert 0.8 * made.error <= max(error, abs(late), abs(early)) <= made.error


@each
@pytest.mark.parametrize("frac", [8, 12, 18, 20])
def test_the_period_is_a_power_of_two(made: WaveSum, truth: Callable[[Tensor], Tensor], frac: int) -> None:
    plan = waves_of(made, frac)
    one = made.factor << angle_frac(frac)  # an argument of 1
    angle = 2 * np.pi / (1 << plan.angle_bits) * one
    assert angle == pytest.approx(2 * np.pi * made.factor / 2**made.factor_bits / 2**made.period_log2)
    assert made.top * made.factor / 2**made.factor_bits < 2**made.period_log2
    assert plan.narrow == frac + 1
