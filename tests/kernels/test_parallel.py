"""Pieces of an operation never outlast it: they write to memory that their caller frees."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from private_llm.kernels import parallel

RANGES = [(0, 1), (1, 2), (2, 3)]


class Slow:
    """Pieces of which some wait until the operation has had time to leave."""

    def __init__(self, fails: int, failure: type[BaseException]) -> None:
        self._fails, self._failure = fails, failure
        self.begun: list[int] = []
        self.done: list[int] = []

    def __call__(self, first: int, last: int) -> None:
        self.begun.append(first)
        if first == self._fails:
            raise self._failure(f"piece {first}")
        threading.Event().wait(0.2)
        self.done.append(first)


@pytest.mark.parametrize("fails", [0, 1, 2])
@pytest.mark.parametrize("failure", [KeyboardInterrupt, MemoryError])
def test_nothing_is_computed_behind_a_failure(fails: int, failure: type[BaseException]) -> None:
    work = Slow(fails, failure)
    with pytest.raises(failure, match=f"piece {fails}"):
        parallel.run_parallel(work, RANGES)
    left = list(work.done)
    threading.Event().wait(0.4)
    assert work.done == left
    assert set(work.begun) - set(work.done) == {fails}


def test_the_first_failure_is_raised() -> None:
    def work(first: int, last: int) -> None:
        raise KeyboardInterrupt if first == 0 else MemoryError(f"piece {first}")

    with pytest.raises(KeyboardInterrupt):
        parallel.run_parallel(work, RANGES)


def test_an_interrupt_of_the_wait_comes_when_all_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    wait, work = threading.Condition.wait_for, Slow(-1, MemoryError)
    left = [KeyboardInterrupt(), KeyboardInterrupt()]

    def interrupted(this: threading.Condition, found: Callable[[], bool], timeout: float | None = None) -> bool:
        if left:
            raise left.pop()
        return wait(this, found, timeout)

    monkeypatch.setattr(threading.Condition, "wait_for", interrupted)
    with pytest.raises(KeyboardInterrupt):
        parallel.run_parallel(work, RANGES)
    assert sorted(work.done) == [0, 1, 2]


def test_a_piece_that_was_handed_over_in_vain_is_not_computed_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where no thread can be started: the pool has taken the piece, and says that it could not."""
    pool, work = ThreadPoolExecutor(1), Slow(-1, MemoryError)
    free = threading.Event()
    pool.submit(free.wait)

    class Refusing:
        def submit(self, *args: object) -> None:
            pool.submit(*args)  # type: ignore[arg-type]
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(parallel, "_workers", Refusing)
    with pytest.raises(RuntimeError, match="can't start"):
        parallel.run_parallel(work, RANGES)
    free.set()
    pool.shutdown()
    assert work.begun == []
