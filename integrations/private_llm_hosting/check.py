"""Everything about a party that can be checked before it runs: files, certificates, share files, ports, names."""

from __future__ import annotations

import logging
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from private_llm_hf.service.served_model import open_model

from private_llm.config import TLSConfig
from private_llm.errors import ConfigError, PrivateLLMError
from private_llm.kernels.devices import device_for
from private_llm.net.addresses import addresses_of, listen, parse_address
from private_llm.net.authority import CertificateFacts, certificate_facts, check_signed
from private_llm.net.ledger import size
from private_llm.net.tls import Credentials
from private_llm.net.users import common_name
from private_llm_hosting.logs import LOGGER
from private_llm_hosting.observers import PartyMetrics
from private_llm_hosting.settings import HostingSettings

Verdict = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class CheckResult:
    """What was looked at, what was found, and whether that will do."""

    what: str
    found: str
    verdict: Verdict = "ok"


def check_party(settings: HostingSettings) -> list[CheckResult]:
    """Look at everything; nothing is sent to anybody, and nothing is changed."""
    config = settings.config
    found = [CheckResult("party", f"{settings.party} of {config.endpoints}, protocol {config.protocol}")]
    found += _tried("hosts", lambda: _hosts(settings))
    if config.tls is not None:
        tls = config.tls
        found += _tried("tls", lambda: _tls(tls, common_name(settings.party)))
    for name, path in settings.service.models.items():
        found += _tried(f"model {name}", lambda name=name, path=path: _model(settings, name, path))  # type: ignore[misc]
    found += _tried("device", lambda: _device(settings))
    for name in ("offline_folder", "offload_folder"):
        folder = getattr(config, name)
        if folder is not None and not os.access(folder, os.W_OK | os.X_OK):
            found.append(CheckResult(name, f"{folder}: no folder that this user may write to; make one", "error"))
    found += _tried("operator port", lambda: _operator(settings))
    return found


def _tried(what: str, look: Callable[[], Iterator[CheckResult]]) -> list[CheckResult]:
    """What a look finds, up to the first thing that is wrong."""
    found = []
    try:
        for finding in look():
            found.append(finding)
    except PrivateLLMError as error:
        found.append(CheckResult(what, str(error), "error"))
    except OSError as error:
        found.append(CheckResult(what, f"{error.filename or what}: {error.strerror or type(error).__name__}", "error"))
    return found


def _hosts(settings: HostingSettings) -> Iterator[CheckResult]:
    config = settings.config
    addresses = addresses_of(config, settings.party, (), b"")
    secure = config.tls is not None
    if not secure:
        yield CheckResult("tls", "none: unencrypted, on loopback addresses only; for trying out", "warning")
    for number, (host, _) in enumerate(addresses):
        if number != settings.party and not _has_address(host):
            yield CheckResult(f"party {number}", f"{host} has no address yet; want one in DNS or /etc/hosts", "warning")
    host, port = addresses[settings.party]
    listen((host, port), anywhere=secure).close()
    yield CheckResult("port", f"{host}:{port} is free")


def _has_address(host: str) -> bool:
    try:
        return bool(socket.getaddrinfo(host, None))
    except OSError:
        return False


def _tls(tls: TLSConfig, name: str) -> Iterator[CheckResult]:
    users = Credentials(tls).users
    facts = check_signed(tls)
    if facts.name != name:
        raise ConfigError(f"{tls.certificate}: got the name {facts.name!r}; want {name!r}; check party and certificate")
    for file, path in (("certificate", tls.certificate), ("ca", tls.ca)):
        for each in certificate_facts(Path(path)):
            soon = in_words(file, each)
            good = f"{each.name}, {each.days_left():.0f} days left"
            yield CheckResult(file, soon or good, "warning" if soon else "ok")
    yield _private("key", Path(tls.key))
    if users is None:
        yield CheckResult("users", "everybody with a client's certificate of the CA")
    else:
        users.verify()
        yield CheckResult("users", f"those on the list ({tls.allow})" if "/" in str(tls.allow) else str(tls.allow))


def _private(what: str, path: Path) -> CheckResult:
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        return CheckResult(what, f"{path}: others may open it (mode {mode:03o}); chmod 600 {path}", "warning")
    return CheckResult(what, f"{path} (mode {mode:03o})")


def _model(settings: HostingSettings, name: str, path: Path) -> Iterator[CheckResult]:
    file = open_model(path, settings.config, settings.party)
    bytes_ = path.stat().st_size
    yield CheckResult(f"model {name}", f"{size(bytes_)}, sharing {file.sharing[:12]}, digest fits")
    yield _private("share file", path)


def _device(settings: HostingSettings) -> Iterator[CheckResult]:
    if settings.config.device_map is None:
        yield CheckResult("device", str(device_for(settings.config.device, settings.party)))


def _operator(settings: HostingSettings) -> Iterator[CheckResult]:
    address = settings.operator
    if address is None:
        yield CheckResult("operator port", "none")
        return
    if address[1] and address[1] == parse_address(settings.config.hosts[settings.party])[1]:
        raise ConfigError(f"operator.address: port {address[1]} is this party's own in hosts; want another one")
    with closing(listen(address, anywhere=False)) as sock:
        local = sock.getsockname()[0] in ("127.0.0.1", "::1")
    text = f"{address[0]}:{address[1]} is free"
    if local:
        yield CheckResult("operator port", text)
    else:
        yield CheckResult(
            "operator port", f"{text}; it has no authentication: let the firewall admit operators only", "warning"
        )


# -- How long certificates are valid ----------------------------------------------------------------------------------
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
