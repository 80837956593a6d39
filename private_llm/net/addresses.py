"""Where endpoints listen: the addresses of parties, what settings allow of them, and listening sockets."""

import contextlib
import errno
import ipaddress
import os
import secrets
import socket
import struct
import sys
from collections.abc import Sequence

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, TransportError, undoing
from private_llm.protocol_facts import CLIENT

Address = tuple[str, int]

_BACKLOG = 64  # connections that the system keeps for an endpoint that has not accepted them yet
_MIN_TOKEN = 16
_UNIX = "unix:"  # begins the address of a socket that the operating system knows by a name, not a port (Linux)
_NAME_BYTES = 16
_SEND_BUFFER = 4 << 20  # bytes asked for; the system grants `net.core.wmem_max` at most (often 208 KB: TCP is faster)


def open_listeners(parties: int) -> list[socket.socket]:
    """A listening loopback socket per party, on free ports. Raises TransportError if nothing can listen here."""
    return [listen(("127.0.0.1", 0), anywhere=False) for _ in range(parties)]


def open_named_listeners(parties: int) -> list[socket.socket]:
    """As `open_listeners`, but Unix sockets with random abstract names where the system has such (Linux).

    A message takes two thirds of TCP's time. Programs of the same network namespace can find them, and are turned away
    unless they run as the same user. Ports where this is refused, and where such sockets hold too little: a party that
    waits for nobody then waits for room. Raises TransportError if nothing can listen here.
    """
    made: list[socket.socket] = []
    try:
        while sys.platform == "linux" and len(made) < parties and _holds_enough():
            made.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            made[-1].bind(b"\0" + (_UNIX + secrets.token_hex(_NAME_BYTES)).encode())
            made[-1].listen(_BACKLOG)
    except OSError:
        for listener in made:
            listener.close()
        made = []
    return made or open_listeners(parties)


def _holds_enough() -> bool:
    """Whether the system grants Unix sockets the room that is asked for."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        return tried.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) >= _SEND_BUFFER


def hosts_of(listeners: Sequence[socket.socket]) -> tuple[str, ...]:
    """The addresses of `open_listeners` or `open_named_listeners`, as `hosts`."""
    places = [listener.getsockname() for listener in listeners]
    return tuple(place[1:].decode() if isinstance(place, bytes) else "{}:{}".format(*place[:2]) for place in places)


def is_named(address: Address) -> bool:
    """Whether it is one of `open_named_listeners`, which have no port; addresses in settings have one."""
    return address[1] == 0 and address[0].startswith(_UNIX)


def shown(address: Address) -> str:
    """An address as errors name it."""
    return "a socket of this machine" if is_named(address) else f"{address[0]}:{address[1]}"


def open_connection(address: Address, timeout: float) -> socket.socket:
    """Connect within `timeout` seconds. Raises OSError."""
    if not is_named(address):
        return socket.create_connection(address, timeout=timeout)
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with undoing(made.close):
        made.settimeout(timeout)
        made.connect(b"\0" + address[0].encode())
        if not same_user(made):
            raise PermissionError(errno.EPERM, "another user listens there")
    return made


def same_user(sock: socket.socket) -> bool:
    """Whether the other end is a program of this user; True for connections that are not Unix sockets."""
    if sys.platform != "linux" or sock.family != socket.AF_UNIX:
        return True
    _, user, _ = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("iII")))
    return bool(user == os.geteuid())


def parse_address(text: str) -> Address:
    """ "host:port" or "[ipv6]:port". Raises ConfigError."""
    host, colon, port = text.rpartition(":")
    host, named = host[1:-1] if host.startswith("[") and host.endswith("]") else host, False
    with contextlib.suppress(UnicodeError):
        host.encode("idna")  # as the system asks for a name
        named = bool(host)
    if not named or not colon or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"hosts: got {text!r}; want host:port with a port from 1 to 65535")
    return host, int(port)


def addresses_of(config: PrivateConfig, me: int, hosts: Sequence[str], token: bytes) -> list[Address]:
    """The parties' addresses, once the settings allow endpoint `me` to use them. Raises ConfigError."""
    # Unix sockets are made by the process that starts the parties; no settings name one.
    own = bool(hosts) and config.party_mode != "remote" and len(token) >= _MIN_TOKEN
    addresses = [(host, 0) if own and host.startswith(_UNIX) else parse_address(host) for host in hosts or config.hosts]
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
    """Refuse plain TCP anywhere but on this machine or among ranks on a trusted network, on purpose."""
    local = config.party_mode != "remote" and len(token) >= _MIN_TOKEN
    if not (config.allow_plain_loopback or local):
        raise ConfigError(
            "connections between endpoints need certificates: set tls='FOLDER' (--tls FOLDER), "
            "or allow_plain_loopback=True (--allow-plain-loopback) if all endpoints run on this machine"
        )
    if local and config.party_mode == "distributed" and config.trusted_network:
        return
    for host, port in (address for address in addresses if not is_named(address)):
        for address in _resolve((host, port)):
            if not ipaddress.ip_address(address[0].partition("%")[0]).is_loopback:
                raise ConfigError(
                    f"hosts: {host} is not a loopback address, and nothing leaves this machine unencrypted; "
                    "set tls='FOLDER'"
                )


def _resolve(address: Address) -> list[Address]:
    try:
        found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise ConfigError(f"hosts: the name {address[0]} has no address ({error.strerror})") from None
    return [(str(entry[4][0]), int(entry[4][1])) for entry in found]


def set_options(sock: socket.socket, pause_s: int) -> None:
    """Options of a connection: no delay of small frames, gone hosts noticed after 4 `pause_s`; Unix sockets: room."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, pause_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, pause_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


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
