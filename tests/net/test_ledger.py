"""The ledger's clock: every second of a module counts once, under the innermost module that is being computed."""

from __future__ import annotations

import pytest

from private_llm.net import ledger
from private_llm.net.ledger import Ledger


class Clock:
    """Seconds that pass when a test says so."""

    now = 5.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(ledger.time, "perf_counter", made)
    return made


def test_time_of_a_module_is_not_that_of_the_modules_within_it(clock: Clock) -> None:
    booked = Ledger(1)
    clock.now += 100.0  # nobody asked anything
    with booked.scope(""):
        clock.now += 1.0
        with booked.scope("layer"):
            clock.now += 2.0
            with booked.scope("layer.fc"):
                clock.now += 4.0
            clock.now += 8.0
        clock.now += 16.0
    clock.now += 100.0
    with booked.scope("layer"):
        clock.now += 32.0
    assert booked.spent == {"": 17.0, "layer": 42.0, "layer.fc": 4.0}


def test_time_before_a_reset_is_forgotten(clock: Clock) -> None:
    booked = Ledger(1)
    with booked.scope("layer"):
        clock.now += 2.0
        booked.reset()
        clock.now += 1.0
    assert booked.spent == {"layer": 1.0}


def test_rounds_of_endpoints_that_ran_side_by_side_are_those_of_the_slowest() -> None:
    endpoints = [Ledger(0), Ledger(1)]
    for endpoint, rounds in zip(endpoints, (2, 3), strict=True):
        endpoint.add_sent(2, "open", 10)
        for _ in range(rounds):
            endpoint.add_round("open")
    merged = ledger.merge(endpoints)
    assert merged.rounds == 3
    assert merged.sent == {(0, 2): 10, (1, 2): 10}
