"""Parties of one process that share a GPU run a recorded step together: one CUDA graph up to each graph break.

Each party's launches are a branch of it, so that they run side by side; a message is read where its sender made it, or
copied, and the receiver's branch waits for it. Bytes and rounds are booked as if it were sent. Parties of one process
protect nobody from its owner, with or without this.

A party decides alone whether it has a program. Where one has none, Python computes what is within, too, which the
others never call: such calls have no points at which parties wait for each other.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from private_llm.errors import DomainError, TransportError, UnsupportedOp
from private_llm.kernels.devices import ALONE
from private_llm.net.direct import Barrier, BarrierEnd, Point
from private_llm.protocols.session import Session
from private_llm.replay.events import BreakEvent, Inner, Receive, Send, Slot
from private_llm.replay.graph_break import GraphBreak, with_break
from private_llm.replay.graphs import GraphProgram, Segment, captured, compute_segment
from private_llm.replay.regions import WeightBinding, uses_cuda_graphs
from private_llm.replay.transports import ProgramTransport
from private_llm.tensor.fixed import Fixed


@dataclass(frozen=True, repr=False)
class _BranchMessage:
    """A payload to which nothing writes any more. mark: the point of its branch at which it is there."""

    tag: str
    payload: Tensor
    mark: torch.cuda.Event | None

    def taken(self, tag: str, room: Tensor, only_read: bool) -> Tensor:
        """Where the receiver's program reads it: at its sender, or copied to the room for it."""
        x = self.payload
        if self.tag != tag or x.numel() != room.numel() or x.dtype != room.dtype:
            raise TransportError(
                f"got '{self.tag}' with {x.numel()} x {x.dtype}; want '{tag}' with {room.numel()} x {room.dtype}"
            )
        if self.mark is not None:
            torch.cuda.current_stream().wait_event(self.mark)
        if only_read and x.is_contiguous() and room.is_contiguous() and not x.data_ptr() % _ALIGNED:
            return x.view(room.shape)
        return room.copy_(x.view(room.shape))


_ALIGNED = 16  # kernels were compiled for addresses that are multiples of it, as those of rooms are
_Links = defaultdict[tuple[int, int], deque[_BranchMessage]]


class JointProgram:
    """The programs of all parties for one call, section by section: a section ends at a graph break, or at the end.

    A section takes what lies in the parties' rooms (`GraphProgram.fixed`) and what earlier ones left in the pool.
    """

    def __init__(self, programs: Sequence[GraphProgram]) -> None:
        """Raises UnsupportedOp for programs that do not fit each other, or lie on several devices."""
        self._device, self._pool = programs[0].device, programs[0].pool
        self._programs = [weakref.ref(each) for each in programs]  # no numbers: those of the dead are given again
        self._sections = [_sections(each.segments) for each in programs]
        self._rooms, self._lasting = [each.fixed for each in programs], [each.lasting for each in programs]
        self._found: list[dict[Slot, Tensor]] = [dict(each) for each in self._rooms]
        self.count = len(self._sections[0])
        if any(each.device != self._device for each in programs):
            raise UnsupportedOp("parties on several devices")
        if any(len(each) != self.count for each in self._sections):
            raise UnsupportedOp("programs with different graph breaks")
        self._copies: list[Tensor] = []  # of messages; other branches read this memory, so it is not free yet
        self._graphs: list[torch.cuda.CUDAGraph] = []
        if self._device.type == "cuda":
            self._graphs = [self._captured(number) for number in range(self.count)]
            self._found, self._copies = [], []  # from now on other graphs of the pool may have this memory as well

    def consists_of(self, programs: Sequence[GraphProgram]) -> bool:
        """Whether these are the programs of all parties."""
        return all(held() is each for held, each in zip(self._programs, programs, strict=True))

    def launch(self, number: int, _: object = None) -> bool:
        """Compute a section for all parties once all came; True. Raises TransportError if sends and receipts differ."""
        if self._graphs:
            self._graphs[number].replay()
        else:
            self._copies.clear()
            self._compute(number, [nullcontext() for _ in self._found])
        return True

    def break_before(self, party: int, number: int) -> BreakEvent[Slot]:
        """The graph break before a section. Raises DomainError for the first one."""
        stop = self._sections[party][number - 1][-1].stop
        if not isinstance(stop, BreakEvent):
            raise DomainError(f"no graph break before section {number}")
        return stop

    def _captured(self, number: int) -> torch.cuda.CUDAGraph:
        with torch.cuda.device(self._device):
            torch.cuda.current_stream().synchronize()
            with ALONE, torch.cuda.stream(self._pool.stream(self._device)):
                return captured(self._pool, functools.partial(self._branches, number))

    def _branches(self, number: int) -> None:
        """A section, each party on a stream of its own, which begin and end with the current one."""
        current = torch.cuda.current_stream()
        branches = [self._pool.stream(self._device, 1 + party) for party in range(len(self._found))]
        for branch in branches:
            branch.wait_stream(current)
        try:
            self._compute(number, [torch.cuda.stream(branch) for branch in branches])
        finally:  # a capture that is to end needs all of them
            for branch in branches:
                current.wait_stream(branch)

    def _compute(self, number: int, branches: Sequence[Any]) -> None:
        """Each party's segments as far as messages for them are there, in turn."""
        links: _Links = defaultdict(deque)
        running = {party: self._steps(party, number, branches[party], links) for party in range(len(self._found))}
        while running:
            moved = False
            for party in list(running):
                match next(running[party], None):
                    case None:
                        del running[party]
                        moved = True
                    case going:
                        moved |= going
            if not moved:
                raise TransportError("programs of parties wait for each other (they disagree on the computation)")
        if any(links.values()):  # of which a later section, or Python, would never know
            raise TransportError("programs of parties send what no other one of them takes before its next graph break")

    def _steps(self, party: int, number: int, branch: Any, links: _Links) -> Iterator[bool]:  # noqa: ANN401 - a stream
        """The section of one party, up to messages that are not there: whether anything was computed since the last."""
        found, moved = self._found[party], True
        for segment in self._sections[party][number]:
            with branch:
                compute_segment(segment, found)
                if isinstance(segment.stop, Send):
                    payload = found[segment.stop.payload]
                    if segment.stop.payload not in self._lasting[party]:  # later its sender writes to it
                        payload = payload.clone()
                        self._copies.append(payload)
                    links[(party, segment.stop.to)].append(_BranchMessage(segment.stop.tag, payload, self._now()))
            if isinstance(segment.stop, Receive):
                while not links[(segment.stop.frm, party)]:
                    yield moved
                    moved = False
                moved = True
                slot, message = segment.stop.payload, links[(segment.stop.frm, party)].popleft()
                with branch:
                    found[slot] = message.taken(
                        segment.stop.tag, self._rooms[party][slot], slot in self._lasting[party]
                    )

    def _now(self) -> torch.cuda.Event | None:
        """A point of the current branch, for which others can wait."""
        if self._device.type != "cuda":
            return None
        mark = torch.cuda.Event()
        mark.record()
        return mark


