"""Certificates for trying things out on one machine, and for tests: a CA and one certificate per endpoint.

The CA's private key is never written: it signs this one set and is forgotten. Parties that distrust each other
make their keys at home and let a CA they agree upon sign them; only the common names matter (see `tls.py`).
"""

from __future__ import annotations

import datetime
import os
import secrets
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from private_llm.config import TLSConfig
from private_llm.errors import ConfigError
from private_llm.net.tls import common_name
from private_llm.net.transport import CLIENT

_SKEW = datetime.timedelta(minutes=5)
"""Clocks may differ by this much."""


def make_certificates(
    folder: str | Path, parties: int, days: float = 365, start: datetime.datetime | None = None
) -> dict[int, TLSConfig]:
    """Write `ca.pem`, and `<name>.pem` with `<name>.key` (mode 600) for each party and the client, into `folder`.

    Returns each endpoint's TLSConfig. Certificates are valid for `days` from `start` (default: now).
    Raises ConfigError when one of the files is there already.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    start = start or datetime.datetime.now(datetime.timezone.utc)
    span = (start - _SKEW, start + datetime.timedelta(days=days))
    ca_key = ec.generate_private_key(ec.SECP256R1())
    ca_name = _name(f"private-llm local CA {secrets.token_hex(4)}")  # two sets never look like one
    ca = (
        _builder(ca_name, ca_name, ca_key, span)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(ca_key, hashes.SHA256())
    )
    ca_path = folder / "ca.pem"
    _write(ca_path, ca.public_bytes(serialization.Encoding.PEM), 0o644)
    configs = {}
    for endpoint in [*range(parties), CLIENT]:
        name = common_name(endpoint)
        key = ec.generate_private_key(ec.SECP256R1())
        uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        certificate = (
            _builder(_name(name), ca_name, key, span)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .sign(ca_key, hashes.SHA256())
        )
        paths = (folder / f"{name}.pem", folder / f"{name}.key")
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        _write(paths[1], private, 0o600)
        _write(paths[0], certificate.public_bytes(serialization.Encoding.PEM), 0o644)
        configs[endpoint] = TLSConfig(certificate=str(paths[0]), key=str(paths[1]), ca=str(ca_path))
    return configs


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
