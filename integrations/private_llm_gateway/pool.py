"""A pool of sessions with the same parties: each request has one to itself while it runs.

A session that failed is renewed before it is used again, by whoever uses it next, so that parties that come back are
found without a restart.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from private_llm.errors import ConfigError, PartyFailed, PrivateLLMError, ProtocolAbort, TransportError

_LOOK_S = 0.1
"""How often a waiting request looks whether its client is still there."""


class PoolBusy(Exception):
    """No session came free in time."""


class Abandoned(Exception):
    """The client went away before there was a session."""


class SessionPool:
    """Private models on sessions of their own. Thread-safe.

    first: a private model (what `from_pretrained` and `patch` return). size: sessions at most. open_session: makes a
    further model on a new session (default: `first.open_session`). Raises ConfigError for more than one session where
    none can be opened.
    """

    def __init__(self, first: Any, size: int, open_session: Callable[[], Any] | None = None) -> None:  # noqa: ANN401
        if size < 1:
            raise ConfigError(f"sessions: got {size}; want at least 1")
        opening = open_session or getattr(first, "open_session", None)
        if opening is None and size > 1:
            raise ConfigError(f"sessions: got {size}; these parties serve one session at a time, so want 1")
        self.first, self.size, self._opening = first, size, opening
        self._idle, self._all = [first], [first]
        self._opened = 1
        self._ended: set[int] = set()
        self._changed = threading.Condition()
        self._closed = False

    @property
    def in_use(self) -> int:
        """Sessions that serve a request now."""
        with self._changed:
            return self._opened - len(self._idle)

    @property
    def healthy(self) -> bool:
        """Whether no session is known to have ended."""
        with self._changed:
            return not self._ended and not self._closed

    @contextmanager
    def session(self, timeout_s: float, gone: Callable[[], bool] = lambda: False) -> Iterator[Any]:
        """A private model for one request. gone: whether the client is (asked while waiting).

        Raises PoolBusy after `timeout_s`, Abandoned, and what `renew` and opening a session raise.
        """
        model = self._take(timeout_s, gone)
        try:
            with self._changed:
                ended = id(model) in self._ended
            if ended:
                self.renew(model)
            yield model
        except PrivateLLMError as error:
            over = getattr(getattr(model, "parties", None), "over", None)  # as when the parties refuse a call
            if over is not None or isinstance(error, TransportError | ProtocolAbort):
                with self._changed:
                    self._ended.add(id(model))
            raise
        finally:
            with self._changed:
                self._idle.append(model)
                self._changed.notify()

    def renew(self, model: Any) -> None:  # noqa: ANN401
        """Give a model whose session ended a new one. Raises PartyFailed and other errors of the library."""
        with self._changed:
            self._ended.add(id(model))
        reconnect = getattr(model, "reconnect", None)
        if reconnect is None:
            raise PartyFailed("the session with the parties is over; start the gateway again")
        reconnect()
        with self._changed:
            self._ended.discard(id(model))

    def close(self) -> None:
        """End all sessions."""
        with self._changed:
            self._closed = True
            models, self._all = self._all, []
            self._changed.notify_all()
        for model in models:
            model.close()

    def _take(self, timeout_s: float, gone: Callable[[], bool]) -> Any:  # noqa: ANN401
        until = time.monotonic() + timeout_s
        with self._changed:
            while not self._idle and (self._opened == self.size or self._closed):
                self._check(until, gone)
                self._changed.wait(_LOOK_S)
            self._check(until, gone, waited=False)
            if self._idle:
                return self._idle.pop()
            self._opened += 1
        try:
            made = self._opening()  # type: ignore[misc]
        except (PrivateLLMError, OSError):
            with self._changed:
                self._opened -= 1
                self._changed.notify()
            raise
        with self._changed:
            self._all.append(made)
        return made

    def _check(self, until: float, gone: Callable[[], bool], waited: bool = True) -> None:
        if self._closed:
            raise PartyFailed("the gateway is closing")
        if gone():
            raise Abandoned
        if waited and time.monotonic() > until:
            raise PoolBusy
