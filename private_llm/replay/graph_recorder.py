"""Writes down what one party computes on a GPU, as a program: every operation of PyTorch, kernel, mask and message.

Operations and kernels are called again as they were, under a CUDA graph. What depends on nothing that changes from run
to run is computed now and kept, unless the step writes to it later. What cannot be repeated (values that leave the GPU,
results whose shape depends on values, a stream of masks that is not the session's) ends the recording.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from private_llm.errors import UnsupportedOp
from private_llm.kernels.seeded_tensor import SeededTensor
from private_llm.kernels.trace_hook import traced_by
from private_llm.net.transport import Transport
from private_llm.replay.events import GraphNode, Slot, TorchCall, mapped, slots_of, tensors_of
from private_llm.replay.graphs import GraphEvent, GraphProgram
from private_llm.replay.layouts import Memories, Pool, part_of
from private_llm.replay.loops import MOVES, STARTED
from private_llm.replay.recording import UNFORESEEN, StepRecorder, all_written_by
from private_llm.replay.transports import noted, unrecorded
from private_llm.ring.prg import Prg

MOST_RECORDED = 4 << 30  # bytes that a recorded step may hold at a time; an eighth of what is free, if that is more
SWEEP = 64 << 20  # after so many bytes more, memory is freed that nobody but the recorder holds


@dataclass(frozen=True)
class _RecordedNode:
    """A node as it was met: the memories of its results and of what it wrote to, and whether its inputs change."""

    node: GraphNode
    memories: frozenset[int]
    changes: bool


class GraphRecorder(StepRecorder[Slot]):
    """Records the programs of a GPU."""

    def __init__(
        self, transport: Transport, streams: Sequence[Prg], device: torch.device, pool: Pool, weights: Memories = ()
    ) -> None:
        """pool: the memory of the party's graphs. weights: of the module."""
        super().__init__(transport, streams, device)
        self._pool, self._most = pool, part_of(device, 8, MOST_RECORDED)
        self._tensors: list[weakref.ref[Tensor]] = []  # by slot
        self._slots: dict[int, Slot] = {}
        self._constants: defaultdict[int, list[Tensor]] = defaultdict(list)  # by memory, until that changes
        self._fixed: dict[Slot, Tensor] = {}  # as tensors without memory
        self._changing: set[int] = set()  # memories
        self._own: dict[int, torch.UntypedStorage] = {}  # that were made in this step; no other one has their number
        self._there: set[int] = set()  # of them, those that are not freed
        self._written: set[int] = set()  # of them, those to which something is written that changes
        self._bytes = self._swept = 0
        self._weights = weights
        self._derived = {x._cdata for x in weights if isinstance(x, torch.UntypedStorage)}  # memories of what they give

    # -- what changes ----------------------------------------------------------------------------------------
    def given(self, x: Tensor) -> Slot:
        """As the interface says."""
        slot = self._slot(x)
        if self.reason is not None:
            raise UnsupportedOp(self.reason)
        self._fixed[slot] = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        self._change([_memory(x)])
        return slot

    def place(self, x: Tensor) -> Slot:
        """As the interface says."""
        slot = self._used(x)
        if not isinstance(slot, Slot) or not self.changes(x):
            raise UnsupportedOp("a constant where a value that changes is wanted")
        return slot

    def _slot(self, x: Tensor, known: Container[int] = ()) -> Slot:
        """known: memories that were there before x was made."""
        found = self._slot_of(x)
        if found is None:
            found = self._slots[id(x)] = Slot(len(self._tensors))
            self._tensors.append(weakref.ref(x))
            memory = _memory(x)
            if memory not in self._changing:
                self._constants[memory].append(x)
            if memory not in self._own and memory not in known:
                self._own[memory] = x.untyped_storage()
                self._there.add(memory)
                self._bytes += self._own[memory].nbytes()
                if self._bytes > min(self._swept + SWEEP, self._most):
                    self._sweep()
        return found

    def _slot_of(self, x: Tensor) -> Slot | None:
        found = self._slots.get(id(x))  # another tensor may have had this number
        return found if found is not None and self._tensors[found.number]() is x else None

    def _sweep(self) -> None:
        """Free what the step itself would have freed: memory that changes and that no tensor has any more."""
        for memory in self._there & self._changing:
            storage = self._own[memory]
            if torch._C._storage_Use_Count(memory) == 1 and storage.resizable():
                self._bytes -= storage.nbytes()
                storage.resize_(0)
                self._there.discard(memory)
        self._swept = self._bytes
        if self._bytes > self._most:
            self.stop(f"more than {self._most >> 20} MiB in one step")

    def _change(self, memories: Collection[int]) -> None:
        self._changing.update(memories)
        for memory in memories:
            self._constants.pop(memory, None)

    def changes(self, x: Tensor) -> bool:
        """Whether the values of x change from run to run."""
        return _memory(x) in self._changing

    def _used(self, x: Tensor) -> Slot | Tensor:
        found = self._slot_of(x)
        if found is None and self.changes(x):
            self.stop("a view that was made unseen")
        return x if found is None else found

    def _add(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], made: Sequence[Tensor],
        written: Sequence[Tensor],
    ) -> None:  # fmt: skip
        used, named = mapped((tuple(args), kwargs), Tensor, self._used)
        given = list(tensors_of((args, kwargs)))
        changes, known = any(map(self.changes, given)), {_memory(x) for x in given}
        memories = {_memory(x) for x in (*made, *written)}
        if any(x.device != self._device for x in (*made, *written)):
            self.stop(f"{_name(function)}: values that leave {self._device}")
        touched = {_memory(x) for x in written}
        if changes and not touched <= self._own.keys():
            self.stop(f"{_name(function)} writes to memory of before")
        if self.reason is not None:
            return
        slots = tuple([self._slot(x, known) for x in made])
        if changes:
            self._change(memories)
            self._written |= touched
        elif any(isinstance(x, SeededTensor) or _memory(x) in self._derived for x in given):
            self._derived |= memories
        if self.reason is None:
            views = bool(made) and not written and memories <= known
            places = tuple([slot for x in written if (slot := self._slot_of(x)) is not None])
            node = GraphNode(function, used, named, slots, not views and function not in STARTED, places)
            self._events.append(_RecordedNode(node, frozenset(memories), changes))

    # -- the modes' ends -------------------------------------------------------------------------------------
    def operated(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401 - PyTorch's
        """Run an operation of PyTorch and write it down."""
        made = self.computing(partial(func, *args, **kwargs), func._schema.is_mutable)
        self._operated(func, made, args, kwargs)
        return made

    @noted
    def _operated(self, func: Any, made: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:  # noqa: ANN401
        given = list(tensors_of((args, kwargs)))
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

    # -- TraceHook -------------------------------------------------------------------------------------------
    @noted
    def addressed(self, tensors: Sequence[Tensor]) -> None:
        """A kernel in main memory, whose results nobody follows."""
        if any(map(self.changes, tensors)):
            self.stop("a kernel on addresses")

    # -- the end ---------------------------------------------------------------------------------------------
    def program(self, inputs: Sequence[Slot], outputs: Sequence[Tensor]) -> GraphProgram:
        """As the interface says."""
        if self.reason is not None:
            raise UnsupportedOp(self.reason)
        events, dropped = self._needed()
        found = [self._used(x) for x in outputs]
        calls = [each for each in events if isinstance(each, TorchCall)]
        used = {slot for each in calls for slot in slots_of((each.arguments, each.named))}
        used |= {x for x in found if isinstance(x, Slot)}
        constants = {slot: x for slot in dropped & used if (x := self._tensors[slot.number]()) is not None}
        if len(constants) < len(dropped & used) or any(map(self.changes, constants.values())):
            raise UnsupportedOp("another name of what comes from outside")
        filled = [_filled(each, constants) if isinstance(each, TorchCall) else each for each in events]
        results = [constants.get(x, x) if isinstance(x, Slot) else x for x in found]
        for node in (each for each in filled if isinstance(each, TorchCall)):
            given = tensors_of((node.arguments, node.named))
            if any(x.device != self._device and x.dim() for x in given):  # single numbers are read when it is called
                raise UnsupportedOp(f"{_name(node.function)}: an operand that is not on {self._device}")
        returned = {_memory(x) for x in (*outputs, *self._publics, *self._encodings.values())}
        if any(x is not None and _memory(x) in self._changing - returned for x in (each() for each in self._tensors)):
            raise UnsupportedOp("a value that outlives the step")
        own = {_memory(x) for x in constants.values()} & self._own.keys()  # not weights
        held = sum(self._own[memory].nbytes() for memory in own)
        derivation = self._derivation(constants)
        self._constants.clear()
        program = GraphProgram(filled, inputs, results, self.masks(), self._fixed, self._device, self._pool, held)
        program.weights, program.derivation = self._weights, derivation
        return program

    def _derivation(self, constants: Mapping[Slot, Tensor]) -> tuple[list[GraphNode], dict[Slot, Tensor]]:
        """Constants that depend on the module's weights, and the nodes that made them."""
        made = {slot: x for slot, x in constants.items() if _memory(x) in self._derived}
        nodes: list[GraphNode] = []
        for each in self._events if made else ():
            if isinstance(each, _RecordedNode) and not each.changes and each.memories & self._derived:
                given = {
                    slot: self._tensors[slot.number]() for slot in slots_of((each.node.arguments, each.node.named))
                }
                outer = {s: x for s, x in given.items() if x is not None and _memory(x) not in self._derived}
                nodes.append(_filled(each.node, outer))
        return nodes, made

    def _needed(self) -> tuple[list[GraphEvent], set[Slot]]:
        """Events but for nodes whose results are the same every time, and the slots of these results."""
        events: list[GraphEvent] = []
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


def _filled(node: GraphNode, constants: Mapping[Slot, Tensor]) -> GraphNode:
    if constants.keys().isdisjoint(slots_of((node.arguments, node.named))):
        return node
    arguments, named = mapped((node.arguments, node.named), Slot, lambda slot: constants.get(slot, slot))
    return replace(node, arguments=arguments, named=named)


def _memory(x: Tensor) -> int:
    """The number of a tensor's memory, as long as that lives."""
    if isinstance(x, SeededTensor):  # it has none
        return -id(x)
    return int(x.untyped_storage()._cdata)


def _name(function: object) -> str:
    return getattr(function, "__name__", str(function))
