"""Pointwise functions with what their records state, and what their price is the sum of: one table for all tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from private_llm.approx import tables
from private_llm.approx.activations import exp
from private_llm.approx.bump import Fitted, waves_of
from private_llm.exact import comparisons
from private_llm.net.ledger import Cost
from private_llm.nn.activations import ACTIVATIONS, Activation
from private_llm.protocols.one_step import TOTAL_BITS
from private_llm.protocols.registry import trio_prices as cost
from private_llm.ring.ring import Ring
from private_llm.tensor.fixed import Fixed
from tests.approx.tables import noise_units

R = Ring(64)


@dataclass(frozen=True)
class Case:
    """`error` is the stated bound; `ends` the domain; `thresholds` where a coarse comparison may differ.

    `noise` bounds the effect of truncation, in units of the result's last place.
    """

    name: str
    run: Callable[[Fixed], Fixed]
    truth: Callable[[Tensor], Tensor]
    error: float
    ends: tuple[float, float]
    thresholds: tuple[float, ...]
    price: Callable[[int], Cost]
    noise: float = 0.0

    def __repr__(self) -> str:
        return self.name


FULL = torch.linspace(-1.008, 1.032, 4001, dtype=torch.float64)


def products(n: int, *shifts: int) -> Cost:
    """Truncated products one after the other."""
    total = Cost()
    for shift in shifts:
        total = total + cost.product(R, n, shift)
    return total


def _bump(n: int, *shifts: int) -> Cost:
    """Three coarse thresholds (39 bits, 26 positions), two injections of one weighted row, the chain."""
    fold = cost.msb(n, 39, 3, low=12) + cost.inject(R, n, 1, 1, 0) + cost.inject(R, n, 1, 1, 0)
    return fold + products(n, *shifts)


def _waves(n: int, fitted: Fitted) -> Cost:
    """Three coarse thresholds, as coarse as the fit allows, a narrow injection of two weighted rows, the waves."""
    made = fitted.waves
    assert made is not None
    plan = waves_of(made, 18)
    fold = cost.msb(n, 39, 3, low=18 - made.resolution) + cost.inject(R, n, 2, 2, 0, low=plan.angle_bits)
    return fold + cost.relu_minus_waves(R, n, plan)


def _logistic(n: int) -> Cost:
    fold = cost.msb(n, 39, 3, low=12) + cost.inject(R, n, 3, 3, 0)
    return fold + products(n, 22, 28, 40, 42) + cost.inject(R, n, 1, 1, 0)


def _exact(n: int, thresholds: int = 1) -> Cost:
    return cost.msb(n, 39, thresholds) + cost.inject(R, n, thresholds, thresholds, 0)


RECORDS = {made.name: made for made in ACTIVATIONS}


def truth(made: Activation, **settings: object) -> Callable[[Tensor], Tensor]:
    """What PyTorch computes."""
    return lambda x: cast("Callable[..., Any]", made.ops[0])(x, *made.example, **settings)


def stated(
    name: str, thresholds: tuple[float, ...], price: Callable[[int], Cost], noise: float = 0.0, **settings: str
) -> Case:
    """As the record says."""
    made = RECORDS[name]
    return Case(
        "_".join([name, *settings.values()]), partial(made.compute, **settings), truth(made, **settings),
        made.error, made.domain, thresholds, price, noise,
    )  # fmt: skip


PIECEWISE = [
    stated("relu", (), _exact),
    Case("absolute", comparisons.absolute, torch.abs, 0.0, RECORDS["relu"].domain, (), _exact),
    stated("hardtanh", (), lambda n: _exact(n, 2)),
]
"""Piecewise linear functions: they also run in the 32-bit ring."""

FITTED = [
    stated("gelu", (0.0, -4.0, 4.0), lambda n: _waves(n, tables.GELU_ERF)),
    stated("gelu", (0.0, -4.0, 4.0), lambda n: _waves(n, tables.GELU_TANH), approximate="tanh"),
    stated("silu", (0.0, -14.0, 14.0), lambda n: _waves(n, tables.SILU)),
    stated("sigmoid", (0.0, -10.0, 10.0), _logistic, 2 * noise_units(tables.LOGISTIC.chain, FULL[FULL <= 0.26])),
    stated("softplus", (0.0, -10.0, 10.0), lambda n: _bump(n, 22, 28, 40, 42),
           noise_units(tables.SOFTPLUS.chain, FULL[FULL <= 0.26])),
    Case(
        "exp", exp, torch.exp, 6e-5, (-(2.0**21) + 2**10, 0.25), (-14.0,),
        lambda n: cost.msb(n, 40, 1, low=18) + cost.exponential(R, n, TOTAL_BITS - 24),
        (2.1e-5 + tables.EXP.chain.error) * 2**18 + noise_units(tables.EXP.chain, FULL[FULL >= -0.75]),
    ),
]  # fmt: skip
"""Functions of polynomials, which need the 64-bit ring."""

CASES = [*PIECEWISE, *FITTED]


def samples(case: Case, frac: int = 18) -> Tensor:
    """A dense grid over the bend, random values over the whole domain, and the extremes; exact at `frac` bits."""
    generator = torch.Generator().manual_seed(1)
    low, high = case.ends
    dense = torch.linspace(-18, 18, 24001, dtype=torch.float64)
    near = torch.linspace(-0.1, 0.1, 1001, dtype=torch.float64)
    sizes = 2.0 ** (torch.rand(4000, generator=generator, dtype=torch.float64) * 22 - 3)
    signs = torch.randint(0, 2, (4000,), generator=generator) * 2 - 1
    edges = torch.tensor([low, high, 0.0, 2.0**-frac, -(2.0**-frac), *case.thresholds, *(-t for t in case.thresholds)])
    x = torch.cat([dense, near, sizes * signs, edges.double()]).clamp(low, high)
    return (x * 2**frac).round() / 2**frac
