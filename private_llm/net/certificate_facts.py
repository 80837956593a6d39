"""What stands in a certificate file: name, dates, fingerprint. Nothing of it is secret."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.x509.oid import NameOID

from private_llm.config import TLSConfig
from private_llm.errors import ConfigError


@dataclass(frozen=True)
class CertificateFacts:
    """One certificate. fingerprint: SHA-256 of the certificate, as openssl prints it. authority: it may sign others."""

    name: str
    issuer: str
    begins: datetime.datetime
    ends: datetime.datetime
    fingerprint: str
    authority: bool

    def days_left(self, now: datetime.datetime | None = None) -> float:
        """Days until it expires; negative afterwards."""
        return (self.ends - (now or datetime.datetime.now(datetime.UTC))).total_seconds() / 86400


def common_name_of(name: x509.Name) -> str:
    """The common names of a subject or issuer, joined by " and "; "" without one."""
    return " and ".join(str(part.value) for part in name.get_attributes_for_oid(NameOID.COMMON_NAME))


def fingerprint_of(raw: bytes) -> str:
    """32 bytes as pairs of hexadecimal digits with colons."""
    return raw.hex(":").upper()


def certificates_in(path: Path) -> list[x509.Certificate]:
    """All certificates of a PEM file. Raises ConfigError if there is none, or it cannot be read."""
    try:
        return x509.load_pem_x509_certificates(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or type(error).__name__}; want a certificate in PEM") from None
    except ValueError:
        raise ConfigError(f"{path}: holds no certificate that can be read; want one in PEM") from None


def facts_of(certificate: x509.Certificate) -> CertificateFacts:
    """What stands in one certificate."""
    try:
        authority = bool(certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca)
    except x509.ExtensionNotFound:
        authority = False
    return CertificateFacts(
        common_name_of(certificate.subject),
        common_name_of(certificate.issuer),
        certificate.not_valid_before_utc,
        certificate.not_valid_after_utc,
        fingerprint_of(certificate.fingerprint(hashes.SHA256())),
        authority,
    )


def certificate_facts(path: Path) -> tuple[CertificateFacts, ...]:
    """What stands in each certificate of a PEM file. Raises ConfigError as `certificates_in`."""
    return tuple(map(facts_of, certificates_in(path)))


def check_signed(tls: TLSConfig) -> CertificateFacts:
    """What stands in an endpoint's certificate, once it is valid now and one of its `ca` signed it. Raises ConfigError.

    A certificate may be followed by those of authorities in between.
    """
    own, *between = certificates_in(Path(tls.certificate))
    facts, now = facts_of(own), datetime.datetime.now(datetime.UTC)
    if not facts.begins <= now:
        raise ConfigError(f"{tls.certificate}: valid from {facts.begins:%Y-%m-%d %H:%M} UTC only; check the clock")
    if facts.ends <= now:
        raise ConfigError(f"{tls.certificate}: expired on {facts.ends:%Y-%m-%d %H:%M} UTC; want a new one")
    if not any(_signed_by(own, other) for other in (*between, *certificates_in(Path(tls.ca)))):
        raise ConfigError(
            f"{tls.certificate}: signed by {facts.issuer!r}, and not by a certificate in {tls.ca}; want certificates "
            "of all endpoints from one CA"
        )
    return facts


def _signed_by(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True
