"""Links with a latency between the parties of a service: what is sent leaves later, and the sender does not wait."""

import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from private_llm_hf.service import local, party_service
from private_llm_hf.service.batch_executor import ServiceLinks
from torch import Tensor

from private_llm.config import PrivateConfig
from private_llm.errors import TransportError
from private_llm.net.children import start_servers
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


def serve(config: PrivateConfig, number: int, listener: socket.socket, latency_ms: float, **named: Any) -> None:  # noqa: ANN401
    """One party of `parties_apart`, in its process."""

    def links(mesh: Transport) -> ServiceLinks:
        return ServiceLinks(DelayedTransport(mesh, latency_ms / 1e3) if latency_ms else mesh)

    with patch.object(party_service, "ServiceLinks", links):
        local.serve(config, number, listener, **named)


def parties_apart(config: PrivateConfig, models: Mapping[str, str | Path], latency_ms: float) -> local.LocalParties:
    """Parties of a service with so many milliseconds between them, one way."""

    def start(
        config: PrivateConfig, entry: str, extra: Mapping[str, Any], listeners: Sequence[socket.socket]
    ) -> Callable[[], None]:
        return start_servers(config, "delayed_links:serve", {**extra, "latency_ms": latency_ms}, listeners)

    with patch.object(local, "start_servers", start):
        return local.LocalParties(config, models)
