"""What a service computes before a client asks for it: the helping party's part of calls that a session has planned.

It is prepared when no other request waits, one call a batch, so that whoever comes waits for one call at most. What the
helping party sends lies on its receivers' disks, encrypted, up to a bound; it goes when it is used, when its session
ends, and when the parties connect anew.
"""

from dataclasses import dataclass, field

from private_llm.errors import ConfigError, PrivateLLMError, ShareFileError, TransportError
from private_llm.protocols.offline_phase import OfflinePhase
from private_llm_hf.party.calls import PlannedCall
from private_llm_hf.service.batch_executor import ServiceLinks, accepts, compute, give_up
from private_llm_hf.service.client_session import Request, owner_of
from private_llm_hf.service.limits import KVCacheQuota
from private_llm_hf.service.served_model import ServedModel


@dataclass
class _PreparedPlan:
    """What was prepared for one session's plan: a label of masks for each call, and what the helping party sent."""

    model: ServedModel
    user: str
    plan: int
    phase: OfflinePhase
    labels: list[str] = field(default_factory=list)


class PreprocessingStore:
    """The prepared plans of all sessions at this party, for the thread that computes, alike at every party."""

    quota: KVCacheQuota  # of the parties' present links

    def __init__(self) -> None:
        self._plans: dict[str, _PreparedPlan] = {}

    @property
    def nbytes(self) -> int:
        """On this party's disk."""
        return sum(prepared.phase.nbytes for prepared in self._plans.values())

    def free_bytes(self, user: str, most: int) -> int:
        """Bytes that a user's plans may still take of `most`: half of them at most for one with a name."""
        own = sum(prepared.phase.nbytes for prepared in self._plans.values() if prepared.user == user)
        return min(most - self.nbytes, most - most // 2 - own) if user else most - self.nbytes

    def forget(self, session: str) -> None:
        """Delete what is left of a session's plan, and its caches."""
        prepared = self._plans.pop(session, None)
        if prepared is not None:
            prepared.phase.close()
            prepared.model.state.forget(owner_of(session))
            self.quota.release(owner_of(session))

    def close(self) -> None:
        """Delete all."""
        for prepared in self._plans.values():
            prepared.phase.close()
        self._plans.clear()

    def prepare(self, model: ServedModel, links: ServiceLinks, request: Request, label: str, room: int) -> None:
        """One call of a plan. label: of its masks, never used before. room: bytes that may be added on disk.

        The helping party computes and sends, its receivers store, the others do nothing. A call that the model does
        not take, or that does not fit on a disk, ends its session (ConfigError, DomainError, UnsupportedOp) and nothing
        else. Raises TransportError for a request that no plan has.
        """
        planned, owner = _planned(request), request.session.id
        if planned.index == 0:
            self.forget(owner)
            phase = OfflinePhase(model.session, links)
            self._plans[owner] = _PreparedPlan(model, request.session.user, planned.plan, phase)
            try:  # all that the plan will keep: what it keeps so far differs between the parties
                self.quota.reserve(request.owner, request.session.user, model.name, planned.positions)
            except PrivateLLMError as error:
                give_up(model, request, self.quota, error)
        prepared = self._plans[owner]
        prepared.labels.append(label)
        before = prepared.phase.nbytes

        def send() -> None:
            if accepts(model, request, self.quota):
                compute(model, links, [request], self.quota, heard=False)

        problem = prepared.phase.prepare(label, send, room=room)
        request.digests = tuple(model.session.protocol.take_digests())
        if problem is not None:
            prepared.phase.close()
            request.fail(ConfigError(f"preprocess: {problem}; plan fewer calls"))
        request.stored = prepared.phase.nbytes - before
        request.session.costs.book(links.ledger)
        request.done.set()

    def run_prepared(self, model: ServedModel, links: ServiceLinks, request: Request) -> None:
        """A prepared call: the helper is silent, its messages are stored. One that does not fit ends its session
        (ConfigError for positions). Raises TransportError for damage: the others would wait.
        """
        session, planned = model.session, _planned(request)
        prepared = self._plans.get(request.session.id)
        if prepared is None or prepared.plan != planned.plan or planned.index >= len(prepared.labels):
            raise TransportError("a call was prepared at some parties only")
        if session.party != session.config.helper and accepts(model, request, self.quota):
            try:
                with prepared.phase.following(prepared.labels[planned.index]):
                    compute(model, links, [request], self.quota)
            except ShareFileError as error:
                raise TransportError(str(error)) from None
        request.session.costs.book(links.ledger)
        if planned.last:
            self.forget(request.session.id)
        request.done.set()


def _planned(request: Request) -> PlannedCall:
    if request.planned is None:
        raise TransportError("a call that nobody planned")
    return request.planned
