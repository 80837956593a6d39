"""Runs before the timed ones: until kernels are compiled and no step is recorded as a program any more."""

from __future__ import annotations

from collections.abc import Callable

MOST_RUNS = 8
"""A program is used from a few calls on, that within another a few calls later; what is new each time never is."""


def warm_up(run: Callable[[], float], uncompiled: Callable[[], int]) -> float:
    """Run until nothing is recorded, at most `MOST_RUNS` times; returns what the first run took (seconds).

    uncompiled: calls so far that Python computed because their program was not ready (`replay.program_cache`).
    """
    before, first = uncompiled(), run()
    for _ in range(MOST_RUNS - 1):
        now = uncompiled()
        if now == before:
            break
        before = now
        run()
    return first
