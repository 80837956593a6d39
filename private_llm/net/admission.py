"""Who comes in: callers of a party's listening socket, and clients of a party service, with their links to this party.

Anybody may open a connection, so what strangers can hold is bounded. A caller has `HANDSHAKE_S` for the whole
handshake. When too many callers of one source, or too many in all, are at it, the one that came first is cut off for
the newcomer, and may call again: an honest handshake takes milliseconds. An acceptor stays open between sessions and
during them, so that a second client is told that the first one is being served.

A client makes two connections to every party, in order, under one random number (`Greeted.caller`). Party 0 decides:
it lets a client in while there is room, all in all and for its user, and otherwise says "busy" with the client's place
in line; clients call again, and the line goes by who came first. The other parties take in whom party 0 has taken in,
as far as they can know it: they bound the numbers, and hear now and then whom party 0 serves (`confirm`). Of callers
that it does not serve, those of the user who has most of them make room. Places of callers that stay away are given up.
"""

import contextlib
import ipaddress
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from torch import Tensor

from private_llm.errors import PartiesBusy, PartyFailed, TransportError
from private_llm.forks import Origin
from private_llm.net.addresses import same_user
from private_llm.net.hello import Greeted
from private_llm.net.sockets import SocketPair, SocketTransport
from private_llm.net.transport import CLIENT
from private_llm.net.wire import FrameKind

HANDSHAKE_S = 10.0  # seconds a handshake may take
_CALLERS = 64  # handshakes at the same time, besides one for each endpoint that is expected
_PER_SOURCE = 16  # the same, of callers from one address (one network of 64 bits with IPv6)
_TICK_S = 0.25  # how often late callers are looked for while nobody calls

Handshake = Callable[[socket.socket, Callable[[], None]], None]
"""Makes the handshake on a connection, and calls the function as soon as the caller has proved who it is."""


@dataclass(frozen=True, eq=False)
class _Caller:
    """A connection whose other end has proved nothing. `line`: a second handle, to cut it off from another thread."""

    line: socket.socket
    source: str
    since: float


class Acceptor:
    """Accepts connections on `listener` and hands them to one receiver at a time (see `lead_to`)."""

    def __init__(self, listener: socket.socket, expected: int) -> None:
        """expected: how many endpoints have business here."""
        self._listener, self._origin = listener, Origin()
        self._most, self._most_of_source = _CALLERS + expected, _PER_SOURCE + expected
        self._callers: list[_Caller] = []
        self._lock = threading.Lock()
        self._receive: Handshake | None = None
        self._closed = False
        self._acceptor = threading.Thread(target=self._accept, name="accept", daemon=True)

    def lead_to(self, receive: Handshake) -> None:
        """Hand callers to `receive` from now on; each call runs in a thread of its own and must not raise."""
        self._receive = receive
        if not self._acceptor.is_alive() and not self._closed:
            self._acceptor.start()

    def close(self) -> None:
        """Accept nobody any more. Idempotent; in a fork it closes the fork's copy alone."""
        self._closed = True
        if not self._origin.here:
            self._listener.close()
            return
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread at once where the system does that
        if self._acceptor.is_alive():
            self._acceptor.join()
        self._listener.close()

    def _accept(self) -> None:
        self._listener.settimeout(_TICK_S)
        while not self._closed:
            with self._lock:
                for caller in [c for c in self._callers if time.monotonic() - c.since > HANDSHAKE_S]:
                    self._cut(caller)
            try:
                sock, address = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:  # closed, or for the moment out of descriptors: late callers will give some back
                time.sleep(0 if self._closed else _TICK_S)
                continue
            if not same_user(sock):
                sock.close()
                continue
            try:
                caller = _Caller(
                    sock.dup(), source_of(str(address[0]) if isinstance(address, tuple) else ""), time.monotonic()
                )
            except OSError:
                sock.close()
                continue
            self._make_room(caller)
            try:
                threading.Thread(target=self._meet, args=(sock, caller), name="answer", daemon=True).start()
            except RuntimeError:  # no more threads for the moment; the acceptor must outlive that
                self._forget(caller)
                sock.close()

    def _meet(self, sock: socket.socket, caller: _Caller) -> None:
        try:
            if self._receive is not None:
                self._receive(sock, lambda: self._forget(caller))
        finally:
            self._forget(caller)

    def _make_room(self, caller: _Caller) -> None:
        """Enter a caller, at the cost of the oldest of its source, or of all."""
        with self._lock:
            same = [other for other in self._callers if other.source == caller.source]
            if len(same) >= self._most_of_source:
                self._cut(same[0])
            elif len(self._callers) >= self._most:
                self._cut(self._callers[0])
            self._callers.append(caller)

    def _cut(self, caller: _Caller) -> None:
        """End a caller's connection; the thread that answers it notices."""
        self._callers.remove(caller)
        with contextlib.suppress(OSError):
            caller.line.shutdown(socket.SHUT_RDWR)
        caller.line.close()

    def _forget(self, caller: _Caller) -> None:
        """It has proved who it is, or is gone."""
        with self._lock:
            if caller in self._callers:
                self._callers.remove(caller)
                caller.line.close()


