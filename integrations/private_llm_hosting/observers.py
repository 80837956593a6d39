"""Who watches a party service: one that writes logs, one that counts for Prometheus (public figures, no user's name),
one that tells several others; and the watch over certificates."""

import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from private_llm_hf.service.settings import BatchFacts, Observer
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from private_llm.config import VERSION
from private_llm.errors import ConfigError
from private_llm.net.authority import certificate_facts
from private_llm.tls_config import TLSConfig
from private_llm_hosting.check import in_words
from private_llm_hosting.logs import LOGGER

_LOG = logging.getLogger(LOGGER)
_MOST, _PERIOD_S = 5, 60.0  # lines about refusals of one class and caller, and the time in which they may be written
_MOST_IN_ALL = 60  # lines about all refusals in the same time
_SESSIONS, _SESSIONS_IN_ALL = 60, 600  # lines of one kind about sessions of one user, and of all, in the same time
STARTING_S = 300.0  # seconds in which a party that is not there is taken to load its models; afterwards it is an error
_AWAITED_S = 30.0  # seconds between two lines about parties that are not there


class LogObserver(Observer):
    """Writes a line per event; passes as "debug". What repeats itself often is counted instead of written."""

    def __init__(self) -> None:
        self._refusals = Throttle(_MOST, _PERIOD_S), Throttle(_MOST_IN_ALL, _PERIOD_S)
        self._sessions = Throttle(_SESSIONS, _PERIOD_S), Throttle(_SESSIONS_IN_ALL, _PERIOD_S)
        self._awaited = Throttle(1, _AWAITED_S)

    def links_up(self) -> None:
        """As `Observer`."""
        _LOG.info("sessions may begin", extra={"event": "links_up"})

    def links_down(self, reason: str, orderly: bool = False) -> None:
        """As `Observer`."""
        level, what = logging.ERROR, "the links between the parties ended"
        if orderly:
            level, what = logging.WARNING, "a party stops in order; the links between the parties ended"
        _LOG.log(level, what, extra={"event": "links_down", "reason": reason})

    def links_awaited(self, who: str | None, reason: str, seconds: float) -> None:
        """As `Observer`: no error as long as others may be starting."""
        starting = who is not None and seconds < STARTING_S
        held = self._awaited.let("starting" if starting else "error")
        if held is None:
            return
        what = "the parties cannot be linked" if who is None else f"waiting for {who} (for {seconds:.0f} s)"
        extra = {"event": "links_awaited", "reason": reason, "seconds": round(seconds), "suppressed": held or None}
        _LOG.log(logging.INFO if starting else logging.ERROR, what, extra=extra)

    def session_began(self, session: str, user: str) -> None:
        """As `Observer`."""
        self._session(logging.INFO, "session began", event="session_began", session=session, user=user)

    def session_ended(self, session: str, user: str, seconds: float, reason: str | None) -> None:
        """As `Observer`."""
        level, message = (logging.INFO, "session ended") if reason is None else (logging.WARNING, "session was ended")
        more = {"event": "session_ended", "session": session, "user": user, "seconds": round(seconds, 3)}
        self._session(level, message, **more, **({} if reason is None else {"reason": reason}))

    def refused(self, who: str, reason: str) -> None:
        """As `Observer`."""
        told = "a caller was refused"
        _repeated(
            self._refusals, class_of(reason), logging.WARNING, told, event="refused", user=who, reason=reason or None
        )

    def busy(self, user: str) -> None:
        """As `Observer`."""
        told = "a client was told to come later"
        _repeated(self._refusals, "busy", logging.WARNING, told, event="busy", user=user)

    def batch_done(self, facts: BatchFacts) -> None:
        """As `Observer`."""
        _LOG.debug(
            "pass done",
            extra={
                "event": "pass", "model": facts.model, "requests": facts.requests, "rows": facts.rows,
                "tokens": facts.tokens, "seconds": round(facts.seconds, 4),
            },
        )  # fmt: skip

    def draining(self) -> None:
        """As `Observer`."""
        _LOG.info("no session begins any more; waiting for those that run", extra={"event": "draining"})

    def _session(self, level: int, message: str, **extra: object) -> None:
        _repeated(self._sessions, message, level, message, **extra)


