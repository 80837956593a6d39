"""Where endpoints listen: the addresses of parties, what settings allow of them, and listening sockets."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, TransportError
from private_llm.net.transport import CLIENT

Address = tuple[str, int]

_BACKLOG = 64
"""Connections that the system keeps for an endpoint that has not accepted them yet."""
_MIN_TOKEN = 16


def open_listeners(parties: int) -> list[socket.socket]:
    """A listening loopback socket per party, on free ports: hand each to its party, and `hosts_of` to everybody.

    Raises TransportError if nothing can listen here.
    """
    return [listen(("127.0.0.1", 0), anywhere=False) for _ in range(parties)]


def hosts_of(listeners: Sequence[socket.socket]) -> tuple[str, ...]:
    """The addresses of `open_listeners`, as `hosts`."""
    return tuple("{}:{}".format(*listener.getsockname()[:2]) for listener in listeners)


def parse_address(text: str) -> Address:
    """ "host:port" or "[ipv6]:port". Raises ConfigError."""
    host, colon, port = text.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"hosts: got {text!r}; want host:port with a port from 1 to 65535")
    return host, int(port)


def addresses_of(config: PrivateConfig, me: int, hosts: Sequence[str], token: bytes) -> list[Address]:
    """The parties' addresses, once the settings allow endpoint `me` to use them. Raises ConfigError."""
    addresses = [parse_address(host) for host in hosts or config.hosts]
    if len(addresses) != config.endpoints:
        raise ConfigError(f"hosts: got {len(addresses)} addresses; want {config.endpoints} for {config.protocol!r}")
    if me != CLIENT and not 0 <= me < config.endpoints:
        raise ConfigError(
            f"endpoint: got {me}; want a party from 0 to {config.endpoints - 1}, or the client ({CLIENT})"
        )
    if config.tls is None:
        _check_plain(config, addresses, token)
    return addresses


def _check_plain(config: PrivateConfig, addresses: Sequence[Address], token: bytes) -> None:
    """Refuse plain TCP anywhere but on this machine, on purpose."""
    local = config.party_mode != "remote" and len(token) >= _MIN_TOKEN
    if not (config.allow_plain_loopback or local):
        raise ConfigError(
            "connections between endpoints need certificates: set tls=TLSConfig(certificate, key, ca) (--tls FOLDER), "
            "or allow_plain_loopback=True (--allow-plain-loopback) if all endpoints run on this machine"
        )
    for host, port in addresses:
        for address in _resolve((host, port)):
            if not ipaddress.ip_address(address[0].partition("%")[0]).is_loopback:
                raise ConfigError(
                    f"hosts: {host} is not a loopback address, and nothing leaves this machine unencrypted; "
                    "set tls=TLSConfig(certificate, key, ca)"
                )


def _resolve(address: Address) -> list[Address]:
    try:
        found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise ConfigError(f"hosts: the name {address[0]} has no address ({error.strerror})") from None
    return [(str(entry[4][0]), int(entry[4][1])) for entry in found]


def listen(address: Address, *, anywhere: bool) -> socket.socket:
    """Listen at `address`; if it belongs to no interface here (a translated address), on all with `anywhere`.

    Raises ConfigError for a name without address, TransportError if the port is taken.
    """
    host, port = _resolve(address)[0] if address[1] else address
    for place in [host, "::" if ":" in host else "0.0.0.0"] if anywhere else [host]:
        try:
            family = socket.AF_INET6 if ":" in place else socket.AF_INET
            return socket.create_server((place, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            cause = error.strerror
    raise TransportError(f"cannot listen at {address[0]}:{address[1]} ({cause}); is another party running there?")
