"""A recorded step: kernels, messages and masks in the order in which one party computed them, ready to run again.

All that changes from run to run lies in one arena: what comes in, the masks, what others send, everything between.
Places in it are relative, so that programs share an arena (`bind`). Weights and constants are read where they lie.
Masks are drawn at the beginning, from the same streams in the same order as the operations would draw them: a program
takes of each stream exactly what the recorded run took, and never twice the same.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from private_llm.errors import DomainError
from private_llm.kernels import teams
from private_llm.kernels.compiling import CompiledStep
from private_llm.net.direct import MOST, Direct
from private_llm.net.wire import tag_bytes
from private_llm.replay import runner
from private_llm.replay.events import (
    NO_BREAK,
    BreakEvent,
    Inner,
    Masks,
    Receive,
    Send,
    TorchCall,
    leaves,
    mapped,
    whole_blocks,
)
from private_llm.replay.transports import ProgramTransport

WORD = 8  # bytes of all elements
_LINE = 64  # bytes: where memories begin
MOST_TABLES = 64  # addresses of weights for which a program keeps its rows: caches, which are read where they lie, move


@dataclass(eq=False)
class Memory:
    """Bytes that change from run to run; first and last: the first and last event that uses them."""

    size: int
    first: int
    last: int
    place: int = -1

    def used(self, event: int) -> None:
        """By this event, too."""
        self.last = max(self.last, event)


@dataclass(frozen=True)
class Operand:
    """A view of a memory, as PyTorch makes views; offset in bytes, stride in elements."""

    memory: Memory
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype = torch.int64


@dataclass(frozen=True)
class ArenaAddress:
    """A place in a memory, in bytes."""

    memory: Memory
    offset: int


@dataclass(frozen=True)
class WeightAddress:
    """A place in one of the module's own memories, in bytes: the same program serves all modules that are alike."""

    number: int
    offset: int


Word = int | ArenaAddress | WeightAddress


@dataclass(frozen=True)
class ProgramStep:
    """One function of `steps` and its row."""

    code: CompiledStep
    row: tuple[Word, ...]


@dataclass(frozen=True)
class Parallel:
    """Pieces of one operation that may run side by side, each some steps one after the other."""

    pieces: tuple[tuple[ProgramStep, ...], ...]


Event = ProgramStep | Parallel | Send[Operand] | Receive[Operand] | TorchCall[Operand] | BreakEvent[Operand]


