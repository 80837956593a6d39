"""The operator port: alive, ready, figures; and callers that do not behave."""

from __future__ import annotations

import http.client
import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest
from private_llm_hf.service.party_service import PartyService
from private_llm_hf.service.settings import BatchFacts
from private_llm_hosting.observers import CLASSES, PartyMetrics
from private_llm_hosting.run import OperatorPort, why_not_ready
from prometheus_client.parser import text_string_to_metric_families

from private_llm.errors import ConfigError


class Place:
    def __init__(self) -> None:
        self.reason: str | None = "starting"
        self.metrics = PartyMetrics(1, "trio", ["demo"])
        self.port = OperatorPort(("127.0.0.1", 0), lambda: self.reason, self.metrics.text)

    def get(self, path: str, method: str = "GET") -> tuple[int, str]:
        connection = http.client.HTTPConnection(*self.port.address, timeout=10)
        connection.request(method, path)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, text

    def figures(self) -> dict[str, float]:
        """By name and labels' values."""
        families = text_string_to_metric_families(self.get("/metrics")[1])
        return {
            " ".join([sample.name.removeprefix("private_llm_party_"), *sample.labels.values()]): sample.value
            for family in families
            for sample in family.samples
        }


@pytest.fixture
def place() -> Iterator[Place]:
    made = Place()
    yield made
    made.port.close()


def test_alive_and_ready(place: Place) -> None:
    assert place.get("/live") == (200, "live\n")
    assert place.get("/ready") == (503, "starting\n")
    place.reason = None
    assert place.get("/ready?x=1") == (200, "ready\n")
    assert place.get("/ready", "HEAD") == (200, "")
    assert place.get("/")[0] == 404
    assert place.get("/live", "POST")[0] == 501


def test_figures(place: Place) -> None:
    metrics = place.metrics
    metrics.links_up()
    metrics.load(3, 2)
    metrics.session_began("0123456789ab", "alice")
    metrics.session_ended("0123456789ab", "alice", 1.0, None)
    metrics.session_ended("0123456789ab", "alice", 1.0, "it went away")
    metrics.refused("eve", "user 'eve' is not on this party's list")
    metrics.busy("bob")
    metrics.batch_done(BatchFacts("demo", 2, 1, 4, 12, 0.2, 1000, 30))
    metrics.batch_done(BatchFacts("demo", 1, 1, 1, 1, 0.02, 100, 30))
    metrics.batch_done(BatchFacts("a name that is not configured", 1, 1, 1, 1, 0.02, 100, 30))
    found = place.figures()
    wanted = {
        "links_up": 1, "draining": 0, "sessions": 3, "requests_waiting": 2, "sessions_begun_total": 1,
        "sessions_ended_total in order": 1, "sessions_ended_total error": 1, "refused_total not on the list": 1,
        "refused_total other": 0, "busy_total": 1, "passes_total demo": 2, "tokens_total demo": 13,
        "sent_bytes_total demo": 1100, "rounds_total demo": 60, "pass_rows_sum demo": 5, "pass_requests_sum demo": 3,
        "pass_seconds_count demo": 2, "pass_seconds_bucket 0.025 demo": 1, "passes_total other": 1,
    }  # fmt: skip
    assert {name: found.get(name) for name in wanted} == wanted
    assert found["process_resident_memory_bytes"] > 1e7
    assert sum(name.startswith("refused_total") for name in found) == len(CLASSES)
    assert not [name for name in found if "alice" in name or "eve" in name or "not configured" in name]
    metrics.links_down("gone")
    metrics.draining()
    found = place.figures()
    assert (found["links_up"], found["links_lost_total"], found["draining"]) == (0, 1, 1)


def test_certificates_in_figures(place: Place) -> None:
    place.metrics.certificate("certificate", "party1", 12.5)
    assert place.figures()["certificate_days_left certificate party1"] == 12.5
    place.metrics.forget_certificates()
    assert not [name for name in place.figures() if name.startswith("certificate")]


def test_callers_that_only_sit_there_do_not_keep_others_out_for_long(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("private_llm_hosting.run._PortHandler.timeout", 0.3)
    idle = [socket.create_connection(place.port.address, timeout=10) for _ in range(40)]
    idle[0].sendall(b"GET /li")
    idle[1].sendall(b"\x16\x03\x01" + b"x" * 2000)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            assert place.get("/live") == (200, "live\n")
            break
        except (http.client.HTTPException, OSError):
            time.sleep(0.05)
    else:
        pytest.fail("nobody was answered")
    for each in idle:
        each.close()


def test_a_port_that_is_taken(place: Place) -> None:
    with pytest.raises(ConfigError, match=r"operator\.address: cannot listen at 127\.0\.0\.1:\d+ .*choose a free port"):
        OperatorPort(place.port.address, lambda: None, bytes)


def test_readiness_names_whom_it_waits_for() -> None:
    metrics = PartyMetrics(1, "trio")
    assert why_not_ready(metrics, None) == "starting"
    metrics.links_awaited("party 2", "party 2 did not connect", 20.2)
    assert why_not_ready(metrics, None) == "waiting for party 2 (for 20 s)"
    metrics.links_awaited(None, "a certificate has expired", 30.0)
    assert why_not_ready(metrics, None) == "the parties cannot be linked: see the log"
    metrics.links_up()
    assert why_not_ready(metrics, None) == "loading models"
    assert why_not_ready(metrics, cast("PartyService", SimpleNamespace(ready=False))) == "loading models"
    assert why_not_ready(metrics, cast("PartyService", SimpleNamespace(ready=True))) is None
    metrics.links_down("party 2 has stopped", True)
    assert why_not_ready(metrics, None) == "starting"
