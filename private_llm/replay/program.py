"""A recorded step: kernels, messages and masks in the order in which one party computed them, ready to run again.

All that changes from run to run lies in one arena: what comes in, the masks, what others send, everything between.
Places in it are relative, so that programs share an arena (`bind`). Weights and constants are read where they lie.
Masks are drawn at the beginning, from the same streams in the same order as the operations would draw them: a program
takes of each stream exactly what the recorded run took, and never twice the same.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from private_llm.kernels import teams
from private_llm.kernels.backends.cpu import steps
from private_llm.kernels.compiling import CompiledStep
from private_llm.net.direct import MOST, Direct
from private_llm.net.wire import tag_bytes
from private_llm.ring.prg import Prg

Place = TypeVar("Place")
"""How a program names a tensor that changes from run to run."""

WORD = 8
"""Bytes of all elements."""
_LINE = 64
"""Bytes: where memories begin."""
MOST_TABLES = 64
"""Addresses of weights for which a program keeps its rows: caches, which are read where they lie, move."""


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
class Address:
    """A place in a memory, in bytes."""

    memory: Memory
    offset: int


@dataclass(frozen=True)
class WeightAddress:
    """A place in one of the module's own memories, in bytes: the same program serves all modules that are alike."""

    number: int
    offset: int


Word = int | Address | WeightAddress


@dataclass(frozen=True)
class Step:
    """One function of `steps` and its row."""

    code: CompiledStep
    row: tuple[Word, ...]


@dataclass(frozen=True)
class Parallel:
    """Pieces of one operation that may run side by side, each some steps one after the other."""

    pieces: tuple[tuple[Step, ...], ...]


@dataclass(frozen=True)
class Send(Generic[Place]):
    """A message."""

    to: int
    tag: str
    payload: Place


@dataclass(frozen=True)
class Receive(Generic[Place]):
    """A message that is awaited."""

    frm: int
    tag: str
    payload: Place


@dataclass(frozen=True)
class TorchCall:
    """An operation of PyTorch that no step computes: its result goes to `result`, unless it writes to an operand."""

    function: Callable[..., Tensor]
    arguments: tuple[Any, ...]
    named: Mapping[str, Any]
    result: Operand | None


@dataclass(frozen=True)
class BreakEvent(Generic[Place]):
    """What Python computes in the midst (`private_llm.replay.graph_break`), of `inputs`: `outputs`."""

    inputs: tuple[Place, ...]
    outputs: tuple[Place, ...]


Event = Step | Parallel | Send[Operand] | Receive[Operand] | TorchCall | BreakEvent[Operand]

Inner = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""Computes a program's graph break."""


@dataclass(frozen=True)
class MaskDraws:
    """All masks of one stream, one after the other: their memories, in whole blocks of the cipher.

    after_break: the break after which they are drawn, -1 at the beginning; what is drawn in a graph break comes
    between.
    """

    stream: int
    memories: tuple[Memory, ...]
    after_break: int = -1

    def together(self) -> Memory:
        """All of them."""
        return Memory(
            sum(each.size for each in self.memories), self.after_break, max(each.last for each in self.memories)
        )