class Arena:
    """The memory in which the programs of one party run, one after the other."""

    def __init__(self) -> None:
        self.words = torch.empty(0, dtype=torch.int64)

    def reserve(self, size: int) -> None:
        """Room for this many bytes."""
        if self.words.numel() * WORD < size:
            room = torch.empty(2 * size // WORD + _LINE, dtype=torch.int64)
            self.words = room[-(room.data_ptr() // WORD) % (_LINE // WORD) :]

    def view(self, operand: Operand) -> Tensor:
        """The words of an operand."""
        start, each = operand.memory.place + operand.offset, operand.dtype.itemsize
        whole = self.words.view(torch.uint8)[start - start % each :]
        whole = whole[: whole.numel() - whole.numel() % each].view(operand.dtype)
        return whole.as_strided(operand.shape, operand.stride)


StepTable = np.ndarray[tuple[int], np.dtype[np.int64]]
Draws = list[tuple[int, np.ndarray[tuple[int], np.dtype[np.uint8]]]]  # streams, and memory for their next bytes


@dataclass
class _BoundProgram:
    """A program in an arena: where it was, its rows with addresses by what its weights are (and where these rows are),
    the masks to draw first, and what Python does for events that are no steps."""

    words: Tensor
    tables: dict[tuple[int, ...], tuple[StepTable, int]]
    inputs: list[Tensor]
    outputs: list[Tensor]
    draws: Draws
    events: dict[int, Callable[[ProgramTransport, Inner | None], None]]


@dataclass
class Program:
    """Events in order; outputs that are tensors are public constants, returned as they are. keep: what must live on."""

    events: Sequence[Event]
    inputs: Sequence[Operand]
    outputs: Sequence[Operand | Tensor]
    masks: Sequence[Masks[Operand]]
    keep: Sequence[object]
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = _placed(self)
        self._starts, self._table, self._kinds = _rows(self.events)
        self._place = int(self._starts.ctypes.data)
        self._pieces = max([1, *(len(each.pieces) for each in self.events if isinstance(each, Parallel))])
        self._bound: _BoundProgram | None = None

    @functools.cached_property
    def _constants(self) -> int:
        found = {each.data_ptr(): each.untyped_storage().nbytes() for each in self.keep if isinstance(each, Tensor)}
        return sum(found.values())

    @property
    def held(self) -> int:
        """Bytes of what it keeps beside the arena: constants, and rows for each owner of weights that was met."""
        tables = 1 if self._bound is None else 1 + len(self._bound.tables)
        return self._constants + 2 * tables * self._table.nbytes

    def bind(self, arena: Arena) -> _BoundProgram:
        """This program in an arena; anew where that has moved. A graph break raises DomainError without `Inner`."""
        arena.reserve(self.size)
        held = self._bound
        if held is not None and held.words is arena.words:
            return held
        octets = arena.words.numpy().view(np.uint8)
        draws: defaultdict[int, Draws] = defaultdict(list)
        for each in self.masks:
            place, size = each.places[0].memory.place, sum(mask.memory.size for mask in each.places)
            draws[each.after_break].append((each.stream, octets[place : place + size]))
        events, passed = {}, 0
        for at, event in enumerate(self.events):
            if not isinstance(event, ProgramStep | Parallel):
                passed += isinstance(event, BreakEvent)
                events[at] = _doing(event, arena, draws[passed])
        inputs, outputs = mapped((list(self.inputs), list(self.outputs)), Operand, arena.view)
        self._bound = _BoundProgram(arena.words, {}, inputs, outputs, draws[0], events)
        return self._bound

    def _addressed(self, bound: _BoundProgram, weights: tuple[int, ...]) -> int:
        """Where the rows for weights at these addresses are."""
        found = bound.tables.get(weights)
        if found is None:
            if len(bound.tables) >= MOST_TABLES:
                bound.tables.clear()
            bases = np.array([0, bound.words.data_ptr(), *weights], np.int64)
            rows = self._table + bases[self._kinds]
            found = bound.tables[weights] = rows, int(rows.ctypes.data)
        return found[1]

    def _run_to_stop(self, table: int, first: int, links: int) -> int:
        """Run from an event on, with a team where pieces may run side by side; returns that which is left to Python."""
        if self._pieces == 1:
            return int(runner.run(table, self._place, first, len(self.events), links, 0))
        with teams.lent(self._pieces) as team:
            return int(runner.run(table, self._place, first, len(self.events), links, team))

    def ready(
        self, transport: ProgramTransport, arena: Arena, inputs: Sequence[Tensor], weights: tuple[int, ...]
    ) -> Callable[[Inner | None], list[Tensor]]:  # fmt: skip
        """What runs it, ready to draw, send or receive: what fails before can still be computed in Python. It gives
        outputs in memory of their own, and raises what `transport` and the graph break, in another arena, raise.

        weights: addresses of the module's memories.
        """
        bound = self.bind(arena)
        for place, given in zip(bound.inputs, inputs, strict=True):
            place.copy_(given)
        return functools.partial(self._run, transport, transport.direct, bound, self._addressed(bound, weights))

    def _run(
        self, transport: ProgramTransport, direct: Direct, bound: _BoundProgram, table: int, inner: Inner | None
    ) -> list[Tensor]:  # fmt: skip
        for stream, octets in bound.draws:
            transport.fill(stream, octets)
        last, at = len(self.events), 0
        while at < last:
            with direct:
                at = self._run_to_stop(table, at, direct.address)
            if at < last:
                bound.events[at](transport, inner)
                at += 1
        return [place.clone() for place in bound.outputs]


def _doing(
    event: Send[Operand] | Receive[Operand] | TorchCall[Operand] | BreakEvent[Operand], arena: Arena, draws: Draws
) -> Callable[[ProgramTransport, Inner | None], None]:  # fmt: skip
    """What Python does for an event that is left to it. draws: of the masks after a graph break."""
    if isinstance(event, TorchCall):
        arguments, named = mapped((event.arguments, event.named), Operand, arena.view)
        results = [arena.view(each) for each in event.made]

        def call(transport: ProgramTransport, inner: Inner | None) -> None:
            found = event.function(*arguments, **named)
            for result in results:
                result.copy_(found)

        return call
    if isinstance(event, BreakEvent):
        taken, given = [[arena.view(x) for x in places] for places in (event.inputs, event.outputs)]

        def resume(transport: ProgramTransport, inner: Inner | None) -> None:
            if inner is None:
                raise DomainError(NO_BREAK)
            for result, made in zip(given, inner(taken), strict=True):
                result.copy_(made)
            for stream, octets in draws:
                transport.fill(stream, octets)

        return resume
    place, tag = arena.view(event.payload).numpy(), event.tag
    if isinstance(event, Send):
        to = event.to
        return lambda transport, inner: transport.send(to, tag, torch.from_numpy(place.copy()))
    frm = event.frm

    def receive(transport: ProgramTransport, inner: Inner | None) -> None:
        place[...] = transport.receive(frm, tag, place.shape, torch.int64).numpy()

    return receive


def _words(event: Event) -> Sequence[Word]:
    if isinstance(event, ProgramStep):
        return event.code.address, *event.row
    if isinstance(event, Parallel):
        return _words_of_pieces(event)
    if isinstance(event, TorchCall | BreakEvent):
        return (runner.STOP,)
    code, endpoint = (runner.SEND, event.to) if isinstance(event, Send) else (runner.RECEIVE, event.frm)
    payload, count = event.payload, math.prod(event.payload.shape)
    if endpoint >= MOST or not torch.empty_strided(payload.shape, payload.stride, device="meta").is_contiguous():
        return (runner.STOP,)
    tag = np.frombuffer(tag_bytes(event.tag), np.int64).tolist()
    return code, endpoint, ArenaAddress(payload.memory, payload.offset), count, *tag


def _words_of_pieces(event: Parallel) -> Sequence[Word]:
    """As `team.piece` reads them, after the code that tells what they are."""
    begins: list[Word] = []
    words: list[Word] = []
    for piece in event.pieces:
        begins.append(1 + len(event.pieces) + len(words))
        words.append(len(piece))
        for step in piece:
            words += [1 + len(step.row), step.code.address, *step.row]
    return runner.TOGETHER, len(event.pieces), *begins, *words


def _rows(events: Sequence[Event]) -> tuple[StepTable, StepTable, StepTable]:
    """Where rows begin, their words with places for addresses, and of which memory: 0 none, 1 arena, 2.. weights."""
    starts: list[int] = []
    words: list[int] = []
    kinds: list[int] = []
    for each in events:
        starts.append(len(words))
        for word in _words(each):
            if isinstance(word, ArenaAddress):
                words.append(word.memory.place + word.offset)
                kinds.append(1)
            elif isinstance(word, WeightAddress):
                words.append(word.offset)
                kinds.append(2 + word.number)
            else:
                words.append(word)
                kinds.append(0)
    return np.array(starts, np.int64), np.array(words, np.int64), np.array(kinds, np.int64)


def _memories(program: Program) -> Iterator[Memory]:
    """All that a program's inputs, outputs and events use, some of them several times."""
    for each in (*program.inputs, *leaves(program.outputs, Operand)):
        yield each.memory
    for event in program.events:
        match event:
            case ProgramStep() | Parallel():
                pieces = event.pieces if isinstance(event, Parallel) else ((event,),)
                yield from (
                    word.memory for piece in pieces for step in piece for word in leaves(step.row, ArenaAddress)
                )
            case TorchCall(_, arguments, named, made):
                yield from (each.memory for each in leaves((arguments, named, made), Operand))
            case BreakEvent(inputs, outputs):
                yield from (each.memory for each in (*inputs, *outputs))
            case _:
                yield event.payload.memory


def _placed(program: Program) -> int:
    """Give every memory its place: one after the other, but where another is not used any more. Returns bytes."""
    breaks = [-1, *(at for at, event in enumerate(program.events) if isinstance(event, BreakEvent))]
    memories = {id(each): each for each in _memories(program)}
    blocks: list[tuple[Memory, list[Memory]]] = []
    for masks in program.masks:
        parts = [mask.memory for mask in masks.places]
        for memory in parts:
            memory.size = whole_blocks(masks.block, memory.size)
            memories.pop(id(memory), None)
        last = max(memory.last for memory in parts)
        blocks.append((Memory(sum(memory.size for memory in parts), breaks[masks.after_break], last), parts))
    top = 0
    taken: list[tuple[int, int, int]] = []  # place, end, last event
    for memory in sorted([*memories.values(), *(block for block, _ in blocks)], key=lambda each: each.first):
        taken = [each for each in taken if each[2] >= memory.first]
        size, place = -(-memory.size // _LINE) * _LINE, 0
        for begin, end, _ in taken:
            if begin - place >= size:
                break
            place = max(place, end)
        memory.place = place
        taken.append((place, place + size, memory.last))
        taken.sort()
        top = max(top, place + size)
    for block, parts in blocks:
        place = block.place
        for memory in parts:
            memory.place, place = place, place + memory.size
    return top
