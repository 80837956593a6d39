"""A gateway that starts its own parties waits for them to load their model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from private_llm_cli.commands.gateway import _first_session

from private_llm.errors import PartiesBusy, PartyFailed


def called(failures: list[Exception]) -> tuple[list[int], Callable[[], str]]:
    calls: list[int] = []

    def call() -> str:
        calls.append(1)
        if len(calls) <= len(failures):
            raise failures[len(calls) - 1]
        return "model"

    return calls, call


def test_it_calls_until_they_have_loaded() -> None:
    calls, call = called([PartiesBusy("they connect")] * 3)
    assert _first_session(call, 60.0) == "model"
    assert len(calls) == 4


def test_parties_of_others_are_called_once() -> None:
    calls, call = called([PartiesBusy("they connect")] * 3)
    with pytest.raises(PartiesBusy):
        _first_session(call, 0.0)
    assert len(calls) == 1


def test_parties_that_failed_are_not_waited_for() -> None:
    calls, call = called([PartyFailed("party 1 stopped")])
    with pytest.raises(PartyFailed):
        _first_session(call, 60.0)
    assert len(calls) == 1
