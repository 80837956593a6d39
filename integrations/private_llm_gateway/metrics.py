"""Figures for Prometheus: requests, tokens, bytes, rounds, seconds. Nothing of any prompt or answer."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from private_llm_gateway.request_executor import RequestExecutor
from private_llm_gateway.served import Served
from private_llm_gateway.usage import UsageTotal

_SECONDS = (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)


class GatewayMetrics:
    """The figures of one gateway."""

    def __init__(self, models: Mapping[str, Served], runner: RequestExecutor) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "private_llm_requests", "Answered requests.", ["endpoint", "status"], registry=self.registry
        )
        self._tokens = Counter(
            "private_llm_tokens", "Tokens of prompts and answers.", ["model", "kind"], registry=self.registry
        )
        self._bytes = Counter(
            "private_llm_bytes", "Bytes sent over all links, parties' among them.", ["model"], registry=self.registry
        )
        self._rounds = Counter("private_llm_rounds", "Rounds of the parties.", ["model"], registry=self.registry)
        self._seconds = Histogram(
            "private_llm_seconds", "From request to whole answer.", ["endpoint"], registry=self.registry,
            buckets=_SECONDS,
        )  # fmt: skip
        gauges = {
            name: Gauge(f"private_llm_{name}", told, ["model"], registry=self.registry)
            for name, told in (
                ("sessions_in_use", "Sessions that serve a request."),
                ("requests_in_flight", "Requests that run or wait."),
                ("ready", "1 if the parties did what was asked last."),
            )
        }
        for name, served in models.items():
            gauges["sessions_in_use"].labels(name).set_function(partial(getattr, served.pool, "in_use"))
            gauges["requests_in_flight"].labels(name).set_function(partial(runner.taken.__getitem__, name))
            gauges["ready"].labels(name).set_function(partial(getattr, served.pool, "healthy"))

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
        return generate_latest(self.registry)
