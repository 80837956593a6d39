"""Mutual TLS 1.3 between endpoints: who a certificate belongs to, and what went wrong in words.

Every endpoint shows a certificate signed by the one CA all endpoints trust; its common name is the endpoint's
name (`party0`, `party1`, ..., `client`, or `client:NAME` for a user with a name, see `roles.py`). Host names are
not looked at: an endpoint is who its certificate says, wherever it runs. Session tickets are off, so that a one-way
connection carries bytes one way only.
OpenSSL encrypts with AES-256-GCM or ChaCha20-Poly1305 and draws fresh keys for each connection; a connection
should be renewed after about 2^24 records (RFC 8446 section 5.5; 256 GiB of full records).
"""

import logging
import os
import socket
import ssl
import threading
from pathlib import Path
from typing import Any

from private_llm.errors import ConfigError, TransportError
from private_llm.net.authority import certificate_facts, check_signed
from private_llm.net.roles import Users, common_name, endpoint_name, is_client
from private_llm.net.transport import CLIENT
from private_llm.tls_config import TLSConfig

_LOG = logging.getLogger("private_llm")

_REMEDIES = {
    "CERTIFICATE_EXPIRED": "its certificate has expired; issue new ones (private-llm certs makes a local set)",
    "UNKNOWN_CA": "the two certificates come from different CAs; give all endpoints certificates of one CA",
    "CERTIFICATE_REQUIRED": "no certificate was shown; set tls='FOLDER'",
    "BAD_CERTIFICATE": "the certificate was refused; it needs the endpoint's name and a signature of the common CA",
    "DECRYPT_ERROR": "the certificate was altered, or signed by another CA of the same name",
    "UNSUPPORTED_CERTIFICATE": "the certificate is not made for TLS servers and clients; issue one for both uses",
    "WRONG_VERSION_NUMBER": "the other end does not speak TLS; set tls at all endpoints or at none",
    "RECORD_LAYER_FAILURE": "the other end does not speak TLS; set tls at all endpoints or at none",
    "HTTP_REQUEST": "the other end speaks plain HTTP; check the port",
    "PROTOCOL_VERSION": "the other end does not speak TLS 1.3",
}
_VERIFY_REMEDIES = {
    9: "its certificate is not valid yet; check the clocks",
    10: "its certificate has expired; issue new ones (private-llm certs makes a local set)",
    18: _REMEDIES["UNKNOWN_CA"],
    19: _REMEDIES["UNKNOWN_CA"],
    20: _REMEDIES["UNKNOWN_CA"],
    21: _REMEDIES["UNKNOWN_CA"],
    7: _REMEDIES["DECRYPT_ERROR"],
    26: _REMEDIES["UNSUPPORTED_CERTIFICATE"],
}


class Credentials:
    """This endpoint's TLS contexts, and the `users` it admits (None: all of its CA).

    Files that have changed are read anew at the next handshake, so that a certificate is renewed without a restart.
    New files that do not fit together, or are another endpoint's, are reported once in the log, and what was there
    before stays in use. Connections that exist are not touched.
    Raises ConfigError if a file is missing, unreadable or does not fit.
    """

    def __init__(self, tls: TLSConfig) -> None:
        for field in ("certificate", "key", "ca"):
            path = Path(getattr(tls, field))
            if not path.is_file():
                raise ConfigError(f"tls.{field}: no file at {path}; private-llm certs makes a set for local use")
        self._tls, self._lock = tls, threading.Lock()
        self._seen = _stamps(tls)
        self._server, self._client = _contexts(tls)
        self._name = certificate_facts(Path(tls.certificate))[0].name
        self.users = None if tls.allow is None else Users(tls.allow)

    def wrap(self, sock: socket.socket, *, server: bool) -> ssl.SSLSocket:
        """A TLS socket around a connected one; its `do_handshake` verifies the peer's certificate against the CA.

        The handshake raises ssl.SSLError (see `explain`), or another OSError if the connection breaks.
        """
        with self._lock:
            self._renew()
            context = self._server if server else self._client
        return context.wrap_socket(sock, server_side=server, do_handshake_on_connect=False)

    def _renew(self) -> None:
        """Use the files as they are now, if they have changed and are good."""
        found = _stamps(self._tls)
        if found == self._seen:
            return
        self._seen = found
        try:
            contexts = _contexts(self._tls)
            facts = check_signed(self._tls)
            if facts.name != self._name:
                raise ConfigError(f"{self._tls.certificate}: got the name {facts.name!r}; want {self._name!r}")
        except (ConfigError, OSError) as error:
            _LOG.error("new certificate files are not used, the old ones stay: %s", error)
            return
        if _stamps(self._tls) != found:  # SAFE: written while they were read; whatever was loaded is not used
            self._seen = None
            return
        self._server, self._client = contexts
        _LOG.info("certificate of %s renewed: valid until %s", facts.name, f"{facts.ends:%Y-%m-%d %H:%M} UTC")


