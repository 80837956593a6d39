"""A recorded step on a GPU: what is computed between two messages is one CUDA graph, started by one call.

Operations and kernels are repeated as they were called, on the same memory. Programs of which none runs within another
share a pool: what one leaves there the next one overwrites, so what a program gives to Python is copied. Masks are
drawn at the beginning and after each graph break (`MaskDraw`), from the same streams as the operations would draw them;
messages go as `net/transport.py` says.
"""

import copy
import functools
import itertools
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from private_llm.errors import DomainError, UnsupportedOp
from private_llm.kernels.devices import ALONE
from private_llm.replay.events import (
    NO_BREAK,
    BreakEvent,
    GraphNode,
    Inner,
    Masks,
    Receive,
    Send,
    Slot,
    TorchCall,
    slots_of,
    whole_blocks,
)
from private_llm.replay.fusion import compile_launches, fused
from private_llm.replay.layouts import Layouts, Memories, Pool, Rebinding, Rooms, compute, part_of, storage_of, view_at
from private_llm.replay.loops import STARTED
from private_llm.replay.program import Arena
from private_llm.replay.statements import statements_of
from private_llm.replay.transports import LiveTransport, ProgramTransport
from private_llm.ring.prg import ChaCha

MOST_BYTES = 1 << 30  # largest memory of what comes in of a program; a tenth of what is free, where that is more
MOST_HELD = 2 << 30  # constants of a session's programs (or an eighth of what is free); inner ones are counted apart


_FAILED = threading.Event()  # a capture did not end in this process, as PyTorch's allocator may believe: no other one


