"""Certificates for trying things out on one machine, and for tests: a CA and one certificate per endpoint.

The CA's private key is never written: it signs this one set and is forgotten. Parties that distrust each other
make their keys at home and let a CA they agree upon sign them (`authority.py`); only the common names matter (see
`tls.py`).
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec

from private_llm.config import TLSConfig
from private_llm.net.authority import Authority, authority_name, write_certificate, write_key
from private_llm.net.tls import common_name
from private_llm.net.transport import CLIENT
from private_llm.net.users import check_user, client_name


def user_folder(folder: str | Path, user: str) -> Path:
    """Where `make_certificates` puts what one user gets. Raises ConfigError for a name that no user may have."""
    return Path(folder) / f"client-{check_user(user)}"


def make_certificates(
    folder: str | Path,
    parties: int,
    days: float = 365,
    start: datetime.datetime | None = None,
    users: Sequence[str] = (),
) -> dict[int, TLSConfig]:
    """Write `ca.pem`, and `<name>.pem` with `<name>.key` (mode 600) for each party and the client, into `folder`.

    users: names of users who get a certificate each, instead of a common one for all clients: `client.pem`,
    `client.key` and `ca.pem` in a folder of their own (`user_folder`).
    Returns the TLSConfig of each endpoint whose files lie in `folder` itself. Certificates are valid for `days` from
    `start` (default: now). Raises ConfigError when one of the files is there already, or for a name that is none.
    """
    folder = Path(folder)
    places = {user: user_folder(folder, user) for user in users}
    folder.mkdir(parents=True, exist_ok=True)
    start, span = start or datetime.datetime.now(datetime.UTC), datetime.timedelta(days=days)
    authority = Authority.new(authority_name(), start, span)  # named so that two sets never look like one

    def issue(name: str, place: Path, file: str) -> TLSConfig:
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = authority.issue(name, key.public_key(), start, span)
        paths = (place / f"{file}.pem", place / f"{file}.key")
        write_key(paths[1], key)
        write_certificate(paths[0], certificate)
        return TLSConfig(certificate=str(paths[0]), key=str(paths[1]), ca=str(place / "ca.pem"))

    for place in (folder, *places.values()):
        place.mkdir(exist_ok=True)
        write_certificate(place / "ca.pem", authority.certificate)
    for user, place in places.items():
        issue(client_name(user), place, client_name(None))
    endpoints = [*range(parties), *([] if users else [CLIENT])]
    return {endpoint: issue(common_name(endpoint), folder, common_name(endpoint)) for endpoint in endpoints}
