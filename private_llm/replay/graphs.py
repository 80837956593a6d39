"""A recorded step on a GPU: what is computed between two messages is one CUDA graph, started by one call.

Operations and kernels are repeated as they were called, on the same memory. Programs of which none runs within another
share a pool: what one leaves there another may overwrite, but for what it sends, gives to Python or returns. Masks are
drawn at the beginning and after each graph break (`masks`), from the same streams as the operations would draw them;
messages go as `net/transport.py` says.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from private_llm.errors import DomainError, UnsupportedOp
from private_llm.kernels.devices import ALONE
from private_llm.replay.capture import Pool, captured
from private_llm.replay.masks import MaskDraw
from private_llm.replay.program import Arena, BreakEvent, Inner, ProgramTransport, Receive, Send

MOST_BYTES = 1 << 30
"""Largest memory of what comes in of a program: attention takes keys and values of all tokens."""
MOST_HELD = 2 << 30
"""The same of all programs of a session: those that run within others, of which each length of a cache has its own, are
counted apart from these, of which each layer has its own."""


@dataclass(frozen=True)
class Slot:
    """A tensor of a step that is another one, or has other values, in each run."""

    number: int


@dataclass(frozen=True)
class GraphNode:
    """An operation of PyTorch or a kernel; tensors that change are slots, others are constants. made: its results.

    computes: whether a GPU has something to do: not for views, and for memory that is only taken.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    named: Mapping[str, Any]
    made: tuple[Slot, ...]
    computes: bool = True


Stop = Send[Slot] | Receive[Slot] | BreakEvent[Slot]
Event = GraphNode | Stop


@dataclass(frozen=True)
class Masks:
    """Elements of a stream, each slot in whole blocks of `block` bytes; behind: the number of graph breaks before."""

    stream: int
    after_break: int
    slots: tuple[Slot, ...]
    block: int


@dataclass(frozen=True)
class _Segment:
    """Nodes, and what comes then; None: the end."""

    nodes: tuple[GraphNode, ...]
    stop: Stop | None

    @property
    def computes(self) -> bool:
        """Whether a GPU has something to do: a graph of nothing is refused."""
        return any(node.computes for node in self.nodes)


class GraphProgram:
    """The same step again. held, size: bytes of its own memory for what comes in."""

    def __init__(
        self, events: Sequence[Event], inputs: Sequence[Slot], outputs: Sequence[Slot | Tensor],
        masks: Sequence[Masks], fixed: Mapping[Slot, Tensor], device: torch.device, pool: Pool,
    ) -> None:  # fmt: skip
        """fixed: memory of what comes in from outside. Raises UnsupportedOp or an error of CUDA for no graph."""
        self.size = self.held = sum(x.numel() * x.element_size() for x in fixed.values())
        if self.size > MOST_BYTES:
            raise UnsupportedOp(f"a graph that takes in more than {MOST_BYTES >> 20} MiB")
        self._inputs, self._outputs, self._device = list(inputs), list(outputs), device
        self._fixed = dict(fixed)
        self._masks: dict[int, MaskDraw] = {}
        for each in masks:
            draw = self._masks.setdefault(each.after_break, MaskDraw(device, pool))
            rooms = draw.add(each.stream, each.block, [fixed[slot] for slot in each.slots])
            self._fixed.update(zip(each.slots, rooms, strict=True))
        self._segments = list(_segments(events))
        self._last = _last_uses(self._segments, outputs)
        self._graphs: list[torch.cuda.CUDAGraph | None] | None = None
        self._kept: dict[Slot, Tensor] = {}
        if device.type == "cuda":
            with torch.cuda.device(device):
                self._compute(dict(self._fixed))  # whatever is compiled, uploaded or tuned at a first call is so now
                torch.cuda.current_stream().synchronize()
                self._capture(pool)

    def run(
        self,
        transport: ProgramTransport,
        arena: Arena,
        given: Sequence[Tensor],
        weights: Sequence[int],
        graph_break: Inner | None,
    ) -> list[Tensor]:
        """The step of these inputs; arena and weights (`Program.run`) are not needed. Results are tensors of their own.

        Rounds and bytes as recorded. Raises what the links raise, and DomainError for a graph break without one.
        """
        return self.ready(transport, arena, given, weights)(graph_break)

    def ready(
        self, transport: ProgramTransport, arena: Arena, given: Sequence[Tensor], weights: Sequence[int]
    ) -> Callable[[Inner | None], list[Tensor]]:  # fmt: skip
        """As `Program.ready`."""
        for slot, x in zip(self._inputs, given, strict=True):
            self._fixed[slot].copy_(x)
        return functools.partial(self._run, transport)

    def _run(self, transport: ProgramTransport, graph_break: Inner | None) -> list[Tensor]:
        found, left = dict(self._fixed) if self._graphs is None else self._kept, 0
        self._draw(transport, left)
        for number, segment in enumerate(self._segments):
            if self._graphs is None:
                self._nodes(segment, number, found)
            elif (graph := self._graphs[number]) is not None:
                graph.replay()
            match segment.stop:
                case Send(to, tag, payload):
                    transport.send(to, tag, found[payload].clone())  # which the next run overwrites
                case Receive(frm, tag, payload):
                    into = self._fixed[payload]
                    into.copy_(transport.receive(frm, tag, tuple(into.shape), into.dtype), non_blocking=True)
                case BreakEvent(inputs, outputs):
                    if graph_break is None:
                        raise DomainError("a program with a graph break was run without one")
                    made = graph_break([found[slot].clone() for slot in inputs])
                    for slot, x in zip(outputs, made, strict=True):
                        self._fixed[slot].copy_(x)
                    left += 1
                    self._draw(transport, left)
        return [(found[x] if isinstance(x, Slot) else x).clone() for x in self._outputs]

    def _draw(self, transport: ProgramTransport, after_break: int) -> None:
        if after_break in self._masks:
            self._masks[after_break].draw(transport)

    def _nodes(self, segment: _Segment, number: int, found: dict[Slot, Tensor]) -> None:
        """Run the nodes of a segment, and let go of what no later one needs."""
        for node in segment.nodes:
            made = node.function(*_filled(node.arguments, found), **_filled(node.named, found))
            results = made if isinstance(made, list | tuple) else (made,)
            for slot, x in zip(node.made, results if node.made else (), strict=True):
                found[slot] = x
        for slot in self._last.get(number, ()):
            found.pop(slot, None)

    def _compute(self, found: dict[Slot, Tensor]) -> None:
        for number, segment in enumerate(self._segments):
            self._nodes(segment, number, found)

    def _capture(self, pool: Pool) -> None:
        """A graph of each segment that computes. Raises UnsupportedOp where an earlier capture failed."""
        self._graphs, found = [], dict(self._fixed)
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream())
        with ALONE, torch.cuda.stream(stream):
            for number, segment in enumerate(self._segments):
                graph = None
                if segment.computes:
                    graph = captured(pool, functools.partial(self._nodes, segment, number, found))
                else:
                    self._nodes(segment, number, found)
                self._graphs.append(graph)
        torch.cuda.current_stream().wait_stream(stream)
        self._kept = found


