"""Connections that do not get on with their request: they are closed, so that they keep nobody out.

uvicorn closes connections that are idle after an answer, but waits for ever for the first request of one, and for the
rest of a request line or headers. Here that takes `HEAD_S` at most; and when more than half of all connections allowed
wait so, or after an answer, the one that waits longest makes room: anybody on the machine may open connections. A
body's time is limited in `guard.py`, and some of it is read at a time, since taking small chunks apart takes long.
Whoever does not read its answer has `READ_S`: otherwise the rest of the answer, the request and the connection would
stay for ever.
"""

from __future__ import annotations

import asyncio
import time

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 10.0
"""Seconds from a connection, or from the first byte after an answer, to the end of a request's headers."""
READ_S = 60.0
"""Seconds in which a client that has fallen behind must catch up (to 16 KiB here), or take the end of an answer."""
_AT_ONCE = 4096
"""Bytes that are read before others have their turn: 700 chunks of one byte, 3 ms."""


class Connection(H11Protocol):
    """A connection of the gateway. `since`: since when it waits for a request, None while it does not."""

    since: float | None = None
    _timer: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a request."""
        super().connection_made(transport)
        transport.max_size = _AT_ONCE  # type: ignore[attr-defined]  # of asyncio's own loop
        self._follow()
        waiting = [each for each in self.connections if isinstance(each, Connection) and each.since is not None]
        if self.limit_concurrency is not None and len(waiting) > self.limit_concurrency // 2:
            min(waiting, key=lambda each: each.since or 0.0)._end()

    def data_received(self, data: bytes) -> None:
        """Wait for the rest, or no more."""
        super().data_received(data)
        self._follow()

    def _unsupported_upgrade_warning(self) -> None:
        """Nothing: clients that offer HTTP/2 are answered without it, and need no package for WebSockets."""

    def connection_lost(self, exc: Exception | None) -> None:
        """It is over."""
        self._stop()
        self._caught_up()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client reads less than it is sent."""
        super().pause_writing()
        self._fall_behind()

    def resume_writing(self) -> None:
        """It has caught up."""
        self._caught_up()
        super().resume_writing()

    def on_response_complete(self) -> None:
        """An answer is written, or waits to be."""
        super().on_response_complete()
        self._fall_behind()
        if self.conn.trailing_data[0]:
            self._follow()
        elif self.since is None and not self.transport.is_closing():
            self.since = time.monotonic()

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

    def _fall_behind(self) -> None:
        """Give the client its time to read."""
        self._caught_up()
        if self.transport.get_write_buffer_size():
            self._unread = self.loop.call_later(READ_S, self._end_unread)

    def _caught_up(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
        self._unread = None

    def _end_unread(self) -> None:
        if self.transport.get_write_buffer_size():
            self._end()

    def _end(self) -> None:
        self._stop()
        self.transport.abort()
