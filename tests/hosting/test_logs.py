"""Logs: lines that programs and people read, that nobody can forge, and that hold no secret."""

from __future__ import annotations

import io
import json
import logging
import re
import warnings
from collections.abc import Callable, Iterator

import pytest
from private_llm_hf.service.settings import BatchFacts, Observer
from private_llm_hosting.logs import configure_logs
from private_llm_hosting.observers import CLASSES, STARTING_S, LogObserver, Observers, Throttle, class_of

from private_llm.errors import TransportError

LOG = logging.getLogger("private_llm")
EVIL = 'eve"\n2026-01-01T00:00:00.000Z ERROR party0 event=forged\u2028\x1b[31m\u202e user=admin'


@pytest.fixture
def lines() -> Iterator[Callable[[str], list[str]]]:
    """Sends logs to memory, in a format; what was there is put back."""
    loggers = [LOG, logging.getLogger("py.warnings")]
    before = [(each.handlers[:], each.level, each.propagate) for each in loggers]
    stream = io.StringIO()

    def read(log_format: str) -> list[str]:
        found = stream.getvalue().splitlines()
        stream.seek(0)
        stream.truncate()
        configure_logs("party1", log_format, "debug", stream)  # type: ignore[arg-type]
        return found

    yield read
    logging.captureWarnings(False)
    for each, (handlers, level, propagate) in zip(loggers, before, strict=True):
        each.handlers[:], each.propagate = handlers, propagate
        each.setLevel(level)


def tell(observer: Observer) -> None:
    observer.links_up()
    observer.session_began("0123456789ab", "alice")
    observer.batch_done(BatchFacts("demo", 2, 1, 4, 12, 0.25, 1000, 30))
    observer.session_ended("0123456789ab", "alice", 1.5, None)
    observer.session_ended("0123456789ab", "alice", 1.5, "it went away")
    observer.refused("127.0.0.1", "user 'eve' is not on this party's list; ask who runs it")
    observer.busy("bob")
    observer.links_down("party 2 is gone")
    observer.load(1, 2)
    observer.draining()


def test_lines_for_programs(lines) -> None:
    lines("json")
    tell(LogObserver())
    found = [json.loads(line) for line in lines("json")]
    assert [each["event"] for each in found] == [
        "links_up", "session_began", "pass", "session_ended", "session_ended", "refused", "busy", "links_down",
        "draining",
    ]  # fmt: skip
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", each["time"]) for each in found)
    assert {each["party"] for each in found} == {"party1"}
    assert found[1] | {"time": ""} == {
        "time": "", "level": "info", "party": "party1", "event": "session_began", "session": "0123456789ab",
        "user": "alice", "message": "session began",
    }  # fmt: skip
    assert (found[4]["level"], found[4]["reason"], found[4]["seconds"]) == ("warning", "it went away", 1.5)


def test_lines_for_people(lines) -> None:
    lines("text")
    LogObserver().session_ended("0123456789ab", "alice", 1.5, "it went away")
    (line,) = lines("text")
    assert re.fullmatch(
        r'\S+Z WARNING party1 event=session_ended session=0123456789ab user=alice reason="it went away" seconds=1\.5'
        r" -- session was ended",
        line,
    )


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_nobody_forges_a_line(lines, log_format: str) -> None:
    lines(log_format)
    observer = LogObserver()
    observer.session_began("0123456789ab", EVIL)
    observer.session_ended("0123456789ab", EVIL, 1.0, EVIL)
    observer.refused(EVIL, EVIL * 1000)
    LOG.warning("from another place: %s", EVIL)
    LOG.warning("of a program", extra={"user": EVIL, "event": EVIL})
    found = lines(log_format)
    assert len(found) == 5
    for line in found:
        assert line.isprintable()
        assert len(line) < 1800
        if log_format == "json":
            assert json.loads(line)["party"] == "party1"
        else:
            assert "user=admin" not in re.sub(r'"(?:[^"\\]|\\.)*"', "", line.partition(" -- ")[0])


def test_words_of_foreign_errors_stay_out(lines) -> None:
    """They may quote anything; those of the library are written to be read."""
    lines("json")
    try:
        try:
            raise ValueError("the prompt was: my secret")
        except ValueError as error:
            raise TransportError("the link to party 2 broke") from error
    except TransportError:
        LOG.exception("a session did not end in order")
    text = lines("json")[0]
    assert "my secret" not in text
    error = json.loads(text)["error"]
    assert error.startswith("TransportError: the link to party 2 broke [test_logs.py:")
    assert " <- ValueError [test_logs.py:" in error


def test_warnings_are_logged(lines) -> None:
    lines("json")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("look\nout", UserWarning, stacklevel=1)
    assert "look out" in json.loads(lines("json")[0])["message"]


def test_a_log_that_is_gone_ends_nothing(lines) -> None:
    lines("text")
    stream = io.StringIO()
    configure_logs("party1", "text", "info", stream)
    stream.close()
    LogObserver().links_up()