def _repeated(throttles: "tuple[Throttle, Throttle]", kind: str, level: int, message: str, **extra: object) -> None:
    """A line, unless there were too many of its kind and user, or in all; the next one counts those held back."""
    held = throttles[0].let(kind, str(extra["user"]))
    in_all = None if held is None else throttles[1].let()
    if held is not None and in_all is not None:
        _LOG.log(level, message, extra={**extra, "suppressed": held + in_all or None})


class Observers(Observer):
    """Tells each of several observers; none of them can keep the others, or the service, from going on."""

    def __init__(self, *others: Observer) -> None:
        def tell(name: str, *arguments: object) -> None:
            for other in others:
                try:
                    getattr(other, name)(*arguments)
                except Exception:  # noqa: BLE001 - watching a service must not end it
                    _LOG.exception("an observer failed at %s", name)

        for name in vars(Observer):
            if name[0] != "_":
                setattr(self, name, functools.partial(tell, name))


# -- why callers were refused, in a few classes, and how often a log repeats itself ------------------------------------
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
_SHARED = ("", "others")  # key of those for whom there is no place
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


_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, math.inf)
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, math.inf)
_NAME = "private_llm_party"


class PartyMetrics(Observer):
    """Counts what a service reports. links_are_up, is_draining, awaits: what it said last."""

    def __init__(self, party: int, protocol: str, models: Iterable[str] = ()) -> None:
        self.registry = registry = CollectorRegistry()
        self.links_are_up = self.is_draining = False
        self.awaits: str | None = None
        ProcessCollector(registry=registry)

        gauge = functools.partial(Gauge, namespace=_NAME, registry=registry)
        counter = functools.partial(Counter, namespace=_NAME, registry=registry)
        histogram = functools.partial(Histogram, labelnames=("model",), namespace=_NAME, registry=registry)

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
        self._rows = histogram("pass_rows", "Rows of a pass.", buckets=_SIZES)
        self._requests = histogram("pass_requests", "Requests that a pass serves.", buckets=_SIZES)
        self._seconds = histogram("pass_seconds", "Seconds of a pass.", buckets=_SECONDS)
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


# -- how long certificates are valid: a figure always, warnings in the log from 30 days on ----------------------------
ALARM_DAYS = 7  # days before its end from which a certificate is an error, as of `check.WARN_DAYS` a warning
_LOOK_S = 60.0  # seconds between two looks: what is renewed shows soon
_REPEAT = 24 * 60  # looks after which a warning is repeated: a day


class ExpiryWatch:
    """Looks at an endpoint's certificate and CAs, now and in a thread, until it is closed."""

    def __init__(self, tls: TLSConfig, metrics: PartyMetrics, look_s: float = _LOOK_S) -> None:
        self._files = {"certificate": Path(tls.certificate), "ca": Path(tls.ca)}
        self._metrics, self._look_s = metrics, look_s
        self._said: dict[str, int] = {}
        self._ended = threading.Event()
        self.look()
        self._thread = threading.Thread(target=self._run, name="certificates", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self._look_s):
            self.look()

    def look(self) -> None:
        """Tell metrics and log what is there now; files that cannot be read keep what was told of them last."""
        try:
            found = [(file, facts) for file, path in self._files.items() for facts in certificate_facts(path)]
        except ConfigError as error:
            self._warn("files", logging.ERROR, f"certificates cannot be read: {error}")
            return
        self._metrics.forget_certificates()
        for file, facts in found:
            self._metrics.certificate(file, facts.name, facts.days_left())
            text = in_words(file, facts)
            if text is not None:
                alarm = facts.days_left() < ALARM_DAYS
                self._warn(facts.fingerprint, logging.ERROR if alarm else logging.WARNING, text)

    def _warn(self, key: str, level: int, text: str) -> None:
        looks = self._said.get(key, 0)
        self._said[key] = looks + 1
        if looks % _REPEAT == 0:
            _LOG.log(level, text, extra={"event": "certificate"})
