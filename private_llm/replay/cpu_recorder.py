"""Writes down what one party computes, as a program: every operation of PyTorch, kernel, mask and message.

What depends on nothing that changes from run to run (weights, public constants) is computed now and read later. What
cannot be written down (values that leave PyTorch, a stream of masks that is not the session's) ends the recording.
"""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from private_llm.errors import UnsupportedOp
from private_llm.kernels import steps
from private_llm.kernels.compiling import CompiledStep
from private_llm.net.transport import Transport
from private_llm.replay import loops
from private_llm.replay.events import TorchCall, mapped, tensors_of
from private_llm.replay.program import (
    ArenaAddress,
    Event,
    Memory,
    Operand,
    Parallel,
    Program,
    ProgramStep,
    WeightAddress,
    Word,
)
from private_llm.replay.recording import UNFORESEEN, StepRecorder, all_written_by
from private_llm.replay.transports import noted
from private_llm.ring.prg import Prg

MOST_RECORDED = 256 << 20  # bytes of all that changes in a step that is recorded, held until the step is over
MOST_BYTES = 64 << 20  # largest memory of a program


@dataclass(frozen=True, repr=False)  # of tensors, which may be shares
class _TracedOperation:
    """Arguments of one of PyTorch's: the tensors among them, whether one varies, and that which is written to."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    tensors: Sequence[Tensor]
    changes: bool
    written: Tensor | None


class CpuRecorder(StepRecorder[Operand]):
    """Records the programs of a CPU."""

    def __init__(
        self, transport: Transport, streams: Sequence[Prg], weights: Sequence[tuple[int, int]] = ()
    ) -> None:  # fmt: skip
        """weights: memories of the module that is recorded, addresses and bytes; other ones in modules like it."""
        super().__init__(transport, streams, torch.device("cpu"))
        self._weights = list(weights)
        self._weights_begin = {start for start, _ in weights}
        self._into: list[Event] = self._events  # where steps are written: there, or to the piece that is computed now
        self._starts: list[int] = []
        self._memories: dict[int, tuple[Memory, int, object]] = {}  # by address: bytes, and what owns them
        self._made: dict[int, tuple[torch.dtype, torch.UntypedStorage]] = {}
        self._keep: list[object] = []
        self._untouched: set[int] = set()
        self._seen: list[weakref.ref[Tensor]] = []
        self._bytes = 0

    # -- what changes ----------------------------------------------------------------------------------------
    def changing(self, x: Tensor) -> Memory:
        """From now on the memory of x changes from run to run; its content comes from elsewhere."""
        storage = x.untyped_storage()
        memory = Memory(storage.nbytes(), len(self._events), len(self._events))
        if self.reason is not None:
            return memory
        self._bytes += storage.nbytes()
        if self._bytes > MOST_RECORDED:
            self.stop(f"more than {MOST_RECORDED >> 20} MiB in one step")
            return memory
        place = storage.data_ptr()
        self._memories[place] = (memory, storage.nbytes(), storage)
        bisect.insort(self._starts, place)
        self._seen.append(weakref.ref(x))
        return memory

    def memory_of(self, x: Tensor) -> Memory | None:
        """Of a tensor that changes; None for others."""
        found = self._memories.get(x.untyped_storage().data_ptr()) if x.numel() else None
        return None if found is None else found[0]

    def changes(self, x: Tensor) -> bool:
        """Whether the values of x change from run to run."""
        return self.memory_of(x) is not None

    def constant(self, x: Tensor) -> None:
        """Ring elements of public values that do not change."""
        self._keep.append(x)

    def _varies(self, x: Tensor) -> bool:
        """Whether x changes from run to run, or is a weight, which is another one in a module that is alike."""
        if not x.numel():
            return False
        start = x.untyped_storage().data_ptr()
        return start in self._memories or start in self._weights_begin

    def place(self, x: Tensor) -> Operand:
        """As the interface says. Raises UnsupportedOp for other elements than int64, too."""
        if x.dtype != torch.int64:
            raise UnsupportedOp(f"{x.dtype} where ring elements are wanted")
        return self._operand(x)

    def _operand(self, x: Tensor) -> Operand:
        found = self._view(x)
        if not isinstance(found, Operand):
            raise UnsupportedOp(self.reason or "a constant where a value that changes is wanted")
        return found

    def given(self, x: Tensor) -> Operand:
        """As the interface says."""
        found = self.arrives(x)
        found.memory.first = -1
        return found

    def arrives(self, x: Tensor) -> Operand:
        """As the interface says."""
        if self.memory_of(x) is None:
            self.changing(x)
        return self._operand(x)

    def _view(self, x: Tensor) -> Operand | Tensor:
        """A tensor as an operation meets it when it is repeated: a constant as it is."""
        memory = self.memory_of(x)
        if memory is None:
            return x
        memory.used(len(self._events))
        return Operand(memory, int(x.storage_offset()) * x.element_size(), tuple(x.shape), x.stride(), x.dtype)

    def _views(self, arguments: Any) -> Any:  # noqa: ANN401 - whatever PyTorch takes
        def view(x: Tensor) -> Operand | Tensor:
            if x.numel() and x.untyped_storage().data_ptr() in self._weights_begin:
                raise UnsupportedOp("an operation on weights")
            return self._view(x)

        return mapped(arguments, Tensor, view)

    def _address(self, place: int) -> Word:
        """A place in a memory that changes, or the address as it is."""
        number = bisect.bisect_right(self._starts, place) - 1
        if number >= 0:
            start = self._starts[number]
            memory, size, _ = self._memories[start]
            if place < start + size:
                memory.used(len(self._events))
                return ArenaAddress(memory, place - start)
        for number, (start, size) in enumerate(self._weights):
            if start <= place < start + size:
                return WeightAddress(number, place - start)
        return place

    def _written(self, place: int) -> None:
        """Before a step writes at an address: what was constant so far begins as a copy of what it is now."""
        if isinstance(self._address(place), ArenaAddress):
            return
        for start, (dtype, storage) in self._made.items():
            if start <= place < start + storage.nbytes() and dtype == torch.int64:
                whole = torch.empty(0, dtype=torch.int64).set_(storage)
                content = whole.clone()
                self.changing(whole)
                del self._made[start]
                piece, self._into = self._into, self._events  # before all pieces, of which others write there, too
                loops.copy(self.emit, whole, content)
                self._into = piece
                return
        raise UnsupportedOp("a step that writes to memory of before")

    def emit(self, code: CompiledStep, row: Sequence[Word | Tensor]) -> None:
        """Write a step down; `loops.Emit`."""
        words: list[Word] = []
        for each in row:
            if isinstance(each, Tensor):
                words.append(self._address(each.data_ptr()))
                if isinstance(words[-1], int):
                    self._keep.append(each)
            else:
                words.append(each)
        self._into.append(ProgramStep(code, tuple(words)))

    # -- TraceHook -------------------------------------------------------------------------------------------
    @noted
    def addressed(self, tensors: Sequence[Tensor]) -> None:
        """Their kernel is going to be called."""
        for x in tensors:
            if x.numel():
                place = x.data_ptr()
                self._untouched.add(place)
                if isinstance(self._address(place), int):
                    self._keep.append(x)

    @noted
    def launched(self, kernel: Callable[..., None], arguments: Sequence[Any]) -> None:
        """A kernel becomes a step."""
        code, kinds = steps.step_of(kernel)
        if "Written" not in kinds:  # its annotations do not say which arguments are addresses
            raise UnsupportedOp(f"a kernel that states no addresses: {kernel.__name__}")
        row: list[Word] = []
        for kind, each in zip(kinds, arguments, strict=True):
            if kind == "Written":
                self._written(int(each))
        for kind, each in zip(kinds, arguments, strict=True):
            if kind == "Keys":
                row.append(self._address(int(each)))
                if not isinstance(row[-1], WeightAddress):
                    raise UnsupportedOp("a mask of another module's weight")
            elif kind == "Zero":
                if not isinstance(each, np.uint64):
                    raise UnsupportedOp(f"a kernel on {type(each).__name__}")
            elif kind in ("Plan", "IndexTable", "Flags"):
                self._keep.append(each)
                row += [each.ctypes.data, each.size]
            else:
                self._untouched.discard(int(each))
                row.append(self._address(int(each)) if kind in ("Read", "Written") else int(each))
        self._into.append(ProgramStep(code, tuple(row)))

    def parallel_region(self, work: Callable[[int, int], None], ranges: Sequence[tuple[int, int]]) -> None:
        """Pieces become one event, for which the memory that each takes is not used again."""
        pieces: list[list[Event]] = []
        try:
            for first, last in ranges:
                pieces.append([])
                self._into = pieces[-1]
                work(first, last)
        finally:
            self._into = self._events
        self._together(pieces)

    @noted
    def _together(self, pieces: Sequence[Sequence[Event]]) -> None:
        found = [tuple([each for each in piece if isinstance(each, ProgramStep)]) for piece in pieces]
        if list(map(len, found)) != list(map(len, pieces)):
            raise UnsupportedOp("pieces side by side that are not all steps")
        if any(found):
            for step in chain.from_iterable(found):
                for word in step.row:
                    if isinstance(word, ArenaAddress):
                        word.memory.used(len(self._events))
            self._events.append(Parallel(tuple(found)))

    @noted
    def record_receive(self, frm: int, tag: str, payload: Tensor) -> None:
        """As the interface says; of other elements no program makes steps."""
        if payload.dtype != torch.int64 or not payload.numel():
            raise UnsupportedOp(f"{payload.numel()} x {payload.dtype}")
        super().record_receive(frm, tag, payload)

    # -- operations of PyTorch -------------------------------------------------------------------------------
    def operated(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401 - PyTorch's
        """Run an operation of PyTorch and write it down."""
        operation = self._begun(func, args, kwargs)
        made = self.computing(partial(func, *args, **kwargs), func._schema.is_mutable)
        self._ended(func, operation, made)  # `noted` names the function where the recording ends
        return made

    @noted
    def _begun(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _TracedOperation:  # noqa: ANN401 - as above
        tensors = list(tensors_of((args, kwargs)))
        operation = _TracedOperation(
            args, kwargs, tensors, any(map(self._varies, tensors)),
            next(iter(all_written_by(func, args, kwargs)), None),
        )  # fmt: skip
        if operation.changes and operation.written is not None:
            self._written(operation.written.data_ptr())
        return operation

    @noted
    def _ended(self, func: Any, operation: _TracedOperation, made: Any) -> None:  # noqa: ANN401 - as above
        for x in made if isinstance(made, list | tuple) else (made,):
            if isinstance(x, Tensor):
                self._follow(func, operation, x)
            elif operation.changes:
                raise UnsupportedOp(f"gives {type(x).__name__} of a value that changes")

    def _follow(self, func: Any, operation: _TracedOperation, x: Tensor) -> None:  # noqa: ANN401 - as above
        if not x.numel() or self.reason is not None:
            return
        written, start = operation.written, x.untyped_storage().data_ptr()
        if func in loops.STARTED:
            self.changing(x)
        elif written is None and any(start == t.untyped_storage().data_ptr() for t in operation.tensors if t.numel()):
            if start in self._memories:
                self._seen.append(weakref.ref(x))  # a view
        elif not operation.changes or func in loops.CONSTANT:
            self._made.setdefault(start, (x.dtype, x.untyped_storage()))
        else:
            if written is None:
                self.changing(x)
            before = len(self._into)
            try:
                more = {key: value for key, value in operation.kwargs.items() if key != "out"}
                if func in loops.MOVES and any(self._varies(index) for index in tensors_of(operation.args[1:])):
                    raise UnsupportedOp("a move to places that change")
                loops.LOWERED[func](self.emit, x, *operation.args, **more)
            except Exception:  # noqa: BLE001 - a rule for other arguments than these
                del self._into[before:]
                self._called(func, operation, None if written is not None else x)

    def _called(self, func: Any, operation: _TracedOperation, made: Tensor | None) -> None:  # noqa: ANN401 - as above
        """An operation that no step computes is called again, if its result has the same shape every time."""
        args = operation.args
        numbers = func in loops.MOVES and all(index.dtype == torch.int64 for index in tensors_of(args[1:]))
        if (UNFORESEEN & set(func.tags) and not numbers) or (made is not None and len(func._schema.returns) != 1):
            raise UnsupportedOp("a result that depends on values or chance")
        result = () if made is None else (self._operand(made),)
        arguments, named = self._views((tuple(args), operation.kwargs))
        self._into.append(TorchCall(func, arguments, named, result))

    # -- the end ---------------------------------------------------------------------------------------------
    def program(self, inputs: Sequence[Operand], outputs: Sequence[Tensor]) -> Program:
        """As the interface says."""
        if self.reason is not None:
            raise UnsupportedOp(self.reason)
        if self._untouched:
            raise UnsupportedOp("addresses that no kernel was called with")
        found = [self.place(x) if self.changes(x) else x for x in outputs]
        for each in found:
            if isinstance(each, Operand):
                each.memory.last = len(self._events)
        returned = {x.untyped_storage().data_ptr() for x in (*outputs, *self._publics, *self._encodings.values())}
        left = (each() for each in self._seen)
        if any(x is not None and x.untyped_storage().data_ptr() not in returned for x in left):
            raise UnsupportedOp("a value that outlives the step")
        program = Program(self._events, inputs, found, self.masks(), self._keep)
        if program.size > MOST_BYTES:
            raise UnsupportedOp(f"a program of more than {MOST_BYTES >> 20} MiB")
        return program
