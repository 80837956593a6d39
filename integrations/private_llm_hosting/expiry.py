"""Watches how long certificates are valid: a metric always, warnings in the log from 30 days on."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from private_llm.config import TLSConfig
from private_llm.errors import ConfigError
from private_llm.net.authority import CertificateFacts, certificate_facts
from private_llm_hosting.logs import LOGGER
from private_llm_hosting.metrics import PartyMetrics

WARN_DAYS = 30
"""Days before its end from which a certificate is warned of."""
ALARM_DAYS = 7
"""The same, as an error."""
_LOOK_S = 60.0
"""Seconds between two looks: what is renewed shows soon."""
_REPEAT = 24 * 60
"""Looks after which a warning is repeated: a day."""
_LOG = logging.getLogger(LOGGER)


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


def in_words(file: str, facts: CertificateFacts) -> str | None:
    """What is to be done about a certificate soon, or None. file: certificate or ca."""
    days = facts.days_left()
    if days >= WARN_DAYS:
        return None
    left = f"expires in {days:.0f} days" if days > 0 else "has expired"
    what = "want a new one (`private-llm certs request`); it is read without a restart"
    if file == "ca":
        what = "make a new CA, and let all endpoints trust both (one file with the two) before certificates are renewed"
    return f"the {file} {facts.name} {left}, on {facts.ends:%Y-%m-%d %H:%M} UTC; {what}"
