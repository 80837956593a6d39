"""docs/studies/comet.md has the figures that the estimator gives today."""

from __future__ import annotations

from pathlib import Path

import comet_tables as tables
import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.full
def test_the_page_has_the_estimators_figures() -> None:
    """One row of the summary stands for all: `python scripts/studies/comet_tables.py` makes them from the same runs."""
    page = (ROOT / "docs" / "studies" / "comet.md").read_text(encoding="utf-8")
    summary = page.partition("<!-- summary -->")[2].partition("<!-- /summary -->")[0]
    size = tables.sizes(False)
    (row,) = [line for line in summary.splitlines() if line.startswith(f"| {size.main} | trio |")]
    count = tables.Counter(size, lambda _: None)
    dense, comet = (count.run(size.main, "trio", way).costs for way in (None, tables.planned(size.main, size)))
    found = [cell.strip().partition(" ")[0] for cell in row.split("|")[3:5]]
    assert found == [tables.gigabytes(dense.bytes_total), tables.gigabytes(comet.bytes_total)], (
        "the estimator gives other figures: run `python scripts/studies/comet_tables.py`, and read the page's sentences"
    )


def test_every_table_has_its_place() -> None:
    page = (ROOT / "docs" / "studies" / "comet.md").read_text(encoding="utf-8")
    for name in tables.TABLES:
        assert page.partition(f"<!-- {name} -->\n")[2].partition(f"\n<!-- /{name} -->")[1], name
        assert "|" in page.partition(f"<!-- {name} -->\n")[2].partition(f"\n<!-- /{name} -->")[0], name
