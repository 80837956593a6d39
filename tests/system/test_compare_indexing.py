"""Indexing in a secret order and by one-hot rows give the same values; what each costs."""

from __future__ import annotations

from typing import Any

import compare_indexing
import pytest
import torch
from torch import Tensor

from private_llm.config import PrivateConfig
from private_llm.protocols.registry import protocol_names
from tests.harness import run_parties

N, PLACES = 40, (0, 3, 4, 17, 39)
every = pytest.mark.parametrize("protocol", protocol_names())


@pytest.fixture
def script() -> Any:
    return compare_indexing


def config(protocol: str) -> PrivateConfig:
    return PrivateConfig.from_dict({"protocol": protocol, "insecure": protocol == "plain"})


def inputs() -> tuple[Tensor, Tensor]:
    active = torch.zeros(N, dtype=torch.float64)
    active[list(PLACES)] = 1
    return active, torch.linspace(-3, 3, N, dtype=torch.float64)


@every
def test_one_hot_rows_stand_for_the_ones_in_order(script: Any, protocol: str) -> None:
    active, _ = inputs()
    found = run_parties(config(protocol), lambda _, a: script.one_hot_rows(a, len(PLACES)), [active], [0])
    assert found.elements[0].nonzero().tolist() == [[row, place] for row, place in enumerate(PLACES)]
    assert int(found.elements[0].sum()) == len(PLACES)


@every
def test_both_ways_pick_the_same_values(script: Any, protocol: str) -> None:
    active, x = inputs()
    setting = config(protocol)
    one = run_parties(setting, lambda _, a, v: script.picked_by_one_hot(a, v, len(PLACES)), [active, x], [0, 18])
    other = run_parties(
        setting, lambda _, a, v: script.picked_in_secret_order((-a).less_than([0.0]), v), [active, x], [0, 18]
    )
    assert one.value.tolist() == pytest.approx(x[list(PLACES)].tolist(), abs=1e-4)
    assert other.value.sort().values.tolist() == pytest.approx(x[list(PLACES)].tolist(), abs=1e-4)


@pytest.mark.parametrize("protocol", ["trio", "dealer"])
@pytest.mark.parametrize("picks", [1, 5])
def test_the_counted_cost_is_that_of_a_run(script: Any, protocol: str, picks: int) -> None:
    active, x = inputs()
    run = run_parties(config(protocol), lambda _, a, v: script.picked_by_one_hot(a, v, picks), [active, x], [0, 18])
    counted = script.counted_one_hot(config(protocol), N, picks)
    assert (counted.total, counted.rounds) == (run.cost.total, run.cost.rounds)


def test_a_wrong_result_stops_the_measurement(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "picked_in_secret_order", lambda active, x: x)
    with pytest.raises(SystemExit, match="secret order, n = 64: the result is off"):
        script.rows_of(config("trio"), 64, 2, 1)


def test_sizes_are_written_in_decimal_units(script: Any) -> None:
    assert [script.size(count) for count in (0, 999, 3590, 17_600_000, 2.1e10)] == [
        "0 B", "999 B", "3.59 kB", "17.6 MB", "21 GB"
    ]  # fmt: skip


def test_a_line_of_the_table_holds_one_size(script: Any) -> None:
    ways = [script.Row(way, "trio", 256, 26, size, 5, 0.5, way == "one-hot") for way, size in
            (("one-hot", 1_340_000), ("secret order", 10_000), ("relu", 14_400))]  # fmt: skip
    assert script.table(ways).splitlines()[-1] == (
        "| trio | 256 | 26 | 1.34 MB, 5, about 0.5 | 10 kB, 5, 500.0 | 14.4 kB, 5, 500.0 | 93, about 1 |"
    )
