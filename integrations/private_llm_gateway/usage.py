"""What a request costs while it runs, over all sessions that it has, renewed ones among them."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

from private_llm.errors import ConfigError

_LOOK_S = 0.5
"""How often the parties are asked what they sent: asking takes a trip to them."""


@dataclass(frozen=True)
class Usage:
    """What a request cost so far: bytes over all links, rounds, and tokens in a second since its first.

    Rounds of sessions that run side by side are added, though they may be the same rounds at the parties.
    """

    bytes: int = 0
    rounds: int = 0
    tokens_per_s: float = 0.0

    def to_dict(self) -> dict[str, float]:
        """For JSON."""
        return {"bytes": self.bytes, "rounds": self.rounds, "tokens_per_s": round(self.tokens_per_s, 3)}


class UsageTotal:
    """The cost of one request, whatever becomes of it. Thread-safe. read, made: tokens of prompts and of answers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes = self._rounds = self.read = self.made = 0
        self._first: tuple[float, int] | None = None

    def prompt(self, tokens: int) -> None:
        """A prompt is given to the parties."""
        with self._lock:
            self.read += tokens

    def tokens(self, count: int) -> None:
        """Tokens came."""
        with self._lock:
            self.made += count
            if self._first is None:
                self._first = (time.monotonic(), self.made)

    def add(self, sent: int, rounds: int) -> None:
        """More was sent."""
        with self._lock:
            self._bytes += sent
            self._rounds += rounds

    @property
    def usage(self) -> Usage:
        """The sum."""
        with self._lock:
            began, first = self._first or (time.monotonic(), 0)
            seconds = time.monotonic() - began
            return Usage(self._bytes, self._rounds, (self.made - first) / seconds if seconds > 0 else 0.0)


class UsageMeter:
    """What one session adds to the usage of a request. Only the thread that uses the session may call it."""

    def __init__(self, model: Any, total: UsageTotal) -> None:  # noqa: ANN401 - a private model
        self._model, self._total = model, total
        self._looked = time.monotonic()
        self._now = (0, 0)
        self._costs(reset=True)

    def look(self, now: bool = False) -> Usage:
        """The total, as of a moment ago or, for this session, of `now`."""
        if now or time.monotonic() - self._looked > _LOOK_S:
            found = self._costs(reset=False)
            self._total.add(found[0] - self._now[0], found[1] - self._now[1])
            self._now = found
            self._looked = time.monotonic()
        return self._total.usage

    def renewed(self) -> None:
        """The session that was counted is over; a new one begins at nothing."""
        self._now = (0, 0)

    def _costs(self, reset: bool) -> tuple[int, int]:
        try:
            costs = self._model.cost(reset=reset)
        except ConfigError:  # nothing is counted with these parties
            return (0, 0)
        return (costs.bytes_total, costs.rounds)
