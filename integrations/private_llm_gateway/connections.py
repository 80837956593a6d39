"""Connections that do not get on with their request: they are closed, so that they keep nobody out.

uvicorn closes connections that are idle behind an answer, but waits for ever for the first request of one, and for the
rest of a request line or headers. Here that takes `HEAD_S` at most; and when more than half of all connections allowed
wait so, the one that waits longest makes room. A body's time is limited in `guard.py`.
"""

from __future__ import annotations

import asyncio
import time

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 10.0
"""Seconds from a connection, or from the first byte behind an answer, to the end of a request's headers."""


class Connection(H11Protocol):
    """A connection of the gateway. `since`: since when it waits for a request, None while it does not."""

    since: float | None = None
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a request."""
        super().connection_made(transport)
        self._follow()
        waiting = [each for each in self.connections if isinstance(each, Connection) and each.since is not None]
        if self.limit_concurrency is not None and len(waiting) > self.limit_concurrency // 2:
            min(waiting, key=lambda each: each.since or 0.0)._end()

    def data_received(self, data: bytes) -> None:
        """Wait for the rest, or no more."""
        super().data_received(data)
        self._follow()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is over."""
        self._stop()
        super().connection_lost(exc)

    def _follow(self) -> None:
        """Start waiting, or stop."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop()
        elif self._timer is None:
            self.since = time.monotonic()
            self._timer = self.loop.call_later(HEAD_S, self._end)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self.since = None, None

    def _end(self) -> None:
        self._stop()
        self.transport.abort()
