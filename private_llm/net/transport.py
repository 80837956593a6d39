"""The interface every link implements: tagged, length-checked tensors between numbered endpoints.

Endpoints are party numbers 0..n-1 and `CLIENT`. A receiver always states shape and dtype of what it
expects (public facts of the computation), so a frame of another length is an error, never a resize.
Bytes whose number the computation does not tell (commands) come in one frame, too: the receiver states how many it
takes at most, and compares that with what the frame announces before it has memory for them.
`exchange` is the one operation that counts an online round.

Between threads of one process a tensor on a GPU travels as it is, if its receiver computes on GPUs, too; one that works
on another stream than the sender waits, on the GPU, until the sender's has come to the message. All other links carry
main memory, from and to GPUs pinned: PyTorch gives that away only when the copies that used it are done, so a frame may
wait in a socket's queue, and a copy to the GPU go on, without anybody's care. Layers of a model may lie on different
devices, so the next one is asked for at every message; what is sent and counted stays the same.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from private_llm.errors import ConfigError, TransportError
from private_llm.net.direct import BarrierEnd, End
from private_llm.net.ledger import CONTROL, Ledger
from private_llm.net.roles import endpoint_name
from private_llm.net.wire import TRAVELS, dtype_code
from private_llm.protocol_facts import CLIENT as CLIENT


def disagreement(endpoint: int, got: str, want: str) -> TransportError:
    """The error where an endpoint sent another message than is wanted."""
    return TransportError(
        f"from {endpoint_name(endpoint)}: got {got}; want {want} (parties disagree on the computation)"
    )


def awaiting(endpoint: int, tag: str) -> str:
    """What an endpoint did when a message did not come: words of an error."""
    what = "a message" if tag == CONTROL else f"'{tag}'"
    return f"while {what} of {endpoint_name(endpoint)} was awaited"


class Transport(ABC):
    """One endpoint's links to all others."""

    def __init__(self, me: int) -> None:
        self.me = me
        self.ledger = Ledger(me)

    def send(self, to: int, tag: str, payload: Tensor) -> None:
        """Send a contiguous int64, int32 or uint8 tensor; its memory must not change afterwards.

        Returns before the receiver has read it, unless 256 MiB wait for it. Raises DomainError for
        another dtype, PartyFailed when the session has stopped.
        """
        if payload.dtype not in TRAVELS:
            dtype_code(payload.dtype)  # which refuses it
        self.ledger.add_sent(to, tag, payload.numel() * payload.element_size())
        self._send(to, tag, payload)

    def recv(self, frm: int, tag: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The next tensor from `frm`. Raises TransportError if tag, dtype or length differ, PartyFailed on silence."""
        return self._recv(frm, tag, shape, dtype)

    def send_bytes(self, to: int, tag: str, raw: bytes | bytearray) -> None:
        """Send at least one byte, as `send` does; the frame says how many there are."""
        self.send(to, tag, torch.frombuffer(raw if isinstance(raw, bytearray) else bytearray(raw), dtype=torch.uint8))

    def recv_bytes(self, frm: int, tag: str, most: int) -> bytes:
        """What `frm` sent by `send_bytes`, up to `most` bytes; more are refused unread. Raises TransportError."""
        return self._recv_bytes(frm, tag, most)

    def exchange(self, peer: int, tag: str, payload: Tensor) -> Tensor:
        """Send to `peer` and receive a tensor of the same shape and dtype from it: one round."""
        self.send(peer, tag, payload)
        self.ledger.add_round(tag)
        return self._recv(peer, tag, tuple(payload.shape), payload.dtype)

    @abstractmethod
    def _send(self, to: int, tag: str, payload: Tensor) -> None: ...

    @abstractmethod
    def _recv(self, frm: int, tag: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor: ...

    def _recv_bytes(self, frm: int, tag: str, most: int) -> bytes:
        raise TransportError(f"'{tag}' was awaited on links that carry tensors of known shapes only")

    @abstractmethod
    def wait(self, frm: int) -> None:
        """Block, however long, until a frame from `frm` is there (it stays); PartyFailed if the session stops."""

    def parallel_session(self, number: int) -> "Transport":
        """This endpoint's links of parallel session `number` (0: this transport), with a ledger of their own.

        Each belongs to one thread; the end of one is the end of all. Raises ConfigError if these links carry one only.
        """
        if number:
            raise ConfigError(
                "parallel sessions: these links carry one; want parallel_sessions=1, or party_mode threads, processes "
                "or remote"
            )
        return self

    def ends(self, endpoint: int) -> Sequence[End]:
        """Ends of connections with an endpoint that programs may use instead: none if this does more than pass on."""
        return ()

    def barrier_end(self) -> BarrierEnd | None:
        """Where this endpoint waits for all others, if they are threads of this process and messages take no time."""
        return None

    def accept_device_tensors(self) -> None:  # noqa: B027 - for most links nothing changes
        """From now on what comes may lie on a GPU, or in pinned memory: who receives moves it to where it computes."""

    def carries_device_tensors(self, to: int) -> bool:
        """Whether a tensor on a GPU reaches this endpoint as it is; it must not be sent there otherwise."""
        return False

    def where_it_comes(self) -> "Transport":
        """These links, which leave what they receive where it lies: in main memory, or on the sender's GPU."""
        return self

    def name_of(self, endpoint: int) -> str:
        """How the machine of an endpoint number is called."""
        return endpoint_name(endpoint)

    def abort(self, reason: str) -> None:  # noqa: B027 - optional
        """Tell all others that this endpoint stops and why; they raise PartyFailed with the reason."""

    def close(self) -> None:  # noqa: B027 - optional
        """Release the links."""


class PassingTransport(Transport):
    """Links that pass everything on to `inner`, whose ledger they share: a base for those that change one thing."""

    def __init__(self, inner: Transport, me: int | None = None, at: Callable[[int], int] = lambda own: own) -> None:
        """me: this endpoint's number, if it is not the inner one. at: the inner number of the one with another number
        here; who changes that lets `send` book under the inner one, too.
        """
        super().__init__(inner.me if me is None else me)
        self.ledger = inner.ledger
        self._inner, self._at = inner, at

    def _send(self, to: int, tag: str, payload: Tensor) -> None:
        self._inner._send(self._at(to), tag, payload)

    def _recv(self, frm: int, tag: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self._inner._recv(self._at(frm), tag, shape, dtype)

    def _recv_bytes(self, frm: int, tag: str, most: int) -> bytes:
        return self._inner._recv_bytes(self._at(frm), tag, most)

    def accept_device_tensors(self) -> None:
        """As the inner transport."""
        self._inner.accept_device_tensors()

    def wait(self, frm: int) -> None:
        """As the inner transport."""
        self._inner.wait(self._at(frm))

    def name_of(self, endpoint: int) -> str:
        """As the inner transport."""
        return self._inner.name_of(self._at(endpoint))

    def abort(self, reason: str) -> None:
        """As the inner transport."""
        self._inner.abort(reason)

    def close(self) -> None:
        """As the inner transport."""
        self._inner.close()


class MetaTransport(Transport):
    """Counts what would be sent and receives meta tensors: costs without weights, data or other parties."""

    def _send(self, to: int, tag: str, payload: Tensor) -> None:
        pass

    def _recv(self, frm: int, tag: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def wait(self, frm: int) -> None:
        """Nothing to wait for."""


_SPIN_S = 2e-4  # how long a copy is asked for without a pause: small ones take some 10 us, and to be woken takes longer
_NAP_S = 5e-5


class Ready:
    """When a tensor that a thread has given away is computed."""

    def __init__(self, x: Tensor) -> None:
        """At the sender, once x was computed on its current stream."""
        stream = torch.cuda.current_stream(x.device)
        self._stream = stream
        # an event is cheap, but most messages are sent and received on the default stream and need none
        self._event = None if stream == torch.cuda.default_stream(x.device) else stream.record_event()

    def wait(self, x: Tensor) -> None:
        """At the receiver: what its current stream of x's GPU does from now on comes after x is computed."""
        here = torch.cuda.current_stream(x.device)
        if here != self._stream:
            here.wait_event(self._event or self._stream.record_event())
            x.record_stream(here)  # else its memory were free for others as soon as nobody in Python holds it


class Staging:
    """One thread's way from a GPU to main memory, on a stream of its own: what others compute meanwhile goes on."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def out(self, x: Tensor) -> Tensor:
        """A copy of x in pinned memory, as soon as x is computed and copied; other threads may run meanwhile."""
        copied = room(tuple(x.shape), x.dtype)
        self._stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(self._stream):
            copied.copy_(x, non_blocking=True)
        done, until = self._stream.record_event(), time.perf_counter() + _SPIN_S
        while not done.query():
            if time.perf_counter() > until:
                time.sleep(_NAP_S)
        return copied  # so x, whose memory the side stream read, need not be held any longer


def room(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Pinned memory for a message. Raises RuntimeError where there is no GPU."""
    return torch.empty(shape, dtype=dtype, pin_memory=True)


def onto(x: Tensor, device: torch.device) -> Tensor:
    """What came, on a device. Nobody waits for a copy to a GPU but the GPU: x may be let go at once."""
    if device.type != "cuda":
        return x.to(device)
    if x.is_cpu and torch.cuda.is_available() and not x.is_pinned():
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


class PlacedTransport(PassingTransport):
    """`inner`, with received tensors on the device that `where` names."""

    def __init__(self, inner: Transport, where: Callable[[], torch.device | str]) -> None:
        super().__init__(inner)
        self._where = where
        self._staging: dict[torch.device, Staging] = {}
        inner.accept_device_tensors()

    def send(self, to: int, tag: str, payload: Tensor) -> None:
        """As the inner transport: as it is where that carries it so, otherwise from main memory."""
        self._inner.send(to, tag, self._carried(to, payload))

    def where_it_comes(self) -> Transport:
        """The inner links."""
        return self._inner

    def barrier_end(self) -> BarrierEnd | None:
        """As the inner links."""
        return self._inner.barrier_end()

    def _carried(self, to: int, payload: Tensor) -> Tensor:
        if not payload.is_cuda or self._inner.carries_device_tensors(to):
            return payload
        if payload.device not in self._staging:
            self._staging[payload.device] = Staging(payload.device)
        return self._staging[payload.device].out(payload)

    def _send(self, to: int, tag: str, payload: Tensor) -> None:
        self._inner._send(to, tag, self._carried(to, payload))

    def _recv(self, frm: int, tag: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return onto(self._inner._recv(frm, tag, shape, dtype), torch.device(self._where()))
