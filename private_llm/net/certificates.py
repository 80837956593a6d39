"""Certificates for trying things out on one machine, and for tests: a CA and one certificate per endpoint.

The CA's private key is never written: it signs this one set and is forgotten. Parties that distrust each other
make their keys at home and let a CA they agree upon sign them; only the common names matter (see `tls.py`).
"""

from __future__ import annotations

import datetime
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from private_llm.config import TLSConfig
from private_llm.errors import ConfigError
from private_llm.net.tls import common_name
from private_llm.net.transport import CLIENT
from private_llm.net.users import check_user, client_name

_SKEW = datetime.timedelta(minutes=5)
"""Clocks may differ by this much."""


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
    start = start or datetime.datetime.now(datetime.UTC)
    span = (start - _SKEW, start + datetime.timedelta(days=days))
    ca_key = ec.generate_private_key(ec.SECP256R1())
    ca_name = _name(f"private-llm local CA {secrets.token_hex(4)}")  # two sets never look like one
    ca = (
        _builder(ca_name, ca_name, ca_key, span)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(ca_key, hashes.SHA256())
    )

    def issue(name: str, place: Path, file: str) -> TLSConfig:
        key = ec.generate_private_key(ec.SECP256R1())
        uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        certificate = (
            _builder(_name(name), ca_name, key, span)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .sign(ca_key, hashes.SHA256())
        )
        paths = (place / f"{file}.pem", place / f"{file}.key")
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        _write(paths[1], private, 0o600)
        _write(paths[0], certificate.public_bytes(serialization.Encoding.PEM), 0o644)
        return TLSConfig(certificate=str(paths[0]), key=str(paths[1]), ca=str(place / "ca.pem"))

    for place in (folder, *places.values()):
        place.mkdir(exist_ok=True)
        _write(place / "ca.pem", ca.public_bytes(serialization.Encoding.PEM), 0o644)
    for user, place in places.items():
        issue(client_name(user), place, client_name(None))
    endpoints = [*range(parties), *([] if users else [CLIENT])]
    return {endpoint: issue(common_name(endpoint), folder, common_name(endpoint)) for endpoint in endpoints}


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    span: tuple[datetime.datetime, datetime.datetime],
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(span[0])
        .not_valid_after(span[1])
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _write(path: Path, data: bytes, mode: int) -> None:
    """Create a file that was not there, with these permissions from the start."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError:
        raise ConfigError(f"{path} exists already; choose an empty folder (no key is ever overwritten)") from None
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
