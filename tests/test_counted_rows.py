"""Rows that are counted again keep their seconds, and say which commit bytes and rounds are of."""

from __future__ import annotations

from typing import Any

import make_networks
import pytest
from generated import counted, taken

BEFORE: dict[str, Any] = {
    "machine": "M", "torch": "2", "version": "1", "commit": "aaaa", "seconds": {"min": 1.0}, "bytes_total": 5,
    "after": {"seconds": {"min": 2.0}, "rounds": 7},
}  # fmt: skip


def now(**changes: object) -> dict[str, Any]:
    return {**BEFORE, "machine": "N", "commit": "bbbb", "seconds": {"min": 9.0}, **changes}


def test_bytes_and_rounds_are_new_and_seconds_old() -> None:
    made = counted(BEFORE, now(bytes_total=4, after={"seconds": {"min": 8.0}, "rounds": 6}))
    after = {"seconds": {"min": 2.0}, "rounds": 6}
    assert made == {**BEFORE, "bytes_total": 4, "after": after, "counted": "bbbb"}
    assert taken([made]) == "M; torch 2; private-llm 1, commit aaaa (bytes and rounds: bbbb)"


def test_a_row_whose_bytes_did_not_change_stays() -> None:
    assert counted(BEFORE, now()) == BEFORE
    assert taken([BEFORE]) == "M; torch 2; private-llm 1, commit aaaa"


def test_a_modelled_row_keeps_its_seconds_of_computing() -> None:
    def row(compute: float, wire: float, commit: str) -> dict[str, Any]:
        parts = {"compute": compute, "latency": 1.0, "wire": wire}
        whole = sum(parts.values())
        return {"commit": commit, "bytes_total": 10 * wire, "parts": parts, "parts_first_token": parts,
                "seconds": {"min": whole}, "seconds_per_token": whole, "seconds_first_token": whole}  # fmt: skip

    made = make_networks.counted_model(row(3.0, 2.0, "aaaa"), row(7.0, 1.0, "bbbb"))
    assert made == {**row(3.0, 1.0, "aaaa"), "counted": "bbbb"}
    assert made["seconds_first_token"] == pytest.approx(5.0)
