"""scripts/studies/train_inversion.py: its rows, its nodes, its picture, and an attacker handed on to another layer."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from private_llm.token_sharding import ShardingPlan

ROOT = Path(__file__).resolve().parents[2]
SCORES = {"exact", "rouge_l", "bleu", "unheld_exact", "unheld_rouge_l", "unheld_bleu"}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts/studies"))
    return importlib.import_module("train_inversion")


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_leaves_one_row_for_each_plan_and_the_next_layer_goes_on_from_it(
    script: ModuleType, tmp_path: Path
) -> None:
    out, saved, picture = tmp_path / "rows.jsonl", tmp_path / "tokens.safetensors", tmp_path / "rows.png"
    quick = ["--tiny", "--front", "0", "--out", str(out)]
    args = script.parse_args([*quick, "--layer", "0", "--save", str(saved)])
    args.steps, args.texts, args.length = 3, 2, 48
    script.main(args)
    args = script.parse_args([*quick, "--start", str(saved), "--layer", "0"])
    args.steps, args.texts, args.length = 0, 2, 48
    script.main(args)
    args = script.parse_args([*quick, "--start", str(saved), "--node", "0,3"])
    args.steps, args.texts, args.length, args.plan = 0, 2, 48, ["4,2,1"]
    script.main(args)
    first, second, *again, third = rows_of(out)
    assert [row["attack"] for row in again] == [first["attack"], second["attack"]]
    assert [list(row["plan"].values()) for row in (first, second)] == [[4, 2, 1, 0], [8, 8, 2, 0]]
    assert [row["layers"] for row in (first, second, third)] == [[0], [0], [1]]
    assert [row["node"] for row in (first, third)] == ["any CompNode", "AttnNode (0, 3)"]
    assert (first["steps"], third["steps"], third["started_from"]) == (3, 0, "tokens")
    for row in (first, second, third):
        assert set(row["attack"]) == set(row["floor"]) == SCORES
        assert all(0 <= value <= 1 for part in ("attack", "floor") for value in row[part].values())
        assert row["floor"]["exact"] >= row["held"]
        assert row["threads"] == 1
    assert [first["held"], third["held"]] == pytest.approx([0.25, 0.5], abs=0.05)
    script.main(script.parse_args(["--plot", str(out), str(picture)]))
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("nodes", "wanted"),
    [(["comp"], [{0}, {1}, {2}]), (["1"], [{1}]), (["0", "2"], [{0, 2}]), (["1,4", "0"], [{8 + 4, 0}])],
)
def test_nodes_are_named_by_number_or_by_pair(script: ModuleType, nodes: list[str], wanted: list[set[int]]) -> None:
    observers = script.observers_of("3,4,2", nodes)
    assert observers.plan == ShardingPlan(3, 4, 2, accept_weak_plan=True)
    assert [set(group) for group in observers.sets] == wanted


@pytest.mark.parametrize(
    ("plan", "node", "message"),
    [("3,4", "comp", "want alpha,c,m"), ("3,4,2", "3", "--node 3: want comp"), ("3,4,2", "0,6", "shards 0 to 5"),
     ("3,4,2", "x", "--node x")],
)  # fmt: skip
def test_wrong_plans_and_nodes_are_refused(script: ModuleType, plan: str, node: str, message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        script.observers_of(plan, [node])


def test_short_texts_are_refused(script: ModuleType) -> None:
    args = script.parse_args(["--tiny"])
    args.texts = 10_000
    with pytest.raises(SystemExit, match="give a longer --test"):
        script.main(args)
    with pytest.raises(SystemExit, match="No text to train on"):
        script.main(script.parse_args([]))