def captured(pool: Pool, launches: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A graph of what `launches` starts on the current stream, which is not the default one; nothing is computed.

    The caller holds `ALONE`. Raises what `launches` raises, and UnsupportedOp once a capture failed in this process.
    """
    if _FAILED.is_set():
        raise UnsupportedOp("no graphs: a capture failed in this process")
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
    try:
        launches()
    except BaseException:
        with suppress(RuntimeError):  # which would hide why
            _end(graph)
        raise
    _end(graph)
    pool.first = pool.first or graph
    return graph


def _end(graph: torch.cuda.CUDAGraph) -> None:
    try:
        graph.capture_end()
    except BaseException:
        _FAILED.set()
        raise


class MaskDraw:
    """What a program draws at once: at its beginning, or after a graph break.

    A ChaCha20 stream is made on the GPU, any other in main memory and copied. A captured draw reads the number of its
    first block from a counter on the GPU and moves it on, so each replay makes the next masks. Python counts along
    (`ChaCha.advance`) and sets the counter where something else was drawn in between. The launches are a graph of their
    own, not part of the segment that needs the masks: a program that is checked takes masks that were written down, and
    one call costs a tenth of what two launches a stream cost from Python.
    """

    def __init__(self, rooms: Rooms) -> None:
        self._memory, self._device = rooms, rooms.device
        self._rooms: dict[int, Tensor] = {}  # by stream
        self._streams: list[ChaCha] = []  # whose keys and counters the launches read
        self._graph: torch.cuda.CUDAGraph | None = None

    def add(self, stream: int, block: int, like: Sequence[Tensor]) -> Iterator[Tensor]:
        """Room for masks of a stream, in whole blocks of `block` bytes each: views of one tensor, shaped as given."""
        starts = [0]
        for x in like:
            starts.append(starts[-1] + whole_blocks(block, x.nbytes))
        self._rooms[stream] = room = self._memory.take(starts[-1])
        for start, x in zip(starts, like, strict=False):
            yield room[start : start + x.nbytes].view(x.dtype).view(x.shape)

    def draw(self, transport: ProgramTransport) -> None:
        """The next masks of each stream: bytes as Python would draw them."""
        streams = [transport.stream(number) for number in self._rooms]
        here = [each for each in streams if isinstance(each, ChaCha)]
        if len(here) < len(streams):
            for number, room in self._rooms.items():
                transport.write(number, room)
            return
        for stream, room in zip(here, self._rooms.values(), strict=True):
            stream.advance(room.numel(), room.device)
        if self._graph is not None and here == self._streams:
            self._graph.replay()
            return
        self._streams, self._graph = here, None
        self.launch()  # compiled and loaded before it is captured
        if self._device.type == "cuda":
            self._capture()

    def launch(self) -> None:
        """Start what makes the masks from the counters on: two launches a stream, which may be captured."""
        for stream, room in zip(self._streams, self._rooms.values(), strict=True):
            stream.write_next(room.view(torch.int32))

    def _capture(self) -> None:
        pool = self._memory.pool
        with ALONE, torch.cuda.stream(pool.stream(self._device)), suppress(UnsupportedOp, RuntimeError):
            self._graph = captured(pool, self.launch)  # without a graph, Python goes on with the launches


StopEvent = Send[Slot] | Receive[Slot] | BreakEvent[Slot]
GraphEvent = GraphNode | StopEvent


@dataclass(frozen=True)
class Segment:
    """Nodes, and what comes then; None: the end. dropped: slots that nobody needs after a node."""

    nodes: tuple[GraphNode, ...]
    stop: StopEvent | None
    dropped: tuple[tuple[Slot, ...], ...] = ()

    def stopped(self) -> tuple[Slot, ...]:
        """Slots that what comes then reads or writes."""
        match self.stop:
            case Send(_, _, payload) | Receive(_, _, payload):
                return (payload,)
            case BreakEvent(inputs, results):
                return *inputs, *results
        return ()

    @property
    def computes(self) -> bool:
        """Whether a GPU has something to do: a graph of nothing is refused."""
        return any(node.computes for node in self.nodes)


def segments_of(events: Sequence[GraphEvent]) -> list[Segment]:
    """Nodes up to each message or graph break, and the rest."""
    found: list[Segment] = []
    nodes: list[GraphNode] = []
    for event in events:
        if isinstance(event, TorchCall):
            nodes.append(event)
        else:
            found.append(Segment(tuple(nodes), event))
            nodes = []
    return [*found, Segment(tuple(nodes), None)]


def compute_segment(segment: Segment, found: dict[Slot, Tensor]) -> None:
    """Run the nodes of a segment, and let go of what no later one needs."""
    for node, dropped in zip(segment.nodes, segment.dropped, strict=True):
        compute(node, found)
        for slot in dropped:
            found.pop(slot, None)


class GraphProgram:
    """The same step again. held: bytes of its constants and of what it keeps to send; of one that is bound to other
    weights, what it has for itself. weights, derivation: of the module with which it was recorded,
    and how constants were made of them (nodes, and the tensors by slot). lasting: messages that nothing writes to after
    they are sent, and those that come and are only read: one memory may be both.
    """

    def __init__(
        self, events: Sequence[GraphEvent], inputs: Sequence[Slot], outputs: Sequence[Slot | Tensor],
        masks: Sequence[Masks[Slot]], fixed: Mapping[Slot, Tensor], device: torch.device, pool: Pool, held: int = 0,
    ) -> None:  # fmt: skip
        """fixed: how what comes in from outside is laid out. Raises UnsupportedOp or an error of CUDA for no graph."""
        most, self.held = part_of(device, 10, MOST_BYTES), held
        if sum(x.nbytes for x in fixed.values()) > most:
            raise UnsupportedOp(f"a graph that takes in more than {most >> 20} MiB")
        self._inputs, self._outputs, self.device, self.pool = list(inputs), list(outputs), device, pool
        self._rooms = Rooms(pool, device)
        self.fixed: dict[Slot, Tensor] = {}
        self.lasting = set[Slot]()
        self._masks: dict[int, MaskDraw] = {}
        for each in masks:
            draw = self._masks.setdefault(each.after_break, MaskDraw(self._rooms))
            rooms = draw.add(each.stream, each.block, [fixed[slot] for slot in each.places])
            self.fixed.update(zip(each.places, rooms, strict=True))
        self.fixed |= {slot: self._rooms.like(x) for slot, x in fixed.items() if slot not in self.fixed}
        self._sent = 0
        self.segments = self._few_launches(segments_of(events))
        self.held += self._sent
        self._graphs: list[torch.cuda.CUDAGraph | None] | None = None
        self._kept: dict[Slot, Tensor] = {}
        self._tried = False
        self.weights: Memories = ()
        self.derivation: tuple[list[GraphNode], dict[Slot, Tensor]] = ([], {})

    def bound_to(self, weights: Memories) -> "GraphProgram":
        """The same step of a module with these weights, which lie as its own do: not captured yet, in this memory."""
        other, rebinding = copy.copy(self), Rebinding(self.weights, weights)
        other.derivation = self.derivation[0], rebinding.derive(*self.derivation)
        other.weights, other._graphs, other._kept, other._tried = weights, None, {}, False
        made = {storage_of(x): x.untyped_storage().nbytes() for x in other.derivation[1].values()}
        known = {x._cdata for x in weights if isinstance(x, torch.UntypedStorage)}
        other.held = self._sent + sum(size for number, size in made.items() if number not in known)
        other._outputs = [rebinding.tensor(x) if isinstance(x, Tensor) else x for x in self._outputs]
        other.segments = [replace(each, nodes=tuple(map(rebinding.node, each.nodes))) for each in self.segments]
        return other

    def ready(
        self, transport: ProgramTransport, arena: Arena, given: Sequence[Tensor], weights: Sequence[int]
    ) -> Callable[[Inner | None], list[Tensor]]:  # fmt: skip
        """As `Program.ready`; arena and weights are not needed. Rounds and bytes as recorded."""
        self.take(given)
        return functools.partial(self._draw_and_run, transport)

    def _draw_and_run(self, transport: ProgramTransport, graph_break: Inner | None) -> list[Tensor]:
        self.draw(transport, 0)
        return self.run_drawn(transport, graph_break)

    def take(self, given: Sequence[Tensor]) -> None:
        """Copy the inputs of the next run."""
        _copy_all([self.fixed[slot] for slot in self._inputs], given)

    def run_drawn(self, transport: ProgramTransport, graph_break: Inner | None) -> list[Tensor]:
        """The step, by graphs, once its inputs and first masks are there; node by node when it is checked.

        Raises what the links raise, and DomainError for a graph break without one.
        """
        if self.device.type == "cuda" and not self._tried and isinstance(transport, LiveTransport):
            self._tried = True
            try:
                with torch.cuda.device(self.device):
                    self._capture()
            except (UnsupportedOp, RuntimeError) as error:
                warnings.warn(f"a step runs without CUDA graphs, which is slower: {error}", stacklevel=2)
        found, left = self.fixed | self._kept, 0
        for number, segment in enumerate(self.segments):
            if self._graphs is None:
                compute_segment(segment, found)
            elif (graph := self._graphs[number]) is not None:
                graph.replay()
            match segment.stop:
                case Send(to, tag, payload):
                    transport.send(to, tag, found[payload].clone())  # which the next run overwrites
                case Receive(frm, tag, payload):
                    into = self.fixed[payload]
                    into.copy_(transport.receive(frm, tag, tuple(into.shape), into.dtype), non_blocking=into.is_cuda)
                case BreakEvent() as event:
                    self.resume(event, graph_break)
                    left += 1
                    self.draw(transport, left)
        return self.results()

    def resume(self, event: BreakEvent[Slot], graph_break: Inner | None) -> None:
        """Let Python compute a graph break. Raises DomainError for none."""
        if graph_break is None:
            raise DomainError(NO_BREAK)
        made = graph_break(_copies([self.fixed[slot] for slot in event.inputs]))
        _copy_all([self.fixed[slot] for slot in event.outputs], made)

    def results(self) -> list[Tensor]:
        """Copies of what was made, once all is computed."""
        return _copies([self.fixed[x] if isinstance(x, Slot) else x for x in self._outputs])

    def draw(self, transport: ProgramTransport, after_break: int) -> None:
        """The masks that are needed after so many graph breaks."""
        if after_break in self._masks:
            self._masks[after_break].draw(transport)

    def _capture(self) -> None:
        """A graph of each segment that computes. Raises UnsupportedOp where an earlier capture failed."""
        graphs: list[torch.cuda.CUDAGraph | None] = []
        found, stream = dict(self.fixed), self.pool.stream(self.device)
        stream.wait_stream(torch.cuda.current_stream())
        with ALONE, torch.cuda.stream(stream):
            for segment in self.segments:
                launches = functools.partial(compute_segment, segment, found)
                graphs.append(captured(self.pool, launches) if segment.computes else launches())
        torch.cuda.current_stream().wait_stream(stream)
        outside = {slot for each in self.segments if not each.computes for node in each.nodes for slot in node.made}
        sent = {each.stop.payload for each in self.segments if isinstance(each.stop, Send)}
        self._graphs, self._kept = graphs, {slot: found[slot] for slot in outside | sent}

    def _few_launches(self, segments: Sequence[Segment]) -> list[Segment]:
        """The segments with few launches each."""
        taken = {each.stop.payload for each in segments if isinstance(each.stop, Receive)}
        apart = {slot: torch.zeros_like(self.fixed[slot]) for slot in taken}  # it may lie at its sender (`joint`)
        there = self.fixed | apart
        layouts = Layouts(there)
        for segment in _letting_go(segments, {*there, *slots_of(self._outputs)}):
            layouts.run(list(zip(segment.nodes, segment.dropped, strict=True)), there)
        del there, apart
        layouts.end(self.fixed[slot] for slot in self.fixed.keys() - taken)
        segments, later, made = self._with_rooms(segments, layouts), set[Slot](), list[Segment]()
        found = layouts.found
        for segment in reversed(segments):
            mine, later = {slot for node in segment.nodes for slot in node.made}, later | {*segment.stopped()}
            made.append(
                Segment(tuple(fused(segment.nodes, found, later & mine, self.fixed, self.device)), segment.stop)
            )
            later |= {slot for node in segment.nodes for slot in slots_of((node.arguments, node.named))}
        compile_launches([node for each in made for node in each.nodes], found, self.device)
        return _letting_go(made[::-1], {*self.fixed})

    def _with_rooms(self, segments: Sequence[Segment], layouts: Layouts) -> list[Segment]:
        """The segments; what they send, give to Python or return lies in rooms of this program.

        Where an elementwise operation or an empty tensor made its memory, that is the room; otherwise it is copied, but
        for messages, which are copied anyway when they are sent.
        """
        found, outside = layouts.found, {storage_of(x) for slot, x in layouts.found.items() if slot in self.fixed}
        origins: dict[int, tuple[Slot, GraphNode]] = {}
        changed: dict[int, int] = {}  # by storage the last segment that writes to it
        for number, segment in enumerate(segments):
            for node in segment.nodes:
                for slot in node.made:
                    origins.setdefault(storage_of(found[slot]), (slot, node))
                if node.computes:
                    changed |= {storage_of(found[slot]): number for slot in (*node.made, *node.written)}
        self._note_lasting(segments, {slot: changed.get(storage_of(x), -1) for slot, x in found.items()})
        numbers, made = itertools.count(1 + max([slot.number for slot in found], default=0)), list[Segment]()
        for number, segment in enumerate(segments):
            copied: dict[Slot, Slot] = {}
            for slot in slots_of(self._outputs if segment.stop is None else segment.stopped()):
                storage, x = storage_of(found[slot]), found[slot]
                if slot in self.fixed or slot in copied:
                    continue
                first, maker = origins.get(storage, (slot, None))
                own = maker is not None and (maker.function in STARTED or statements_of(maker, found))
                if own and storage not in outside and changed.get(storage, 0) <= number:
                    if first not in self.fixed:
                        self.fixed[first] = self._rooms.like(found[first])
                    further = int(x.storage_offset() - found[first].storage_offset())
                    self.fixed[slot] = view_at(self.fixed[first], x.shape, x.stride(), further)
                    continue
                if isinstance(segment.stop, Send):
                    self._sent += x.nbytes
                    continue
                copied[slot] = new = Slot(next(numbers))
                self.fixed[new] = self._rooms.like(torch.empty_like(x))
                layouts.add(new, self.fixed[new])
            copies = [
                GraphNode(torch.ops.aten.copy_.default, (new, slot), {}, (new,), True, (new,))
                for slot, new in copied.items()
            ]
            stop = segment.stop
            if isinstance(stop, BreakEvent):
                stop = replace(stop, inputs=tuple([copied.get(slot, slot) for slot in stop.inputs]))
            made.append(Segment((*segment.nodes, *copies), stop))
            if segment.stop is None:
                self._outputs = [copied.get(x, x) if isinstance(x, Slot) else x for x in self._outputs]
        return made

    def _note_lasting(self, segments: Sequence[Segment], changed: Mapping[Slot, int]) -> None:
        """changed: the last segment that writes to a slot's memory, -1 for none."""
        given = set(slots_of([self._outputs, *(x.stop.inputs for x in segments if isinstance(x.stop, BreakEvent))]))
        fleeting = set[Slot]()
        for number, segment in enumerate(segments):
            match segment.stop:
                case Send(payload=slot):
                    (self.lasting if changed[slot] <= number else fleeting).add(slot)
                case Receive(payload=slot):
                    (self.lasting if changed[slot] < 0 and slot not in given else fleeting).add(slot)
        self.lasting -= fleeting


def _copy_all(into: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    """Copy tensors, in one launch for each type where PyTorch can."""
    pairs: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for to, x in zip(into, given, strict=True):
        targets, sources = pairs.setdefault(to.dtype, ([], []))
        targets.append(to)
        sources.append(x)
    for targets, sources in pairs.values():
        torch._foreach_copy_(targets, sources, non_blocking=True)


def _copies(given: Sequence[Tensor]) -> list[Tensor]:
    made = [torch.empty_like(x) for x in given]
    _copy_all(made, given)
    return made


def _letting_go(segments: Sequence[Segment], kept: set[Slot]) -> list[Segment]:
    """Segments that free slots after their last use; `kept`: inputs, outputs, and what graphs write each time."""
    last: dict[Slot, tuple[int, int]] = {}
    for number, segment in enumerate(segments):
        if not segment.computes:
            kept |= {slot for node in segment.nodes for slot in node.made}
        for place, node in enumerate(segment.nodes):
            for slot in (*slots_of((node.arguments, node.named)), *node.made):
                last[slot] = number, place
        kept |= set(segment.stopped())
    found: dict[tuple[int, int], list[Slot]] = {}
    for slot, at in last.items():
        if slot not in kept:
            found.setdefault(at, []).append(slot)
    return [
        replace(each, dropped=tuple(tuple(found.get((number, place), ())) for place in range(len(each.nodes))))
        for number, each in enumerate(segments)
    ]
