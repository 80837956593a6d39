"""Open the full mesh of connections between the parties and the client.

Of two parties the one with the higher number connects to the other; the client, which may sit behind a firewall,
connects to all parties. Each pair makes two connections a parallel session, one per direction (see `outgoing.py`).

Without an `Admission` one client at a time is served. Clients call the parties in order, and party 0 lets one of them
in: of clients that start together one gets all parties, and the others, told that it is busy, none.
"""

import contextlib
import logging
import math
import secrets
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar

from private_llm.config import PrivateConfig
from private_llm.errors import PartiesBusy, TransportError, undoing
from private_llm.net.addresses import Address, addresses_of, listen, open_connection, set_options, shown
from private_llm.net.admission import HANDSHAKE_S, Acceptor, Admission
from private_llm.net.hello import CALLER_BYTES, Greeted, answer, greet
from private_llm.net.roles import endpoint_name, named_errors
from private_llm.net.sockets import SocketPair, SocketTransport
from private_llm.net.tls import Credentials, caller_name, explain
from private_llm.net.transport import CLIENT
from private_llm.protocol_facts import ASSISTED

_LOG = logging.getLogger("private_llm")
WAIT_UNTIL: ContextVar[float] = ContextVar("WAIT_UNTIL", default=math.inf)
"""When `connect` waits for nobody any more, whatever else says how long (`time.monotonic`)."""

_GATE = 0  # the party that decides which client is served
_LOOK_S = 1.0  # how often an endpoint that waits for calls looks which of those it knows have left
_TELL_FIRST_S, _TELL_AGAIN_S = 2.0, 10.0  # seconds until a client's log says whom it waits for, and between such lines


class Unreached(TransportError):
    """Endpoints that were not there in time: they may come yet. who: their names."""

    def __init__(self, text: str, who: str = "") -> None:
        super().__init__(text)
        self.who = who


def connect(
    config: PrivateConfig,
    me: int,
    *,
    hosts: Sequence[str] = (),
    token: bytes = b"",
    listener: socket.socket | None = None,
    wait_s: float | None = None,
    acceptor: Acceptor | None = None,
    admission: Admission | None = None,
) -> SocketTransport:
    """Connect endpoint `me` (a party number or CLIENT) with all others and return its transport.

    hosts: "host:port" of each party (default: config.hosts). token: secret known to the endpoints of this session
    only; without it, certificates must tell who is who. listener: this party's listening socket, for instance
    inherited from the process that chose the port (see `open_listeners`). acceptor: instead of a listener, what
    `open_acceptor` returned: it stays open, so that callers are answered between sessions and during them, and a
    session without a call for config.idle_s ends. wait_s: seconds to wait for the others (default: config.timeout_s; a
    party that serves waits much longer); a client waits config.busy_wait_s for its turn besides. admission: of a party
    service: the links are then to the other parties only (of 'assisted': to nobody, as servers say nothing to each
    other), and clients are handed to it, each with links of its own.

    Without config.tls the connections are plain: on loopback addresses or Unix sockets only, and only with
    config.allow_plain_loopback or (parties started on this machine, party_mode other than "remote") with a token.
    Raises ConfigError before anything is sent if the settings do not allow a safe connection, Unreached when an
    endpoint is not there within wait_s, TransportError when one refuses or is not who it should be, PartiesBusy when
    another client is served all the time. A client that waits warns in its log for whom.
    """
    addresses = addresses_of(config, me, hosts, token)
    mesh = _Mesh(config, me, addresses, token, config.timeout_s if wait_s is None else wait_s, admission)
    idle_s = None if acceptor is None else config.idle_s
    if admission is not None:  # party 0 says something more often than that
        idle_s = config.timeout_s
    with contextlib.ExitStack() as stack:
        if acceptor is None and me != CLIENT:
            acceptor = Acceptor(listener or listen(addresses[me], anywhere=config.tls is not None), config.endpoints)
            stack.callback(acceptor.close)
        with undoing(mesh.close):
            parallel_sessions = [SocketTransport(me, pairs, config.timeout_s, idle_s) for pairs in mesh.open(acceptor)]
    for parallel_session in parallel_sessions:
        parallel_session.join(parallel_sessions)
    return parallel_sessions[0]


