"""Messages that lie on a GPU: when they may be read, and how they come to and from links of main memory.

Threads of one process hand each other tensors of a GPU as they are. What a GPU does for one stream it does in order;
who works on another stream than the sender waits, on the GPU, until the sender's has come to the message.

Links of main memory take and bring pinned memory, which a GPU reads and writes itself. PyTorch keeps pinned memory that
nobody holds any more for the next message of that size (a power of two), and gives it away only when the copies that
used it are done: so a frame may wait in a socket's queue, and a copy to the GPU go on, without anybody's care.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

_SPIN_S = 2e-4
"""How long a copy is asked for without a pause: small ones take some 10 us, and to be woken takes longer."""
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