def source_of(address: str) -> str:
    """What counts as one source: an IPv4 address, an IPv6 network of 64 bits, or "", this machine by a Unix socket."""
    if not address:
        return ""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.IPv6Network((found, 64), strict=False))


_GATE = 0
_AWAY_S = 3.0  # seconds after which a client in line that has not called again has left
_NOTES = 16  # words that it waits which a client may say in the time in which it has reason for two
_READ_S = 0.1  # how often it is looked whether a client that reads slowly is still there
_SPARE = 8  # sessions that another party than party 0 holds beyond the limit: theirs may end a little later


class ClientLink(SocketTransport):
    """This party's links to one client, one answer at most in memory; two threads, of which one sends, may use it."""

    def __init__(
        self, me: int, pair: SocketPair, caller: bytes, user: str, timeout: float, idle_s: float | None
    ) -> None:
        super().__init__(me, {CLIENT: pair}, timeout, idle_s=idle_s)
        self.number, self.user = caller.hex(), user
        self._in[CLIENT].bound_notes(self._slice / _NOTES, 32 * _NOTES)

    def abort(self, reason: str) -> None:
        """As the interface says; whatever the client goes on sending, it is not waited for."""
        super().abort(reason)
        self._in[CLIENT].give_up(reason)

    def taken(self, seconds: float) -> bool:
        """Wait at most `seconds` until all that was sent has left this machine; whether it has."""
        return self._out[CLIENT].drained(seconds)

    def await_reader(self) -> None:
        """Wait until all left this machine. Raises PartyFailed for a client that reads nothing for a time-out."""
        moved, until = -1, 0.0
        while not self.taken(_READ_S):
            self.look()
            if self._out[CLIENT].moved != moved:
                moved, until = self._out[CLIENT].moved, time.monotonic() + self.timeout
            elif time.monotonic() > until:
                raise PartyFailed(f"the client read nothing for {self.timeout:g} s")

    def show_life(self) -> None:
        """Tell the client, which waits for an answer, that this party works. From any thread."""
        self._out[CLIENT].note(FrameKind.WAITING, bytes([self.me]))

    def _send(self, to: int, tag: str, payload: Tensor | bytes | bytearray) -> None:
        self._check()
        self._out[to].send_payload(tag, payload)


@dataclass
class _Admitted:
    """A client let in and its connections: True for the one that sends. known: party 0 has it, too."""

    user: str
    since: float
    lines: dict[bool, tuple[socket.socket, bytes]] = field(default_factory=dict)
    linked: bool = False
    link: ClientLink | None = None
    known: bool = False


