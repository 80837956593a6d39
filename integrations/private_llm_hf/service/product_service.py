"""A server of protocol "assisted" for several clients at a time, each with a session in a thread of its own.

Servers hold no secret and say nothing to each other, so each lets clients in by itself, and sessions share nothing but
weights that the server read. They multiply side by side. What goes wrong in one ends it, and nothing else.
"""

import functools
import logging
import socket
import threading
import time
from contextlib import closing
from dataclasses import dataclass

import torch

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError
from private_llm.kernels.address import trim_allocator, tune_allocator
from private_llm.kernels.devices import device_for
from private_llm.kernels.parallel import usable_cores
from private_llm.net.admission import Admission, ClientLink
from private_llm.net.rendezvous import connect, open_acceptor
from private_llm.net.roles import called
from private_llm.protocol_facts import ASSISTED
from private_llm_hf.client.open_weights import open_weights
from private_llm_hf.party.command_loop import reported
from private_llm_hf.party.product_server import ProductServer, ServerMemory
from private_llm_hf.service.settings import Observer, ServiceSettings

_LOG = logging.getLogger("private_llm")
_TICK_S = 0.25  # how often it is looked whether the service should end, and who waits long for an answer


@dataclass(eq=False)
class _ProductSession:
    """A client that was let in. server: its end of the session, once they have agreed on settings."""

    link: ClientLink
    began: float
    server: ProductServer | None = None
    told: float = 0.0


class ProductService:
    """One server, for all its clients."""

    def __init__(
        self, config: PrivateConfig, number: int, settings: ServiceSettings, observer: Observer | None = None,
        checkpoint: str | None = None, listener: socket.socket | None = None,
    ) -> None:  # fmt: skip
        """checkpoint: what it multiplies by (None: clients send weights). listener: its socket, if there is one. Raises
        ConfigError for other settings and too many clients, and as `open_weights`.
        """
        if config.protocol != ASSISTED or config.party_mode != "remote" or not 0 <= number < config.endpoints:
            raise ConfigError(f"party: got {number} of {config.protocol!r}; want a server of 'assisted' with hosts")
        self.config, self.number, self.settings, self._listener = config, number, settings, listener
        self.observer = observer or Observer()
        device = device_for(config.device, number)
        self._memory = ServerMemory(device, settings.sessions)
        self._weights = None if checkpoint is None else open_weights(checkpoint, device, config.weight_bits)
        self._sessions: set[_ProductSession] = set()
        self._lock, self._up = threading.Lock(), False
        self._leave_at: float | None = None
        self.admission = Admission(
            number, config.timeout_s, config.idle_s, settings.sessions, settings.sessions_per_user, settings.waiting,
            self._arrived, lambda reason: self.observer.refused("a caller", reason), self.observer.busy, decides=True,
        )  # fmt: skip
        self.admission.closed_because = f"{called(config, number)} is not ready"

    @property
    def ready(self) -> bool:
        """Whether clients may come."""
        return self._up and self._leave_at is None

    def drain(self) -> None:
        """As `PartyService.drain`."""
        if self._leave_at is None:
            self._leave_at = time.monotonic() + self.settings.drain_s
            self.admission.close(f"{called(self.config, self.number)} is about to stop")
            self.observer.draining()

    def run(self) -> None:
        """Serve until drained. Raises ConfigError if no safe connection can be, TransportError for a taken port."""
        tune_allocator()
        with (
            closing(open_acceptor(self.config, self.number, self._listener)) as acceptor,
            closing(connect(self.config, self.number, acceptor=acceptor, admission=self.admission)),
        ):
            if self._leave_at is None:
                self.admission.reopen()
            self._up = True
            self.observer.links_up()
            while not self._gone():
                self._look()
                time.sleep(_TICK_S)
            for each in self._list():
                each.link.abort(f"{called(self.config, self.number)} has stopped")

    def _gone(self) -> bool:
        return self._leave_at is not None and (not self._sessions or time.monotonic() >= self._leave_at)

    def _list(self) -> list[_ProductSession]:
        with self._lock:
            return list(self._sessions)

    def _look(self) -> None:
        """Tell those whose products take long, because many compute, that they come."""
        now, every = time.monotonic(), self.config.timeout_s / 8
        computing = 0
        for each in self._list():
            server = each.server
            since = None if server is None else server.busy_since
            computing += since is not None
            if since is not None and now - max(since, each.told) > every:
                each.told = now
                each.link.show_life()
        self.observer.load(len(self._sessions), computing)

    def _arrived(self, link: ClientLink) -> None:
        served = _ProductSession(link, time.monotonic())
        with self._lock:
            self._sessions.add(served)
        self.observer.session_began(link.number[:12], link.user)
        threading.Thread(target=self._run, args=(served,), name=f"session {link.number[:12]}", daemon=True).start()

    def _ready(self, link: ClientLink) -> None:
        """Before the next request: the client has read the last answer; each session has its part of the cores."""
        link.await_reader()
        share = max(1, usable_cores() // max(1, len(self._sessions)))
        if torch.get_num_threads() != share:  # of this thread
            torch.set_num_threads(share)

    def _run(self, served: _ProductSession) -> None:
        link, reason = served.link, None

        def serve() -> None:
            served.server = ProductServer(self.config, link, self._weights, self._memory, link.user)
            served.server.serve(functools.partial(self._ready, link))

        try:
            reason = reported(self.config, self.number, link, serve)
        finally:
            served.server = None
            with self._lock:
                self._sessions.discard(served)
            self.admission.leave(link)
            self.observer.session_ended(link.number[:12], link.user, time.monotonic() - served.began, reason)
            link.close()
            trim_allocator()
