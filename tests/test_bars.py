"""Bytes and rounds stay within tests/bars.toml; each of its ratios has something that measures it."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
BARS: dict[str, list[dict[str, Any]]] = tomllib.loads((ROOT / "tests" / "bars.toml").read_text("utf-8"))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("bar", BARS["exact"], ids=lambda bar: bar["what"])
def test_bytes_and_rounds_stay_within_their_bars(bar: dict[str, Any], run: Callable[..., str]) -> None:
    if "estimate" in bar:
        found = json.loads(run("estimate", *bar["estimate"].split(), "--json"))
    else:  # test_figures.py holds rows against the code
        wanted = dict(bar["row"])
        rows = map(json.loads, (ROOT / "docs" / wanted.pop("file")).read_text("utf-8").splitlines())
        # the first of rows that differ in their links alone
        found = next(row for row in rows if wanted.items() <= row.items())
    assert found[bar["column"]] <= bar["at_most"]


def test_every_ratio_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts" / "studies"), *sys.path])
    import check_bars

    assert set(check_bars.MEASURED) == {bar["name"] for bar in BARS["ratio"]}
