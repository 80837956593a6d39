"""Open the full mesh of connections between the parties and the client.

Of two parties the one with the higher number connects to the other; the client, which may sit behind a
firewall, connects to all parties. Each pair makes two connections a lane, one per direction (see `links.py`).
"""

from __future__ import annotations

import contextlib
import ipaddress
import select
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Sequence

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, TransportError
from private_llm.net.hello import Greeted, answer, greet
from private_llm.net.sockets import Pair, SocketTransport
from private_llm.net.tls import Credentials, explain
from private_llm.net.transport import CLIENT, endpoint_name

_HELLO_S = 10.0
"""Seconds a handshake may take."""
_HANDSHAKES = 64
"""Handshakes an endpoint answers at the same time; more callers are turned away."""
_MIN_TOKEN = 16

Address = tuple[str, int]


def connect(
    config: PrivateConfig,
    me: int,
    *,
    hosts: Sequence[str] = (),
    token: bytes = b"",
    listener: socket.socket | None = None,
    device: str = "cpu",
    wait_s: float | None = None,
) -> SocketTransport:
    """Connect endpoint `me` (a party number or CLIENT) with all others and return its transport.

    hosts: "host:port" of each party (default: config.hosts). token: secret known to the endpoints of this session
    only; without it, certificates must tell who is who. listener: this party's listening socket, for instance
    inherited from the process that chose the port (see `open_listeners`). wait_s: seconds to wait for the others
    (default: config.timeout_s; a party that serves waits much longer).

    Without config.tls the connections are plain TCP: on loopback addresses only, and only with
    config.allow_plain_loopback or (parties started on this machine, party_mode other than "remote") with a token.
    Raises ConfigError before anything is sent if the settings do not allow a safe connection, TransportError when
    an endpoint is not reached within wait_s, or refuses, or is not who it should be.
    """
    addresses = [parse_address(host) for host in hosts or config.hosts]
    if len(addresses) != config.endpoints:
        raise ConfigError(f"hosts: got {len(addresses)} addresses; want {config.endpoints} for {config.protocol!r}")
    if me != CLIENT and not 0 <= me < config.endpoints:
        raise ConfigError(
            f"endpoint: got {me}; want a party from 0 to {config.endpoints - 1}, or the client ({CLIENT})"
        )
    if config.tls is None:
        _check_plain(config, addresses, token)
    mesh = _Mesh(config, me, addresses, token, config.timeout_s if wait_s is None else wait_s)
    try:
        if listener is None and me != CLIENT:
            listener = _listen(addresses[me], anywhere=config.tls is not None)
        lanes = [SocketTransport(me, pairs, config.timeout_s, device) for pairs in mesh.open(listener)]
    except BaseException:
        mesh.close()
        raise
    for lane in lanes:
        lane.join(lanes)
    return lanes[0]


def open_listeners(parties: int) -> list[socket.socket]:
    """A listening loopback socket per party, on free ports: hand each to its party, and `hosts_of` to everybody."""
    return [_listen(("127.0.0.1", 0), anywhere=False) for _ in range(parties)]


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


