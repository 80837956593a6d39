"""The replay counts what the cache manager's steps price, and its patterns are as described."""

from __future__ import annotations

from typing import Any

import pytest
import replay_cache
import torch
from comet_cache.refill import RefillCost, RefillManager

COST = RefillCost(weight=5.0, token=2.0, entry=0.25)


@pytest.fixture
def script() -> Any:
    return replay_cache


def patterns(script: Any, layers: int = 3, steps: int = 40, heads: int = 5) -> Any:
    drawn = torch.rand((layers, steps, heads), generator=torch.Generator().manual_seed(0)) < 0.2
    return script.Patterns("random", drawn, 4, 20)


def own(found: Any, script: Any) -> torch.Tensor:
    """The new token's part of each step: the active heads, the token, their entries."""
    used = found.active.any(2).sum(0)
    return (COST.weight + COST.entry) * found.active.sum((0, 2)) + COST.token * used


@pytest.mark.parametrize("strategy", ["merged", "prefetch", "per head", "per entry"])
def test_bytes_are_those_of_the_steps(script: Any, strategy: str) -> None:
    found = patterns(script)
    prefetch = COST if strategy == "prefetch" else None
    priced = torch.zeros(40, dtype=torch.float64)
    for layer in found.active:
        manager = RefillManager(1, 5, prefetch)
        for number, active in enumerate(layer):
            step = manager.step(active[None])
            if strategy == "per head":
                priced[number] += sum(part.bytes(COST) for part in step.apart(number))
            elif strategy == "per entry":
                first, *others = step.apart(number)
                each = COST.weight + COST.token + COST.entry
                priced[number] += first.bytes(COST) + sum(part.entries for part in others) * each
            else:
                priced[number] += step.bytes(COST)
    counts = script.replay(found, prefetch, lambda _: None)
    assert torch.allclose(counts.refill(strategy, COST) + own(found, script), priced)
    assert bool((counts.rectangle >= counts.entries + counts.own).all())


def test_rows_hold_every_cost_and_strategy(script: Any) -> None:
    rows = script.rows_of(patterns(script), lambda _: None)
    assert {(row.cost, row.strategy) for row in rows} == {
        (cost, strategy) for cost in ("paper", "dealer, remask", "trio", "dealer", "quad")
        for strategy in script.STRATEGIES
    }  # fmt: skip
    for row in rows:
        same = next(other for other in rows if (other.cost, other.strategy) == (row.cost, "merged"))
        assert row.total - row.bytes == pytest.approx(same.total - same.bytes, abs=2)  # the new token's part
        if row.strategy.startswith("per"):
            assert row.bytes >= same.bytes
        if row.cost in ("trio", "dealer", "quad"):
            assert row.bytes == same.bytes
        assert same.total <= same.dense
    assert {row.products for row in rows if row.strategy == "merged"} == {1.0}


@pytest.mark.parametrize("uneven", [False, True])
def test_half_of_the_heads_are_active_and_stay_so(script: Any, uneven: bool) -> None:
    found = script.generated(4000, 8.0, uneven, 4)
    active = found.active
    ends = int((active[:, :-1] & ~active[:, 1:]).sum())
    assert float(active.double().mean()) == pytest.approx(0.5, abs=0.08)
    assert int(active.sum()) / ends == pytest.approx(8, rel=0.1)
    if not uneven:
        assert found.away() == pytest.approx(8, rel=0.1)
    assert bool(active.double().mean(1).std() > 0.2) is uneven


def test_figures_have_three_digits_or_more(script: Any) -> None:
    assert [script.megabytes(value) for value in (0, 14_590, 12_300_000, 2_213_950_000)] == [
        "0", "0.0146", "12.3", "2,214"
    ]  # fmt: skip
    assert script.times(3.0, 2.0) == "1.50"
    assert script.times(0.0, 0.0) == "-"
