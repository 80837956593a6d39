"""The faults of `tests/system/walk_deploy.py`: whom they hit, and what fails."""

from __future__ import annotations

import importlib
import random
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

SCRIPTS = str(Path(__file__).resolve().parent / "system")
RIGHT = (5, 6, 7, 8)


@pytest.fixture(scope="module")
def faults() -> Any:
    sys.path.insert(0, SCRIPTS)
    try:
        yield importlib.import_module("walk_faults")
    finally:
        sys.path.remove(SCRIPTS)


@pytest.fixture(scope="module")
def client(faults: ModuleType) -> ModuleType:
    return importlib.import_module("walk_client")


@pytest.mark.parametrize("seed", [0, 13])
def test_ten_faults_are_of_both_kinds_and_hit_every_party(faults: ModuleType, seed: int) -> None:
    found = faults.plan(10, ("kill", "unplug"), 3, random.Random(seed))
    for kind in ("kill", "unplug"):
        hit = [each.party for each in found if each.kind == kind]
        assert len(hit) == 5
        assert set(hit) == {0, 1, 2}
    assert all(1 <= each.tokens <= faults.TOKENS // 2 for each in found)
    assert min(each.hold_s for each in found) < faults.TIMEOUT_S < max(each.hold_s for each in found)
    assert len(faults.plan(2, ("kill",), 3, random.Random(seed))) == 2


@pytest.mark.parametrize(
    ("ids", "error", "took", "failed"),
    [
        (RIGHT, None, 1.0, []),
        (RIGHT[:2], "party 1 stopped: its connection closed", 1.0, []),
        ((), "party 1 was silent for 6 s", 6.0, []),
        ((5, 9), "party 1 stopped: its connection closed", 1.0, ["no wrong token"]),
        ((5, 6, 7, 9), None, 1.0, ["no wrong token", "the whole text"]),
        (RIGHT[:2], None, 1.0, ["the whole text"]),
        (RIGHT[:2], "party 1 stopped: its connection closed", 60.0, ["ended in time"]),
        (RIGHT[:2], "party 2 stopped: its connection closed", 1.0, ["the error says why"]),
        (RIGHT[:2], "party 1: something went wrong", 1.0, ["the error says why"]),
    ],
)
def test_what_is_a_failure(
    faults: ModuleType, client: ModuleType, ids: tuple[int, ...], error: str | None, took: float, failed: list[str]
) -> None:
    found: list[str] = []

    def check(what: str, good: bool, why: str = "") -> None:
        if not good:
            found.append(what.removeprefix("x: "))

    right = client.Answer(RIGHT, "text", None, 0.0)
    answer = client.Answer(ids, "text", error, 0.0)
    faults._judge(SimpleNamespace(check=check), "x", answer, right, "party 1", took)
    assert found == failed


def test_no_answer_is_a_failure(faults: ModuleType, client: ModuleType) -> None:
    found: list[tuple[str, bool]] = []
    right = client.Answer(RIGHT, "text", None, 0.0)
    place = SimpleNamespace(check=lambda what, good, why="": found.append((what, good)))
    faults._judge(place, "x", None, right, "party 1", 60.0)
    assert found == [("x: the request ended", False)]