def _check_plain(config: PrivateConfig, addresses: Sequence[Address], token: bytes) -> None:
    """Refuse plain TCP anywhere but on this machine, on purpose."""
    local = config.party_mode != "remote" and len(token) >= _MIN_TOKEN
    if not (config.allow_plain_loopback or local):
        raise ConfigError(
            "connections between endpoints need certificates: set tls=TLSConfig(certificate, key, ca), or "
            "allow_plain_loopback=True if all endpoints run on this machine"
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


def _listen(address: Address, *, anywhere: bool) -> socket.socket:
    """Listen at `address`; if it belongs to no interface here (a translated address), on all with `anywhere`."""
    host, port = _resolve(address)[0] if address[1] else address
    for place in [host, "::" if ":" in host else "0.0.0.0"] if anywhere else [host]:
        try:
            family = socket.AF_INET6 if ":" in place else socket.AF_INET
            return socket.create_server((place, port), family=family, backlog=_HANDSHAKES)
        except OSError as error:
            cause = error.strerror
    raise TransportError(f"cannot listen at {address[0]}:{address[1]} ({cause}); is another party running there?")


class _Mesh:
    """The connections made so far."""

    def __init__(
        self, config: PrivateConfig, me: int, addresses: Sequence[Address], token: bytes, wait_s: float
    ) -> None:
        self._me, self._addresses, self._token = me, addresses, token
        self._timeout, self._wait, self._lanes = config.timeout_s, wait_s, config.lanes
        self._deadline = time.monotonic() + wait_s
        self._credentials = Credentials(config.tls) if config.tls else None
        self._calls = [p for p in range(len(addresses)) if p < me]
        self._called_by = [] if me == CLIENT else [*range(me + 1, len(addresses)), CLIENT]
        self._made: dict[tuple[int, bool, int], tuple[socket.socket, bytes]] = {}
        self._refused = ""
        self._changed = threading.Condition()
        self._slots = threading.BoundedSemaphore(_HANDSHAKES)
        self._done = False

    def open(self, listener: socket.socket | None) -> list[dict[int, Pair]]:
        """Make the connections of all lanes, or raise TransportError; the listener is closed."""
        with contextlib.ExitStack() as stack:
            if listener is not None:
                acceptor = threading.Thread(target=self._accept, args=(listener,), name="accept", daemon=True)
                acceptor.start()
                stack.callback(self._stop, listener, acceptor)
            while not self._complete():
                for peer, inbound, lane in self._missing(self._calls):
                    self._call(peer, inbound, lane)
                self._await_calls()
        made, peers = self._made, {peer for peer, _, _ in self._made}
        return [{p: Pair(*made[(p, True, k)], *made[(p, False, k)]) for p in peers} for k in range(self._lanes)]

    def _missing(self, peers: Sequence[int]) -> list[tuple[int, bool, int]]:
        """Connections to make with some of the others: peer, whether this end sends, lane."""
        every = ((peer, sends, lane) for peer in peers for lane in range(self._lanes) for sends in (True, False))
        return [key for key in every if key not in self._made]

    def _complete(self) -> bool:
        """Accept nobody any more, if all connections are there; those whose other end gave up meanwhile are not."""
        with self._changed:
            for key in [key for key, (sock, _) in self._made.items() if _ended(sock)]:
                self._made.pop(key)[0].close()
            self._done = not self._missing([*self._calls, *self._called_by])
            return self._done

    def _await_calls(self) -> None:
        """Wait for those who call this endpoint."""
        with self._changed:
            self._changed.wait_for(lambda: not self._missing(self._called_by), self._left())
            missing = sorted({peer for peer, _, _ in self._missing(self._called_by)})
        if missing:
            names = ", ".join(map(endpoint_name, missing))
            refused = f"; the last caller was refused: {self._refused}" if self._refused else ""
            raise TransportError(
                f"{names} did not connect within {self._wait:g} s; start all endpoints with the same hosts{refused}"
            )

    def _stop(self, listener: socket.socket, acceptor: threading.Thread) -> None:
        """Accept nobody any more."""
        with self._changed:
            self._done = True
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread at once where the system does that
        acceptor.join()
        listener.close()

    def close(self) -> None:
        """Close whatever was opened."""
        with self._changed:
            self._done = True
            for sock, _ in self._made.values():
                sock.close()

    def _left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def _keep(self, sock: socket.socket, greeted: Greeted, sends: bool) -> None:
        """Keep a connection; a newer one of the same kind replaces an older one (its end has started again)."""
        with self._changed:
            if self._done:
                sock.close()
                return
            key = (greeted.peer, sends, greeted.lane)
            old = self._made.pop(key, None)
            if old is not None:
                old[0].close()
            self._made[key] = (sock, greeted.session)
            self._changed.notify_all()

    # -- calling ----------------------------------------------------------------------------------------
    def _call(self, peer: int, inbound: bool, lane: int) -> None:
        """Connect to `peer`, again and again until the time is up; a refusal is final."""
        host, port = self._addresses[peer]
        pause, cause = 0.02, "no answer"
        while self._left() > 0:
            try:
                plain = socket.create_connection((host, port), timeout=min(_HELLO_S, self._left() + 0.01))
                with self._handshake(plain, server=False) as sock:
                    greeted = greet(sock, self._me, peer, inbound, self._token, lane, self._lanes)
                    self._keep(sock, greeted, sends=inbound)
                return
            except ssl.SSLEOFError:
                cause = "it closed the connection during the TLS handshake"
            except ssl.SSLError as error:
                raise TransportError(explain(error, endpoint_name(peer))) from None
            except TransportError:
                raise
            except OSError as error:
                cause = error.strerror or str(error)
            time.sleep(min(pause, self._left()))
            pause = min(2 * pause, 0.5)
        raise TransportError(
            f"{endpoint_name(peer)} at {host}:{port} was not reached within {self._wait:g} s ({cause}); check that "
            "it runs, its address and the firewall"
        )

    @contextlib.contextmanager
    def _handshake(self, sock: socket.socket, *, server: bool) -> Iterator[socket.socket]:
        """Options for small frames and dead hosts, then TLS; the socket is closed if that or the block fails."""
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if hasattr(socket, "TCP_KEEPIDLE"):
                pause = max(1, int(self._timeout / 4))
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, pause)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, pause)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
            if self._credentials:
                secured = self._credentials.wrap(sock, server=server)
                sock = secured
                secured.do_handshake()
            yield sock
        except BaseException:
            _part(sock)
            raise

    # -- being called -------------------------------------------------------------------------------------
    def _accept(self, listener: socket.socket) -> None:
        """Answer callers until all connections are made."""
        listener.settimeout(0.1)
        while not self._done:
            try:
                sock, _ = listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return  # the listener was closed
            if self._slots.acquire(blocking=False):
                threading.Thread(target=self._answer, args=(sock,), name="answer", daemon=True).start()
            else:
                sock.close()

    def _answer(self, sock: socket.socket) -> None:
        """Make the handshake with one caller; a failure is remembered for the message, and harms nobody else."""
        sock.settimeout(min(_HELLO_S, self._left() + 0.01))
        try:
            with self._handshake(sock, server=True) as secured:
                greeted = answer(secured, self._me, self._token, self._admit)
                self._keep(secured, greeted, sends=not greeted.inbound)
        except ssl.SSLError as error:
            self._refused = explain(error, "a caller")
        except OSError as error:  # TransportError is one
            self._refused = error.strerror or str(error)
        finally:
            self._slots.release()

    def _admit(self, peer: int, lanes: int) -> None:
        if peer not in self._called_by:
            raise TransportError(f"{endpoint_name(peer)} is not expected to connect to {endpoint_name(self._me)}")
        if lanes != self._lanes:
            raise TransportError(
                f"lanes: got {lanes} at {endpoint_name(peer)}; want {self._lanes}, as at {endpoint_name(self._me)}"
            )


def _ended(sock: socket.socket) -> bool:
    """Whether the other end has closed a connection that nobody has read from."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    if not poll.poll(0):
        return False
    try:
        return not socket.socket.recv(sock, 1, socket.MSG_PEEK)  # SAFE: the plain method leaves what TLS will read
    except OSError:
        return True


def _part(sock: socket.socket) -> None:
    """Close a refused connection so that the other end still reads why: unread bytes would reset it."""
    with contextlib.suppress(OSError):
        # SAFE: the plain methods, on a connection that carries nothing more: an alert or refusal was its last word.
        socket.socket.shutdown(sock, socket.SHUT_WR)
        sock.settimeout(1.0)
        for _ in range(16):
            if not socket.socket.recv(sock, 4096):
                break
    sock.close()
