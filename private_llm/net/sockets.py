"""Parties as separate processes, joined by TCP connections (or any stream sockets), with or without TLS.

`rendezvous.connect` makes the connections; this module moves tensors over them and decides who has failed:

- a broken connection, or silence for `timeout` seconds: PartyFailed, with the name of the peer and what was awaited.
  An endpoint that waits tells the others for whom, so that the one that is really silent is named; who says nothing
  else for `timeout` times the number of endpoints has failed, too;
- whoever fails first sends its reason to all others, which raise PartyFailed with it. A reason that names another
  endpoint than the one that gave it is marked as passed on: nobody speaks for another;
- a client that asks for nothing for `idle_s` seconds: its session ends, and the parties are free for others.

The ledger counts payload bytes. A transport belongs to one thread; only `abort` may be called from another. In a fork
of its process it raises ProtocolAbort, and aborting or closing it says nothing on the shared connections. Parallel
sessions have connections of their own, so that none waits for another; the end of one is the end of all.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from private_llm.errors import ConfigError, PartyFailed, TransportError
from private_llm.forks import Origin
from private_llm.net.direct import End
from private_llm.net.incoming import Incoming
from private_llm.net.outgoing import Outgoing
from private_llm.net.roles import endpoint_name
from private_llm.net.transport import CLIENT, Transport, awaiting
from private_llm.net.wire import FrameKind

_FIRST_HAND_S = 0.2  # seconds to wait for the words of the endpoint that failed, when another has passed them on
_LIFE_S = 5.0  # how often a client that works says so to endpoints that may have nothing to do with what it asks for


class SocketPair(NamedTuple):
    """The two connected sockets between this endpoint and one other, and their sessions' names (8 bytes)."""

    out: socket.socket
    out_session: bytes
    inn: socket.socket
    in_session: bytes


