"""What a request costs while it runs, over all its sessions, renewed ones among them; and figures for Prometheus."""

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from private_llm.errors import ConfigError

if TYPE_CHECKING:
    from private_llm_gateway.request_executor import RequestExecutor
    from private_llm_gateway.served import Served

_SECONDS = (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
_LOOK_S = 0.5  # how often the parties are asked what they sent: asking takes a trip to them


@dataclass(frozen=True)
class Usage:
    """What a request cost so far: bytes over all links, rounds (of parallel sessions in sum), tokens a second since the
    first. kept: tokens of its prompts that a session had read before.
    """

    bytes: int = 0
    rounds: int = 0
    tokens_per_s: float = 0.0
    kept: int = 0

    def to_dict(self) -> dict[str, float]:
        """For JSON."""
        return {"bytes": self.bytes, "rounds": self.rounds, "tokens_per_s": round(self.tokens_per_s, 3)}


class UsageTotal:
    """The cost of one request, whatever becomes of it. Thread-safe. read, made: tokens of prompts and of answers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes = self._rounds = self._kept = self.read = self.made = 0
        self._first: tuple[float, int] | None = None

    def tokens(self, count: int) -> None:
        """Tokens came."""
        with self._lock:
            self.made += count
            if self._first is None:
                self._first = (time.monotonic(), self.made)

    def add(self, sent: int = 0, rounds: int = 0, read: int = 0, kept: int = 0) -> None:
        """More was sent; so many tokens of a prompt are given to the parties, or need not be read again."""
        with self._lock:
            self._bytes += sent
            self._rounds += rounds
            self.read += read
            self._kept += kept

    @property
    def usage(self) -> Usage:
        """The sum."""
        with self._lock:
            began, first = self._first or (time.monotonic(), 0)
            seconds = time.monotonic() - began
            speed = (self.made - first) / seconds if seconds > 0 else 0.0
            return Usage(self._bytes, self._rounds, speed, self._kept)


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

    def renewed(self, model: Any) -> None:  # noqa: ANN401
        """The session that was counted is over; the model's new one begins at nothing."""
        self._model, self._now = model, (0, 0)

    def _costs(self, reset: bool) -> tuple[int, int]:
        try:
            costs = self._model.cost(reset=reset)
        except ConfigError:  # nothing is counted with these parties
            return (0, 0)
        return (costs.bytes_total, costs.rounds)


class GatewayMetrics:
    """The figures of one gateway: requests, tokens, bytes, rounds, seconds. Nothing of any prompt or answer."""

    def __init__(self, models: "Mapping[str, Served]", runner: "RequestExecutor") -> None:
        self.registry = registry = CollectorRegistry()
        counter = partial(Counter, namespace="private_llm", registry=registry)
        self._requests = counter("requests", "Answered requests.", ["endpoint", "status"])
        self._tokens = counter("tokens", "Tokens of prompts and answers.", ["model", "kind"])
        self._bytes = counter("bytes", "Bytes sent over all links, parties' among them.", ["model"])
        self._rounds = counter("rounds", "Rounds of the parties.", ["model"])
        told = "From request to whole answer."
        self._seconds = Histogram("private_llm_seconds", told, ["endpoint"], registry=registry, buckets=_SECONDS)
        gauge = partial(Gauge, labelnames=["model"], namespace="private_llm", registry=registry)
        in_use = gauge("sessions_in_use", "Sessions that serve a request.")
        in_flight = gauge("requests_in_flight", "Requests that run or wait.")
        ready = gauge("ready", "1 if the parties did what was asked last.")
        for name, served in models.items():
            in_use.labels(name).set_function(partial(getattr, served.pool, "in_use"))
            in_flight.labels(name).set_function(partial(runner.taken.__getitem__, name))
            ready.labels(name).set_function(partial(getattr, served.pool, "healthy"))

        at = "Sessions at a group of parties, by its hosts."
        self._at = Gauge("private_llm_group_sessions", at, ["model", "group"], registry=registry)
        self._groups = {name: served.pool.groups for name, served in models.items() if served.pool.groups is not None}

    def answered(self, endpoint: str, status: int, seconds: float) -> None:
        """A request is over. endpoint: one of the gateway's, so that there are few."""
        self._requests.labels(endpoint, str(status)).inc()
        self._seconds.labels(endpoint).observe(seconds)

    def record_usage(self, model: str, total: UsageTotal) -> None:
        """What a request took, whether or not anybody waited for its end."""
        usage = total.usage
        self._tokens.labels(model, "prompt").inc(total.read)
        self._tokens.labels(model, "completion").inc(total.made)
        self._bytes.labels(model).inc(usage.bytes)
        self._rounds.labels(model).inc(usage.rounds)

    def text(self) -> bytes:
        """As Prometheus reads it."""
        self._at.clear()  # groups that are left
        for name, groups in self._groups.items():
            for hosts, count in groups.sessions().items():
                self._at.labels(name, ",".join(hosts)).set(count)
        return generate_latest(self.registry)