class Admission:
    """The clients of one party. `open`: whether any may come in now; why not is in `closed_because`."""

    def __init__(
        self, me: int, timeout: float, idle_s: float | None, sessions: int, per_user: int, waiting: int,
        arrived: Callable[[ClientLink], None], refused: Callable[[str], None] = lambda reason: None,
        busy: Callable[[str], None] = lambda user: None, out_for: Callable[[str], float] = lambda user: 0.0,
        decides: bool = False,
    ) -> None:  # fmt: skip
        """sessions, per_user: at a time. waiting: clients in line. arrived: is given each client that is connected.

        out_for: seconds for which a user is not let in. decides: this party asks no other one who may come in.
        """
        self._decides = decides or me == _GATE
        self.refused, self._busy, self.out_for = refused, busy, out_for
        self._me, self._timeout, self._idle = me, timeout, idle_s
        self._sessions, self._per_user, self._waiting = sessions, per_user, waiting
        self._arrived = arrived
        self._callers: dict[bytes, _Admitted] = {}
        self._line: dict[bytes, tuple[str, float]] = {}
        self._lock = threading.Lock()
        self.open, self.closed_because = False, "the parties connect with each other"

    def admit(self, caller: Greeted, user: str) -> None:
        """Let a client in that has proved who it is, or raise PartiesBusy.

        Raises TransportError for a user who is kept out, and for a number that belongs to another user.
        """
        with self._lock:
            self._drop_late()
            found = self._callers.get(caller.caller)
            if found is not None and found.user != user:
                raise TransportError("this caller's number belongs to a session of another user")
            if found is not None:
                return
            if not self.open:
                raise PartiesBusy(self.closed_because)
            left = self.out_for(user)
            if left:
                raise TransportError(
                    f"inputs of user {user!r} ended the sessions of all, twice: come again in {left:.0f} s, or ask who "
                    "runs this party"
                )
            if self._decides:
                self._take_turn(caller.caller, user)
            else:
                self._make_room(user)
            self._callers[caller.caller] = _Admitted(user, time.monotonic())

    def confirm(self, served: Collection[str]) -> None:
        """Party 0 serves these sessions."""
        with self._lock:
            for number, caller in self._callers.items():
                caller.known = caller.known or number.hex() in served

    def _make_room(self, user: str) -> None:
        """Raise PartiesBusy unless there is room for one more, or a caller that party 0 does not serve gives it up."""
        strangers: dict[str, list[bytes]] = {}
        for number, caller in self._callers.items():
            if not caller.known:
                strangers.setdefault(caller.user, []).append(number)
        mine = strangers.get(user, [])
        if self._room(user) + _SPARE <= 0:
            if not mine:
                raise PartiesBusy(f"user {user!r} has {self._per_user} sessions already, as many as one user may have")
            self._forget(mine[0])
        elif len(self._callers) >= self._sessions + _SPARE:
            most = max(strangers.values(), key=len, default=[])
            if len(most) <= len(mine):
                raise PartiesBusy(f"all {self._sessions} sessions are taken")
            self._forget(most[0])

    def _take_turn(self, caller: bytes, user: str) -> None:
        """Raise PartiesBusy unless there is room and nobody who could have it waits longer."""
        now = time.monotonic()
        self._line = {other: seen for other, seen in self._line.items() if now - seen[1] < _AWAY_S}
        room, ahead = self._sessions - len(self._callers), 0
        asked: Counter[str] = Counter()
        for other, (theirs, _) in self._line.items():
            if other == caller:
                break
            ahead += asked[theirs] < self._room(theirs)  # who asks for more than it may have keeps nobody waiting
            asked[theirs] += 1
        if self._room(user) > asked[user] and ahead < room:
            self._line.pop(caller, None)
            return
        own = sum(theirs == user for theirs, _ in self._line.values())
        if caller not in self._line and user and own >= self._per_user:
            self._busy(user)
            raise PartiesBusy(f"user {user!r} has {own} clients in line already, as many as one user may have sessions")
        if caller not in self._line and len(self._line) >= self._waiting:
            self._busy(user)
            raise PartiesBusy(f"all {self._sessions} sessions are taken, and {len(self._line)} clients wait already")
        if caller not in self._line:
            self._busy(user)
        self._line[caller] = (user, now)
        if self._room(user) <= 0:
            raise PartiesBusy(f"user {user!r} has {self._per_user} sessions already, as many as one user may have")
        raise PartiesBusy(f"all {self._sessions} sessions are taken, and {ahead} clients are before you")

    def _room(self, user: str) -> int:
        """Further sessions that a user may have."""
        return self._per_user - sum(other.user == user for other in self._callers.values())

    def keep(self, sock: socket.socket, greeted: Greeted) -> None:
        """Keep a connection of a client that was let in; with the second one its links are made."""
        with self._lock:
            caller = self._callers.get(greeted.caller)
            if caller is None or caller.linked or not self.open:
                sock.close()
                return
            old = caller.lines.pop(not greeted.inbound, None)
            if old is not None:
                old[0].close()
            caller.lines[not greeted.inbound] = (sock, greeted.session)
            if len(caller.lines) < 2:
                return
            caller.linked = True
            pair = SocketPair(*caller.lines[True], *caller.lines[False])
            caller.link = link = ClientLink(self._me, pair, greeted.caller, caller.user, self._timeout, self._idle)
        self._arrived(link)

    def leave(self, link: ClientLink) -> None:
        """A session is over; its place is free."""
        with self._lock:
            found = self._callers.get(bytes.fromhex(link.number))
            if found is not None and found.link in (None, link):
                del self._callers[bytes.fromhex(link.number)]

    def close(self, reason: str) -> None:
        """Let nobody in any more, because of `reason`, and forget those whose links are not made yet."""
        with self._lock:
            self.open, self.closed_because = False, reason
            for number in [number for number, caller in self._callers.items() if not caller.linked]:
                self._forget(number)

    def reopen(self) -> None:
        """Let clients in."""
        with self._lock:
            self.open = True

    def _drop_late(self) -> None:
        """Forget callers that have made one of their connections, or none, and left it at that."""
        now = time.monotonic()
        late = [n for n, c in self._callers.items() if not c.linked and now - c.since > 2 * HANDSHAKE_S]
        for number in late:
            self._forget(number)

    def _forget(self, number: bytes) -> None:
        caller = self._callers.pop(number)
        if caller.link is not None:
            caller.link.abort("party 0 has no such session, and its place was needed")
            return
        for sock, _ in caller.lines.values():
            with contextlib.suppress(OSError):
                sock.close()