class ProgramTransport(Protocol):
    """What a program meets when it runs: streams and links, or what was written down of them."""

    def direct(self) -> Direct:
        """The connections that a program may use itself."""

    def fill(self, stream: int, out: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
        """The next bytes of a stream."""

    def stream(self, number: int) -> Prg | None:
        """The stream itself, which a device may go on with; None where masks are what another run drew."""

    def send(self, to: int, tag: str, payload: Tensor) -> None:
        """As `Transport.send`, without the ledger."""

    def receive(self, frm: int, tag: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """As `Transport.recv`."""


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


Table = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass
class _BoundProgram:
    """A program in an arena: where it was, its rows with addresses by what its weights are (and where these rows are),
    and what Python does for events that are no steps."""

    words: Tensor
    tables: dict[tuple[int, ...], tuple[Table, int]]
    inputs: list[Tensor]
    outputs: list[Tensor]
    draws: dict[int, list[tuple[int, np.ndarray[tuple[int], np.dtype[np.uint8]]]]]
    events: dict[int, Callable[[ProgramTransport], None]]
    graph_breaks: dict[int, tuple[list[Tensor], list[Tensor]]]


@dataclass
class Program:
    """Events in order; outputs that are tensors are public constants, returned as they are. keep: what must live on."""

    events: Sequence[Event]
    inputs: Sequence[Operand]
    outputs: Sequence[Operand | Tensor]
    draws: Sequence[MaskDraws]
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
        """Bytes."""
        found = {each.data_ptr(): each.untyped_storage().nbytes() for each in self.keep if isinstance(each, Tensor)}
        return sum(found.values())

    @property
    def held(self) -> int:
        """Bytes of what it keeps beside the arena: constants, and rows for each owner of weights that was met."""
        tables = 1 if self._bound is None else 1 + len(self._bound.tables)
        return self._constants + 2 * tables * self._table.nbytes

    def bind(self, arena: Arena) -> _BoundProgram:
        """This program in an arena; anew where the arena has moved."""
        arena.reserve(self.size)
        held = self._bound
        if held is not None and held.words is arena.words:
            return held
        octets = arena.words.numpy().view(np.uint8)
        draws: dict[int, list[tuple[int, np.ndarray[tuple[int], np.dtype[np.uint8]]]]] = {-1: []}
        for drawn in self.draws:
            place = drawn.memories[0].place
            taken = octets[place : place + sum(memory.size for memory in drawn.memories)]
            draws.setdefault(drawn.after_break, []).append((drawn.stream, taken))
        left = [(at, each) for at, each in enumerate(self.events) if not isinstance(each, Step | Parallel)]
        events = {at: _doing(each, arena) for at, each in left if not isinstance(each, BreakEvent)}
        graph_breaks = {
            at: ([arena.view(x) for x in each.inputs], [arena.view(x) for x in each.outputs])
            for at, each in left
            if isinstance(each, BreakEvent)
        }
        self._bound = _BoundProgram(
            arena.words, {}, [arena.view(each) for each in self.inputs],
            [arena.view(each) if isinstance(each, Operand) else each for each in self.outputs], draws, events,
            graph_breaks,
        )  # fmt: skip
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
            return int(steps.run(table, self._place, first, len(self.events), links, 0))
        with teams.lent(self._pieces) as team:
            return int(steps.run(table, self._place, first, len(self.events), links, team))

    def run(
        self, transport: ProgramTransport, arena: Arena, inputs: Sequence[Tensor], weights: tuple[int, ...] = (),
        inner: Inner | None = None,
    ) -> list[Tensor]:  # fmt: skip
        """Outputs in memory of their own. weights: addresses of the module's memories. inner: what its graph break
        computes, in another arena. Raises what `transport` and `inner` raise.
        """
        return self.ready(transport, arena, inputs, weights)(inner)

    def ready(
        self, transport: ProgramTransport, arena: Arena, inputs: Sequence[Tensor], weights: tuple[int, ...]
    ) -> Callable[[Inner | None], list[Tensor]]:  # fmt: skip
        """As `run`, up to where it draws, sends or receives: what fails before can still be computed in Python."""
        bound = self.bind(arena)
        for place, given in zip(bound.inputs, inputs, strict=True):
            place.copy_(given)
        return functools.partial(self._run, transport, transport.direct(), bound, self._addressed(bound, weights))

    def _run(
        self, transport: ProgramTransport, direct: Direct, bound: _BoundProgram, table: int, inner: Inner | None
    ) -> list[Tensor]:  # fmt: skip
        for stream, octets in bound.draws[-1]:
            transport.fill(stream, octets)
        last, at = len(self.events), 0
        while at < last:
            with direct:
                at = self._run_to_stop(table, at, direct.address)
            if at in bound.graph_breaks and inner is not None:
                taken, results = bound.graph_breaks[at]
                for result, made in zip(results, inner(taken), strict=True):
                    result.copy_(made)
                for stream, octets in bound.draws.get(at, ()):
                    transport.fill(stream, octets)
                at += 1
            elif at < last:
                bound.events[at](transport)
                at += 1
        return [place.clone() for place in bound.outputs]


def _doing(event: Send[Operand] | Receive[Operand] | TorchCall, arena: Arena) -> Callable[[ProgramTransport], None]:
    """What Python does for an event that the compiled program leaves to it."""
    if isinstance(event, TorchCall):
        made = functools.partial(event.function, *_seen(event.arguments, arena), **_seen(event.named, arena))
        result = None if event.result is None else arena.view(event.result)

        def call(_: ProgramTransport) -> None:
            found = made()
            if result is not None:
                result.copy_(found)

        return call
    place, tag = arena.view(event.payload).numpy(), event.tag
    if isinstance(event, Send):
        to = event.to
        return lambda transport: transport.send(to, tag, torch.from_numpy(place.copy()))
    frm = event.frm

    def receive(transport: ProgramTransport) -> None:
        place[...] = transport.receive(frm, tag, place.shape, torch.int64).numpy()

    return receive


def _words(event: Event) -> Sequence[Word]:
    """The row of an event."""
    if isinstance(event, Step):
        return event.code.address, *event.row
    if isinstance(event, Parallel):
        return _words_of_pieces(event)
    if isinstance(event, TorchCall | BreakEvent):
        return (steps.STOP,)
    code, endpoint = (steps.SEND, event.to) if isinstance(event, Send) else (steps.RECEIVE, event.frm)
    payload, count = event.payload, math.prod(event.payload.shape)
    if endpoint >= MOST or not torch.empty_strided(payload.shape, payload.stride, device="meta").is_contiguous():
        return (steps.STOP,)
    tag = np.frombuffer(tag_bytes(event.tag), np.int64).tolist()
    return code, endpoint, Address(payload.memory, payload.offset), count, *tag


def _words_of_pieces(event: Parallel) -> Sequence[Word]:
    """As `team.piece` reads them, behind the code that tells what they are."""
    begins: list[Word] = []
    words: list[Word] = []
    for piece in event.pieces:
        begins.append(1 + len(event.pieces) + len(words))
        words.append(len(piece))
        for step in piece:
            words += [1 + len(step.row), step.code.address, *step.row]
    return steps.TOGETHER, len(event.pieces), *begins, *words


def _rows(events: Sequence[Event]) -> tuple[Table, Table, Table]:
    """Where rows begin, their words with places for addresses, and of which memory: 0 none, 1 arena, 2.. weights."""
    starts: list[int] = []
    words: list[int] = []
    kinds: list[int] = []
    for each in events:
        starts.append(len(words))
        for word in _words(each):
            if isinstance(word, Address):
                words.append(word.memory.place + word.offset)
                kinds.append(1)
            elif isinstance(word, WeightAddress):
                words.append(word.offset)
                kinds.append(2 + word.number)
            else:
                words.append(word)
                kinds.append(0)
    return np.array(starts, np.int64), np.array(words, np.int64), np.array(kinds, np.int64)


def _seen(arguments: Any, arena: Arena) -> Any:  # noqa: ANN401 - whatever PyTorch takes
    """Arguments with tensors for operands."""
    if isinstance(arguments, Operand):
        return arena.view(arguments)
    if isinstance(arguments, Mapping):
        return {key: _seen(each, arena) for key, each in arguments.items()}
    if isinstance(arguments, list | tuple):
        return type(arguments)(_seen(each, arena) for each in arguments)
    return arguments


def _operands(arguments: Any) -> Iterator[Operand]:  # noqa: ANN401 - whatever PyTorch takes
    """The operands among arguments."""
    if isinstance(arguments, Operand):
        yield arguments
    elif isinstance(arguments, list | tuple):
        for each in arguments:
            yield from _operands(each)


def _placed(program: Program) -> int:
    """Give every memory its place: one after the other, but where another is not used any more. Returns bytes."""
    memories: dict[int, Memory] = {}
    found = [each.memory for each in (*program.inputs, *_operands(list(program.outputs)))]
    for each in program.events:
        if isinstance(each, Step | Parallel):
            together = each.pieces if isinstance(each, Parallel) else ((each,),)
            rows = (step.row for piece in together for step in piece)
            found += [word.memory for row in rows for word in row if isinstance(word, Address)]
        elif isinstance(each, TorchCall):
            held = [*each.arguments, *each.named.values(), each.result]
            found += [operand.memory for operand in _operands(held)]
        elif isinstance(each, BreakEvent):
            found += [operand.memory for operand in (*each.inputs, *each.outputs)]
        else:
            found.append(each.payload.memory)
    for memory in found:
        memories[id(memory)] = memory
    blocks = [(each.together(), each.memories) for each in program.draws]
    for _, parts in blocks:
        for memory in parts:
            memories.pop(id(memory), None)
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
