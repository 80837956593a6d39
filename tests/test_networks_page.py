"""docs/networks.md shows its rows, and every figure of others has a source and says what it differs in."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from make_networks import plot_wan
from wan_models import wan_model

ROOT = Path(__file__).resolve().parent.parent
PUBLISHED: list[dict[str, Any]] = json.loads((ROOT / "docs" / "networks-published.json").read_text("utf-8"))


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "pages"))
    return importlib.import_module("make_networks")


def test_the_page_is_that_of_the_rows(script: Any) -> None:
    assert script.is_current()
    rows = script.read_rows(script.ROWS)
    assert len({script.key(row) for row in rows}) == len(rows) > 0


def test_a_page_of_other_rows_is_found(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = script.read_rows(script.ROWS)
    changed = tmp_path / "networks.jsonl"
    script.keep(changed, [{**rows[0], "seconds_per_token": 1234.5}, *rows[1:]])
    monkeypatch.setattr(script, "ROWS", changed)
    assert not script.is_current()


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: f"{row['system']}, {row['model']}, {row['unit']}")
def test_every_published_figure_says_where_it_is_from_and_what_it_differs_in(row: dict[str, Any]) -> None:
    for name in ("system", "source", "model", "what", "said", "setting", "machine", "network", "differs"):
        assert row[name].strip(), name
    assert row["unit"] in ("token", "first token", "forward", "ratio")
    assert (row["seconds"] is None) == (row["unit"] == "ratio")
    assert row["seconds"] is None or row["seconds"] > 0
    assert 2022 <= row["year"] <= 2026
    if row["beside"] is not None:
        assert wan_model(row["beside"]).name == row["beside"]


def test_systems_that_the_field_knows_are_there() -> None:
    systems = {row["system"] for row in PUBLISHED}
    assert {"PUMA", "BumbleBee", "SIGMA", "MPCache", "POST", "Perseus"} <= systems


def test_ours_is_measured_where_it_can_be(script: Any) -> None:
    def row(how: str, latency: float, token: float, **more: object) -> dict[str, Any]:
        return {"model": "gpt2", "how": how, "way": "plain", "latency_ms": latency, "bandwidth_mbit": 1000.0,
                "seconds_first_token": 10 * token, "seconds_per_token": token, **more}  # fmt: skip

    rows = [row("modelled", 0.2, 9.0), row("measured", 0.2, 1.5), row("measured", 20.0, 30.25, bandwidth_mbit=100.0),
            row("measured", 1.0, 2.0, way="drafts"), row("measured", 20.0, 31.0)]  # fmt: skip
    assert script.ours("gpt2", rows) == "gpt2, measured: 15 / - / 310; 1.5 / - / 31"
    assert script.ours("gpt2", rows[:1]) == "gpt2, modelled: 90 / - / -; 9 / - / -"
    assert script.ours("llama-7b", rows) == script.ours(None, rows) == "-"


def test_the_picture_is_drawn_from_few_rows(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    row = {"model": "gpt2", "how": "measured", "way": "plain", "latency_ms": 1.0, "bandwidth_mbit": 1000.0,
           "seconds_per_token": 2.0}  # fmt: skip
    plot_wan([row, {**row, "latency_ms": 20.0, "seconds_per_token": 30.0}], PUBLISHED, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 10_000
