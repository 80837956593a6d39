"""Keys made at home: each organisation makes its own and asks a CA that all agree upon to sign it.

1. Whoever keeps the CA makes it once (`make_authority`); its key signs, and never leaves that folder.
2. An endpoint makes its key and a request (`make_request`); the key stays with it, the request is public.
3. The CA's keeper signs (`sign_request`) once the request's fingerprint was compared over another channel.

Only the name and the public key of a request are taken over; what it asks for besides is ignored.

`make_certificates` makes a whole set at once, to try things out on one machine: the key of its CA is never written.
"""

from __future__ import annotations

import datetime
import os
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from private_llm.errors import ConfigError
from private_llm.net.roles import check_user, client_name, common_name, is_client
from private_llm.protocol_facts import CLIENT
from private_llm.tls_config import TLSConfig


@dataclass(frozen=True)
class CertificateFacts:
    """One certificate. fingerprint: SHA-256 of the certificate, as openssl prints it. authority: it may sign others."""

    name: str
    issuer: str
    begins: datetime.datetime
    ends: datetime.datetime
    fingerprint: str
    authority: bool

    def days_left(self) -> float:
        """Days until it expires; negative afterwards."""
        return (self.ends - datetime.datetime.now(datetime.UTC)).total_seconds() / 86400


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
    """The facts of an endpoint's valid certificate, signed by its `ca` or an authority behind it, else ConfigError."""
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


SKEW = datetime.timedelta(minutes=5)  # clocks may differ by this much
_LONGEST = 36500  # days that a certificate is valid at most: dates of certificates end with the year 9999
_PARTY = re.compile(r"party(0|[1-9][0-9]?)")
_CA_KEY, _CA = "ca.key", "ca.pem"
_NOT_USED = dict.fromkeys(
    ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only", "decipher_only"),
    False,
)
"""Uses that no key has."""
_NO_PASSWORD = serialization.NoEncryption()

PrivateKey = ec.EllipticCurvePrivateKey
PublicKey = ec.EllipticCurvePublicKey | rsa.RSAPublicKey | ed25519.Ed25519PublicKey | ed448.Ed448PublicKey
_STRONG_RSA = 2048


@dataclass(frozen=True)
class SigningRequest:
    """A key that waits for its certificate. fingerprint: SHA-256 of its public key, to compare by phone."""

    name: str
    fingerprint: str
    path: Path


def check_days(days: float) -> datetime.timedelta:
    """How long a certificate is valid. Raises ConfigError."""
    if not 0 < days <= _LONGEST:
        raise ConfigError(f"days: got {days:g}; want more than 0, at most {_LONGEST}")
    return datetime.timedelta(days=days)


def check_endpoint_name(name: str) -> str:
    """The name, or ConfigError if no endpoint may have it."""
    if not _PARTY.fullmatch(name) and not is_client(name):
        raise ConfigError(f"name: got {name!r}; want party0, party1, ..., client, or client:NAME for one user")
    return name


class Authority:
    """A CA: signs certificates of endpoints."""

    def __init__(self, key: PrivateKey, certificate: x509.Certificate) -> None:
        self.key, self.certificate = key, certificate

    @classmethod
    def new(cls, start: datetime.datetime, span: datetime.timedelta) -> Authority:
        """One with a new key, and a name that no other has, that is valid for `span` from `start`."""
        key, name = ec.generate_private_key(ec.SECP256R1()), f"private-llm local CA {secrets.token_hex(4)}"
        certificate = _builder(_name(name), _name(name), key.public_key(), start, start + span, authority=True).sign(
            key, hashes.SHA256()
        )
        return cls(key, certificate)

    @classmethod
    def open(cls, folder: Path) -> Authority:
        """The one that `make_authority` wrote. Raises ConfigError if it is not whole."""
        (certificate, *_), raw = certificates_in(folder / _CA), _read(folder / _CA_KEY)
        try:
            key = serialization.load_pem_private_key(raw, password=None)
        except (ValueError, TypeError):
            raise ConfigError(f"{folder / _CA_KEY}: no unencrypted private key in PEM; want that of the CA") from None
        if not isinstance(key, PrivateKey) or key.public_key() != certificate.public_key():
            raise ConfigError(f"{folder / _CA_KEY}: is not the key of {_CA}; want the pair that `certs ca` wrote")
        return cls(key, certificate)

    def issue(self, name: str, key: PublicKey, start: datetime.datetime, span: datetime.timedelta) -> x509.Certificate:
        """A certificate for an endpoint: for both sides of TLS, and to sign nothing; it ends with the CA's at last."""
        ends = min(start + span, self.certificate.not_valid_after_utc)
        uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        return (
            _builder(_name(name), self.certificate.subject, key, start, ends, authority=False)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .sign(self.key, hashes.SHA256())
        )