def check_name(sock: socket.socket, endpoint: int, users: Users | None = None) -> None:
    """Raise TransportError unless the peer's certificate, if any, names `endpoint`, and as a client one of `users`."""
    if not isinstance(sock, ssl.SSLSocket):
        return
    names = _names(sock)
    if endpoint == CLIENT and len(names) == 1 and is_client(names[0]):
        if users is not None:
            users.check(names[0])
    elif names != [common_name(endpoint)]:
        raise TransportError(
            f"certificate of {endpoint_name(endpoint)}: got the name {' and '.join(names) or 'none'}; want "
            f"{common_name(endpoint)}; check the order of hosts and which certificate each endpoint uses"
        )


def caller_name(sock: socket.socket) -> str:
    """The user whose certificate the other end has shown, "" for a client without a name or without TLS."""
    names = _names(sock) if isinstance(sock, ssl.SSLSocket) else []
    return names[0].partition(":")[2] if len(names) == 1 else ""


def _names(sock: ssl.SSLSocket) -> list[str]:
    certificate: Any = sock.getpeercert() or {}
    return [str(value) for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]


def explain(error: ssl.SSLError, who: str) -> str:
    """Cause and remedy of a failed handshake with `who`."""
    if isinstance(error, ssl.SSLCertVerificationError):
        remedy = _VERIFY_REMEDIES.get(error.verify_code, "issue certificates for all endpoints from one CA")
        return f"TLS with {who}: its certificate was refused here ({error.verify_message}): {remedy}"
    reason = error.reason or type(error).__name__
    remedy = next((text for key, text in _REMEDIES.items() if key in reason), "check the tls settings of both ends")
    side = f"{who} refused" if "ALERT" in reason else "failed"
    return f"TLS with {who}: {side} ({reason.replace('_', ' ').lower()}): {remedy}"


def _stamps(tls: TLSConfig) -> tuple[tuple[int, ...], ...] | None:
    """What changes with every file that takes the place of another, or is written to; None while one is missing."""
    try:
        found = [os.stat(path) for path in (tls.certificate, tls.key, tls.ca)]
    except OSError:
        return None
    return tuple((each.st_mtime_ns, each.st_ino, each.st_size) for each in found)


def _contexts(tls: TLSConfig) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """For accepting and for calling. Raises ConfigError."""
    server = _context(tls, ssl.PROTOCOL_TLS_SERVER)
    server.num_tickets = 0
    return server, _context(tls, ssl.PROTOCOL_TLS_CLIENT)


def _context(tls: TLSConfig, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # SAFE: `check_name` compares the certificate's name with the endpoint instead
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(cafile=tls.ca)
        context.load_cert_chain(tls.certificate, tls.key, password=_no_password)
    except (ssl.SSLError, ValueError) as error:
        reason = error.reason if isinstance(error, ssl.SSLError) else None
        raise ConfigError(
            f"tls: the certificate, key and ca do not fit together ({reason or 'the key is encrypted'}); want PEM "
            "files: a certificate, its unencrypted private key, and the CA that signed it"
        ) from None
    return context


def _no_password() -> str:
    raise ValueError("the key is encrypted")
