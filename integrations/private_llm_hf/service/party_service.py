"""A party that serves many clients at once: one permanent mesh between the parties, and other links to each client.

The thread of each session takes its client's commands and inputs (`client_session.py`). One thread, the one that calls
`run`, computes: party 0 chooses among the requests that wait (`scheduler.py`), all parties agree that they have them
(`party/agreement.py`), and run them as one batch (`batch.py`). So a client that is slow, or leaves, or sends nonsense,
makes nobody wait and ends nothing but its own session. When a party fails, all sessions end with its name; the others
connect again, with the shares that they hold, as soon as it is back.
"""

import functools
import logging
import math
import re
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from typing import TypeVar

import torch

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, PrivateLLMError, ProtocolAbort, TransportError
from private_llm.kernels.address import tune_allocator
from private_llm.net.admission import Acceptor, Admission, ClientLink
from private_llm.net.offline_store import OfflineStore
from private_llm.net.rendezvous import Unreached, connect, open_acceptor
from private_llm.net.roles import HEARSAY, WHO, called, named
from private_llm.net.sockets import SocketTransport
from private_llm.protocols.session import join
from private_llm_hf.party.agreement import Ack, Commit, Proposal, RequestRef, Transcript, Vote, joined, tally
from private_llm_hf.service.batch_executor import ServiceLinks, run_requests
from private_llm_hf.service.checks import batch_key, past_of
from private_llm_hf.service.client_session import ClientSession, Request
from private_llm_hf.service.limits import ClientQuarantine, KVCacheQuota, Limits, elements_of, meet
from private_llm_hf.service.preprocessing_store import PreprocessingStore
from private_llm_hf.service.scheduler import RequestSize, Scheduler
from private_llm_hf.service.served_model import ServedModel, open_models
from private_llm_hf.service.settings import BatchFacts, Observer, ServiceSettings
from private_llm_hf.wire.commands import recv_message, send_message

_LOG = logging.getLogger("private_llm")
_CONNECT_S = 10.0  # seconds of one try to reach the others; between two it is looked whether the service should end
_PAUSE_S = 0.2
_TICK_S = 0.25  # how often an idle party looks after its links
_STOPPED = "has stopped"  # what a party that was drained says at the end, after its name
_APART = "the parties disagree on the step that they are at"
StepMessage = TypeVar("StepMessage", Proposal, Vote, Commit, Ack)
_GRACE_S = 0.02  # seconds that a party waits for a request that party 0 has got already


