"""Observers of a party service: one that writes logs, and one that tells several others."""

from __future__ import annotations

import logging

from private_llm_hf.service.observer import Observer, PassFacts

from private_llm_hosting.logs import LOGGER
from private_llm_hosting.refusals import Throttle, class_of

_LOG = logging.getLogger(LOGGER)
_MOST, _PERIOD_S = 5, 60.0
"""Lines about refusals of one class and caller, and the time in which they may be written."""
_MOST_IN_ALL = 60
"""Lines about all refusals in the same time."""


class LogObserver(Observer):
    """Writes a line per event; passes as "debug". Repeated refusals are counted instead of written."""

    def __init__(self) -> None:
        self._each, self._all = Throttle(_MOST, _PERIOD_S), Throttle(_MOST_IN_ALL, _PERIOD_S)

    def links_up(self) -> None:
        """As `Observer`."""
        _LOG.info("connected with all other parties", extra={"event": "links_up"})

    def links_down(self, reason: str) -> None:
        """As `Observer`."""
        _LOG.error("the links between the parties ended", extra={"event": "links_down", "reason": reason})

    def session_began(self, session: str, user: str) -> None:
        """As `Observer`."""
        _LOG.info("session began", extra={"event": "session_began", "session": session, "user": user})

    def session_ended(self, session: str, user: str, seconds: float, reason: str | None) -> None:
        """As `Observer`."""
        more = {"event": "session_ended", "session": session, "user": user, "seconds": round(seconds, 3)}
        if reason is None:
            _LOG.info("session ended", extra=more)
        else:
            _LOG.warning("session was ended", extra={**more, "reason": reason})

    def refused(self, who: str, reason: str) -> None:
        """As `Observer`."""
        self._repeated("refused", "a caller was refused", who, reason, class_of(reason))

    def busy(self, user: str) -> None:
        """As `Observer`."""
        self._repeated("busy", "a client was told to come later", user, "", "busy")

    def pass_done(self, facts: PassFacts) -> None:
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

    def _repeated(self, event: str, message: str, user: str, reason: str, kind: str) -> None:
        held = self._each.let(kind, user)
        if held is None:
            return
        in_all = self._all.let()
        if in_all is None:
            return
        extra = {"event": event, "user": user, "reason": reason or None, "suppressed": held + in_all or None}
        _LOG.warning(message, extra=extra)


class Observers(Observer):
    """Tells each of several observers; none of them can keep the others, or the service, from going on."""

    def __init__(self, *others: Observer) -> None:
        self._others = others

    def _tell(self, name: str, *arguments: object) -> None:
        for other in self._others:
            try:
                getattr(other, name)(*arguments)
            except Exception:  # noqa: BLE001 - watching a service must not end it
                _LOG.exception("an observer failed at %s", name)

    def links_up(self) -> None:
        """As `Observer`."""
        self._tell("links_up")

    def links_down(self, reason: str) -> None:
        """As `Observer`."""
        self._tell("links_down", reason)

    def session_began(self, session: str, user: str) -> None:
        """As `Observer`."""
        self._tell("session_began", session, user)

    def session_ended(self, session: str, user: str, seconds: float, reason: str | None) -> None:
        """As `Observer`."""
        self._tell("session_ended", session, user, seconds, reason)

    def refused(self, who: str, reason: str) -> None:
        """As `Observer`."""
        self._tell("refused", who, reason)

    def busy(self, user: str) -> None:
        """As `Observer`."""
        self._tell("busy", user)

    def pass_done(self, facts: PassFacts) -> None:
        """As `Observer`."""
        self._tell("pass_done", facts)

    def load(self, sessions: int, requests: int) -> None:
        """As `Observer`."""
        self._tell("load", sessions, requests)

    def draining(self) -> None:
        """As `Observer`."""
        self._tell("draining")
