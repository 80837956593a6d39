"""Run the requests that the parties have agreed upon as one batch, and answer each to its own client.

What is done here depends on public facts alone and is the same at all parties: a request that is refused is refused
everywhere, and the others go on. What a client sends for an input was received by the thread of its session, so that no
client can make a batch wait: the protocol receives from what was recorded, and what it opens goes to the client whose
turn it is (`ServiceLinks`).
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from private_llm.errors import DomainError, PrivateLLMError, ProtocolAbort, ShareFileError, TransportError
from private_llm.net.direct import End
from private_llm.net.transport import CLIENT, PassingTransport, Transport
from private_llm.protocols.offline_phase import section_label
from private_llm.protocols.share import Index, Share
from private_llm_hf.party.calls import outputs_message, receive_inputs
from private_llm_hf.party.session_state import SessionState
from private_llm_hf.service.batch import BatchedRequest, run_batch
from private_llm_hf.service.checks import check_call
from private_llm_hf.service.client_session import ReceivedTensor, Request
from private_llm_hf.service.limits import MOST_HANDLES, KVCacheQuota, Limits
from private_llm_hf.service.served_model import ServedModel
from private_llm_hf.wire.commands import CacheEdit, Call, SelectRows

_LOG = logging.getLogger("private_llm")
OF_THE_MACHINE = (MemoryError, OSError)  # what one party may meet and the others not


class ServiceLinks(PassingTransport):
    """Links between parties, with the client's number for a batch's clients. inputs, receivers: next, in order."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.inputs: deque[ReceivedTensor] = deque()
        self.receivers: deque[Callable[[str, Tensor], None]] = deque()

    def ends(self, endpoint: int) -> Sequence[End]:
        """Those of the parties."""
        return () if endpoint == CLIENT else self._inner.ends(endpoint)

    def serve(self, frames: Sequence[ReceivedTensor], receivers: Sequence[Callable[[str, Tensor], None]]) -> None:
        """From now on these inputs and receivers; what is left of others is forgotten."""
        self.inputs, self.receivers = deque(frames), deque(receivers)

    def _send(self, to: int, tag: str, payload: Tensor) -> None:
        if to != CLIENT:
            self._inner._send(to, tag, payload)
        elif self.receivers:
            self.receivers.popleft()(tag, payload)
        else:
            raise TransportError(f"'{tag}': this batch opens more values than its clients wait for")

    def _recv(self, frm: int, tag: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if frm != CLIENT:
            return self._inner._recv(frm, tag, shape, dtype)
        frame = self.inputs.popleft() if self.inputs else None
        if frame is None or (frame.tag, frame.payload.dtype) != (tag, dtype) or frame.payload.shape != shape:
            raise TransportError(f"'{tag}': the inputs that were recorded are others than this batch takes")
        return frame.payload


def run_requests(
    model: ServedModel, links: ServiceLinks, requests: Sequence[Request], quota: KVCacheQuota
) -> tuple[int, int]:
    """Answer these requests; rows and positions that were computed. A request's own mistake, and a DomainError or other
    error of the whole batch, ends the sessions of their requests; it is not raised. Raises as `compute`.
    """
    accepted = [request for request in requests if accepts(model, request, quota)]
    if not accepted or not compute(model, links, accepted, quota):
        return 0, 0
    rows = sum(request.call.rows for request in accepted)
    for request in accepted:
        request.session.costs.book(links.ledger, rows=request.call.rows, total=rows)
        request.done.set()
    return rows, sum(math.prod(r.call.secret[0].shape[:2]) for r in accepted)


def accepts(model: ServedModel, request: Request, quota: KVCacheQuota) -> bool:
    """Bring the caches of a request to where its call wants them; False, and its session ends, if the call is bad."""
    state, owner, call = model.state, request.owner, request.call
    if request.error is not None:
        return False
    try:
        change(state, owner, request.edits, quota.limits)
        state.free(request.session.id, request.free)
        check_fits(model, owner, call, quota.limits)
        if request.planned is None:  # a plan's caches are reserved when it begins
            new = math.prod(call.secret[0].shape[:2]) if call.cache or call.encode_to else 0
            quota.reserve(owner, request.session.user, model.name, state.positions(owner) + new)
    except Exception as error:  # noqa: BLE001 - it follows from public facts, so it is the same at all parties
        give_up(model, request, quota, refusal(request, error))
    return request.error is None


def give_up(model: ServedModel, request: Request, quota: KVCacheQuota, error: PrivateLLMError) -> None:
    """The session of a request ends; nothing that the request half did is left."""
    model.session.checks.clear()
    model.state.forget(request.owner)
    if request.planned is None:  # the account of a plan is the same at all parties: it ends with the session
        quota.release(request.owner)
    request.fail(error)


def compute(
    model: ServedModel, links: ServiceLinks, requests: Sequence[Request], quota: KVCacheQuota, heard: bool = True
) -> bool:
    """Run what `accepts` let pass as one batch, and open to each client its own; False if all failed. heard: by clients
    (no helper runs ahead). Raises TransportError, ProtocolAbort, ShareFileError if parties cannot go on.
    """
    try:
        batch = [BatchedRequest(r.owner, r.call, tuple(_received(model, links, r))) for r in requests]
        answers = run_batch(model.state, batch)
    except (TransportError, ProtocolAbort, ShareFileError):
        raise
    except PrivateLLMError as error:  # the same at all parties: it follows from public facts
        for request in requests:
            give_up(model, request, quota, type(error)(str(error)))
        return False
    opened, receivers = [], []
    for request, answer in zip(requests, answers, strict=True):
        if heard:
            request.session.answer(outputs_message(answer))
        for _, fixed in answer.outputs:
            opened.append((CLIENT, fixed.share))
            receivers.append(request.session.give)
    links.serve((), receivers)
    if opened:
        model.session.protocol.reveal(opened)
    return True


def refusal(request: Request, error: Exception) -> PrivateLLMError:
    """What ends a request's session; the unforeseen is logged. Raises errors that may be this machine's alone."""
    if isinstance(error, PrivateLLMError):
        return error
    if isinstance(error, OF_THE_MACHINE):
        raise error
    if isinstance(error, LookupError):
        return TransportError("a cache that is not there")
    _LOG.error("session %s asked for what nobody foresaw", request.session.short, exc_info=error)
    return TransportError(f"a call that this service cannot run ({type(error).__name__})")


def change(state: SessionState, owner: str, edits: Sequence[CacheEdit], limits: Limits) -> None:
    """Change caches. Raises DomainError, before it, for what copies or keeps more than a session may."""
    copied = 0
    for number, edit in enumerate(edits, 1):
        rows = edit.index.numel() if isinstance(edit, SelectRows) else state.rows(owner, edit.handle)
        copied += max(rows, state.rows(owner, edit.handle)) * state.past(owner, edit.handle)
        limits.check_edits(copied, number)
        state.edit(owner, edit)
        _check_handles(state.handles(owner))


def check_fits(model: ServedModel, owner: str, call: Call, limits: Limits) -> None:
    """Refuse a call that the model does not take (as `check_call`), or that is too large (DomainError)."""
    state = model.state
    check_call(state, owner, call)
    limits.check_call(model.model.config, call, 0 if call.cache is None else state.past(owner, call.cache))
    _check_handles({*state.handles(owner), call.cache or call.encode_to})


def _check_handles(handles: Collection[int | None]) -> None:
    if len(handles) > MOST_HANDLES:
        raise DomainError(f"caches: got more than {MOST_HANDLES} of them; give up those that are not needed")


def _received(model: ServedModel, links: ServiceLinks, request: Request) -> list[Share | Index]:
    """A call's secret inputs, as shares of the parties' session, masked by the streams of its client. Local."""
    mine, protocol = request.session, model.session.protocol
    if request.planned is not None:
        masks = protocol.input_masks(mine.keys, section_label(request.planned.plan, request.planned.number))
    else:
        masks = mine.masks = mine.masks or protocol.input_masks(mine.keys)
    links.serve(request.frames, ())
    protocol = protocol.on(torch.device(model.session.device))
    with torch.no_grad(), protocol.ledger.scope(""), protocol.inputs_of(masks):
        return receive_inputs(protocol, model.model, request.call)
