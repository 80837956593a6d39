"""A transport that remembers what passed through it, in order, and can alter what is sent.

Transcripts must not depend on secrets, what a party receives must look uniform, and a protocol
that promises to notice tampering must notice it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from private_llm.errors import DomainError
from private_llm.net.transport import PassingTransport, Transport

Alter = Callable[[int, str, Tensor], Tensor]
"""Gets the number of a sent message (from 0), its tag and its payload; returns what is sent instead."""


@dataclass(frozen=True, eq=False)
class Message:
    """One message at one endpoint; `payload` is kept on request and never shown."""

    direction: Literal["sent", "received"]
    peer: int
    tag: str
    dtype: torch.dtype
    nbytes: int
    payload: Tensor | None = field(default=None, repr=False)

    @property
    def outline(self) -> tuple[str, int, str, torch.dtype, int]:
        """Everything but the payload: what an onlooker of the encrypted link may see."""
        return (self.direction, self.peer, self.tag, self.dtype, self.nbytes)


class RecordingTransport(PassingTransport):
    """Wraps `inner`, whose ledger it shares. `messages` grows as messages pass."""

    def __init__(self, inner: Transport, *, payloads: bool = False, alter: Alter | None = None) -> None:
        super().__init__(inner)
        self.messages: list[Message] = []
        self._payloads, self._alter = payloads, alter
        self._sent = 0

    @property
    def outline(self) -> list[tuple[str, int, str, torch.dtype, int]]:
        """The transcript without payloads: must be a function of public shapes alone."""
        return [message.outline for message in self.messages]

    def _send(self, to: int, tag: str, payload: Tensor) -> None:
        if self._alter is not None:
            payload = self._alter(self._sent, tag, payload)
        self._sent += 1
        self._note("sent", to, tag, payload)
        self._inner._send(to, tag, payload)

    def _recv(self, frm: int, tag: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        payload = self._inner._recv(frm, tag, shape, dtype)
        self._note("received", frm, tag, payload)
        return payload

    def _recv_bytes(self, frm: int, tag: str, most: int) -> bytes:
        raw = self._inner._recv_bytes(frm, tag, most)
        self._note("received", frm, tag, torch.frombuffer(bytearray(raw), dtype=torch.uint8))
        return raw

    def _note(self, direction: Literal["sent", "received"], peer: int, tag: str, payload: Tensor) -> None:
        size = payload.numel() * payload.element_size()
        kept = payload.clone() if self._payloads else None
        self.messages.append(Message(direction, peer, tag, payload.dtype, size, kept))


def flip(number: int, bit: int = 0) -> Alter:
    """Alter sent message `number` in one bit (counted from its first byte's lowest, modulo its length).

    What is returned raises DomainError for an empty message.
    """

    def alter(index: int, tag: str, payload: Tensor) -> Tensor:
        if index != number:
            return payload
        if not payload.numel():
            raise DomainError(f"message {number} ('{tag}') is empty: it has no bit to flip")
        changed = payload.clone(memory_format=torch.contiguous_format)
        octets = changed.view(-1).view(torch.uint8)
        octets[bit // 8 % octets.numel()] ^= 1 << bit % 8
        return changed

    return alter
