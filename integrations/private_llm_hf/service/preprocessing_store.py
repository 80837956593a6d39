"""What a service computes before a client asks for it: the helping party's part of calls that a session has planned.

It is prepared when no other request waits, one call a batch, so that whoever comes waits for one call at most. What the
helping party sends lies on its receivers' disks, encrypted, up to a bound; it goes when it is used, when its session
ends, and when the parties connect anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from private_llm.errors import ConfigError, PrivateLLMError, ProtocolAbort, ShareFileError, TransportError
from private_llm.net.transport import CLIENT
from private_llm.protocols.offline_phase import OfflinePhase, section_label
from private_llm.protocols.session import Session
from private_llm_hf.party.calls import CallResult, PlannedCall, outputs_message, run_alone
from private_llm_hf.service.batch_executor import ServiceLinks, change, check_fits, inputs_received, refusal
from private_llm_hf.service.client_session import Request
from private_llm_hf.service.limits import KVCacheQuota, add_part
from private_llm_hf.service.served_model import ServedModel


@dataclass
class _PreparedPlan:
    """What was prepared for one session's plan: a label of masks for each call, and what the helping party sent."""

    model: ServedModel
    user: str
    plan: int
    phase: OfflinePhase
    labels: list[str] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return self.phase.nbytes


class PreprocessingStore:
    """The prepared plans of all sessions at this party. Used by the thread that computes, at the same place of the
    same step at every party.
    """

    quota: KVCacheQuota
    """Of the parties' present links."""

    def __init__(self) -> None:
        self._plans: dict[str, _PreparedPlan] = {}

    @property
    def nbytes(self) -> int:
        """On this party's disk."""
        return sum(prepared.nbytes for prepared in self._plans.values())

    def free_bytes(self, user: str, most: int) -> int:
        """Bytes that a user's plans may still take of `most`: half of them at most for one with a name."""
        own = sum(prepared.nbytes for prepared in self._plans.values() if prepared.user == user)
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

    # -- before -------------------------------------------------------------------------------------------------
    def prepare(self, model: ServedModel, links: ServiceLinks, request: Request, label: str, room: int) -> None:
        """One call of a plan. label: of its masks, never used before. room: bytes that may be added on disk.

        The helping party computes and sends, its receivers store, the others do nothing. A call that the model does
        not take, or that does not fit on a disk, ends its session (ConfigError, DomainError, UnsupportedOp) and nothing
        else. Raises TransportError for a request that no plan has.
        """
        session, planned = model.session, _planned(request)
        if planned.index == 0:
            self.forget(request.session.id)
            self._plans[request.session.id] = _PreparedPlan(
                model, request.session.user, planned.plan, OfflinePhase(session, links)
            )
            self._reserve(model, request, planned)
        prepared = self._plans[request.session.id]
        prepared.labels.append(label)
        before = prepared.nbytes
        links.serve((), ())

        def send() -> None:
            if self._fits(model, request):
                _open(session, _computed(model, request))

        problem = prepared.phase.prepare(label, lambda: _alone(model, request, send), room=room)
        request.digests = tuple(session.protocol.take_digests())
        if problem is not None:
            prepared.phase.close()
            request.fail(ConfigError(f"preprocess: {problem}; plan fewer calls"))
        request.stored = prepared.nbytes - before
        add_part(request.session.costs, links.ledger, 1, 1)
        request.done.set()

    # -- when the data are there ----------------------------------------------------------------------------------
    def run_prepared(self, model: ServedModel, links: ServiceLinks, request: Request) -> None:
        """A call that was prepared: the helping party is silent, what it sent comes from the store.

        A call that does not fit ends its session (ConfigError for too many positions). Raises TransportError if what is
        stored is damaged: the others would wait for this party.
        """
        session, planned = model.session, _planned(request)
        prepared = self._plans.get(request.session.id)
        if prepared is None or prepared.plan != planned.plan or planned.index >= len(prepared.labels):
            raise TransportError("a call was prepared at some parties only")
        links.serve(request.frames, ())

        def answer() -> None:
            if not self._fits(model, request):
                return
            try:
                with prepared.phase.following(prepared.labels[planned.index]):
                    result = _computed(model, request)
                    request.session.answer(outputs_message(result))
                    links.serve((), [request.session.give for _ in result.outputs])
                    _open(session, result)
            except ShareFileError as error:
                raise TransportError(str(error)) from None

        if session.party != session.config.helper:
            _alone(model, request, answer)
        add_part(request.session.costs, links.ledger, 1, 1)
        if planned.last:
            self.forget(request.session.id)
        request.done.set()

    # -- both -----------------------------------------------------------------------------------------------------
    def _reserve(self, model: ServedModel, request: Request, planned: PlannedCall) -> None:
        """Count all that the plan will keep from its beginning on: what it keeps so far differs between the parties."""
        try:
            self.quota.reserve(owner_of(request.session.id), request.session.user, model.name, planned.positions)
        except PrivateLLMError as error:
            _give_up(model, request, error)

    def _fits(self, model: ServedModel, request: Request) -> bool:
        """Bring the plan's caches to where the call wants them; False, and the session ends, if the call is bad."""
        planned, owner = _planned(request), owner_of(request.session.id)
        try:
            change(model.state, owner, planned.edits, self.quota.limits)
            check_fits(model, owner, planned.call, self.quota.limits)
        except Exception as error:  # noqa: BLE001 - as in `batch_executor`
            _give_up(model, request, refusal(request, error))
        return request.error is None


def owner_of(session: str) -> str:
    """Under this name the caches of a session's plan are kept: no other call can name them."""
    return f"{session} plan"


def _planned(request: Request) -> PlannedCall:
    if request.planned is None:
        raise TransportError("a call that nobody planned")
    return request.planned


def _give_up(model: ServedModel, request: Request, error: PrivateLLMError) -> None:
    """The session ends; nothing that it half did is left."""
    model.session.checks.clear()
    model.state.forget(owner_of(request.session.id))
    request.fail(error)


def _computed(model: ServedModel, request: Request) -> CallResult:
    """Inside a section: inputs and the model."""
    session, planned = model.session, _planned(request)
    masks = session.protocol.input_masks(request.session.keys, section_label(planned.plan, planned.number))
    with torch.no_grad(), session.protocol.ledger.scope(""):
        secrets = inputs_received(model, masks, planned.call)
        return run_alone(model.state, owner_of(request.session.id), planned.call, secrets)


def _open(session: Session, result: CallResult) -> None:
    if result.outputs:
        session.protocol.reveal([(CLIENT, fixed.share) for _, fixed in result.outputs])


def _alone(model: ServedModel, request: Request, run: Callable[[], None]) -> None:
    """What goes wrong with a call ends its session: it follows from public facts, so it is the same at all who compute.

    Raises TransportError and ProtocolAbort, which end all.
    """
    try:
        run()
    except (TransportError, ProtocolAbort):
        raise
    except PrivateLLMError as error:
        _give_up(model, request, error)
