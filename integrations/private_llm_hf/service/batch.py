"""A batch: one run of a model for the requests of several sessions, each of which gets its own rows.

    rows of all requests, below each other       Index and Share parts joined, one lookup
    shorter prompts and caches begin later       padding on the left, hidden by masks; positions are stated
    one KV cache for all of them                 `SessionState.together`: nothing is copied while the company stays
    one verdict of the range check for each row  `RangeChecks.batch`

Rounds are those of one request and bytes those of a batch. Every party runs the same batches in the same order. What a
client gets depends on its own rows alone, but for roundings, and what the range check cannot tell apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from private_llm.errors import undoing
from private_llm.protocols.share import Index, Share
from private_llm.tensor.fixed import Fixed
from private_llm.tensor.secret import SecretTensor
from private_llm_hf.models.architectures import architecture, table
from private_llm_hf.party.calls import CallResult, answer, model_name, run_alone, run_model, taken
from private_llm_hf.party.session_state import SessionState
from private_llm_hf.service.checks import kept_positions
from private_llm_hf.transformers_versions import CACHE
from private_llm_hf.wire.answers import GUARD
from private_llm_hf.wire.commands import Call


@dataclass(frozen=True)
class BatchedRequest:
    """A session's request in a batch. inputs: in the order of `call.secret` (for Tokens `Index`, else `Share`)."""

    owner: str
    call: Call
    inputs: tuple[Share | Index, ...]


RequestBatch = Sequence[BatchedRequest]


def run_batch(state: SessionState, requests: RequestBatch) -> list[CallResult]:
    """Run the model once for requests of equal `batch_key` that `check_call` let pass; one alone may be with any key.

    Opens nothing. Returns what each request opens, its verdict [rows] under GUARD (alone: [1]). After an error the
    caches of all requests are gone, and no range check is pending.
    """
    with undoing(lambda: _abandon(state, requests)), torch.no_grad(), state.session.protocol.ledger.scope(""):
        return _run(state, requests)


def _run(state: SessionState, requests: RequestBatch) -> list[CallResult]:
    if len(requests) == 1:
        (request,) = requests
        return [run_alone(state, request.owner, request.call, request.inputs)]
    order = sorted(range(len(requests)), key=lambda i: (requests[i].owner, requests[i].call.cache or 0))
    found = _run_shared(state, [requests[i] for i in order])
    return [answer for _, answer in sorted(zip(order, found, strict=True), key=lambda pair: pair[0])]


def _abandon(state: SessionState, requests: RequestBatch) -> None:
    """Forget what a batch that failed left half done: pending checks, and caches whose layers may differ in length."""
    state.session.checks.clear()
    for request in requests:
        if request.call.cache is not None:
            state.free(request.owner, [request.call.cache])


@dataclass(frozen=True)
class _RowSpan:
    """Where a request lies: rows start .. start + rows - 1, the last `length` new columns, after `past` of its own."""

    start: int
    rows: int
    length: int
    past: int
    padding: int

    def mask(self, given: object) -> Tensor:
        """[rows, all columns] of its own mask or none, 0 at the padding."""
        own = given if isinstance(given, Tensor) else torch.ones(self.rows, self.past + self.length, dtype=torch.int64)
        return torch.constant_pad_nd(own.to(torch.int64), (self.padding, 0))


def _run_shared(state: SessionState, requests: RequestBatch) -> list[CallResult]:
    model, session = state.model, state.session
    cached = [((r.owner, r.call.cache), r.call.rows, r.call.secret[0].shape[1]) for r in requests if r.call.cache]
    pasts = [0 if r.call.cache is None else state.past(r.owner, r.call.cache) for r in requests]
    inputs: dict[str, Any] = {}
    if cached:
        inputs[CACHE] = state.together(cached)
    spans = _spans(requests, pasts)
    inputs |= _public(model, requests, spans)
    inputs[model_name(requests[0].call.secret[0])] = _secret(state, requests, spans)
    rows = spans[-1].start + spans[-1].rows
    session.checks.batch = rows  # each row has a verdict of its own
    try:
        made = answer(session, run_model(model, session, inputs), requests[0].call.outputs)
    finally:
        session.checks.batch = None
    keep = kept_positions(requests[0].call)
    width = max(span.length for span in spans)
    return [_own(made, span, width if keep == 0 else 0) for span in spans]


def _spans(requests: RequestBatch, pasts: Sequence[int]) -> list[_RowSpan]:
    columns = max(pasts) + max(request.call.secret[0].shape[1] for request in requests)
    spans, start = [], 0
    for request, past in zip(requests, pasts, strict=True):
        length = request.call.secret[0].shape[1]
        spans.append(_RowSpan(start, request.call.rows, length, past, columns - past - length))
        start += request.call.rows
    return spans


