"""A recorded step on a GPU: what is computed between two messages is one CUDA graph, started by one call.

Operations and kernels are repeated as they were called, on the same memory. Programs of which none runs within another
share a pool: what one leaves there another may overwrite, but for what it sends, gives to Python or returns. Masks are
drawn at the beginning and after each graph break (`masks`), from the same streams as the operations would draw them;
messages go as `net/transport.py` says.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from private_llm.errors import DomainError, UnsupportedOp
from private_llm.kernels.devices import ALONE
from private_llm.replay.capture import Pool, captured
from private_llm.replay.fusion import compile_launches, fused
from private_llm.replay.masks import MaskDraw
from private_llm.replay.nodes import Event, Segment, Slot, compute, compute_segment, segments_of, slots_of
from private_llm.replay.program import Arena, BreakEvent, Inner, ProgramTransport, Receive, Send

MOST_BYTES = 1 << 30
"""Largest memory of what comes in of a program: attention takes keys and values of all tokens."""
MOST_HELD = 2 << 30
"""The same of all programs of a session: those that run within others, of which each length of a cache has its own, are
counted apart from these, of which each layer has its own."""


@dataclass(frozen=True)
class Masks:
    """Elements of a stream, each slot in whole blocks of `block` bytes; behind: the number of graph breaks before."""

    stream: int
    after_break: int
    slots: tuple[Slot, ...]
    block: int


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
        self._inputs, self._outputs, self.device, self.pool = list(inputs), list(outputs), device, pool
        self.fixed = dict(fixed)
        self._masks: dict[int, MaskDraw] = {}
        for each in masks:
            draw = self._masks.setdefault(each.after_break, MaskDraw(device, pool))
            rooms = draw.add(each.stream, each.block, [fixed[slot] for slot in each.slots])
            self.fixed.update(zip(each.slots, rooms, strict=True))
        self.segments = _few_launches(segments_of(events), self.fixed, outputs)
        self._graphs: list[torch.cuda.CUDAGraph | None] | None = None
        self._kept: dict[Slot, Tensor] = {}
        self._tried = False

    def run(
        self, transport: ProgramTransport, arena: Arena, given: Sequence[Tensor], weights: Sequence[int],
        graph_break: Inner | None,
    ) -> list[Tensor]:  # fmt: skip
        """The step of these inputs, node by node; arena and weights (`Program.run`) are not needed. Results are tensors
        of their own.

        Rounds and bytes as recorded. Raises what the links raise, and DomainError for a graph break without one.
        """
        self.take(given)
        self.draw(transport, 0)
        return self._run(transport, graph_break)

    def ready(
        self, transport: ProgramTransport, arena: Arena, given: Sequence[Tensor], weights: Sequence[int]
    ) -> Callable[[Inner | None], list[Tensor]]:  # fmt: skip
        """As `Program.ready`."""
        self.take(given)
        return functools.partial(self._draw_and_run, transport)

    def _draw_and_run(self, transport: ProgramTransport, graph_break: Inner | None) -> list[Tensor]:
        self.draw(transport, 0)
        return self.run_drawn(transport, graph_break)

    def take(self, given: Sequence[Tensor]) -> None:
        """Copy the inputs of the next run."""
        _copy_all([self.fixed[slot] for slot in self._inputs], given)

    def run_drawn(self, transport: ProgramTransport, graph_break: Inner | None) -> list[Tensor]:
        """The step, by graphs, once its inputs and first masks are there."""
        if self.device.type == "cuda" and not self._tried:
            self._tried = True
            try:
                with torch.cuda.device(self.device):
                    self._capture()
            except (UnsupportedOp, RuntimeError) as error:
                warnings.warn(f"a step runs without CUDA graphs, which is slower: {error}", stacklevel=2)
        return self._run(transport, graph_break)

    def _run(self, transport: ProgramTransport, graph_break: Inner | None) -> list[Tensor]:
        found, left = dict(self.fixed) if self._graphs is None else self._kept, 0
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
                    self.resume(event, found, graph_break)
                    left += 1
                    self.draw(transport, left)
        return self.results(found)

    def resume(self, event: BreakEvent[Slot], found: Mapping[Slot, Tensor], graph_break: Inner | None) -> None:
        """Let Python compute a graph break. Raises DomainError for none."""
        if graph_break is None:
            raise DomainError("a program with a graph break was run without one")
        made = graph_break(_copies([found[slot] for slot in event.inputs]))
        _copy_all([self.fixed[slot] for slot in event.outputs], made)

    def results(self, found: Mapping[Slot, Tensor]) -> list[Tensor]:
        """Copies of what was made, once all is computed."""
        return _copies([found[x] if isinstance(x, Slot) else x for x in self._outputs])

    def draw(self, transport: ProgramTransport, after_break: int) -> None:
        """The masks that are needed after so many graph breaks."""
        if after_break in self._masks:
            self._masks[after_break].draw(transport)

    def _capture(self) -> None:
        """A graph of each segment that computes. Raises UnsupportedOp where an earlier capture failed."""
        graphs: list[torch.cuda.CUDAGraph | None] = []
        found, stream = dict(self.fixed), torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream())
        with ALONE, torch.cuda.stream(stream):
            for segment in self.segments:
                launches = functools.partial(compute_segment, segment, found)
                graphs.append(captured(self.pool, launches) if segment.computes else launches())
        torch.cuda.current_stream().wait_stream(stream)
        self._graphs, self._kept = graphs, found


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


def _few_launches(
    segments: Sequence[Segment], fixed: Mapping[Slot, Tensor], outputs: Sequence[object]
) -> list[Segment]:
    """The segments with few launches each, found out by a run of which all is kept."""
    found = dict(fixed)
    for segment in segments:
        for node in segment.nodes:
            compute(node, found)
    later = {x for x in outputs if isinstance(x, Slot)}
    made: list[Segment] = []
    for segment in reversed(segments):
        later |= set(segment.stopped())
        mine = {slot for node in segment.nodes for slot in node.made}
        made.append(Segment(tuple(fused(segment.nodes, found, later & mine)), segment.stop))
        later |= {slot for node in segment.nodes for slot in slots_of([node.arguments, node.named])}
    compile_launches([node for each in made for node in each.nodes], found)
    return _letting_go(made[::-1], {*fixed, *(x for x in outputs if isinstance(x, Slot))})


def _letting_go(segments: Sequence[Segment], kept: set[Slot]) -> list[Segment]:
    """The segments, with what nobody needs after each node.

    Kept is what comes in, is sent or returned, and what lies outside the pool, since graphs write to it in each run.
    """
    last: dict[Slot, tuple[int, int]] = {}
    for number, segment in enumerate(segments):
        if not segment.computes:
            kept |= {slot for node in segment.nodes for slot in node.made}
        for place, node in enumerate(segment.nodes):
            for slot in (*slots_of(node.arguments), *slots_of(node.named), *node.made):
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
