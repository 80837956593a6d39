"""A party's listening socket, and the callers that have not yet proved who they are.

Anybody may open a connection, so what strangers can hold is bounded. A caller has `HANDSHAKE_S` for the whole
handshake, however slowly it speaks. When too many callers of one source, or too many in all, are at it, the one that
came first is cut off for the newcomer: an honest handshake takes milliseconds, one that lingers makes room. Who is cut
off may call again.

An acceptor stays open between sessions and during them, so that a second client is told that the first one is being
served.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from private_llm.forks import Origin
from private_llm.net.addresses import same_user

HANDSHAKE_S = 10.0
"""Seconds a handshake may take."""
_CALLERS = 64
"""Handshakes at the same time, besides one for each endpoint that is expected."""
_PER_SOURCE = 16
"""The same, of callers from one address (one network of 64 bits with IPv6)."""
_TICK_S = 0.25
"""How often late callers are looked for while nobody calls."""

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
            self._cut_late()
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

    def _cut_late(self) -> None:
        with self._lock:
            for caller in [c for c in self._callers if time.monotonic() - c.since > HANDSHAKE_S]:
                self._cut(caller)

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
    """What counts as one source: an IPv4 address, or the 64-bit network that one host of IPv6 has to itself.

    Empty, which is this machine by a Unix socket, is one, too.
    """
    if not address:
        return ""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.IPv6Network((found, 64), strict=False))
