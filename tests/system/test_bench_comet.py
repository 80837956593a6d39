"""scripts/studies/bench_comet.py: sparse and dense steps compute the same, and what each sends."""

from __future__ import annotations

import json

import pytest
from bench_comet import SETTINGS, WAYS, Case, app
from typer.testing import CliRunner

SHAPE = (2, 5, 16, 2, 40)
LARGEST_ERROR = 1e-3


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_row_compares_a_sparse_step_with_the_dense_one(setting: str) -> None:
    row = Case(setting, "neurons, open levels", SHAPE, tiny=True).run(1)
    assert row["error_max"] < LARGEST_ERROR
    assert row["ratio"] == row["seconds"]["median"] / row["dense_seconds"]["median"]
    assert row["ratio_bytes"] == row["bytes_total"] / row["dense_bytes"]
    assert row["rounds"] > row["dense_rounds"] > 0


def test_a_budget_costs_more_than_open_levels_and_blocks_less_than_neurons() -> None:
    found = {way: Case("trio", way, SHAPE, tiny=True).run(1)["bytes_total"] for way in WAYS}
    assert found["neurons, open levels"] < found["neurons, budget"]
    assert found["blocks of 16, budget"] < found["neurons, budget"]


def test_the_script_prints_a_row_for_each_protocol_and_way() -> None:
    result = CliRunner().invoke(app, ["--tiny", "--repeat", "1", "--json"])
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(row["setting"], row["way"]) for row in rows] == [(s, w) for s in SETTINGS for w in WAYS]
