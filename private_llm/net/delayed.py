"""Links with a latency, for measurements: what is sent leaves later, and the sender does not wait for it."""

from __future__ import annotations

import queue
import threading
import time

from torch import Tensor

from private_llm.errors import TransportError
from private_llm.net.transport import PassingTransport, Transport

_Item = tuple[float, str, Tensor]


class DelayedTransport(PassingTransport):
    """The links of `inner`; every tensor sent leaves `seconds` after it was given, in order."""

    def __init__(self, inner: Transport, seconds: float) -> None:
        super().__init__(inner)
        self._seconds = seconds
        self._queues: dict[int, queue.SimpleQueue[_Item | None]] = {}
        self._failure: TransportError | None = None

    def _send(self, to: int, tag: str, payload: Tensor) -> None:
        if self._failure is not None:
            raise self._failure
        if to not in self._queues:
            self._queues[to] = queue.SimpleQueue()
            threading.Thread(target=self._carry, args=(to,), name=f"delayed to {to}", daemon=True).start()
        self._queues[to].put((time.monotonic() + self._seconds, tag, payload))

    def _carry(self, to: int) -> None:
        """Send what is due, until the end."""
        while (item := self._queues[to].get()) is not None:
            due, tag, payload = item
            time.sleep(max(0.0, due - time.monotonic()))
            try:
                self._inner._send(to, tag, payload)
            except TransportError as error:
                self._failure = error
                return

    def close(self) -> None:
        """As the inner transport, once what was given has left."""
        for each in self._queues.values():
            each.put(None)
        self._inner.close()
