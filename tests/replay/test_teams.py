"""Teams compute every piece of every step once, whoever is awake, whatever a piece takes, and for several callers."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from private_llm.kernels import steps, teams
from private_llm.replay.program import Arena, ArenaAddress, Memory, Operand, Parallel, Program, ProgramStep
from private_llm.replay.transports import ReplayTransport, Trace

pytestmark = pytest.mark.skipif(not teams.HERE, reason="no teams on this system")


def counted(lengths: Sequence[Sequence[int]]) -> tuple[Program, Tensor]:
    """Step after step adds 1 to places of its own, a piece to so many; and what 0 becomes."""
    size = max(sum(each) for each in lengths)
    memory = Memory(8 * size, -1, len(lengths))
    one = torch.ones(1, dtype=torch.int64)
    want, events = torch.zeros(size, dtype=torch.int64), []
    for each in lengths:
        at, pieces = 0, []
        for length in each:
            place = ArenaAddress(memory, 8 * at)
            row = (1, 1, 1, length, place, 0, 0, 0, 1, place, 0, 0, 0, 1, one.data_ptr(), 0, 0, 0, 0, steps.ADD, 1)
            pieces.append((ProgramStep(steps.combine, row),))
            want[at : at + length] += 1
            at += length
        events.append(Parallel(tuple(pieces)))
    whole = Operand(memory, 0, (size,), (1,))
    return Program(events, [whole], [whole], [], [one]), want


def some(seed: int, rows: int = 40) -> list[list[int]]:
    """Pieces of 1 to 20,000 elements."""
    draw = random.Random(seed)
    return [[int(10 ** (4.3 * draw.random())) for _ in range(draw.randint(1, 9))] for _ in range(rows)]


def check(seed: int, times: int) -> None:
    repeat(*counted(some(seed)), times)


def repeat(program: Program, want: Tensor, times: int) -> None:
    arena, outside = Arena(), ReplayTransport(Trace())
    for _ in range(times):
        (found,) = program.ready(outside, arena, [torch.zeros_like(want)], ())(None)
        assert torch.equal(found, want)


@pytest.mark.parametrize("seed", range(3))
def test_every_piece_is_computed_once(seed: int) -> None:
    check(seed, 50)


def test_callers_have_teams_of_their_own() -> None:
    failed: list[BaseException] = []

    def caller(seed: int) -> None:
        try:
            check(seed, 30)
        except BaseException as error:
            failed.append(error)

    callers = [threading.Thread(target=caller, args=(seed,)) for seed in range(4)]
    for each in callers:
        each.start()
    for each in callers:
        each.join()
    assert not failed


def test_teams_are_lent_again() -> None:
    with teams.lent(3) as one, teams.lent(3) as other:
        assert len({0, one, other}) == 3
    number = len(teams._idle)
    for _ in range(20):
        with teams.lent(3):
            assert len(teams._idle) == number - 1
    assert len(teams._idle) == number
    with teams.lent(1) as nobody:
        assert nobody == 0


def test_a_system_that_has_no_counters_left_computes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> int:
        raise OSError("too many open files")

    monkeypatch.setattr(os, "eventfd", none)
    monkeypatch.setattr(teams, "_idle", [])
    with teams.lent(4) as team:
        assert team == 0
    check(7, 3)
    monkeypatch.undo()


def test_a_team_that_the_system_made_smaller_is_lent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise RuntimeError("no more threads")

    monkeypatch.setattr(threading.Thread, "start", none)
    monkeypatch.setattr(teams, "_idle", [])
    for _ in range(3):
        with teams.lent(4) as team:
            assert team == 0
    assert len(teams._idle) == 1


def test_a_forked_process_has_workers_of_its_own() -> None:
    check(1, 1)
    program, want = counted([[3, 1, 200, 7]] * 20)
    child = os.fork()
    if not child:  # no assertion of this process reaches the test
        try:
            assert not teams._idle
            repeat(program, want, 3)
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
