"""What a round costs in Python calls does not creep up: rounds are many, and Python is most of their time."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from private_llm.config import PrivateConfig

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "studies"
STEPS = 2


def test_calls_of_two_decode_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer of a Llama and its head: 12 000 calls at an evaluator and 10 300 at the helper, and some head room.

    Before plans and public constants were computed once they were 27 200 and 19 300, and 14 400 and 12 200 before a
    layer's bits were. The sum over both evaluators is
    compared: whichever of them is first makes what the threads of a process share. Alone this test counts more than
    behind others, which have made some of that.
    """
    monkeypatch.syspath_prepend(str(SCRIPTS))
    count_calls = importlib.import_module("count_calls").count_calls
    found = count_calls(PrivateConfig(protocol="trio", party_mode="threads", replay=False), STEPS)
    totals = {party: counts.total() for party, counts in found.items()}
    assert sorted(totals) == ["party 0", "party 1", "party 2"]
    assert 6_000 < totals["party 0"] < 10_700
    assert 2 * 7_000 < totals["party 1"] + totals["party 2"] < 2 * 12_400


def test_calls_of_a_linear_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the rule of `F.linear` to the kernels; with Python 3.12, where a comprehension is no call, fewer.

    They were 187 to 201 in 28 files when each number of bits was asked for anew, and a message took a lock in Python.
    """
    monkeypatch.syspath_prepend(str(SCRIPTS))
    study = importlib.import_module("count_calls")
    found = study.calls_of_linear(PrivateConfig(protocol="trio", party_mode="threads", replay=False))
    most = {"party 0": 88, "party 1": 93, "party 2": 95}
    assert sorted(found) == sorted(most)
    for party, codes in found.items():
        files = {code.co_filename for code in codes if Path(code.co_filename).is_file()}
        assert 60 < len(codes) <= most[party], [study.place(code) for code in codes]
        assert len(files) <= 15, sorted(files)


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
