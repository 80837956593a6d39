"""Writes down what one party computes on a GPU, as a program: every operation of PyTorch, kernel, mask and message.

As `recorder` for the CPU; here operations and kernels are called again as they were, under a CUDA graph. What depends
on nothing that changes from run to run is computed now and kept, unless the step writes to it later. What cannot be
repeated (values that leave the GPU, results whose shape depends on values, a stream of masks that is not the session's)
ends the recording; the step itself goes on as always.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from private_llm.errors import UnsupportedOp
from private_llm.kernels.seeded_tensor import SeededTensor
from private_llm.kernels.trace_hook import traced_by
from private_llm.net.transport import Transport
from private_llm.replay.capture import Pool
from private_llm.replay.graphs import GraphProgram, Masks
from private_llm.replay.loops import MOVES
from private_llm.replay.nodes import GraphNode, Slot, Stop, slots_of
from private_llm.replay.program import BreakEvent, Receive, Send
from private_llm.replay.recording import UNFORESEEN, Held, StepRecorder, all_written_by, tensors_of
from private_llm.replay.transports import noted, unrecorded
from private_llm.ring.prg import Prg

MOST_RECORDED = 4 << 30
"""Bytes of all that a step makes and takes in while it is recorded: all of it is held until the step is over."""

_ROOM = frozenset({
    torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default, torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default, torch.ops.aten.new_empty_strided.default,
})  # fmt: skip
"""Operations that take memory and compute nothing."""


@dataclass(frozen=True)
class _RecordedNode:
    """A node as it was met: the memories of its results and of what it wrote to, and whether its inputs change."""

    node: GraphNode
    memories: frozenset[int]
    changes: bool


class GraphRecorder(StepRecorder[Slot]):
    """Records the programs of a GPU."""

    def __init__(
        self, transport: Transport, streams: Sequence[Prg], device: torch.device, pool: Pool
    ) -> None:  # fmt: skip
        """device: where the party computes. pool: the memory of its graphs."""
        super().__init__(transport, streams)
        self._device, self._pool = device, pool
        self._events: list[_RecordedNode | Stop] = []
        self._tensors: list[Tensor] = []  # by slot; as long as they live, no other one has their number
        self._slots: dict[int, Slot] = {}
        self._fixed: dict[Slot, Tensor] = {}
        self._changing: set[int] = set()  # memories
        self._own: set[int] = set()  # memories that were made in this step
        self._written: set[int] = set()  # of them, those to which something is written that changes
        self._masks: dict[tuple[int, int], list[Slot]] = {}
        self._after_break = 0
        self._bytes = 0

    # -- what changes ----------------------------------------------------------------------------------------
    def given(self, x: Tensor) -> Slot:
        """A tensor whose values come from outside. Raises UnsupportedOp if it is too large."""
        slot = self._slot(x)
        if self.reason is not None:
            raise UnsupportedOp(self.reason)
        self._fixed[slot] = x
        self._changing.add(_memory(x))
        return slot

    def public(self, x: Tensor) -> Slot:
        """A public tensor that changes; its ring elements come from outside, too, where they are made of views of it.

        Raises UnsupportedOp for an empty one.
        """
        if not x.numel():
            raise UnsupportedOp("a public tensor without elements")
        self.publics.tensors.append(x)
        return self.given(x)

    @noted
    def _break(self, given: Sequence[Tensor], made: Sequence[Tensor]) -> list[Tensor]:
        results = [x.contiguous().clone() for x in made]
        inputs = [self._used(x) for x in given]
        if not all(isinstance(slot, Slot) and self.changes(x) for slot, x in zip(inputs, given, strict=True)):
            raise UnsupportedOp("a graph break that is given a constant")
        outputs = tuple([self.given(x) for x in results])
        self._events.append(BreakEvent(tuple([x for x in inputs if isinstance(x, Slot)]), outputs))
        self._after_break += 1
        return results

    def _slot(self, x: Tensor, known: Container[int] = ()) -> Slot:
        """known: memories that were there before x was made."""
        found = self._slots.get(id(x))
        if found is None:
            found = self._slots[id(x)] = Slot(len(self._tensors))
            self._tensors.append(x)
            memory = _memory(x)
            if memory not in self._own and memory not in known:
                self._own.add(memory)
                self._bytes += x.untyped_storage().nbytes()
                if self._bytes > MOST_RECORDED:
                    self.stop(f"more than {MOST_RECORDED >> 20} MiB in one step")
        return found

    def place(self, x: Tensor) -> Slot:
        """A tensor that was met before."""
        return self._slots[id(x)]

    def changes(self, x: Tensor) -> bool:
        """Whether the values of x change from run to run."""
        return _memory(x) in self._changing

    def _used(self, x: Tensor) -> Slot | Tensor:
        """A tensor as a node meets it."""
        found = self._slots.get(id(x))
        if found is None and self.changes(x):
            self.stop("a view that was made unseen")
        return x if found is None else found

    def _all_used(self, arguments: Any) -> Any:  # noqa: ANN401 - whatever PyTorch takes
        if isinstance(arguments, Tensor):
            return self._used(arguments)
        if isinstance(arguments, list | tuple):
            return type(arguments)([self._all_used(each) for each in arguments])
        return arguments

    def _held(self) -> Sequence[Held]:
        return (
            self._events, self._tensors, self._slots, self._fixed, self._changing, self._own, self._written,
            self._masks, self.publics,
        )  # fmt: skip

    def _add(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], made: Sequence[Tensor],
        written: Sequence[Tensor],
    ) -> None:  # fmt: skip
        """A node, whose results are `made`."""
        used, named = self._all_used(tuple(args)), {key: self._all_used(each) for key, each in kwargs.items()}
        given = list(tensors_of([*args, *kwargs.values()]))
        changes, known = any(map(self.changes, given)), {_memory(x) for x in given}
        memories = {_memory(x) for x in (*made, *written)}
        if any(x.device != self._device for x in (*made, *written)):
            self.stop(f"{_name(function)}: values that leave {self._device}")
        touched = {_memory(x) for x in written}
        if changes and not touched <= self._own:
            self.stop(f"{_name(function)} writes to memory of before")
        if self.reason is not None:
            return
        slots = tuple([self._slot(x, known) for x in made])
        if changes:
            self._changing |= memories
            self._written |= touched
        if self.reason is None:
            views = bool(made) and not written and memories <= known
            places = tuple([self._slots[id(x)] for x in written if id(x) in self._slots])
            node = GraphNode(function, used, named, slots, not views and function not in _ROOM, places)
            self._events.append(_RecordedNode(node, frozenset(memories), changes))

    # -- the modes' ends -------------------------------------------------------------------------------------
    def operated(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401 - PyTorch's
        """Run an operation of PyTorch and write it down."""
        made = self.computing(partial(func, *args, **kwargs), func._schema.is_mutable)
        self._operated(func, made, args, kwargs)
        return made

    @noted
    def _operated(self, func: Any, made: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:  # noqa: ANN401
        given = list(tensors_of([*args, *kwargs.values()]))
        results = list(tensors_of([made]))
        changes = any(map(self.changes, given))
        numbers = func in MOVES and all(index.dtype == torch.int64 for index in tensors_of(args[1:]))
        if changes and ((UNFORESEEN & set(func.tags) and not numbers) or (made is not None and not results)):
            raise UnsupportedOp("a result that depends on values or chance")
        if changes or any(x.device == self._device for x in results):
            self._add(func, args, kwargs, results, all_written_by(func, args, kwargs))

    def computed(self, call: Callable[..., Any], arguments: Sequence[Any], writes: int) -> Any:  # noqa: ANN401
        """A kernel, which is called here; the last `writes` arguments are written to."""
        with unrecorded(), traced_by(None):
            made = self.computing(partial(call, *arguments), bool(writes))
            self._computed(call, made, arguments, writes)
            return made

    @noted
    def _computed(self, call: Callable[..., Any], made: Any, arguments: Sequence[Any], writes: int) -> None:  # noqa: ANN401
        if any(isinstance(x, SeededTensor) and not x.on_gpus for x in tensors_of(arguments)):
            raise UnsupportedOp("masks of weights that are made in main memory")
        written = list(tensors_of(arguments[len(arguments) - writes :]))
        self._add(call, arguments, {}, list(tensors_of([made])), written)

    # -- Watcher ---------------------------------------------------------------------------------------------
    @noted
    def addressed(self, tensors: Sequence[Tensor]) -> None:
        """A kernel in main memory, whose results nobody follows."""
        if any(map(self.changes, tensors)):
            self.stop("a kernel on addresses")

    def launched(self, kernel: Callable[..., None], arguments: Sequence[Any]) -> None:
        """`addressed` was told of it."""

    @noted
    def masks_drawn(self, stream: object, out: Tensor) -> None:
        """Masks, of one of the session's streams."""
        number = self.number_of(stream)
        if not out.numel():
            return
        if number is None or out.device != self._device:
            raise UnsupportedOp("masks of another stream, or on another device")
        self._masks.setdefault((number, self._after_break), []).append(self.given(out))

    @noted
    def escaped(self, x: Tensor) -> None:
        """Values leave PyTorch, so what becomes of them is not seen."""
        if self.changes(x):
            self.stop("values that leave PyTorch")

    # -- RecordingTransport
    # -------------------------------------------------------------------------------------------------
    @noted
    def record_send(self, to: int, tag: str, payload: Tensor) -> None:
        """A message leaves: what it contains must change from run to run."""
        slot = self._used(payload)
        if not isinstance(slot, Slot) or not self.changes(payload):
            raise UnsupportedOp("a constant")
        self._events.append(Send(to, tag, slot))

    @noted
    def record_receive(self, frm: int, tag: str, payload: Tensor) -> None:
        """A message has come."""
        self._events.append(Receive(frm, tag, self.given(payload)))

    # -- the end ---------------------------------------------------------------------------------------------
    def program(self, inputs: Sequence[Slot], outputs: Sequence[Tensor]) -> GraphProgram:
        """What was written down. Raises UnsupportedOp where that is not all."""
        if self.reason is not None:
            raise UnsupportedOp(self.reason)
        events, dropped = self._needed()
        found = [self._used(x) for x in outputs]
        used = {
            slot for each in events if isinstance(each, GraphNode) for slot in slots_of([each.arguments, each.named])
        }
        used |= {x for x in found if isinstance(x, Slot)}
        constants = {slot: self._tensors[slot.number] for slot in dropped & used}
        if any(map(self.changes, constants.values())):
            raise UnsupportedOp("another name of what comes from outside")
        filled = [_with(each, constants) for each in events]
        results = [constants.get(x, x) if isinstance(x, Slot) else x for x in found]
        fixed = {  # zeros, with which a first run does nothing unforeseen
            slot: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).zero_()
            for slot, x in self._fixed.items()
        }
        masks = [
            Masks(stream, after_break, tuple(slots), self._streams[stream].block)
            for (stream, after_break), slots in self._masks.items()
        ]
        for each in filled:
            if isinstance(each, GraphNode) and any(
                map(self._elsewhere, tensors_of([each.arguments, *each.named.values()]))
            ):
                raise UnsupportedOp(f"{_name(each.function)}: an operand that is not on {self._device}")
        returned = {_memory(x) for x in (*outputs, *self.publics.all())}
        changing, left = self._changing, [weakref.ref(x) for x in self._tensors]
        self._tensors, self._fixed = [], {}
        if any(x is not None and _memory(x) in changing - returned for x in (each() for each in left)):
            raise UnsupportedOp("a value that outlives the step")
        return GraphProgram(filled, inputs, results, masks, fixed, self._device, self._pool)

    def _elsewhere(self, x: Tensor) -> bool:
        """Whether an operation would have to move x; single numbers are read when it is called."""
        return x.device != self._device and x.dim() > 0

    def _needed(self) -> tuple[list[GraphNode | Stop], set[Slot]]:
        """Events but for nodes whose results are the same every time, and the slots of these results."""
        events: list[GraphNode | Stop] = []
        dropped: set[Slot] = set()
        for event in self._events:
            if not isinstance(event, _RecordedNode):
                events.append(event)
            elif event.changes:
                events.append(event.node)
            elif self._fixed.keys() & set(event.node.made):
                continue  # masks, as they were drawn
            elif event.memories & self._written:
                events.append(event.node)
            else:
                dropped |= set(event.node.made)
        return events, dropped


def _with(event: GraphNode | Stop, constants: Mapping[Slot, Tensor]) -> GraphNode | Stop:
    """A node with the constants among its arguments."""
    if not isinstance(event, GraphNode) or not any(
        slot in constants for slot in slots_of([event.arguments, event.named])
    ):
        return event
    return replace(event, arguments=_put(event.arguments, constants), named=_put(event.named, constants))


def _put(arguments: Any, constants: Mapping[Slot, Tensor]) -> Any:  # noqa: ANN401 - whatever PyTorch takes
    if isinstance(arguments, Slot):
        return constants.get(arguments, arguments)
    if isinstance(arguments, list | tuple):
        return type(arguments)([_put(each, constants) for each in arguments])
    if isinstance(arguments, Mapping):
        return {key: _put(each, constants) for key, each in arguments.items()}
    return arguments


def _memory(x: Tensor) -> int:
    """The number of a tensor's memory, as long as that lives."""
    if isinstance(x, SeededTensor):  # it has none
        return -id(x)
    return int(x.untyped_storage()._cdata)


def _name(function: object) -> str:
    return getattr(function, "__name__", str(function))