def make_authority(folder: Path, days: float) -> CertificateFacts:
    """Write `ca.key` (mode 600, of its keeper alone) and `ca.pem` (for everybody). Raises ConfigError if one exists."""
    span = check_days(days)
    _refuse_taken(folder / _CA_KEY, folder / _CA)
    made = Authority.new(datetime.datetime.now(datetime.UTC), span)
    folder.mkdir(parents=True, exist_ok=True)
    write_key(folder / _CA_KEY, made.key)
    write_certificate(folder / _CA, made.certificate)
    return facts_of(made.certificate)


def make_request(folder: Path, name: str) -> SigningRequest:
    """Write a new key and a request to sign it: `party1.key` (mode 600) and `party1.csr`, of users `client.*`.

    Raises ConfigError for a name that no endpoint has, and if one of the files exists.
    """
    stem = check_endpoint_name(name).partition(":")[0]
    key_path, path = folder / f"{stem}.key", folder / f"{stem}.csr"
    _refuse_taken(key_path, path)
    key = ec.generate_private_key(ec.SECP256R1())
    request = x509.CertificateSigningRequestBuilder().subject_name(_name(name)).sign(key, hashes.SHA256())
    folder.mkdir(parents=True, exist_ok=True)
    write_key(key_path, key)
    write_new(path, request.public_bytes(serialization.Encoding.PEM), 0o644)
    return SigningRequest(name, _key_fingerprint(key.public_key()), path)


def read_request(path: Path) -> SigningRequest:
    """What a request asks for. Raises ConfigError as `sign_request`."""
    request = _load_request(path)
    return SigningRequest(common_name_of(request.subject), _key_fingerprint(_usable(request, path)), path)


def sign_request(ca: Path, path: Path, out: Path | None, days: float) -> tuple[Path, CertificateFacts]:
    """Sign a request with the CA of a folder; the certificate takes the request's place in name, with `.pem`, in `out`.

    out: a folder (default: where the request lies).
    Raises ConfigError for what is no request, for a name that no endpoint has, a key too weak, a CA that is not whole
    or has expired, and if the certificate exists.
    """
    span, request, authority = check_days(days), _load_request(path), Authority.open(ca)
    target = (out or path.parent) / f"{path.stem}.pem"
    _refuse_taken(target)
    now = datetime.datetime.now(datetime.UTC)
    if authority.certificate.not_valid_after_utc <= now:
        raise ConfigError(f"{ca / _CA}: the CA has expired; make a new one in another folder (`private-llm certs ca`)")
    name = check_endpoint_name(common_name_of(request.subject))
    made = authority.issue(name, _usable(request, path), now, span)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_certificate(target, made)
    return target, facts_of(made)


def _load_request(path: Path) -> x509.CertificateSigningRequest:
    try:
        request = x509.load_pem_x509_csr(_read(path))
    except ValueError:
        raise ConfigError(f"{path}: got another file; want a request (.csr) by `private-llm certs request`") from None
    if not request.is_signature_valid:
        raise ConfigError(f"{path}: its signature does not fit its key; it was altered on the way: send it again")
    return request


def _usable(request: x509.CertificateSigningRequest, path: Path) -> PublicKey:
    key = request.public_key()
    weak = isinstance(key, rsa.RSAPublicKey) and key.key_size < _STRONG_RSA
    if weak or not isinstance(key, PublicKey):
        raise ConfigError(f"{path}: its key is weak, or of a kind that TLS 1.3 does not take; want P-256 or Ed25519")
    return key


def _key_fingerprint(key: PublicKey) -> str:
    digest = hashes.Hash(hashes.SHA256())
    digest.update(key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo))
    return fingerprint_of(digest.finalize())


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: PublicKey, start: datetime.datetime, ends: datetime.datetime, *,
    authority: bool,
) -> x509.CertificateBuilder:  # fmt: skip
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(start - SKEW)
        .not_valid_after(ends)
        .add_extension(x509.BasicConstraints(ca=authority, path_length=0 if authority else None), critical=True)
        .add_extension(
            x509.KeyUsage(not authority, key_cert_sign=authority, crl_sign=authority, **_NOT_USED), critical=True
        )
    )


def write_certificate(path: Path, certificate: x509.Certificate) -> None:
    """Write a certificate in PEM. Raises ConfigError if the file is there."""
    write_new(path, certificate.public_bytes(serialization.Encoding.PEM), 0o644)


def write_key(path: Path, key: PrivateKey) -> None:
    """Write a private key in PEM that only its owner may read. Raises ConfigError if the file is there."""
    form = serialization.PrivateFormat.PKCS8
    write_new(path, key.private_bytes(serialization.Encoding.PEM, form, _NO_PASSWORD), 0o600)


def write_new(path: Path, data: bytes, mode: int) -> None:
    """Create a file that was not there, with these permissions from the start. Raises ConfigError if it was."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError:
        raise _taken(path) from None
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)


def _refuse_taken(*paths: Path) -> None:
    for path in paths:
        if os.path.lexists(path):
            raise _taken(path)


def _taken(path: Path) -> ConfigError:
    return ConfigError(f"{path} exists already; choose an empty folder (no key is ever overwritten)")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or type(error).__name__}") from None


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
    authority = Authority.new(start, span)

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