def test_repeated_refusals_are_counted_instead(lines, monkeypatch: pytest.MonkeyPatch) -> None:
    lines("json")
    now = [0.0]
    observer = LogObserver()
    for throttle in observer._refusals:
        monkeypatch.setattr(throttle, "_clock", lambda: now[0])
    for _ in range(1000):
        observer.refused("10.0.0.1", "the other end does not speak TLS")
    observer.refused("10.0.0.2", "the other end does not speak TLS")
    now[0] = 61
    observer.refused("10.0.0.1", "the other end does not speak TLS")
    found = [json.loads(line) for line in lines("json")]
    assert [each.get("suppressed") for each in found] == [None] * 6 + [995]
    for number in range(5000):
        observer.refused(f"10.0.{number}", "the other end does not speak TLS")
    assert len(lines("json")) == 59
    assert len(observer._refusals[0]._windows) <= 257


def test_the_throttle_forgets_what_is_over() -> None:
    now = [0.0]
    throttle = Throttle(1, 10, keys=2, clock=lambda: now[0])
    assert [throttle.let("a"), throttle.let("b"), throttle.let("a"), throttle.let("c"), throttle.let("d")] == [
        0, 0, None, 0, None,
    ]  # fmt: skip
    now[0] = 20
    assert throttle.let("e") == 0  # in the place of b
    assert throttle.let("a") == 1


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("its certificate has expired; issue new ones", "certificate expired"),
        ("user 'eve' is not on this party's list; ask who runs it", "not on the list"),
        ("the certificate 'client' names no user, and this party admits users by name", "not on the list"),
        ("the other end does not speak TLS; set tls at all endpoints or at none", "not this protocol"),
        ("wire version: got 1; want 2", "version"),
        ("the two certificates come from different CAs", "other CA"),
        ("x" * 10_000, "other"),
    ],
)
def test_refusals_fall_into_few_classes(reason: str, kind: str) -> None:
    assert class_of(reason) == kind
    assert kind in CLASSES


def test_an_observer_that_fails_disturbs_nobody(lines) -> None:
    lines("json")

    class Broken(Observer):
        def links_up(self) -> None:
            raise RuntimeError("a word of somebody")

    Observers(Broken(), LogObserver()).links_up()
    found = [json.loads(line) for line in lines("json")]
    assert [each["message"] for each in found] == ["an observer failed at links_up", "sessions may begin"]
    tell(Observers(LogObserver()))
    assert len(lines("json")) == 9


@pytest.mark.parametrize(("orderly", "level"), [(True, "warning"), (False, "error")])
def test_a_party_that_stops_in_order_is_no_error(lines, orderly: bool, level: str) -> None:
    lines("json")
    Observers(LogObserver()).links_down("party 2 has stopped", orderly)
    (found,) = [json.loads(line) for line in lines("json")]
    assert (found["level"], found["event"], found["reason"]) == (level, "links_down", "party 2 has stopped")


def test_parties_that_are_starting_are_waited_for_without_errors(lines, monkeypatch: pytest.MonkeyPatch) -> None:
    lines("json")
    now = [0.0]
    log = LogObserver()
    monkeypatch.setattr(log._awaited, "_clock", lambda: now[0])
    observer = Observers(log)
    for seconds in range(10, 700, 10):
        now[0] = seconds
        observer.links_awaited("party 2", "party 2 did not connect within 10 s", seconds)
    found = [json.loads(line) for line in lines("json")]
    told = [(each["seconds"], each["level"]) for each in found]
    assert told == [(at, "info" if at < STARTING_S else "error") for at, _ in told]
    assert [at for at, _ in told if at < STARTING_S] == list(range(10, int(STARTING_S), 30))
    assert len([at for at, _ in told if at >= STARTING_S]) == 14
    assert found[1]["message"] == "waiting for party 2 (for 40 s)"
    assert (found[1]["suppressed"], found[1]["event"]) == (2, "links_awaited")


def test_links_that_are_refused_are_an_error_at_once_and_not_five_times_a_second(lines) -> None:
    lines("json")
    observer = LogObserver()
    for _ in range(50):
        observer.links_awaited(None, "the certificate of party 2 has expired", 1.0)
    (found,) = [json.loads(line) for line in lines("json")]
    assert (found["level"], found["reason"]) == ("error", "the certificate of party 2 has expired")


def test_sessions_without_end_do_not_fill_the_log(lines, monkeypatch: pytest.MonkeyPatch) -> None:
    lines("json")
    now = [0.0]
    observer = LogObserver()
    for throttle in observer._sessions:
        monkeypatch.setattr(throttle, "_clock", lambda: now[0])
    for _ in range(1000):
        observer.session_began("0123456789ab", "eve")
        observer.session_ended("0123456789ab", "eve", 0.01, "it went away")
    observer.session_began("ba9876543210", "alice")
    now[0] = 61
    observer.session_began("0123456789ab", "eve")
    found = [json.loads(line) for line in lines("json")]
    began = [each for each in found if each["event"] == "session_began"]
    assert [each["user"] for each in began] == ["eve"] * 60 + ["alice", "eve"]
    assert [each.get("suppressed") for each in began] == [None] * 61 + [940]
    assert len(found) - len(began) == 60
    for number in range(5000):
        observer.session_began("0123456789ab", f"user{number}")
    assert 200 < len(lines("json")) <= 599
