"""Why callers were refused, in a few classes for metrics and alerts, and how often a log repeats itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_CLASSES = (
    ("certificate expired", ("has expired", "not valid yet")),
    ("other CA", ("different cas", "another ca", "unknown ca")),
    ("no certificate", ("no certificate", "certificate required")),
    ("not on the list", ("'s list", "list of users", "names no user", "admits users")),
    ("wrong name", ("want the name", "got the name", "certificate of")),
    ("version", ("version",)),
    ("other settings", ("settings", "agree", "differ")),
    ("no such model", ("no model", "share file", "sharing")),
    ("limit", ("too many", "at most", "limit", "queue")),
    ("not this protocol", ("no frame", "not speak tls", "plain http", "malformed", "oversized", "truncated")),
    ("certificate refused", ("certificate", "tls")),
    ("slow or gone", ("timed out", "closed", "reset", "handshake")),
)
OTHER = "other"
_SHARED = ("", "others")
"""Key of those for whom there is no place."""
CLASSES = (*(name for name, _ in _CLASSES), OTHER)


def class_of(reason: str) -> str:
    """One of CLASSES: the first whose words occur in a reason."""
    text = reason.lower()
    return next((name for name, words in _CLASSES if any(word in text for word in words)), OTHER)


class Throttle:
    """Lets through `most` of one key in `period_s`, and counts what it held back. May be called from any thread."""

    def __init__(
        self, most: int, period_s: float, keys: int = 256, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """keys: how many are told apart at a time; those beyond share one, so that strangers cannot fill memory."""
        self._most, self._period, self._keys, self._clock = most, period_s, keys, clock
        self._windows: dict[tuple[str, ...], tuple[float, int, int]] = {}
        self._lock = threading.Lock()

    def let(self, *key: str) -> int | None:
        """None: hold this one back. Otherwise how many of its key were held back since the last that was let."""
        now = self._clock()
        with self._lock:
            if key not in self._windows and self._full():
                self._forget(now)
                key = _SHARED if self._full() else key
            since, let, held = self._windows.get(key, (now, 0, 0))
            if now - since >= self._period:
                since, let = now, 0
            if let >= self._most:
                self._windows[key] = (since, let, held + 1)
                return None
            self._windows[key] = (since, let + 1, 0)
            return held

    def _full(self) -> bool:
        return len(self._windows) - (_SHARED in self._windows) >= self._keys

    def _forget(self, now: float) -> None:
        """Drop keys whose time is over and that hold nothing back."""
        for key in [k for k, (since, _, held) in self._windows.items() if now - since >= self._period and not held]:
            del self._windows[key]