# -- inputs -------------------------------------------------------------------------------------------------------
def _secret(state: SessionState, requests: RequestBatch, spans: Sequence[_RowSpan]) -> SecretTensor:
    """The secret inputs of all requests, as the model takes them, [rows, columns, width]: one lookup for all."""
    item, held = requests[0].call.secret[0], [request.inputs[0] for request in requests]
    rows, width = spans[-1].start + spans[-1].rows, max(span.length for span in spans)
    if isinstance(held[0], Index):
        same = all(span.length == width for span in spans)
        count = sum(span.rows * span.length for span in spans)
        joined = _joined_index([each for each in held if isinstance(each, Index)])
        found = taken(state, item, joined, (rows, width) if same else (count,))
        return found if same else found.viewed(lambda part: _padded(part, spans, width))
    columns = zip(*(each.parts for each in held if isinstance(each, Share)), strict=True)
    flat = [torch.cat([part.reshape(-1, part.shape[-1]) for part in column]) for column in columns]
    padded = Share(tuple(_padded(part, spans, width) for part in flat))
    return SecretTensor(Fixed(state.session, padded, state.session.frac))


def _joined_index(held: Sequence[Index]) -> Index:
    keys = tuple(torch.cat(column) for column in zip(*(each.keys for each in held), strict=True))
    return Index(keys, sum(each.count for each in held), held[0].domain, held[0].one_hot)


def _padded(flat: Tensor, spans: Sequence[_RowSpan], width: int) -> Tensor:
    """[tokens, size] as [rows, width, size]: a row's first once more for each column before it, as norms want."""
    made, start = [], 0
    for span in spans:
        stop = start + span.rows * span.length
        own = flat[start:stop].reshape(span.rows, span.length, flat.shape[-1])
        made.append(torch.cat([own[:, :1].expand(-1, width - span.length, -1), own], 1))
        start = stop
    return torch.cat(made)


def _public(model: PreTrainedModel, requests: RequestBatch, spans: Sequence[_RowSpan]) -> dict[str, Any]:
    """Masks, positions and the rest. No mask where nobody has one and nothing is padded."""
    each = [request.call.public for request in requests]
    public: dict[str, Any] = {name: each[0][name] for name in ("use_cache", "logits_to_keep") if name in each[0]}
    if "logits_to_keep" in public:
        public["logits_to_keep"] = kept_positions(requests[0].call)
    if any("attention_mask" in own for own in each) or any(span.padding for span in spans):
        masks = [span.mask(own.get("attention_mask")) for own, span in zip(each, spans, strict=True)]
        public["attention_mask"] = torch.cat(masks)
    if architecture(model.config).kind == "decoder":
        by_mask = model.config.model_type in table("positions_by_mask")
        found = [_positions(own, span, by_mask) for own, span in zip(each, spans, strict=True)]
        public["position_ids"] = _left(found)
        return public
    for name in sorted({*each[0]} - {*public, "attention_mask"}):
        rows = [own[name] for own in each]
        public[name] = torch.cat([_rows(value, span.rows) for value, span in zip(rows, spans, strict=True)])
    return public


def _positions(public: dict[str, Any], span: _RowSpan, by_mask: bool) -> Tensor:
    """[rows, length]: those that are given, else as the model counts: from the mask, or on from the past."""
    given, mask = public.get("position_ids"), public.get("attention_mask")
    if isinstance(given, Tensor):
        return _rows(given, span.rows)
    if by_mask and isinstance(mask, Tensor):
        return (mask.cumsum(1) * mask - 1)[:, span.past :]
    return torch.arange(span.past, span.past + span.length).expand(span.rows, -1)


def _rows(value: object, rows: int) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"a fact of each row: got {type(value).__name__}; want a tensor")
    return value.expand(rows, -1)


def _left(each: Sequence[Tensor]) -> Tensor:
    width = max(one.shape[1] for one in each)
    return torch.cat([torch.constant_pad_nd(one, (width - one.shape[1], 0)) for one in each])


# -- outputs ------------------------------------------------------------------------------------------------------
def _own(every: CallResult, span: _RowSpan, width: int) -> CallResult:
    """A request's rows; and where outputs are of all `width` columns (0: as many of each request), its own ones."""
    rows = slice(span.start, span.start + span.rows)

    def cut(name: str, value: Fixed) -> Fixed:
        padded = width > span.length and name != GUARD
        return value.view(lambda part: part[rows, -span.length :] if padded else part[rows])

    return CallResult(every.class_, tuple((name, cut(name, value)) for name, value in every.outputs))
