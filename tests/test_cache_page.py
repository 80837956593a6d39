"""docs/studies/mpcache.md shows its rows, and rows that are counted again keep what was timed."""

from __future__ import annotations

from pathlib import Path

import make_cache_tables
import pytest
from mpcache_rows import Case

from private_llm.kv_cache.policies.papers import MPCacheConfig
from private_llm.kv_cache.policies.policy import Level

SMALL = MPCacheConfig.paper(gamma=0.5, least=16, recent=3, levels=(Level(8, 0.5), Level(4, 0.5)))


def test_the_page_is_that_of_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_cache_tables.is_current()
    rows = make_cache_tables.read_rows(make_cache_tables.ROWS)
    monkeypatch.setattr(make_cache_tables, "ROWS", tmp_path / "rows.jsonl")
    make_cache_tables.keep(make_cache_tables.ROWS, [{**rows[0], "bytes": 1}, *rows[1:]])
    assert not make_cache_tables.is_current()


@pytest.mark.full
def test_rows_that_are_counted_keep_their_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("step", "MPCache", "llama-2", "trio", 64, SMALL, measured=True, tiny=True)
    timed = {"seconds": {"min": 1.0, "median": 2.0, "max": 3.0}, "bandwidth_mbit": None, "commit": "12345678"}
    untimed = make_cache_tables.untimed(case)
    before = {**untimed, **timed}
    assert "seconds" not in untimed
    monkeypatch.setattr(make_cache_tables, "cases", lambda: [case])
    monkeypatch.setattr(make_cache_tables, "ROWS", tmp_path / "rows.jsonl")
    for rounds, same in ((before["rounds"], True), (before["rounds"] + 1, False)):
        make_cache_tables.keep(make_cache_tables.ROWS, [{**before, "rounds": rounds}, {**before, "label": "no case"}])
        make_cache_tables.count()
        assert make_cache_tables.read_rows(make_cache_tables.ROWS) == [
            before if same else {**before, "counted": untimed["commit"]}
        ]
