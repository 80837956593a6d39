"""Everything about a party that can be checked before it runs: files, certificates, share files, ports, names."""

import os
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from private_llm.errors import ConfigError, PrivateLLMError
from private_llm.kernels.devices import device_for
from private_llm.net.addresses import addresses_of, listen, parse_address
from private_llm.net.authority import CertificateFacts, certificate_facts, check_signed
from private_llm.net.ledger import size
from private_llm.net.roles import common_name
from private_llm.net.tls import Credentials
from private_llm.tls_config import TLSConfig
from private_llm_hosting.settings import PartySettings

Verdict = Literal["ok", "warning", "error"]
WARN_DAYS = 30  # days before its end from which a certificate is warned of


@dataclass(frozen=True)
class CheckResult:
    """What was looked at, what was found, and whether that will do."""

    what: str
    found: str
    verdict: Verdict = "ok"


def check_party(settings: PartySettings) -> list[CheckResult]:
    """Look at everything; nothing is sent to anybody, and nothing is changed."""
    config = settings.config
    found = [CheckResult("party", f"{settings.party} of {config.endpoints}, protocol {config.protocol}")]
    found += _tried("hosts", lambda: _hosts(settings))
    if config.tls is not None:
        tls = config.tls
        found += _tried("tls", lambda: _tls(tls, common_name(settings.party)))
    for name, path in settings.models.items():
        found += _tried(f"model {name}", lambda name=name, path=path: _model(settings, name, path))  # type: ignore[misc]
    if settings.checkpoint is not None:
        found += _tried("model", lambda: _checkpoint(str(settings.checkpoint)))
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


def _hosts(settings: PartySettings) -> Iterator[CheckResult]:
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


def _model(settings: PartySettings, name: str, path: Path) -> Iterator[CheckResult]:
    from private_llm_hf.service.served_model import open_model  # which takes seconds

    file = open_model(path, settings.config, settings.party)
    bytes_ = path.stat().st_size
    yield CheckResult(f"model {name}", f"{size(bytes_)}, sharing {file.sharing[:12]}, digest fits")
    yield _private("share file", path)


def _checkpoint(source: str) -> Iterator[CheckResult]:
    from private_llm_hf.party.node import NodeCheckpoint  # which takes seconds

    yield CheckResult("model", f"{source}, digest {NodeCheckpoint.open(source).digest[:12]}")


def _device(settings: PartySettings) -> Iterator[CheckResult]:
    if settings.config.device_map is None:
        yield CheckResult("device", str(device_for(settings.config.device, settings.party)))


def _operator(settings: PartySettings) -> Iterator[CheckResult]:
    address = settings.operator
    if address is None:
        yield CheckResult("operator port", "none")
        return
    if address[1] and address[1] == parse_address(settings.config.hosts[settings.party])[1]:
        raise ConfigError(f"operator.address: port {address[1]} is this party's own in hosts; want another one")
    with closing(listen(address, anywhere=False)) as sock:
        local = sock.getsockname()[0] in ("127.0.0.1", "::1")
    more = "" if local else "; it has no authentication: let the firewall admit operators only"
    yield CheckResult("operator port", f"{address[0]}:{address[1]} is free{more}", "ok" if local else "warning")


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
