"""A transport for a party that computes on several devices: what arrives is moved to where it is needed.

Links carry main memory. Which device is next is asked at every message, because the layers of a model may lie on
different ones; the same messages are sent and counted as without this.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from private_llm.net.transport import PassingTransport, Transport


class PlacedTransport(PassingTransport):
    """`inner`, with received tensors on the device that `where` names."""

    def __init__(self, inner: Transport, where: Callable[[], torch.device | str]) -> None:
        super().__init__(inner)
        self._where = where

    def send(self, to: int, tag: str, payload: Tensor) -> None:
        """As the inner transport, from main memory."""
        self._inner.send(to, tag, payload.cpu() if payload.is_cuda else payload)

    def in_main_memory(self) -> Transport:
        """The inner links."""
        return self._inner

    def _recv(self, frm: int, tag: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self._inner._recv(frm, tag, shape, dtype).to(self._where())
