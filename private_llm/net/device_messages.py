"""Messages that lie on a GPU: when they may be read.

Threads of one process hand each other tensors of a GPU as they are. What a GPU does for one stream it does in order;
who works on another stream than the sender waits, on the GPU, until the sender's has come to the message.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
