"""Programs of all parties of one process as one: which belong together, and which cannot be one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from private_llm.config import PrivateConfig
from private_llm.kernels.trace_hook import this_thread
from private_llm.net.direct import Barrier
from private_llm.net.transport import Transport
from private_llm.protocols.session import Session
from private_llm.protocols.share import Share
from private_llm.replay import joint
from private_llm.replay.events import BreakEvent, GraphNode, Receive, Send, Slot
from private_llm.replay.graphs import GraphEvent, GraphProgram
from private_llm.replay.layouts import Pool
from private_llm.replay.modules import repeated
from private_llm.replay.program_cache import ProgramCache, programs_of
from private_llm.replay.regions import Result, WeightBinding
from private_llm.ring.prg import Seed
from private_llm.tensor.fixed import Fixed
from private_llm.tensor.secret import SecretTensor
from tests.replay.test_graphs import _as_on_a_gpu  # noqa: F401 - a fixture
from tests.replay.test_programs import FRAC
from tests.session import run_session

X, Y, Z = map(Slot, range(3))


def words(number: int) -> Tensor:
    return torch.full((2,), number)


def begin(program: GraphProgram, events: list[GraphEvent], fixed: list[Slot], output: Slot) -> GraphProgram:
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
    assert second.results()[0].tolist() == [5, 5]


def test_messages_that_are_taken_later_leave_programs_apart() -> None:
    """What is taken after the next graph break would be mistaken for what is sent there."""
    graph_break = BreakEvent((X,), (Y,))
    sends = begin(new(), [Send(1, "x", X), graph_break, Send(1, "x", Y)], [X, Y], X)
    takes = begin(new(), [graph_break, Receive(0, "x", Z)], [X, Y, Z], Z)
    barrier = Barrier(2)
    with pytest.warns(UserWarning, match="send what no other one of them takes"):
        assert joint._started(barrier, "name", [sends, takes]) is None
    assert "name" in barrier.closed


def test_a_party_that_lost_a_program_is_not_waited_for_within() -> None:
    """There it calls what is within, and the others, which have the whole as a program, do not."""
    counts: dict[int, int] = {}

    def party(session: Session, transport: Transport) -> None:
        x, programs = Fixed(session, session.protocol.receive_input((2, 8)), FRAC), ProgramCache()

        def within(values: Sequence[Fixed]) -> Result:
            return [values[0].view(lambda part: part + 1)], ()

        def whole(values: Sequence[Fixed]) -> Result:
            if this_thread.hook is not None:
                return within(values)
            return programs.run(session, "within", values, within)[0], ()

        for call in range(9):
            programs.run(session, "whole", [x], whole, WeightBinding("whole"))
            if session.party == 1 and call > 1:  # its programs hold more than those of the others
                programs._regions = type(programs._regions)(
                    (key, each)
                    for key, each in programs._regions.items()
                    if key[0] != "whole"  # type: ignore[index]
                )
        counts[session.party] = programs.counts["repeated"]

    run_session(PrivateConfig(), party, lambda end: end.share(torch.ones(2, 8, dtype=torch.int64)), timeout=6.0)
    assert counts == {0: 6, 1: counts[1], 2: 6}
    assert counts[1] > 0


def test_a_party_whose_masks_no_gpu_makes_is_not_waited_for() -> None:
    """It keeps AES seeds of weights, because its memory is short; the others have the weights, and programs."""
    refused: dict[int, list[str]] = {}

    def party(session: Session, transport: Transport) -> None:
        x = SecretTensor(Fixed(session, session.protocol.receive_input((2, 8)), FRAC))
        seed, parts = Seed(bytes(32)), [torch.zeros(8, 8, dtype=torch.int64)] * 2
        if session.party == 1:
            parts = [seed.drawn(name, (8, 8), session.ring) for name in "ab"]
        weight = SecretTensor(Fixed(session, Share(tuple(parts)), FRAC))
        call = repeated(lambda x: x + x, "unit", session, "kind", [("weight", weight)])
        for _ in range(6):
            call(x)
        programs = programs_of(session)
        assert programs is not None
        refused[session.party] = list(programs.refused)

    run_session(PrivateConfig(), party, lambda end: end.share(torch.ones(2, 8, dtype=torch.int64)), timeout=6.0)
    assert refused == {0: [], 1: ["masks of weights that are made in main memory"], 2: []}