def open_acceptor(config: PrivateConfig, me: int, listener: socket.socket | None = None) -> Acceptor:
    """Listen at party `me`'s address in config.hosts, for many sessions: hand the acceptor to `connect`, and close it.

    listener: a socket that listens there already. Raises ConfigError for settings that allow no safe connection (as
    `connect`), TransportError for a taken port.
    """
    with named_errors(config):
        addresses = addresses_of(config, me, (), b"")
        users = Credentials(config.tls).users if config.tls else None  # a bad file is told before anything listens
        if users is not None:
            users.verify()
        return Acceptor(listener or listen(addresses[me], anywhere=config.tls is not None), config.endpoints)


class _Mesh:
    """The connections made so far."""

    def __init__(
        self, config: PrivateConfig, me: int, addresses: Sequence[Address], token: bytes, wait_s: float,
        admission: Admission | None = None,
    ) -> None:  # fmt: skip
        self._me, self._addresses, self._token = me, addresses, token
        left = max(0.0, WAIT_UNTIL.get() - time.monotonic())
        self._wait, self._busy_wait = min(wait_s, left), min(config.busy_wait_s, left)
        self._timeout, self._parallel_sessions = config.timeout_s, config.parallel_sessions
        self._deadline = time.monotonic() + self._wait
        self._credentials = Credentials(config.tls) if config.tls else None
        self._admission = admission
        others = [] if admission is not None and config.protocol == ASSISTED else range(len(addresses))
        self._calls = [p for p in others if p < me]
        callers = [*(p for p in others if p > me), *([] if admission else [CLIENT])]
        self._called_by = [] if me == CLIENT else callers
        self._made: dict[tuple[int, bool, int], tuple[socket.socket, bytes]] = {}
        self._caller = secrets.token_bytes(CALLER_BYTES)
        self._turn_by: float | None = None
        self._began = time.monotonic()
        self._tell_at = self._began + _TELL_FIRST_S
        self._places: dict[int, tuple[bytes, float]] = {}  # who calls under a number (`Greeted.caller`), since when
        self._arriving: dict[int, bytes] = {}  # callers let in whose handshake is being finished, by thread
        self._refused = ""
        self._changed = threading.Condition()
        self._done = False

    def open(self, acceptor: Acceptor | None) -> list[dict[int, SocketPair]]:
        """Connect all parallel sessions, or raise TransportError. Afterwards further callers are told "busy"."""
        if acceptor is not None:
            acceptor.lead_to(self._receive)
        while not self._complete():
            for peer, inbound, parallel_session in self._missing(self._calls):
                self._call(peer, inbound, parallel_session)
            self._await_calls()
        made, peers = self._made, {peer for peer, _, _ in self._made}
        return [
            {p: SocketPair(*made[(p, True, k)], *made[(p, False, k)]) for p in peers}
            for k in range(self._parallel_sessions)
        ]

    def _missing(self, peers: Sequence[int]) -> list[tuple[int, bool, int]]:
        """Connections to make with some of the others: peer, whether this end sends, parallel session."""
        every = (
            (peer, sends, parallel_session)
            for peer in peers
            for parallel_session in range(self._parallel_sessions)
            for sends in (True, False)
        )
        return [key for key in every if key not in self._made]

    def _complete(self) -> bool:
        """Accept nobody any more, if all connections are there; those whose other end gave up meanwhile are not."""
        with self._changed:
            self._drop_ended()
            self._done = not self._missing([*self._calls, *self._called_by])
            return self._done

    def _drop_ended(self) -> None:
        """Close connections whose other end has left; the lock is held."""
        gone = [key for key, (sock, _) in self._made.items() if _ended(sock)]
        if self._me == CLIENT and any(peer == _GATE for peer, _, _ in gone):
            gone = list(self._made)  # who lost its turn must hold no party while it waits for another
        for key in gone:
            self._made.pop(key)[0].close()

    def _await_calls(self) -> None:
        """Wait for those who call this endpoint, or until one that it has called is to be called again."""
        with self._changed:
            while self._missing(self._called_by) and self._left() > 0:
                self._changed.wait(min(_LOOK_S, self._left()))
                self._drop_ended()
                if self._missing(self._calls):
                    return
            missing = sorted({peer for peer, _, _ in self._missing(self._called_by)})
        if missing:
            names = ", ".join(map(endpoint_name, missing))
            refused = f"; the last caller was refused: {self._refused}" if self._refused else ""
            raise Unreached(
                f"{names} did not connect within {self._wait:g} s; start all endpoints with the same hosts{refused}",
                names,
            )

    def close(self) -> None:
        with self._changed:
            self._done = True
            for sock, _ in self._made.values():
                sock.close()

    def _left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def _keep(self, sock: socket.socket, greeted: Greeted, sends: bool) -> None:
        """Keep a connection; a newer one of the same kind replaces an older one (its end has tried again)."""
        with self._changed:
            place = self._places.get(greeted.peer)
            if self._done or (place is not None and place[0] != greeted.caller):
                sock.close()
                return
            key = (greeted.peer, sends, greeted.parallel_session)
            old = self._made.pop(key, None)
            if old is not None:
                old[0].close()
            self._made[key] = (sock, greeted.session)
            self._changed.notify_all()

    # -- calling ----------------------------------------------------------------------------------------
    def _call(self, peer: int, inbound: bool, parallel_session: int) -> None:
        """Connect to `peer`, again and again until the time is up; a refusal is final, unless it says "busy"."""
        place = shown(self._addresses[peer])
        pause, cause = 0.02, "no answer"
        while self._left() > 0:
            try:
                plain = open_connection(self._addresses[peer], min(HANDSHAKE_S, self._left() + 0.01))
                with self._handshake(plain, server=False) as sock:
                    who = self._token, self._caller
                    greeted = greet(sock, self._me, peer, inbound, *who, parallel_session, self._parallel_sessions)
                    self._keep(sock, greeted, sends=inbound)
                return
            except ssl.SSLEOFError:
                cause = "it closed the connection during the TLS handshake"
            except ssl.SSLError as error:
                raise TransportError(explain(error, endpoint_name(peer))) from None
            except PartiesBusy as error:
                cause = str(error)
                if self._me == CLIENT and peer == _GATE:
                    self._queue(cause)
            except TransportError:
                raise
            except OSError as error:
                cause = error.strerror or str(error)
            self._tell_waiting(f"{endpoint_name(peer)} at {place}", cause)
            time.sleep(min(pause, self._left()))
            pause = min(2 * pause, 0.5)
        raise Unreached(
            f"{endpoint_name(peer)} at {place} was not reached within {self._wait:g} s ({cause}); check that "
            "it runs, its address and the firewall",
            endpoint_name(peer),
        )

    def _tell_waiting(self, who: str, cause: str) -> None:
        """Log for whom a client waits, now and then; a party service tells its observer."""
        now = time.monotonic()
        if self._me == CLIENT and now >= self._tell_at:
            self._tell_at = now + _TELL_AGAIN_S
            waited = f"waiting for {who} (for {now - self._began:.0f} s): {cause}"
            _LOG.warning("%s", waited, extra={"event": "waiting"})

    def _queue(self, cause: str) -> None:
        """A client is told to come later: time spent so is not counted, but must not exceed config.busy_wait_s."""
        now = time.monotonic()
        if self._turn_by is None:
            self._turn_by = now + self._busy_wait
        if now >= self._turn_by:
            raise PartiesBusy(
                f"{cause}; waited {self._busy_wait:g} s for it. Try again later, or wait longer (busy_wait_s, "
                "--busy-wait)"
            )
        self._deadline = now + self._wait

    @contextlib.contextmanager
    def _handshake(self, sock: socket.socket, *, server: bool) -> Iterator[socket.socket]:
        """Options for small frames and dead hosts, then TLS; the socket is closed if that or the block fails."""
        with undoing(lambda: _part(sock)):
            set_options(sock, max(1, int(self._timeout / 4)))
            if self._credentials:
                sock = self._credentials.wrap(sock, server=server)
                sock.do_handshake()
            yield sock

    def _refuse(self, reason: str) -> None:
        """Remember why a caller was refused, and log it unless the one before was refused for the same reason."""
        if self._admission is not None:
            self._admission.refused(reason)
        elif reason != self._refused:
            _LOG.warning("%s refused a caller: %s", endpoint_name(self._me), reason)
        self._refused = reason

    # -- being called -------------------------------------------------------------------------------------
    def _receive(self, sock: socket.socket, proved: Callable[[], None]) -> None:
        """Make the handshake with one caller; a failure is remembered for the message, and harms nobody else."""
        sock.settimeout(HANDSHAKE_S)
        users = self._credentials.users if self._credentials else None

        try:
            with undoing(sock.close):
                looked = not sock.recv(1, socket.MSG_PEEK)
            if looked:  # whether somebody listens here, as users do before they load a model
                sock.close()
                return
            with self._handshake(sock, server=True) as secured:

                def admit(caller: Greeted) -> None:
                    if caller.peer == CLIENT and self._admission is not None:
                        self._admission.admit(caller, caller_name(secured))
                    else:
                        self._admit(caller)
                    proved()  # who is refused goes on counting as a stranger until its connection is closed

                greeted = answer(secured, self._me, self._token, admit, users)
                if greeted.peer == CLIENT and self._admission is not None:
                    self._admission.keep(secured, greeted)
                else:
                    self._keep(secured, greeted, sends=not greeted.inbound)
        except PartiesBusy:
            return  # it comes again
        except ssl.SSLError as error:
            self._refuse(explain(error, "a caller"))
        except OSError as error:  # TransportError is one
            self._refuse(error.strerror or str(error))
        finally:
            with self._changed:
                self._arriving.pop(threading.get_ident(), None)

    def _admit(self, caller: Greeted) -> None:
        """Let in a caller that has proved who it is, or raise TransportError; PartiesBusy: it should come later. A
        client has its place as long as it holds connections, though without a session for timeout_s at most. An
        endpoint besides the client that starts again replaces itself.
        """
        peer = caller.peer
        if peer not in self._called_by:
            raise TransportError(
                f"{endpoint_name(peer)} is not expected to connect to {endpoint_name(self._me)}; compare their settings"
            )
        if caller.parallel_sessions != self._parallel_sessions:
            raise TransportError(
                f"parallel sessions: got {caller.parallel_sessions} at {endpoint_name(peer)}; want "
                f"{self._parallel_sessions}, as at {endpoint_name(self._me)}"
            )
        with self._changed:
            place = self._places.get(peer)
            if self._done or (peer == CLIENT and place is not None and self._taken(*place, caller.caller)):
                raise PartiesBusy("it serves another client")
            if place is None or place[0] != caller.caller:
                for key in [key for key in self._made if key[0] == peer]:
                    self._made.pop(key)[0].close()
                self._places[peer] = caller.caller, time.monotonic()
            self._arriving[threading.get_ident()] = caller.caller

    def _taken(self, holder: bytes, since: float, caller: bytes) -> bool:
        """Whether the client's place is another's than this caller's."""
        if holder == caller or time.monotonic() - since > self._timeout:
            return False
        held = [sock for (peer, _, _), (sock, _) in self._made.items() if peer == CLIENT]
        return holder in self._arriving.values() or not all(map(_ended, held))


def _ended(sock: socket.socket) -> bool:
    """Whether the other end has closed a connection that nobody has read from."""
    poll, hung_up = select.poll(), getattr(select, "POLLRDHUP", 0)  # where the system tells: also after unread bytes
    poll.register(sock, select.POLLIN | hung_up)
    found = dict(poll.poll(0))
    if not found or found[sock.fileno()] & hung_up:
        return bool(found)
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
