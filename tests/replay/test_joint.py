"""Programs of all parties of one process as one: which belong together, and which cannot be one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from private_llm.net.barrier import Barrier
from private_llm.replay import joint
from private_llm.replay.capture import Pool
from private_llm.replay.graphs import GraphProgram
from private_llm.replay.nodes import Event, GraphNode, Slot
from private_llm.replay.program import BreakEvent, Receive, Send

X, Y, Z = map(Slot, range(3))


def words(number: int) -> Tensor:
    return torch.full((2,), number)


def begin(program: GraphProgram, events: list[Event], fixed: list[Slot], output: Slot) -> GraphProgram:
    program.__init__(events, [X], [output], [], {slot: words(0) for slot in fixed}, torch.device("cpu"), Pool())  # type: ignore[misc]
    return program


def times(program: GraphProgram, factor: int) -> GraphProgram:
    return begin(program, [GraphNode(torch.ops.aten.mul.Tensor, (X, factor), {}, (Y,))], [X], Y)


def new() -> GraphProgram:
    return GraphProgram.__new__(GraphProgram)


def test_a_program_that_was_recorded_anew_is_another_one() -> None:
    """Also where Python gives it the number of the one that is gone."""
    barrier, first, second = Barrier(2), times(new(), 2), times(new(), 3)
    assert joint._started(barrier, "name", [first, second]) is not None
    number, left = id(second), []
    del second
    second = new()
    while id(second) != number and len(left) < 1000:
        left.append(second)
        second = new()
    times(second, 5)
    for each in (first, second):
        each.take([words(1)])
    both = joint._started(barrier, "name", [first, second])
    assert both is not None
    assert second.results(both.found[1])[0].tolist() == [5, 5]


def test_messages_that_are_taken_later_leave_programs_apart() -> None:
    """What is taken after the next graph break would be mistaken for what is sent there."""
    graph_break = BreakEvent((X,), (Y,))
    sends = begin(new(), [Send(1, "x", X), graph_break, Send(1, "x", Y)], [X, Y], X)
    takes = begin(new(), [graph_break, Receive(0, "x", Z)], [X, Y, Z], Z)
    barrier = Barrier(2)
    with pytest.warns(UserWarning, match="send what no other one of them takes"):
        assert joint._started(barrier, "name", [sends, takes]) is None
    assert "name" in barrier.closed