class SocketTransport(Transport):
    """One endpoint's links to its peers; `pairs` holds the connected sockets by endpoint.

    What it receives lies in main memory; tensors of a device are copied there before sending. idle_s: how long `wait`
    waits for a client that sends nothing at all (None: for ever).
    """

    def __init__(self, me: int, pairs: dict[int, SocketPair], timeout: float, idle_s: float | None = None) -> None:
        super().__init__(me)
        self._origin = Origin()
        self.timeout = timeout
        self.idle_s = idle_s
        self._life = self._said_at = time.monotonic()
        self._said: int | None = None
        self._slice = min(1.0, timeout / 8)
        self._failure: str | None = None
        self._parallel_sessions = [self]
        self._out = {peer: Outgoing(pair.out, me, peer, pair.out_session) for peer, pair in pairs.items()}
        patience = timeout * (len(pairs) + 1)  # the longest chain of endpoints of which each waits for the next
        self._in = {
            peer: Incoming(pair.inn, peer, pair.in_session, self._slice, patience) for peer, pair in pairs.items()
        }

    def ends(self, endpoint: int) -> Sequence[End]:
        """Both, where the sockets are plain ones."""
        if endpoint not in self._out:
            return ()
        ends = self._in[endpoint], self._out[endpoint]  # the second one looks what has come at the first
        return ends if all(end.plain for end in ends) else ()

    def accept_device_tensors(self) -> None:
        """Receive into pinned memory, where there is a GPU."""
        for link in self._in.values():
            link.pinned = torch.cuda.is_available()

    @property
    def wire_bytes(self) -> int:
        """Bytes sent to all peers in all parallel sessions, headers and notes included, TLS overhead excluded."""
        return sum(
            link.wire_bytes for parallel_session in self._parallel_sessions for link in parallel_session._out.values()
        )

    def join(self, parallel_sessions: list[SocketTransport]) -> None:
        """Be one of the parallel sessions of this endpoint, which are given in order, this one among them."""
        self._parallel_sessions = parallel_sessions

    def parallel_session(self, number: int) -> SocketTransport:
        """The links of another parallel session."""
        if not 0 <= number < len(self._parallel_sessions):
            raise ConfigError(
                f"parallel session: got {number}; these links were made for "
                f"parallel_sessions={len(self._parallel_sessions)}"
            )
        return self._parallel_sessions[number]

    def send_bytes(self, to: int, tag: str, raw: bytes | bytearray) -> None:
        """As the interface says, without a copy. Raises TransportError if the endpoint has left or is dead."""
        self.ledger.add_sent(to, tag, len(raw))
        self._send(to, tag, raw)

    def _send(self, to: int, tag: str, payload: Tensor | bytes | bytearray) -> None:
        self._check()
        try:
            link = self._out[to]
            if not link.has_room(0):
                self._wait_for_room(to)
            link.send_payload(tag, payload)
        except TransportError as error:
            raise self._fail(error, to, f"while '{tag}' was sent to {endpoint_name(to)}") from None
        if self.me == CLIENT and time.monotonic() - self._life > _LIFE_S:
            self._show_life()

    def _recv(self, frm: int, tag: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        self._check()
        try:
            return self._in[frm].receive(tag, shape, dtype, self._idle)
        except TransportError as error:
            raise self._fail(error, frm, awaiting(frm, tag)) from None

    def _recv_bytes(self, frm: int, tag: str, most: int) -> bytes:
        self._check()
        try:
            return self._in[frm].receive_bytes(tag, most, self._idle)
        except TransportError as error:
            raise self._fail(error, frm, awaiting(frm, tag)) from None

    def _show_life(self) -> None:
        """Tell every endpoint, in every parallel session, that this client works: a call may need only some."""
        self._life = time.monotonic()
        for parallel_session in self._parallel_sessions:
            for out in parallel_session._out.values():
                out.note(FrameKind.WAITING, bytes([self.me]))

    def wait(self, frm: int) -> None:
        """Block for a frame from `frm`. Raises TransportError: PartyFailed if the session stops, or after idle_s."""
        self._check()
        link, heard = self._in[frm], time.monotonic()

        def look(but: Incoming, silence: float) -> None:
            nonlocal heard
            self._check()
            self._glance(but)
            now = time.monotonic()
            if silence == 0.0:  # it has just said that it lives
                heard = now
            elif self.idle_s is not None and now - heard >= self.idle_s:
                holds = " and holds the parties" if frm == CLIENT else ""
                raise PartyFailed(f"{endpoint_name(frm)} sent nothing for {self.idle_s:g} s{holds}")

        try:
            link.wait(look)
        except TransportError as error:
            raise self._fail(error, frm, f"while the next request of {endpoint_name(frm)} was awaited") from None

    def look(self) -> None:
        """Notice without waiting who ended or is gone: PartyFailed; TransportError for a frame that is none."""
        self._check()
        for peer, link in self._in.items():
            try:
                link.glance()
            except TransportError as error:
                raise self._fail(error, peer, "while nothing was awaited") from None
            if link.ended is not None:
                raise self._fail(PartyFailed(link.ended), peer, "while nothing was awaited")

    def abort(self, reason: str) -> None:
        """Tell all others that this endpoint stops and why; nothing in a fork, whose parent goes on."""
        if not self._origin.here:
            return
        ending = [each for each in self._parallel_sessions if each._failure is None]
        for each in ending:
            each._failure = reason
            for link in each._out.values():
                link.end_lending()
        for each in sorted(ending, key=lambda each: each is not self):
            for link in each._out.values():
                link.abort(reason)

    def close(self) -> None:
        """Write what is queued, say goodbye and close all connections, of all parallel sessions; nothing in a fork."""
        if not self._origin.here:
            return
        for parallel_session in self._parallel_sessions:
            parallel_session._close()

    def _close(self) -> None:
        deadline = time.monotonic() + (self.timeout if self._failure is None else self._slice)
        for link in self._out.values():
            link.close(max(0.0, deadline - time.monotonic()))
        for inn in self._in.values():
            inn.close()
        if self._failure is None:
            self._failure = "this endpoint has closed the session"

    # -- failures -------------------------------------------------------------------------------------
    def _check(self) -> None:
        self._origin.demand("this connection")
        if self._failure is not None:
            raise PartyFailed(self._failure)

    def _fail(self, error: TransportError, peer: int, what: str) -> TransportError:
        """Stop the session because of `error`, unless it has stopped, or somebody else's reason has arrived."""
        if self._failure is not None:
            return PartyFailed(self._failure)
        told = self._told(peer)
        reason = told or str(error)
        if told is None and not self._in[peer].aborted:
            reason = f"{endpoint_name(self.me)}: {reason}, {what}; restart the session"
        self.abort(reason)
        return type(error)(reason)

    def _told(self, peer: int) -> str | None:
        """The reason of an abort that lies unread on a broken connection: rather from whom it is than passed on."""
        deadline = time.monotonic() + _FIRST_HAND_S
        while True:
            heard = None
            for link in [self._in[peer], *self._in.values()]:
                with contextlib.suppress(TransportError):
                    link.glance()
                if link.first_hand:
                    return link.ended
                if link.aborted and heard is None:
                    heard = link.ended
            if heard is None or time.monotonic() > deadline:
                return heard
            time.sleep(_FIRST_HAND_S / 20)

    def _glance(self, but: Incoming) -> None:
        for link in self._in.values():
            if link is not but:
                link.glance()

    def _idle(self, link: Incoming, silence: float) -> None:
        """`link.peer` has been silent for `silence` seconds, or (0) has just said for whom it waits.

        Every such word starts its time anew, and is passed on by those who wait for the speaker: so the one who
        waits for the silent endpoint itself gives up first. Nothing is passed on when the wait leads back to
        this endpoint: a circle ends after the timeout.
        """
        self._check()
        self._glance(link)
        root = link.waits_for
        if root is not None and root != self.me and root not in self._in:
            raise TransportError(f"from {endpoint_name(link.peer)}: it waits for endpoint {root}, and there is none")
        if silence <= self._slice and root != self.me:
            self._pass_on(link.peer if root is None else root)
        if silence >= self.timeout:
            name = endpoint_name(link.peer)
            also = "" if root is None or root == link.peer else f", after it had waited for {endpoint_name(root)}"
            raise PartyFailed(f"{name} was silent for {self.timeout:g} s{also}")

    def _pass_on(self, root: int) -> None:
        """Say for whom this endpoint waits, unless it has just said so: two who wait in turns would echo each other."""
        now = time.monotonic()
        if self._said == root and now - self._said_at < self._slice / 2:
            return
        self._said, self._said_at = root, now
        for out in self._out.values():
            out.note(FrameKind.WAITING, bytes([root]))

    def _wait_for_room(self, to: int) -> None:
        link, inn = self._out[to], self._in[to]
        silence, moved = 0.0, link.moved
        while not link.has_room(self._slice):
            silence = silence + self._slice if link.moved == moved else 0.0
            moved = link.moved
            inn.glance()
            self._idle(inn, silence)
