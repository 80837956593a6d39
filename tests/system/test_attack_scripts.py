"""The scripts of the attacks, from the command line to rows and picture."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.forked_scripts import ROOT, Scripts

Run = Callable[..., str]


@pytest.fixture
def run(forked_scripts: Scripts, tmp_path: Path) -> Run:
    """Runs a script with options: its output if it ends with `code` 0, else its errors."""

    def call(script: str, *options: str, code: int = 0) -> str:
        ended, out, err = forked_scripts.run(ROOT / "scripts" / "studies" / script, tmp_path, *options)
        assert ended == code, err
        return err if code else out

    return call


def test_one_attack(run: Run) -> None:
    row = json.loads(run("attack_plan.py", "--partials", "open", "--plan", "2,1,1", "--nodes", "1", "--tiny", "--json"))
    assert (row["tokens"], row["vocabulary"], row["known_or_held"]) == (6, 200, 3)
    assert row["gained"] <= 3
    assert 0.5 <= row["exact"] <= 1
    words = run("attack_plan.py", "--states", "permuted", "--tiny")
    assert "states: 6 searches, 1.2e+03 candidates in all" in words
    assert "ROUGE-L" in words
    assert "want nodes from 0 to 143" in run("attack_plan.py", "--nodes", "900", "--tiny", code=2)


@pytest.mark.parametrize("encoder", [False, True])
def test_likelihoods_behind_a_split(encoder: bool, run: Run) -> None:
    how = ("--attacks", "likelihood", "--plan", "4,4,1", "--nodes", "2", "--split", "1", "--tiny")
    more = ("--encoder",) if encoder else ()
    row = json.loads(run("attack_plan.py", *how, *more, "--json"))
    assert (row["tokens"], row["split"], row["encoder"], row["rows"], row["unknown"]) == (16, 1, encoder, 2, 14)
    assert len(row["ranks"]) == 2
    assert all(1 <= rank <= row["vocabulary"] for rank in row["ranks"].values())
    assert "rank of the true one among" in run("attack_plan.py", *how, *more)
    assert "want CompNodes, 0 to 3" in run("attack_plan.py", *how, *more, "--nodes", "4", code=2)
    assert "want --attacks likelihood" in run("attack_plan.py", "--encoder", "--tiny", code=2)


def test_figures(tmp_path: Path, run: Run) -> None:
    rows, picture = tmp_path / "rows.jsonl", tmp_path / "picture.png"
    run("attack_figures.py", "--rows", str(rows), "--tiny")
    names = [json.loads(line)["name"] for line in rows.read_text().splitlines()]
    assert set(names) == {"gap", "share", "rounding"}
    run("attack_figures.py", "--rows", str(rows), "--plot", str(picture))
    assert picture.stat().st_size > 1000