def _segments(events: Sequence[Event]) -> Sequence[_Segment]:
    found: list[_Segment] = []
    nodes: list[GraphNode] = []
    for event in events:
        if isinstance(event, GraphNode):
            nodes.append(event)
        else:
            found.append(_Segment(tuple(nodes), event))
            nodes = []
    return [*found, _Segment(tuple(nodes), None)]


def _last_uses(segments: Sequence[_Segment], outputs: Sequence[object]) -> dict[int, list[Slot]]:
    """Slots by the number of the segment behind which nobody needs them.

    Kept is what is sent or returned, and what lies outside the pool, since graphs write to it in each run.
    """
    last: dict[Slot, int] = {}
    kept = {x for x in outputs if isinstance(x, Slot)}
    for number, segment in enumerate(segments):
        if not segment.computes:
            kept |= {slot for node in segment.nodes for slot in node.made}
        for node in segment.nodes:
            for slot in (*slots_of(node.arguments), *slots_of(node.named), *node.made):
                last[slot] = number
        match segment.stop:
            case Send(_, _, payload) | Receive(_, _, payload):
                kept.add(payload)
            case BreakEvent(inputs, results):
                kept |= {*inputs, *results}
    found: dict[int, list[Slot]] = {}
    for slot, number in last.items():
        if slot not in kept:
            found.setdefault(number, []).append(slot)
    return found


def slots_of(arguments: object) -> Sequence[Slot]:
    """Those among arguments of an operation."""
    if isinstance(arguments, Slot):
        return [arguments]
    if isinstance(arguments, Mapping):
        arguments = list(arguments.values())
    if isinstance(arguments, list | tuple):
        return [slot for each in arguments for slot in slots_of(each)]
    return []


def _filled(arguments: Any, found: Mapping[Slot, Tensor]) -> Any:  # noqa: ANN401 - whatever PyTorch takes
    """Arguments with tensors for slots."""
    if isinstance(arguments, Slot):
        return found[arguments]
    if isinstance(arguments, list | tuple):
        return type(arguments)([_filled(each, found) for each in arguments])
    if isinstance(arguments, Mapping):
        return {key: _filled(each, found) for key, each in arguments.items()}
    return arguments
