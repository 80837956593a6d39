"""A party's links while it serves many clients: to the other parties as they are, to "the client" whoever is served.

What a client sends for an input is received beforehand, by the thread of its session (`ClientInputRecorder`), so that
no client can make a batch wait. During a batch the protocol receives from what was recorded, and what it opens goes to
the client whose turn it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from private_llm.errors import TransportError
from private_llm.net.direct import End
from private_llm.net.transport import CLIENT, PassingTransport, Transport

Give = Callable[[str, Tensor], None]
"""Sends a tensor, with its tag, to one client."""


@dataclass(frozen=True)
class ReceivedTensor:
    """One tensor that a client has sent."""

    tag: str
    payload: Tensor

    def __repr__(self) -> str:
        return f"Frame({self.tag!r}, shape={tuple(self.payload.shape)})"


class ClientInputRecorder(Transport):
    """A client's link that remembers what is received over it; nothing can be sent."""

    def __init__(self, link: Transport) -> None:
        super().__init__(link.me)
        self.frames: list[ReceivedTensor] = []
        self._link = link

    def _send(self, to: int, tag: str, payload: Tensor) -> None:
        raise TransportError(f"'{tag}': nothing is sent while a client's inputs are received")

    def _recv(self, frm: int, tag: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        payload = self._link.recv(frm, tag, shape, dtype)
        self.frames.append(ReceivedTensor(tag, payload))
        return payload

    def wait(self, frm: int) -> None:
        """As the client's link."""
        self._link.wait(frm)


class ServiceLinks(PassingTransport):
    """The links between the parties, with a client's number for whichever clients a batch serves.

    inputs: what is received next from "the client". receivers: who gets what is sent to "the client", in order.
    """

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.inputs: deque[ReceivedTensor] = deque()
        self.receivers: deque[Give] = deque()

    def ends(self, endpoint: int) -> Sequence[End]:
        """Those of the parties."""
        return () if endpoint == CLIENT else self._inner.ends(endpoint)

    def serve(self, frames: Sequence[ReceivedTensor], receivers: Sequence[Give]) -> None:
        """From now on these inputs and receivers; what is left of others is forgotten."""
        self.inputs, self.receivers = deque(frames), deque(receivers)

    def _send(self, to: int, tag: str, payload: Tensor) -> None:
        if to != CLIENT:
            super()._send(to, tag, payload)
        elif self.receivers:
            self.receivers.popleft()(tag, payload)
        else:
            raise TransportError(f"'{tag}': there is no client that this batch opens something to")

    def _recv(self, frm: int, tag: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if frm != CLIENT:
            return super()._recv(frm, tag, shape, dtype)
        frame = self.inputs.popleft() if self.inputs else None
        if frame is None or (frame.tag, frame.payload.dtype) != (tag, dtype) or frame.payload.shape != shape:
            raise TransportError(f"'{tag}': the inputs that were recorded are others than this batch takes")
        return frame.payload
