"""What a run met outside: masks, and what it sent and received. Written down, and given back to check a program."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from private_llm.kernels.trace_hook import TraceHook
from private_llm.net.direct import Direct
from private_llm.net.transport import PassingTransport, Transport
from private_llm.protocols.protocol import Protocol
from private_llm.replay.events import whole_blocks
from private_llm.ring.prg import Prg


class Trace:
    """Masks by stream (whole blocks) and messages in order, where the party computes: a prompt's are gigabytes."""

    def __init__(self) -> None:
        self.drawn: dict[int, list[Tensor]] = {}
        self.sent: list[tuple[int, str, Tensor]] = []
        self.received: list[tuple[int, str, Tensor]] = []


@contextmanager
def unrecorded() -> Iterator[None]:
    """Inside, what PyTorch computes is no part of the step."""
    with _disable_current_modes():
        yield


ResultT = TypeVar("ResultT")


def noted(note: Callable[..., ResultT]) -> Callable[..., ResultT | None]:
    """A method of a recorder that only writes down: errors end the writing, not the step; then None.

    So a method that does something for the step itself (sends, computes) must not be one.
    """

    @functools.wraps(note)
    def guarded(self: TracedTransport, *about: Any) -> ResultT | None:  # noqa: ANN401 - what the method takes
        if self.reason is not None:
            return None
        try:
            with unrecorded():
                return note(self, *about)
        except Exception as error:  # noqa: BLE001 - what nobody foresaw is no reason to end the step
            named = [each if isinstance(each, str) else getattr(each, "__name__", "") for each in about]
            self.stop(f"{' '.join([note.__name__.strip('_'), *filter(None, named)])}: {error or type(error).__name__}")
            return None

    return guarded


class TracedTransport(TraceHook, PassingTransport):
    """Links that tell of every message; who receives or sends has a copy of its own, while all is written down."""

    def __init__(self, inner: Transport, streams: Sequence[Prg]) -> None:
        """streams: of the session's masks."""
        super().__init__(inner)
        self.inner, self.trace, self._streams = inner, Trace(), list(streams)
        self.reason: str | None = None  # why not all of the step was written down, or None

    def stop(self, reason: str) -> None:
        """From now on nothing is written down."""
        self.reason = self.reason or reason

    def operations(self) -> AbstractContextManager[object]:
        """Inside, PyTorch tells of operations, if they are written down."""
        return nullcontext()

    def send(self, to: int, tag: str, payload: Tensor) -> None:
        """Tell, and let the inner transport send a copy and book it: under its own numbers, where it has others."""
        with unrecorded():
            self.record_send(to, tag, payload)
            copied = self._copied(payload)
            self._inner.send(to, tag, payload if copied is None else copied)

    def _recv(self, frm: int, tag: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        with unrecorded():
            payload = super()._recv(frm, tag, shape, dtype)
            copied = self._copied(payload)
            payload = payload if copied is None else copied
            self.record_receive(frm, tag, payload)
            return payload

    @noted
    def _copied(self, payload: Tensor) -> Tensor:
        return payload.clone()

    def _recv_bytes(self, frm: int, tag: str, most: int) -> bytes:
        self.stop("a message of unknown size")
        return super()._recv_bytes(frm, tag, most)

    def wait(self, frm: int) -> None:
        """As the inner transport; no step that is repeated waits for a command."""
        self.stop("a message of unknown size")
        super().wait(frm)

    @noted
    def record_send(self, to: int, tag: str, payload: Tensor) -> None:
        """A message leaves."""
        self.trace.sent.append((to, tag, payload.clone()))

    @noted
    def record_receive(self, frm: int, tag: str, payload: Tensor) -> None:
        """A message has come."""
        self.trace.received.append((frm, tag, payload.clone()))


class TraceLog(TracedTransport):
    """Writes down what a run meets outside, and nothing of what it computes."""

    @noted
    def masks_drawn(self, stream: object, out: Tensor) -> None:
        """Masks of one of the session's streams."""
        for number, each in enumerate(self._streams):
            if each is stream:
                octets = out.view(torch.uint8)
                whole = octets.new_zeros(whole_blocks(each.block, len(octets)))
                whole[: len(octets)] = octets
                self.trace.drawn.setdefault(number, []).append(whole)


@contextmanager
def recorded_by(protocol: Protocol, recorder: Transport) -> Iterator[None]:
    """Inside, the protocol's links are the recorder's."""
    kept, protocol.transport = protocol.transport, recorder
    try:
        yield
    finally:
        protocol.transport = kept


class ReplayTransport:
    """What a program sends to and receives from when it is checked: what was written down of another run."""

    def __init__(self, trace: Trace) -> None:
        self._drawn = {stream: torch.cat(drawn) for stream, drawn in trace.drawn.items()}
        self._received, self.sent = iter(trace.received), Trace().sent
        self.equal = True
        self.direct = Direct(lambda _: ())  # every message is compared

    def fill(self, stream: int, out: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
        """The next masks of a stream, in main memory."""
        self.write(stream, torch.from_numpy(out))

    def write(self, stream: int, room: Tensor) -> None:
        """The same for uint8 [bytes] on any device."""
        drawn, size = self._drawn.get(stream, room[:0]), room.numel()
        self.equal &= drawn.numel() >= size
        if self.equal:
            room.copy_(drawn[:size])
            self._drawn[stream] = drawn[size:]

    def stream(self, number: int) -> None:
        """None: masks are those of the other run."""

    def send(self, to: int, tag: str, payload: Tensor) -> None:
        """Write down."""
        self.sent.append((to, tag, payload))

    def receive(self, frm: int, tag: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """What the other run received, zeros if that was something else."""
        whom, what, payload = next(self._received, (-1, "", torch.empty(0)))
        self.equal &= (whom, what, tuple(payload.shape), payload.dtype) == (frm, tag, shape, dtype)
        return payload if self.equal else torch.zeros(shape, dtype=dtype)

    def agrees(self, trace: Trace) -> bool:
        """Whether the program drew, received and sent the same as the other run, and all of it."""
        left = any(each.numel() for each in self._drawn.values()) or next(self._received, None) is not None
        pairs = zip(self.sent, trace.sent, strict=False)
        same = all(one[:2] == other[:2] and torch.equal(one[2], other[2].to(one[2].device)) for one, other in pairs)
        return self.equal and not left and len(self.sent) == len(trace.sent) and same


class LiveTransport:
    """What a program sends to and receives from when it is repeated: the links of its party."""

    def __init__(self, transport: Transport, streams: Sequence[Prg]) -> None:
        self.transport = transport
        self._streams = streams
        self.send = transport._send
        self.receive = transport.where_it_comes()._recv  # programs have memory of their own for it
        self.direct = Direct(transport.ends)
        self.barrier_end = transport.barrier_end()

    def fill(self, stream: int, out: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
        """The next bytes of a stream."""
        self._streams[stream].fill(out)

    def write(self, stream: int, room: Tensor) -> None:
        """The same for uint8 [bytes] on any device."""
        here = torch.empty(room.numel(), dtype=torch.uint8, pin_memory=room.is_cuda)
        self.fill(stream, here.numpy())
        room.copy_(here, non_blocking=True)  # PyTorch keeps pinned memory until it is copied

    def stream(self, number: int) -> Prg:
        """The party's."""
        return self._streams[number]


ProgramTransport = LiveTransport | ReplayTransport  # what a program meets: streams and links, or their record
