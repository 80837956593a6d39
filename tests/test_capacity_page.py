"""docs/capacity.md shows its rows, and the formula that makes its plan of them."""

from __future__ import annotations

import importlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "pages"))
    return importlib.import_module("make_capacity")


def test_the_page_is_that_of_the_rows(script: Any) -> None:
    assert script.is_current()
    rows = script.read_rows(script.ROWS)
    assert len({script.key(row) for row in rows}) == len(rows) > 0
    assert all(row["equal"] for row in rows if row["how"] == "measured")


def test_a_page_of_other_rows_is_found(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = script.read_rows(script.ROWS)
    changed = tmp_path / "capacity.jsonl"
    script.keep(changed, [{**rows[0], "tokens_per_s": 1234.5}, *rows[1:]])
    monkeypatch.setattr(script, "ROWS", changed)
    assert not script.is_current()


def test_there_is_a_row_of_each_number_at_a_time_and_of_each_estimate(script: Any) -> None:
    found = {script.key(row) for row in script.read_rows(script.ROWS)}
    measured = {("measured", *kind, None, script.NEW, count) for kind in script.MEASURED for count in script.AT_ONCE}
    assert measured | {("modelled", *asdict(case).values()) for case in script.MODELLED} == found


MODELLED = {"how": "modelled", "model": "demo", "protocol": "trio", "seq": 8, "new": 8, "batch": 10, "gmacs": 25.0,
            "parties": 3, "bytes_total": 8000, "bytes_busiest_link": 4000, "rounds": 100, "seconds": 40.0,
            "weights": 10e9, "client": 0, "cache": 1e9}  # fmt: skip
MEASURED = {"how": "measured", "model": "demo", "protocol": "trio", "parties": 3, "at_once": 4, "tokens": 20,
            "seconds": 9.0, "rounds": 1000, "bytes": 500.0, "processor_s": 18.0,
            "memory_mib": {"gateway": 100, "party 0": 924}}  # fmt: skip


def test_a_modelled_group_has_the_memory_of_all_its_processes(script: Any) -> None:
    group = script.Group.modelled(MODELLED)
    assert (group.tokens_per_s, group.link_bytes) == (2, 50)
    assert group.memory == pytest.approx(4 * 0.6e9 + 1.2 * 3 * 11e9)
    assert (group.machines, group.cores, group.gpus) == (4, 4, 0)
    assisted = {**MODELLED, "protocol": "assisted", "parties": 2, "client": 2e9, "gmacs": 1500.0}
    group = script.Group.modelled(assisted)
    assert group.memory == pytest.approx(3 * 0.6e9 + 1.2 * (2 * 10e9 + 2e9 + 1e9))  # the cache is the client's
    assert (group.machines, group.cores, group.gpus) == (3, 1, 2)


def test_a_measured_group_also_waits_for_its_links(script: Any) -> None:
    group = script.Group.measured(MEASURED, MODELLED)
    assert group.link_bytes == pytest.approx(500 * 4 / 20 / 2)  # half of the bytes pass the busiest machine
    assert group.tokens_per_s == pytest.approx(20 / (9.0 + 1000 * 1e-3))
    assert script.Group.measured({**MEASURED, "protocol": "assisted"}, MODELLED).tokens_per_s == pytest.approx(20 / 11)
    assert (group.memory, group.cores) == (1024 * 2**20, 2)
    narrow = script.Group.measured({**MEASURED, "bytes": 5e9}, MODELLED)
    assert narrow.tokens_per_s == pytest.approx(125e6 / narrow.link_bytes)  # 1 Gbit/s carries no more


def test_users_take_half_a_token_a_second_of_equal_groups(script: Any) -> None:
    group = script.Group("", "measured", 2.0, 1e6, 3e9, 1.5, 2, 4)
    made = script.plan(group, 10)
    assert (made.groups, made.tokens_per_s, made.memory, made.cores) == (3, 5, 9e9, 4.5)
    assert (made.gpus, made.machines) == (6, 12)
    assert made.mbit == pytest.approx(5 / 3 * 8)
    assert script.plan(group, 10_000).groups == 2500
    assert script.plan(group, 1).groups == 1


def test_a_group_is_measured_at_the_number_of_requests_that_makes_most(script: Any) -> None:
    slow, fast = {**MEASURED, "at_once": 8, "seconds": 20.0}, MEASURED
    chat = {**MODELLED, "seq": 128, "new": 128}
    assert [each.words for each in script.groups_of([slow, fast, MODELLED, chat])] == [
        "the bundled model, trio, 4 at a time", "the bundled model, trio, 10 at a time"
    ]  # fmt: skip
