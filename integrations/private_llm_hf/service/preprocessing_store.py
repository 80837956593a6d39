"""What a service computes before a client asks for it: the helping party's part of calls that a session has planned.

It is prepared when no other request waits, one call a batch, so that whoever comes waits for one call at most. What the
helping party sends lies on its receivers' disks, encrypted, up to a bound; it goes when it is used, when its session
ends, and when the parties connect anew.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from private_llm.errors import ConfigError, PrivateLLMError, ProtocolAbort, ShareFileError, TransportError
from private_llm.net.offline_store import OfflineStore, OfflineStoreTransport, OfflineTransport, store_call_within
from private_llm.net.transport import CLIENT, Transport
from private_llm.protocols.offline_phase import section_label
from private_llm.protocols.session import Session
from private_llm_hf.party.calls import CallResult, PlannedCall, run_alone
from private_llm_hf.service.batch_executor import change, check_fits, inputs_received, outputs_message, refusal
from private_llm_hf.service.client_session import Request
from private_llm_hf.service.limits import KVCacheQuota
from private_llm_hf.service.links import ServiceLinks
from private_llm_hf.service.served_model import ServedModel


@dataclass
class _PreparedPlan:
    """What was prepared for one session's plan: a label of masks for each call, and what the helping party sent."""

    model: ServedModel
    user: str
    plan: int
    store: OfflineStore | None
    labels: list[str] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return 0 if self.store is None else self.store.nbytes

    def close(self) -> None:
        if self.store is not None:
            self.store.close()
            self.store = None


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
            prepared.close()
            prepared.model.state.forget(owner_of(session))
            self.quota.release(owner_of(session))

    def close(self) -> None:
        """Delete all."""
        for prepared in self._plans.values():
            prepared.close()
        self._plans.clear()

    # -- before -------------------------------------------------------------------------------------------------
    def prepare(self, model: ServedModel, links: ServiceLinks, request: Request, label: str, room: int) -> None:
        """One call of a plan. label: of its masks, never used before. room: bytes that may be added on disk.

        The helping party computes and sends, its receivers store, the others do nothing. A call that the model does
        not take, or that does not fit on a disk, ends its session (ConfigError, DomainError, UnsupportedOp) and nothing
        else. Raises TransportError for a request that no plan has.
        """
        session, planned = model.session, _planned(request)
        helper, keepers = session.config.helper, session.config.offline_receivers
        keeps = session.party in keepers
        if planned.index == 0:
            self.forget(request.session.id)
            made = OfflineStore(session.config.offline_folder) if keeps else None
            self._plans[request.session.id] = _PreparedPlan(model, request.session.user, planned.plan, made)
            self._reserve(model, request, planned)
        prepared = self._plans[request.session.id]
        prepared.labels.append(label)
        before = prepared.nbytes
        if session.party == helper:
            self._send_ahead(model, links, request, label, keepers)
        elif prepared.store is not None and helper is not None:
            problem = store_call_within(links, helper, prepared.store, room)
            if problem is not None:
                prepared.close()
                request.fail(ConfigError(f"preprocess: {problem}; plan fewer calls"))
        request.stored = prepared.nbytes - before
        if planned.last and prepared.store is not None:
            prepared.store.rewind()
        request.session.costs.add(links.ledger, 1, 1)
        request.done.set()

    def _send_ahead(
        self, model: ServedModel, links: ServiceLinks, request: Request, label: str, keepers: tuple[int, ...]
    ) -> None:
        session = model.session
        links.serve((), ())
        try:
            if self._fits(model, request):
                with session.protocol.section(label, OfflineTransport):
                    answer = _computed(model, request)
                    session.protocol.reveal([(CLIENT, fixed.share) for _, fixed in answer.outputs])
        except (TransportError, ProtocolAbort):
            raise
        except PrivateLLMError as error:
            _give_up(model, request, error)
        request.digests = tuple(session.protocol.take_digests())
        OfflineTransport(links).end_call(keepers)  # also after a mistake: its receivers wait for it

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
        if session.party != (session.config.facts.helper if session.config.facts else None):
            self._answer(model, links, request, prepared)
        request.session.costs.add(links.ledger, 1, 1)
        if planned.last:
            self.forget(request.session.id)
        request.done.set()

    def _answer(self, model: ServedModel, links: ServiceLinks, request: Request, prepared: _PreparedPlan) -> None:
        session, store = model.session, prepared.store
        helper = session.config.helper

        def reading(transport: Transport) -> Transport:
            if store is None or helper is None:
                return transport
            return OfflineStoreTransport(transport, helper, store, lambda: session.protocol.device)

        links.serve(request.frames, ())
        if not self._fits(model, request):
            return
        try:
            with session.protocol.section(prepared.labels[_planned(request).index], reading):
                answer = _computed(model, request)
                _open(session, links, request, answer)
            if store is not None:
                store.finish_call()
        except ShareFileError as error:
            raise TransportError(str(error)) from None
        except (TransportError, ProtocolAbort):
            raise
        except PrivateLLMError as error:  # the same at all who compute: it follows from public facts
            _give_up(model, request, error)

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
    model.session.numerics.clear()
    model.state.forget(owner_of(request.session.id))
    request.fail(error)


def _computed(model: ServedModel, request: Request) -> CallResult:
    """Inside a section: inputs and the model."""
    session, planned = model.session, _planned(request)
    masks = session.protocol.input_masks(request.session.keys, section_label(planned.plan, planned.number))
    with torch.no_grad(), session.protocol.ledger.scope(""):
        secrets = inputs_received(session, masks, planned.call)
        return run_alone(model.model, session, model.state, owner_of(request.session.id), planned.call, secrets)


def _open(session: Session, links: ServiceLinks, request: Request, answer: CallResult) -> None:
    request.session.answer(outputs_message(answer))
    links.serve((), [request.session.give for _ in answer.outputs])
    if answer.outputs:
        session.protocol.reveal([(CLIENT, fixed.share) for _, fixed in answer.outputs])