class PartyService:
    """One party, for all its models' clients. Raises ConfigError, ShareFileError, PatchMismatch before it listens."""

    limits: Limits

    def __init__(
        self, config: PrivateConfig, number: int, settings: ServiceSettings, observer: Observer | None = None,
        listener: socket.socket | None = None,
    ) -> None:  # fmt: skip
        """listener: this party's listening socket, if the process that started it has chosen the port."""
        self.settings, self.observer, self.rows = settings, observer or Observer(), settings.rows
        self._models, self.config = open_models(settings.models, _checked(config, number), number)
        if number in self.config.offline_receivers and settings.offline_bytes:
            OfflineStore(self.config.offline_folder).close()  # one that cannot be written is told before anybody comes
        self.number, self._listener = number, listener
        self._scheduler, self._preprocessing = Scheduler(settings), PreprocessingStore()
        self._sessions: dict[str, ClientSession] = {}
        self._lock = threading.Lock()
        self._ended: list[str] = []
        self._step, self._others_leave = 0, False
        self._leave_at: float | None = None
        self._up = threading.Event()
        self._last_live = 0.0
        self._alone_since = time.monotonic()
        self._quarantine = ClientQuarantine()
        self.admission = Admission(
            number, self.config.timeout_s, self.config.idle_s, settings.sessions, settings.sessions_per_user,
            settings.waiting, self._arrived, lambda reason: self.observer.refused("a caller", reason),
            self.observer.busy, self._quarantine.seconds_barred,
        )  # fmt: skip

    @property
    def ready(self) -> bool:
        """Whether clients may come: connected with all parties, models built, not about to end."""
        return self._up.is_set() and self._leave_at is None

    def drain(self) -> None:
        """Let no session begin any more, and end when those that run are over, after drain_s at most."""
        if self._leave_at is None:
            self._leave_at = time.monotonic() + self.settings.drain_s
            self.admission.close(f"{called(self.config, self.number)} is about to stop")
            self.observer.draining()
            self._scheduler.wake()

    def run(self) -> None:
        """Serve until drained. Raises ConfigError if no safe connection can be, TransportError for a taken port."""
        tune_allocator()
        with closing(open_acceptor(self.config, self.number, self._listener)) as acceptor:
            while not self._gone():
                self._serve_once(acceptor)

    def _gone(self) -> bool:
        if self._leave_at is None:
            return False
        return not self._sessions or time.monotonic() >= self._leave_at

    def _serve_once(self, acceptor: Acceptor) -> None:
        """Connect with the others and serve until a party fails."""
        try:
            links = connect(self.config, self.number, wait_s=_CONNECT_S, acceptor=acceptor, admission=self.admission)
        except (TransportError, OSError) as error:
            reason = named(self.config, str(error))
            self.admission.close(f"the parties connect with each other ({reason})")
            who = named(self.config, error.who) if isinstance(error, Unreached) else None
            self.observer.links_awaited(who, reason, time.monotonic() - self._alone_since)
            time.sleep(_PAUSE_S)
            return
        reason = f"{called(self.config, self.number)} {_STOPPED}"
        try:
            self._serve(links)
        except PrivateLLMError as error:
            reason = named(self.config, str(error))
        except Exception as error:  # noqa: BLE001 - whatever it is, the others must not wait for this party
            _LOG.exception("%s lost its place in the computation", called(self.config, self.number))
            reason = f"{called(self.config, self.number)}: {type(error).__name__}"
        finally:
            self._up.clear()
            self.admission.close(f"the parties connect with each other ({reason})")
            links.abort(reason)
            self._end_sessions(reason)
            links.close()
            self._preprocessing.close()
            self._alone_since = time.monotonic()
            self.observer.links_down(reason, re.fullmatch(rf"{HEARSAY}(?:{WHO}) {_STOPPED}", reason) is not None)

    def _serve(self, mesh: SocketTransport) -> None:
        links = ServiceLinks(mesh)
        session = join(self.config, self.number, links, client=False)
        with torch.no_grad():
            for model in self._models.values():
                model.begin(session)
            own = Limits.own(self.settings, self.config, [model.model.config for model in self._models.values()])
            self.limits = meet(links, self.config.parties, own)
            self._quota = KVCacheQuota(self.limits)
            self._preprocessing.quota = self._quota
            self._step = 0
            self._transcript = Transcript(session)
            self._transcript.add(self.limits)
            self._up.set()
            self.observer.links_up()
            if self._leave_at is None:
                self.admission.reopen()
            lead = self._lead if self.number == 0 else self._follow
            while not self._gone():
                lead(mesh, links)

    # -- sessions -----------------------------------------------------------------------------------------------
    def _arrived(self, link: ClientLink) -> None:
        session = ClientSession(self, link)
        with self._lock:
            self._sessions[session.id] = session
        self.observer.session_began(session.short, session.user)
        session.start()

    def model_of(self, digest: str | None) -> ServedModel:
        """The model that a client names by its digest; the first one for an unknown one, which the client refuses."""
        return self._models.get(digest or "", next(iter(self._models.values())))

    def submit(self, request: Request) -> None:
        """A call waits for a batch. Raises TransportError while the parties are not connected."""
        if not self._up.is_set():
            raise TransportError("the parties connect with each other; try again")
        self._scheduler.add_request(request)

    def over(self, session: ClientSession, reason: str | None) -> None:
        """A session has ended here."""
        with self._lock:
            if self._sessions.get(session.id) is session:  # its number may be another's by now
                del self._sessions[session.id]
            self._ended.append(session.id)
        self._scheduler.finish_session(session)
        self.admission.leave(session.link)
        self.observer.session_ended(session.short, session.user, time.monotonic() - session.began, reason)

    def _end_sessions(self, reason: str) -> None:
        with self._lock:
            sessions = list(self._sessions.values())
            self._ended.clear()
        for session in sessions:
            session.cut(reason)
        until = time.monotonic() + self.config.timeout_s
        for session in sessions:
            session.join(max(0.0, until - time.monotonic()))
        self._scheduler.clear()
        with self._lock:
            self._ended.clear()

    def _take_ended(self) -> tuple[str, ...]:
        with self._lock:
            ended, self._ended = tuple(self._ended), []
        return ended

    # -- party 0 ------------------------------------------------------------------------------------------------
    def _lead(self, mesh: SocketTransport, links: ServiceLinks) -> None:
        """One step of party 0: choose, ask the others, run."""
        requests = self._scheduler.schedule(_TICK_S, self._size_of, self.limits.elements)
        ended = self._take_ended()
        self._scheduler.forget_sessions(ended)
        now = time.monotonic()
        pulse = now - self._last_live > min(2.0, self.config.timeout_s / 8)
        if not requests and not ended and not pulse:
            mesh.look()
            return
        live = None
        if pulse:
            self._last_live = now
            with self._lock:
                live = tuple(self._sessions)
            self.observer.load(len(live), len(self._scheduler))
        self._step += 1
        proposal = Proposal(self._step, tuple(RequestRef(r.session.id, r.number) for r in requests), live)
        self._tell_others(links, proposal)
        votes = [self._hear(links, party, Vote) for party in range(1, self.config.parties)]
        if any(len(vote.facts) != len(requests) for vote in votes):
            raise ProtocolAbort(_APART)
        over, places = self._lost(votes), []
        for place, verdict in enumerate(tally([vote.facts for vote in votes], [r.facts for r in requests])):
            request = requests[place]
            if request.session.id in over or request.session.id in ended:
                continue
            if verdict is None:
                self._scheduler.requeue(request, self.config.timeout_s)
            elif verdict:
                places.append(place)
            else:
                request.session.cut("the client told the parties different things")
        commit = Commit(self._step, tuple(places), (*ended, *sorted(over)))
        self._tell_others(links, commit)
        self._carry_out(links, [requests[place] for place in places], proposal, commit)

    def _tell_others(self, links: ServiceLinks, message: Proposal | Commit) -> None:
        for party in range(1, self.config.parties):
            send_message(links, party, message)

    def _hear(self, links: ServiceLinks, party: int, kind: type[StepMessage]) -> StepMessage:
        """What a party says in this step. Raises ProtocolAbort for a message of another one."""
        message = recv_message(links, party, (kind,))
        if message.step != self._step:
            raise ProtocolAbort(_APART)
        return message

    def _size_of(self, request: Request) -> RequestSize:
        """What of a batch it takes; planned calls run alone, as do those that cannot be measured and will fail."""
        if request.planned is not None:
            return RequestSize(None, 0)
        try:
            return self._measure(request)
        except Exception:  # noqa: BLE001 - whatever its client caused ends its session alone
            _LOG.exception("session %s asked for what cannot be measured", request.session.short)
            return RequestSize(None, 0)

    def _measure(self, request: Request) -> RequestSize:
        model = request.session.model
        held = functools.partial(model.state.past, request.session.id)
        past = past_of(held, request.call, request.edits, request.free)
        alone = self._quarantine.runs_alone(request.session.user)
        key = None if alone else batch_key(model.model, model.session.config, request.call, past)
        return RequestSize(key, elements_of(model.model.config, request.call, past))

    def _lost(self, votes: Sequence[Vote]) -> set[str]:
        """Sessions that are over at another party, which are cut here; and parties that want to stop are noted."""
        over = set()
        for party, vote in enumerate(votes, 1):
            if vote.leaving and not self._others_leave:
                self._others_leave = True
                self.admission.close(f"{called(self.config, party)} is about to stop")
            for number in vote.ended:
                with self._lock:
                    session = self._sessions.get(number)
                if session is not None:
                    session.cut(f"{called(self.config, party)} lost its connection to the client")
                    over.add(number)
        return over

    # -- the others ---------------------------------------------------------------------------------------------
    def _follow(self, mesh: SocketTransport, links: ServiceLinks) -> None:
        """One step of another party: say what is here, then run what party 0 says."""
        links.wait(0)
        self._step += 1
        proposal = self._hear(links, 0, Proposal)
        wanted = [(request.session, request.number) for request in proposal.requests]
        held = self._scheduler.find_requests(wanted, _GRACE_S)
        facts = tuple(None if request is None else request.facts for request in held)
        send_message(links, 0, Vote(self._step, facts, self._take_ended(), self._leave_at is not None))
        commit = self._hear(links, 0, Commit)
        runs = []
        for place in commit.places:
            request = held[place] if place < len(held) else None
            if request is None:
                raise ProtocolAbort("party 0 runs a request that is not here")
            if request in runs:
                raise ProtocolAbort("party 0 runs a request twice")
            runs.append(request)
        self._scheduler.remove_requests(runs)
        if proposal.live is not None:
            self.admission.confirm(proposal.live)
            self._drop_strangers(proposal.live)
            self.observer.load(len(self._sessions), len(self._scheduler))
        self._carry_out(links, runs, proposal, commit)

    def _drop_strangers(self, live: Sequence[str]) -> None:
        """End sessions that party 0 does not have: it comes first, so they are over there, or never began."""
        known, now = set(live), time.monotonic()
        with self._lock:
            strange = [s for s in self._sessions.values() if s.id not in known and now - s.began > _CONNECT_S]
        for session in strange:
            session.cut("party 0 has no such session")

    # -- all ------------------------------------------------------------------------------------------------------
    def _carry_out(self, links: ServiceLinks, requests: list[Request], proposal: Proposal, commit: Commit) -> None:
        """Forget what ended, run a batch; the same at all parties. Raises ProtocolAbort, unsent, where they differ."""
        self._transcript.add([proposal, commit])
        self._transcript.compare(links, range(self.config.parties), joined([request.facts for request in requests]))
        self._forget(commit.ended, requests)
        if not requests:
            return
        began = time.perf_counter()
        model = requests[0].session.model
        links.ledger.reset()
        try:
            rows, tokens = self._run_batch(model, links, requests)
        except ProtocolAbort:
            self._quarantine.record_abort(request.session.user for request in requests)
            raise
        own = [request for request in requests if request.planned is None]  # a planned one's disk is one party's own
        self._transcript.add([type(request.error).__name__ for request in own])
        if self.number != 0:
            send_message(links, 0, Ack(self._step))
        else:  # wait until the others are through: only then is it known which of its sessions go on
            for party in range(1, self.config.parties):
                self._hear(links, party, Ack)
        seconds = time.perf_counter() - began
        self._scheduler.update_from_batch(requests, seconds)
        users, ledger = len({request.session.user for request in requests}), links.ledger
        sent, rounds = sum(ledger.sent.values()), sum(ledger.rounds.values())
        self.observer.batch_done(BatchFacts(model.name, len(requests), users, rows, tokens, seconds, sent, rounds))

    def _forget(self, ended: Sequence[str], requests: Sequence[Request]) -> None:
        """Let go of what sessions kept that are over, and cut them here: without it their next call would run as their
        first. Raises ProtocolAbort for one that is no session, or runs in this very step.
        """
        running = {request.session.id for request in requests}
        for number in ended:
            if number in running or not re.fullmatch("[0-9a-f]+", number):
                raise ProtocolAbort("party 0 ends a session that it runs, or one that cannot be")
            self._quota.release(number)
            for model in self._models.values():
                model.state.forget(number)
            self._preprocessing.forget(number)
            with self._lock:
                session = self._sessions.get(number)
            if session is not None:
                session.cut("another party lost its connection to the client")

    def _run_batch(self, model: ServedModel, links: ServiceLinks, requests: list[Request]) -> tuple[int, int]:
        """Rows and positions that were computed."""
        for request in requests:
            if request.drop:
                self._preprocessing.forget(request.session.id)
        first = requests[0]
        if first.planned is None:
            return run_requests(model, links, requests, self._quota)
        model.state.free(first.session.id, first.free)  # at those, too, who do not run it
        if first.prepares:
            room = self._preprocessing.free_bytes(first.session.user, self.settings.offline_bytes)
            self._preprocessing.prepare(model, links, first, f"ahead {self._step}", room)
        else:
            self._preprocessing.run_prepared(model, links, first)
        return first.call.rows, math.prod(first.call.secret[0].shape[:2])


def _checked(config: PrivateConfig, number: int) -> PrivateConfig:
    """The configuration of a service. Raises ConfigError for what a service does not do."""
    if config.facts is None or config.plan is not None:
        raise ConfigError("a party service works with shares; nodes of token sharding serve one client at a time")
    if config.weights != "secret" or config.parallel_sessions > 1:
        raise ConfigError("a party service wants weights='secret' and parallel_sessions=1; it merges calls by itself")
    if not 0 <= number < config.parties:
        raise ConfigError(f"party: got {number}; want 0 to {config.parties - 1} for {config.protocol!r}")
    if config.party_mode != "remote":
        raise ConfigError(f"party_mode: got {config.party_mode!r}; a party service wants 'remote', and hosts")
    return config
