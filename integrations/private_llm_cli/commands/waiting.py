"""Waiting for parties that are still starting, and saying for whom."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from private_llm.errors import PartiesBusy, PartyFailed, TransportError
from private_llm.net.rendezvous import Unreached

_T = TypeVar("_T")
_LOG = logging.getLogger("private_llm")
_PAUSE_S = 0.5
_FAILURES = 2
"""Sessions that parties may end as they begin."""


def when_ready(call: Callable[[], _T], wait_s: float, show: Callable[[str], None]) -> _T:
    """What `call` makes, as soon as all parties are there and let a session in.

    wait_s: no further try begins after so many seconds; one that has begun takes its own time (`timeout_s`,
    `busy_wait_s`). show: hears for whom it waits. Raises TransportError in the end, PartyFailed the third time, because
    parties whose links form anew end what has just begun, and at once what waiting does not mend.
    """
    began, failures = time.monotonic(), 0
    with _waiting_told(show):
        while True:
            try:
                return call()
            except (Unreached, PartiesBusy, PartyFailed) as error:
                failures += isinstance(error, PartyFailed)
                if failures > _FAILURES:
                    raise
                passed, reason = time.monotonic() - began, str(error)
            if passed >= wait_s:
                raise TransportError(f"the parties were not ready after {passed:.0f} s (--wait {wait_s:g}): {reason}")
            show(f"waiting for the parties (for {passed:.0f} s): {reason}")
            time.sleep(min(_PAUSE_S, wait_s - passed))


@contextlib.contextmanager
def _waiting_told(show: Callable[[str], None]) -> Iterator[None]:
    """Hand the library's words on whom it waits for to `show`; its warnings stay what they are."""
    handler, level = _Handler(show), _LOG.level
    _LOG.addHandler(handler)
    if _LOG.getEffectiveLevel() > logging.INFO:
        _LOG.setLevel(logging.INFO)
    try:
        yield
    finally:
        _LOG.removeHandler(handler)
        _LOG.setLevel(level)


class _Handler(logging.Handler):
    """Takes what is waited for; warnings go where they would go without it."""

    def __init__(self, show: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self._show = show

    def emit(self, record: logging.LogRecord) -> None:
        """One record."""
        if getattr(record, "event", None) == "waiting":
            self._show(record.getMessage())
        elif record.levelno >= logging.WARNING and logging.lastResort is not None and not _others(self):
            logging.lastResort.handle(record)


def _others(own: logging.Handler) -> bool:
    """Whether somebody else handles records."""
    return bool(logging.getLogger().handlers) or any(each is not own for each in _LOG.handlers)