def run_together(
    program: GraphProgram, transport: ProgramTransport, end: BarrierEnd, point: Point, graph_break: Inner | None
) -> list[Tensor]:
    """What a party's ready program makes: together with all others if they come to this point, else alone."""
    program.draw(transport, 0)
    joint = end.wait(point, program, functools.partial(_started, end.barrier, point[0]))
    if joint is None:
        _held.pop(program, None)  # which keeps what it was together with
        return program.run_drawn(transport, graph_break)
    for number in range(1, joint.count):
        program.resume(joint.break_before(end.me, number), graph_break)
        program.draw(transport, number)
        end.wait((*point, number), None, functools.partial(joint.launch, number), follows=True)
    return program.results()


_held: weakref.WeakKeyDictionary[GraphProgram, JointProgram] = weakref.WeakKeyDictionary()
"""By the first party's program: what it is together with those that came with it last."""


def _started(barrier: Barrier, name: Hashable, programs: Sequence[GraphProgram]) -> JointProgram | None:
    """The programs as one, whose first section is computed; None, now and later, where they cannot be one."""
    try:
        held = _held.get(programs[0])
        if held is None or not held.consists_of(programs):
            held = _held[programs[0]] = JointProgram(programs)
        held.launch(0)
    except Exception as error:  # noqa: BLE001 - each of them can compute alone
        barrier.close(name)
        _held.pop(programs[0], None)
        warnings.warn(f"parties on one GPU compute each for itself, which is slower: {error}", stacklevel=2)
        return None
    return held


def _sections(segments: Sequence[Segment]) -> list[list[Segment]]:
    found: list[list[Segment]] = [[]]
    for segment in segments:
        found[-1].append(segment)
        if isinstance(segment.stop, BreakEvent):
            found.append([])
    return found


class CallPoints:
    """Which calls of one party are which of the others, in one session."""

    def __init__(self) -> None:
        self._met: Counter[Hashable] = Counter()
        self._hidden = False

    def next(self, session: Session, within: bool, inputs: Sequence[Fixed], binding: WeightBinding) -> Point | None:
        """The same call's name at all parties; None for one party's alone or no graph. within: in a graph break."""
        if self._hidden or not uses_cuda_graphs(session):
            return None
        what = (binding.name, within, tuple([tuple(x.shape) for x in inputs]))
        self._met[what] += 1
        return what, self._met[what]

    @contextmanager
    def hiding(
        self, graph_break: GraphBreak | None, inside_break: Callable[[], AbstractContextManager[None]]
    ) -> Iterator[None]:
        """Inside, Python computes what others may repeat: calls have no points but in the graph break."""

        @contextmanager
        def shown() -> Iterator[None]:
            self._hidden = before
            with inside_break():
                yield
            self._hidden = True

        before, self._hidden = self._hidden, True
        if graph_break is not None:
            graph_break.outside = shown
        try:
            with with_break(graph_break):
                yield
        finally:
            self._hidden = before


def end_of(session: Session, end: BarrierEnd | None) -> BarrierEnd | None:
    """The barrier's end, unless threads of this process are nodes that are no parties."""
    return None if end is None or end.barrier.parties != session.config.parties else end
