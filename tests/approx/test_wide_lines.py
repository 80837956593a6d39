"""Inverse roots over 43 octaves by one table of lines: errors, rounds, and norms of rows with massive entries."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from private_llm.approx.lines import WideLines, octaves_apart, power_by_lines
from private_llm.approx.norms import layer_norm, rms_norm
from private_llm.config import PrivateConfig
from private_llm.protocols.registry import trio_prices as cost
from private_llm.protocols.session import Session
from private_llm.ring.ring import Ring
from private_llm.tensor.fixed import Fixed
from tests.harness import run_parties

LINES = WideLines(own=21, log2_high=37, frac=29, gain=24.0)
KEYS = PrivateConfig(adder="keys")


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("lines", [LINES, WideLines(21, 21, 21, 27.7, 14), WideLines(29, 17, 22, 2.6, 16)])
@pytest.mark.parametrize("protocol", ["trio", "dealer"])
def test_relative_errors_and_price(protocol: str, lines: WideLines) -> None:
    """From where x has 16 significant bits on. Only points within 2^-13 of where copies meet may be further off."""
    low = max(lines.log2_low + 1, 16 - lines.own)
    x = 2.0 ** torch.linspace(low, lines.log2_high, 3000, dtype=torch.float64)
    x = torch.round(x * 2.0**lines.own) / 2.0**lines.own
    config = PrivateConfig(adder="keys", protocol=protocol)  # type: ignore[arg-type]
    got = run_parties(config, lambda _, a: power_by_lines(a, lines), [x], fracs=[lines.own])
    want = lines.gain * x**-0.5
    assert float(((got.value - want).abs() / want).max()) <= 1.5e-4
    price = cost.truncate(Ring(64), 3000, lines.apart) + cost.piecewise(Ring(64), 6000, lines.shape)
    assert (got.cost.total, got.cost.rounds) == (price.total, price.rounds) == (price.total, 3)


def test_where_the_copies_meet_and_below_the_range() -> None:
    """A comparison may be off by a little at every end: nothing jumps there. Below the range results fall to zero."""
    ends = torch.tensor(
        [LINES.log2_low + 1.0, LINES.log2_low + LINES.apart, LINES.log2_low + LINES.apart + 1], dtype=torch.float64
    )
    x = (2.0 ** ends[:, None] * (1 + torch.linspace(-0.002, 0.002, 41, dtype=torch.float64))).reshape(-1)
    got = run_parties(KEYS, lambda _, a: power_by_lines(a, LINES), [x], fracs=[21]).value
    assert float((got * x**0.5 / 24 - 1).abs().max()) <= 5e-3  # 0.2 % below the range, where the rise is twice as steep
    # 2^-13 of a comparison, and the lines' own
    assert float((got * x**0.5 / 24 - 1).abs()[41:].max()) <= 2e-4
    below = 2.0 ** torch.linspace(LINES.log2_low - 3, LINES.log2_low + 1, 50, dtype=torch.float64)
    small = run_parties(KEYS, lambda _, a: power_by_lines(a, LINES), [below], fracs=[21]).value
    assert bool((small >= -1e-3).all())
    assert bool((small <= 24 * below**-0.5 * 1.01).all())


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_norms_of_massive_rows_take_few_rounds(kind: str, weighted: bool) -> None:
    x, weight = noise(16, 576) * 2.0 ** torch.arange(-2.0, 14.0)[:, None], 1 + 0.3 * noise(576, seed=1)
    x[-1, 7] = 2.0**17

    def run(session: Session, rows: Fixed, gain: Fixed) -> Fixed:
        known = {"square": 27, "gain": 1 if weighted else None}
        if kind == "rms":
            return rms_norm(rows, gain if weighted else None, 1e-5, **known)  # type: ignore[arg-type]
        return layer_norm(rows, gain if weighted else None, None, 1e-5, **known)  # type: ignore[arg-type]

    centred = x if kind == "rms" else x - x.mean(-1, keepdim=True)
    want = centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + 1e-5) * (weight if weighted else 1)
    by_keys, by_circuits = (run_parties(config, run, [x, weight], fracs=[12, 18]) for config in (KEYS, PrivateConfig()))
    errors = (by_keys.value - want).norm(dim=-1) / want.norm(dim=-1)
    assert float(errors[3:].max()) <= 2e-4, "rows of 12 fractional bits that are not too small for them"
    assert by_keys.cost.rounds <= by_circuits.cost.rounds - 5
    assert by_keys.cost.total < 1.25 * by_circuits.cost.total


def test_ranges_that_it_reaches() -> None:
    assert octaves_apart(2.0 ** (37 - 43), 37) == 22
    assert octaves_apart(2.0 ** (37 - 44), 37) is None
    assert octaves_apart(2.0**-4, 21) == 14
    assert not WideLines(own=30, log2_high=37, frac=29).fit


def test_small_rows_above_epsilon_are_right() -> None:
    """Where the ring has room, the range begins at epsilon: a row of 0.004 is no row of zeros."""
    x = 0.004 * noise(4, 512)
    got = run_parties(KEYS, lambda _, a: rms_norm(a, None, 1e-6, square=16), [x])
    want = x / torch.sqrt((x**2).mean(-1, keepdim=True) + 1e-6)
    assert float(((got.value - want).norm(dim=-1) / want.norm(dim=-1)).max()) <= 2e-3, "18 fractional bits of 0.004"
    assert got.cost.rounds <= 7
