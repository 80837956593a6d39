"""`private-llm certs`: a set for trying out, and the steps by which each organisation makes its key at home."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError
from private_llm.net.authority import (
    CertificateFacts,
    certificate_facts,
    check_days,
    make_authority,
    make_certificates,
    make_request,
    read_request,
    sign_request,
    user_folder,
)
from private_llm.net.roles import named
from private_llm.net.transport import endpoint_name
from private_llm.net.wire import legible
from private_llm_cli.commands.output import CONSOLE, emit_json


def trial(out: Path, config: PrivateConfig, parties: int | None, days: float, users: Sequence[str] = ()) -> None:
    """Write a CA and one certificate per endpoint: `parties` of them, or all of `config`, and the client or `users`."""
    if parties is not None and parties < 1:
        raise ConfigError(f"parties: got {parties}; want at least 1")
    check_days(days)
    made = make_certificates(out, config.endpoints if parties is None else parties, days, users=users)
    for endpoint, tls in made.items():
        holder = named(config, endpoint_name(endpoint))
        CONSOLE.print(f"for {holder} alone: {tls.certificate} with {tls.key}", highlight=False, markup=False)
    for user in users:
        CONSOLE.print(f"for user {user} alone: the folder {user_folder(out, user)}", highlight=False, markup=False)
    CONSOLE.print(
        f"signed by {out / 'ca.pem'}. All keys were made on this machine: for trying out. Parties that distrust each "
        "other make their own keys and let a CA they agree upon sign them.",
        highlight=False,
        markup=False,
    )


def ca(out: Path, days: float) -> None:
    """Make a CA in a folder."""
    facts = make_authority(out, days)
    _say(f"for whoever keeps the CA alone: {out / 'ca.key'} (no copy on a party's machine; keep one off line)")
    _say(f"for everybody: {out / 'ca.pem'}, valid until {facts.ends:%Y-%m-%d}, SHA-256 {facts.fingerprint}")


def request(out: Path, name: str) -> None:
    """Make a key and a request."""
    made = make_request(out, name)
    _say(f"stays here: {made.path.with_suffix('.key')}")
    _say(f"for whoever keeps the CA: {made.path}, for {name}; read this to them by phone:")
    _say(f"  SHA-256 of its key {made.fingerprint}")


def sign(path: Path, ca: Path, out: Path | None, days: float, name: str) -> None:
    """Sign a request. Raises ConfigError if it is for another name than `name`."""
    asked = read_request(path)
    if name and asked.name != name:
        raise ConfigError(f"{path}: got a request for {asked.name!r}; want one for {name!r}; nothing was signed")
    made, facts = sign_request(ca, path, out, days)
    _say(f"for {facts.name} (public): {made}, valid until {facts.ends:%Y-%m-%d}, and {ca / 'ca.pem'}")
    _say("signed for whoever holds the key with this fingerprint; did they read the same one to you?")
    _say(f"  SHA-256 of its key {asked.fingerprint}")


def show(paths: Sequence[Path], as_json: bool) -> None:
    """Print what stands in certificates and requests."""
    for path in paths:
        if path.suffix == ".csr":
            asked = read_request(path)
            values = {"name": asked.name, "key_fingerprint": asked.fingerprint}
            text = f"{path}: request for {asked.name}\n  SHA-256 of its key {asked.fingerprint}"
            _emit({"file": str(path), **values}, text, as_json)
            continue
        for facts in certificate_facts(path):
            values = {key: str(value) for key, value in dataclasses.asdict(facts).items()}
            days = round(facts.days_left(), 1)
            _emit({"file": str(path), **values, "days_left": days}, f"{path}: {_text(facts, days)}", as_json)


def _text(facts: CertificateFacts, days: float) -> str:
    left = f"{days:.0f} days left" if days > 0 else "EXPIRED"
    kind = "CA " if facts.authority else ""
    return (
        f"{kind}{facts.name}, {left} (until {facts.ends:%Y-%m-%d %H:%M} UTC), signed by {facts.issuer}\n"
        f"  SHA-256 {facts.fingerprint}"
    )


def _emit(values: dict[str, object], text: str, as_json: bool) -> None:
    if as_json:
        emit_json({"name": "certs", **{("subject" if key == "name" else key): each for key, each in values.items()}})
    else:
        for line in text.splitlines():
            _say(line)


def _say(line: str) -> None:
    CONSOLE.print(legible(line), highlight=False, markup=False, emoji=False, soft_wrap=True)  # :AB: is no emoji
