"""Figures of a party service for Prometheus: counts, sizes and times, which are public; no name of a user."""

from __future__ import annotations

import math
from collections.abc import Iterable

from private_llm_hf.service.observer import BatchFacts, Observer
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from private_llm.config import VERSION
from private_llm_hosting.observers import CLASSES, class_of

_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_NAME = "private_llm_party"


class PartyMetrics(Observer):
    """Counts what a service reports. links_are_up, is_draining, awaits: what it said last."""

    def __init__(self, party: int, protocol: str, models: Iterable[str] = ()) -> None:
        self.registry = registry = CollectorRegistry()
        self.links_are_up = self.is_draining = False
        self.awaits: str | None = None
        ProcessCollector(registry=registry)

        def gauge(name: str, text: str, labels: Iterable[str] = ()) -> Gauge:
            return Gauge(f"{_NAME}_{name}", text, tuple(labels), registry=registry)

        def counter(name: str, text: str, labels: Iterable[str] = ()) -> Counter:
            return Counter(f"{_NAME}_{name}", text, tuple(labels), registry=registry)

        def histogram(name: str, text: str, buckets: Iterable[float]) -> Histogram:
            return Histogram(f"{_NAME}_{name}", text, ("model",), buckets=(*buckets, math.inf), registry=registry)

        gauge("info", "Version, party and protocol; always 1.", ("version", "party", "protocol")).labels(
            VERSION, str(party), protocol
        ).set(1)
        self._links = gauge("links_up", "1 while this party is connected with all others.")
        self._drains = gauge("draining", "1 when no session begins any more.")
        self._sessions = gauge("sessions", "Sessions that are open.")
        self._waiting = gauge("requests_waiting", "Requests that wait for a pass.")
        self._lost = counter("links_lost", "How often the links between the parties ended.")
        self._begun = counter("sessions_begun", "Sessions that began.")
        self._ended = counter("sessions_ended", "Sessions that ended: in order, or not.", ("how",))
        self._refused = counter("refused", "Callers that were not let in.", ("reason",))
        self._busy = counter("busy", "Clients that were told to come later.")
        self._passes = counter("passes", "Passes through a model.", ("model",))
        self._tokens = counter("tokens", "Positions computed, over all rows.", ("model",))
        self._sent = counter("sent_bytes", "Bytes that this party sent in passes.", ("model",))
        self._rounds = counter("rounds", "Rounds of communication in passes.", ("model",))
        self._rows = histogram("pass_rows", "Rows of a pass.", _SIZES)
        self._requests = histogram("pass_requests", "Requests that a pass serves.", _SIZES)
        self._seconds = histogram("pass_seconds", "Seconds of a pass.", _SECONDS)
        self._expiry = gauge("certificate_days_left", "Days until a certificate expires.", ("file", "subject"))
        self._models = frozenset(models)
        for reason in CLASSES:
            self._refused.labels(reason)
        for how in ("in order", "error"):
            self._ended.labels(how)
        for model in self._models:
            for each in (self._passes, self._tokens, self._sent, self._rounds):
                each.labels(model)

    def text(self) -> bytes:
        """All figures in the text format of Prometheus."""
        return generate_latest(self.registry)

    def certificate(self, file: str, subject: str, days: float) -> None:
        """How many days a certificate has left. file: certificate or ca."""
        self._expiry.labels(file, subject).set(days)

    def forget_certificates(self) -> None:
        """Those that are told next are all there are."""
        self._expiry.clear()

    def links_up(self) -> None:
        """As `Observer`."""
        self.links_are_up, self.awaits = True, None
        self._links.set(1)

    def links_down(self, reason: str, orderly: bool = False) -> None:
        """As `Observer`."""
        self.links_are_up = False
        self._links.set(0)
        self._lost.inc()

    def links_awaited(self, who: str | None, reason: str, seconds: float) -> None:
        """As `Observer`."""
        self.awaits = "the parties cannot be linked: see the log" if who is None else (
            f"waiting for {who} (for {seconds:.0f} s)"
        )  # fmt: skip

    def session_began(self, session: str, user: str) -> None:
        """As `Observer`."""
        self._begun.inc()

    def session_ended(self, session: str, user: str, seconds: float, reason: str | None) -> None:
        """As `Observer`."""
        self._ended.labels("in order" if reason is None else "error").inc()

    def refused(self, who: str, reason: str) -> None:
        """As `Observer`."""
        self._refused.labels(class_of(reason)).inc()

    def busy(self, user: str) -> None:
        """As `Observer`."""
        self._busy.inc()

    def batch_done(self, facts: BatchFacts) -> None:
        """As `Observer`."""
        model = facts.model if facts.model in self._models else "other"
        self._passes.labels(model).inc()
        self._tokens.labels(model).inc(facts.tokens)
        self._sent.labels(model).inc(facts.sent)
        self._rounds.labels(model).inc(facts.rounds)
        self._rows.labels(model).observe(facts.rows)
        self._requests.labels(model).observe(facts.requests)
        self._seconds.labels(model).observe(facts.seconds)

    def load(self, sessions: int, requests: int) -> None:
        """As `Observer`."""
        self._sessions.set(sessions)
        self._waiting.set(requests)

    def draining(self) -> None:
        """As `Observer`."""
        self.is_draining = True
        self._drains.set(1)
