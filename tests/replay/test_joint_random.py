"""Random programs of three parties as one joint program, and interpreted one operation after the other."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from private_llm.net.direct import Barrier
from private_llm.replay import joint
from private_llm.replay.events import BreakEvent, GraphNode, Receive, Send, Slot
from private_llm.replay.graphs import GraphEvent, GraphProgram
from private_llm.replay.layouts import Pool, compute

aten = torch.ops.aten
PARTIES = range(3)
CPU = torch.device("cpu")


class Party:
    """Operations that fit each other; slots by shape."""

    def __init__(self, draw: random.Random) -> None:
        self.draw, self.events = draw, list[GraphEvent]()
        self.shapes: dict[Slot, tuple[int, int]] = {}
        self.fixed: dict[Slot, Tensor] = {}
        self.inputs = [self.slot((draw.choice([2, 4]), 4), True) for _ in range(draw.randint(1, 3))]

    def slot(self, shape: tuple[int, int], fixed: bool = False) -> Slot:
        made = Slot(len(self.shapes))
        self.shapes[made] = shape
        if fixed:
            self.fixed[made] = torch.empty(shape, dtype=torch.int64, device="meta")
        return made

    def some(self) -> Slot:
        return self.draw.choice(list(self.shapes))

    def operate(self) -> None:
        x = self.some()
        shape = self.shapes[x]
        y = self.draw.choice([each for each in self.shapes if self.shapes[each] == shape])
        match self.draw.randrange(8):
            case 0:
                self.add(aten.add.Tensor, (x, y), shape)
            case 1:
                self.add(aten.mul.Tensor, (x, self.draw.randint(2, 5)), shape)
            case 2 | 3:
                self.add(aten.add_.Tensor, (x, self.draw.choice([y, 7])), shape, written=(x,))
            case 4 if shape[0] > 1:
                self.add(aten.slice.Tensor, (x, 0, 1, 2), (1, shape[1]), computes=False)
            case 5:  # taken for a kernel
                self.add(aten.cumsum.default, (x, 0), shape)
            case 6 if shape[0] < 8:
                self.add(aten.cat.default, ([x, y], 0), (2 * shape[0], shape[1]))
            case 7:
                named = {"dtype": torch.int64, "device": CPU}
                room = self.add(aten.empty_strided.default, (shape, (shape[1], 1)), shape, computes=False, **named)
                self.add(aten.copy_.default, (room, x), shape, written=(room,))

    def add(
        self, function: object, arguments: tuple[object, ...], shape: tuple[int, int], computes: bool = True,
        written: tuple[Slot, ...] = (), **named: object,
    ) -> Slot:  # fmt: skip
        made = self.slot(shape)
        self.events.append(GraphNode(function, arguments, named, (made,), computes, written))  # type: ignore[arg-type]
        return made


def parties(seed: int) -> list[Party]:
    draw = random.Random(seed)
    made = [Party(draw) for _ in PARTIES]
    for number in range(draw.randint(5, 30)):
        kind = draw.random()
        if kind < 0.6:
            draw.choice(made).operate()
        elif kind < 0.93:
            frm, to = draw.sample(PARTIES, 2)
            x = made[frm].some()
            made[frm].events.append(Send(to, str(number), x))
            made[to].events.append(Receive(frm, str(number), made[to].slot(made[frm].shapes[x], True)))
        else:
            for each in made:
                x = each.some()
                each.events.append(BreakEvent((x,), (each.slot(each.shapes[x], True),)))
    return made


def within(given: Sequence[Tensor]) -> list[Tensor]:
    return [given[0] * 3 + 1]


def interpreted(made: Sequence[Party], values: Sequence[Sequence[Tensor]]) -> list[dict[Slot, Tensor]]:
    links = defaultdict[tuple[int, int], deque[Tensor]](deque)
    found = [
        dict(zip(each.inputs, [x.clone() for x in given], strict=True))
        for each, given in zip(made, values, strict=True)
    ]
    left = [deque(each.events) for each in made]
    while any(left):
        for me, (events, here) in enumerate(zip(left, found, strict=True)):
            while events and not (isinstance(events[0], Receive) and not links[events[0].frm, me]):
                match event := events.popleft():
                    case Send(to, _, payload):
                        links[me, to].append(here[payload].clone())
                    case Receive(frm, _, payload):
                        here[payload] = links[frm, me].popleft()
                    case BreakEvent(inputs, outputs):
                        (here[outputs[0]],) = within([here[inputs[0]].clone()])
                    case _:
                        compute(event, here)
    return found


@pytest.mark.parametrize("first", range(0, 80, 20))
def test_a_joint_program_is_its_parties_programs(first: int) -> None:
    """Whatever is sent, written to afterwards, received, written to there, given to Python or returned; three times."""
    for seed in range(first, first + 20):
        made = parties(seed)
        outputs = [each.draw.sample(list(each.shapes), min(len(each.shapes), 3)) for each in made]
        programs = [
            GraphProgram(each.events, each.inputs, wanted, [], each.fixed, CPU, Pool())
            for each, wanted in zip(made, outputs, strict=True)
        ]
        barrier, draw = Barrier(len(PARTIES)), torch.Generator().manual_seed(seed)
        for _ in range(3):
            values = [[torch.randint(-9, 9, each.shapes[x], generator=draw) for x in each.inputs] for each in made]
            for program, given in zip(programs, values, strict=True):
                program.take(given)
            together = joint._started(barrier, "name", programs)
            if together is None:  # a message that is taken after a graph break
                break
            for number in range(1, together.count):
                for me, program in enumerate(programs):
                    program.resume(together.break_before(me, number), within)
                together.launch(number)
            want = interpreted(made, values)
            for me in PARTIES:
                found = zip(outputs[me], programs[me].results(), strict=True)
                assert all(torch.equal(x, want[me][slot]) for slot, x in found), (seed, me)
