"""Reciprocal and reciprocal square root over their ranges: relative error, cells, refusals, rounds."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from private_llm.approx.normalise import QUARTERS, THIRDS, Cells, grid, reciprocal, rsqrt
from private_llm.config import PrivateConfig
from private_llm.errors import DomainError
from tests.harness import PLAIN, TRIO, run_meta, run_parties

both = pytest.mark.parametrize("config", [PLAIN, TRIO], ids=["plain", "trio"])


def spread(cells: Cells, low: float, high: float, frac: int) -> Tensor:
    """Log-uniform values, both ends, and both sides of every threshold."""
    x = low * (high / low) ** torch.linspace(0, 1, 3001, dtype=torch.float64)
    thresholds = torch.tensor(grid(cells, low, high)[0], dtype=torch.float64)
    unit = 2.0**-frac
    x = torch.cat([x, thresholds, thresholds - unit, thresholds + unit, thresholds * 1.003])
    return ((x * 2**frac).round() / 2**frac).clamp(low, high)


@both
@pytest.mark.parametrize(("low", "high"), [(1.0, 128.0), (0.99, 1.3), (0.125, 5000.0), (3.0, 1e5)])
def test_reciprocal(config: PrivateConfig, low: float, high: float) -> None:
    x = spread(QUARTERS, low, high, 18)
    result = run_parties(config, lambda _, a: reciprocal(a, low, high), [x])
    assert float((result.value * x - 1).abs().max()) <= 2e-5
    coarse = run_parties(config, lambda _, a: reciprocal(a, low, high, frac=18), [x])
    assert float((coarse.value - 1 / x).abs().max()) <= 2e-5 / low + 2.0**-18


@both
@pytest.mark.parametrize(("low", "high", "frac"), [(2.0**-10, 2.0**20, 30), (2.0**-20, 2.0**10, 36), (1.0, 2.0, 24)])
def test_rsqrt(config: PrivateConfig, low: float, high: float, frac: int) -> None:
    x = spread(THIRDS, low, high, frac)
    result = run_parties(config, lambda _, a: rsqrt(a, low, high, frac=34), [x], [frac])
    # 2^-34 absolute against a result of at least 2^-10.
    assert float((result.value * x.sqrt() - 1).abs().max()) <= 3e-5


@both
def test_rsqrt_with_the_session_s_bits(config: PrivateConfig) -> None:
    x = torch.tensor([[0.25, 4.0], [1.0, 900.0]], dtype=torch.float64)
    value = run_parties(config, lambda _, a: rsqrt(a, 0.1, 1000.0), [x]).value
    assert float((value - x**-0.5).abs().max()) <= 3e-5 * 3.2 + 2.0**-17


@pytest.mark.parametrize(
    ("cells", "low", "high"), [(QUARTERS, 1.0, 128.0), (THIRDS, 0.003, 77.0), (QUARTERS, 0.99, 1.3)]
)
def test_every_value_finds_its_cell(cells: Cells, low: float, high: float) -> None:
    thresholds, weights = grid(cells, low, high)
    assert len(weights) == len(thresholds) + 1
    for x in torch.linspace(low, high, 5001, dtype=torch.float64).tolist():
        y = x * weights[sum(x >= t for t in thresholds)]
        assert 1.0 - 1e-12 <= y <= 1.3 + 1e-12


def test_rounds() -> None:
    def rounds(function: object, *shape: int) -> int:
        return run_meta(TRIO, function, [shape]).rounds  # type: ignore[arg-type]

    assert rounds(lambda _, a: reciprocal(a, 1.0, 128.0), 12) == 8
    assert rounds(lambda _, a: reciprocal(a, 1.0, 128.0, frac=18), 12) == 9
    assert rounds(lambda _, a: rsqrt(a, 2.0**-10, 2.0**20), 12) == 10


def test_meta_agrees_with_the_ledger() -> None:
    run = run_parties(TRIO, lambda _, a: reciprocal(a, 1.0, 64.0), [torch.linspace(1, 64, 100)])
    assert run_meta(TRIO, lambda _, a: reciprocal(a, 1.0, 64.0), [(100,)]) == run.cost


def test_refusals() -> None:
    with pytest.raises(DomainError, match="0 < low < high"):
        run_meta(TRIO, lambda _, a: reciprocal(a, 0.0, 1.0), [(3,)])
    with pytest.raises(DomainError, match="0 < low < high"):
        run_meta(TRIO, lambda _, a: reciprocal(a, 2.0, 1.0), [(3,)])
    with pytest.raises(DomainError, match="leaves the ring"):
        run_meta(TRIO, lambda _, a: rsqrt(a, 1.0, math.ldexp(1.0, 40)), [(3,)])
    with pytest.raises(DomainError, match="64-bit ring"):
        run_meta(PrivateConfig(ring=32, frac_bits=12), lambda _, a: reciprocal(a, 1.0, 8.0), [(3,)])
