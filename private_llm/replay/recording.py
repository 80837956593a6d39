"""What all recorders do alike: they are told of operations, pass messages on, and note public values that change.
Where recording ends, the step itself goes on as always.

Public tensors that change from call to call are, for example, rotary angles; ring elements are made of views of them.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from private_llm.errors import UnsupportedOp
from private_llm.net.transport import Transport
from private_llm.replay.events import BreakEvent, Masks, PlaceT, Receive, Send, tensors_of
from private_llm.replay.transports import TracedTransport, noted, unrecorded
from private_llm.ring.prg import Prg
from private_llm.tensor.dispatch import TorchArg

Encoding = tuple[int, tuple[int, ...], tuple[int, ...], int, int]
"""Number of a public tensor; shape, strides and offset (from its first element) of a view of it; fractional bits."""


class StepRecorder(TracedTransport, Generic[PlaceT]):
    """Records while `operations` is the mode of PyTorch, it watches the thread, and is the party's links."""

    def __init__(self, transport: Transport, streams: Sequence[Prg], device: torch.device) -> None:
        """device: where the party computes."""
        super().__init__(transport, streams)
        self._publics: list[Tensor] = []  # that change
        self._encodings: dict[Encoding, Tensor] = {}  # ring elements of views of them
        self._device = device
        self._events: list[Any] = []
        self._drawn: dict[tuple[int, int], list[PlaceT]] = {}  # by stream and number of graph breaks before
        self._breaks = 0

    def operations(self) -> AbstractContextManager[object]:
        """The mode of PyTorch that tells this recorder of operations."""
        return _Operations(self)

    @abstractmethod
    def operated(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401 - PyTorch's
        """Run an operation of PyTorch and write it down."""

    @abstractmethod
    def given(self, x: Tensor) -> PlaceT:
        """A tensor whose values come from outside, before the step. Raises UnsupportedOp if it is too large."""

    def arrives(self, x: Tensor) -> PlaceT:
        """As `given`, in the midst of the step."""
        return self.given(x)

    @abstractmethod
    def place(self, x: Tensor) -> PlaceT:
        """A tensor that changes from run to run and was met before. Raises UnsupportedOp for a constant."""

    @abstractmethod
    def changes(self, x: Tensor) -> bool:
        """Whether the values of x change from run to run."""

    @abstractmethod
    def program(self, inputs: Sequence[PlaceT], outputs: Sequence[Tensor]) -> Any:  # noqa: ANN401 - as programs are
        """What was written down. Raises UnsupportedOp where that is not all."""

    def constant(self, x: Tensor) -> None:
        """Ring elements of public values that do not change."""

    def stop(self, reason: str) -> None:
        """This step cannot be repeated as a program; what was held for it is let go."""
        super().stop(reason)
        for held in vars(self).values():
            if isinstance(held, list | dict | set):
                held.clear()

    def public(self, x: Tensor) -> PlaceT:
        """A public tensor that changes, also as ring elements of its views. Raises UnsupportedOp for an empty one."""
        if not x.numel():
            raise UnsupportedOp("a public tensor without elements")
        self._publics.append(x)
        return self.given(x)

    def encoded(self, values: Tensor, bits: int, make: Callable[[], Tensor]) -> Tensor:
        """Ring elements of public values."""
        with unrecorded():
            made = make()
        held = self._encoded(values, bits, made)
        return made if held is None else held

    @noted
    def _encoded(self, values: Tensor, bits: int, made: Tensor) -> Tensor:
        if not self.changes(values):
            self.constant(made)
            return made
        key = self._encoding_of(values, bits)
        if key is None:
            self.stop("ring elements of public values that are computed")
            return made
        held = self._encodings.get(key)
        if held is None:
            held = self._encodings[key] = made.clone()
            self.given(held)
        return held

    def _encoding_of(self, values: Tensor, bits: int) -> Encoding | None:
        """How ring elements of `values` are made; None if they are no view of a public tensor."""
        place = values.untyped_storage().data_ptr()
        for number, each in enumerate(self._publics):
            if each.untyped_storage().data_ptr() == place and each.dtype == values.dtype:
                offset = int(values.storage_offset() - each.storage_offset())
                return number, tuple(values.shape), values.stride(), offset, bits
        return None

    def graph_break(self, given: Sequence[Tensor], made: Sequence[Tensor]) -> Sequence[Tensor]:
        """Python has computed the graph break of this step; returns what the step goes on with."""
        results = self._break(given, made)
        return made if results is None else results

    @noted
    def _break(self, given: Sequence[Tensor], made: Sequence[Tensor]) -> Sequence[Tensor]:
        """Write a graph break down; copies of what it made."""
        results = [x.contiguous().clone() for x in made]
        inputs = tuple([self.place(x) for x in given])
        self._events.append(BreakEvent(inputs, tuple([self.arrives(x) for x in results])))
        self._breaks += 1
        return results

    @noted
    def masks_drawn(self, stream: object, out: Tensor) -> None:
        """Masks, of one of the session's streams."""
        number = next((n for n, each in enumerate(self._streams) if each is stream), None)
        if number is None or out.device != self._device:
            raise UnsupportedOp("masks of another stream, or on another device")
        if out.numel():
            self._drawn.setdefault((number, self._breaks), []).append(self.arrives(out))

    def masks(self) -> list[Masks[PlaceT]]:
        """All that were drawn."""
        drawn = self._drawn.items()
        return [Masks(n, self._streams[n].block, after_break, tuple(each)) for (n, after_break), each in drawn]

    @noted
    def escaped(self, x: Tensor) -> None:
        """Values leave PyTorch, so what becomes of them is not seen."""
        if self.changes(x):
            self.stop("values that leave PyTorch")

    @noted
    def record_send(self, to: int, tag: str, payload: Tensor) -> None:
        """A message leaves: what it contains must change from run to run."""
        self._events.append(Send(to, tag, self.place(payload)))

    @noted
    def record_receive(self, frm: int, tag: str, payload: Tensor) -> None:
        """A message has come."""
        self._events.append(Receive(frm, tag, self.arrives(payload)))

    def computing(self, call: Callable[[], Any], writes: bool) -> Any:  # noqa: ANN401 - whatever it makes
        """What a part of the step makes. Where memory runs out that this recording holds, that is let go, and the part
        is computed once more, unless it writes to memory that is there.
        """
        try:
            return call()
        except (MemoryError, RuntimeError) as error:
            # of PyTorch's allocators that of the CPU has no class of its own for it
            full = isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
            if self.reason is not None or writes or not full:
                raise
            self.stop(f"memory ran out: {error}")
        return call()

    def encodings(self) -> dict[Encoding, PlaceT]:
        """Ring elements of public tensors, which whoever repeats the program makes anew."""
        return {key: self.place(held) for key, held in self._encodings.items()}


class _Operations(TorchDispatchMode):
    """Passes operations on tensors on to a recorder."""

    def __init__(self, recorder: StepRecorder[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(
        self, func: TorchArg, types: Sequence[type], args: Sequence[TorchArg] = (),
        kwargs: Mapping[str, TorchArg] | None = None,
    ) -> TorchArg:  # fmt: skip
        return self._recorder.operated(func, args, kwargs or {})


UNFORESEEN = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output, torch.Tag.nondeterministic_seeded}
"""Marks of operations whose result has another shape, or is drawn anew, each time."""


def all_written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:  # noqa: ANN401
    """The tensors that an operation writes to."""
    found: list[Any] = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(kwargs.get(argument.name) if argument.kwarg_only else args[number])
    return list(tensors_of(found))
