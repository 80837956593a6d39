"""What a round costs in Python calls does not creep up: rounds are many, and Python is most of their time."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from private_llm.config import PrivateConfig

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "studies"
STEPS = 2


def test_calls_of_two_decode_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer of a Llama and its head: 14 600 calls at an evaluator and 12 600 at the helper, and some head room.

    Before plans and public constants were computed once they were 27 200 and 19 300. The sum over both evaluators is
    compared: whichever of them is first makes what the threads of a process share. Alone this test counts more than
    behind others, which have made some of that.
    """
    monkeypatch.syspath_prepend(str(SCRIPTS))
    count_calls = importlib.import_module("count_calls").count_calls
    found = count_calls(PrivateConfig(protocol="trio", party_mode="threads", replay=False), STEPS)
    totals = {party: counts.total() for party, counts in found.items()}
    assert sorted(totals) == ["party 0", "party 1", "party 2"]
    assert 6_000 < totals["party 0"] < 12_800
    assert 2 * 7_000 < totals["party 1"] + totals["party 2"] < 2 * 14_800


def test_calls_of_decode_steps_that_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers run as programs from the fourth step on; attention meets every length once here, and stays in Python.

    18 300 calls of all parties, and some head room; 23 000 when a layer was several programs.
    """
    monkeypatch.syspath_prepend(str(SCRIPTS))
    count_calls = importlib.import_module("count_calls").count_calls
    found = count_calls(PrivateConfig(protocol="trio", party_mode="threads"), STEPS, before=4)
    totals = [sum(each.values()) for each in found.values()]
    assert len(totals) == 3
    assert 0 < sum(totals) < 20_000
