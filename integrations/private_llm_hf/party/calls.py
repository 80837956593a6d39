"""One call at a party: what it may ask for, its inputs as the model takes them, what it opens; and calls of a plan."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import ModelOutput

from private_llm.errors import ProtocolAbort, TransportError, UnsupportedOp
from private_llm.exact.maximum import argmax
from private_llm.protocols.protocol import Protocol
from private_llm.protocols.session import Session
from private_llm.protocols.share import Index, Share
from private_llm.replay.program_cache import repeat
from private_llm.tensor.fixed import Fixed
from private_llm.tensor.range_check import verdict
from private_llm.tensor.secret import SecretIndex, SecretTensor
from private_llm_hf.kv_cache.cache import SecretCache
from private_llm_hf.party.model_description import validate_input_shape
from private_llm_hf.party.session_state import SessionState
from private_llm_hf.transformers_versions import CACHE
from private_llm_hf.wire.answers import GUARD, Output, Outputs
from private_llm_hf.wire.commands import OPENED, PUBLIC, CacheEdit, Call, CallOrEdit, CallPlace, Tokens, Values


@dataclass(frozen=True)
class CallResult:
    """What a call opens to its client, in order; the range check's verdict is last. class_: of the model's output."""

    class_: str
    outputs: tuple[tuple[str, Fixed], ...]


def refuse_unknown(call: Call) -> None:
    """Raise UnsupportedOp for inputs or outputs that parties do not take or open, or open once only."""
    refused = sorted({*call.public} - PUBLIC) + sorted({*call.outputs} - {*OPENED})
    if refused:
        raise UnsupportedOp(f"the client asks for {', '.join(refused)}, which parties do not take or open")
    if len({*call.outputs}) < len(call.outputs):
        raise UnsupportedOp(f"the client asks for {len(call.outputs)} outputs, some of them twice; want each once")


def table_of(model: PreTrainedModel, item: Tokens) -> nn.Embedding:
    """The embedding that looks token ids up. Raises TransportError unless it has `item.vocabulary` rows."""
    stack = model.get_decoder() if item.name.startswith("decoder_") else model
    table: nn.Embedding = stack.get_input_embeddings()
    if item.vocabulary != table.num_embeddings:  # the work of a lookup follows from this number
        raise TransportError(f"vocabulary: got {item.vocabulary}; the model has {table.num_embeddings} tokens")
    return table


def receive_inputs(protocol: Protocol, model: PreTrainedModel, call: Call) -> list[Share | Index]:
    """Shares of a call's token ids and values from the client. Raises TransportError for other shapes (`table_of`)."""
    made: list[Share | Index] = []
    for item in call.secret:
        shape = validate_input_shape(item.shape)
        if isinstance(item, Tokens):
            made.append(protocol.receive_index(math.prod(shape), table_of(model, item).num_embeddings))
        else:
            made.append(protocol.receive_input(shape))
    return made


def taken(state: SessionState, item: Tokens | Values, held: Share | Index, shape: tuple[int, ...]) -> SecretTensor:
    """A secret input of `shape`, as the model takes it: ids are looked up as embeddings. Raises as `table_of`."""
    session = state.session
    if isinstance(held, Share):
        return SecretTensor(Fixed(session, held.map(lambda part: part.reshape(shape)), session.frac))
    if not isinstance(item, Tokens):
        raise TransportError(f"{item.name}: got shares of indices; want shares of real numbers")
    made: SecretTensor = table_of(state.model, item)(SecretIndex(session, held, shape))
    return made


def model_name(item: Tokens | Values) -> str:
    """The argument of the model that a secret input becomes."""
    return item.name.replace("input_ids", "inputs_embeds")


def arguments(state: SessionState, owner: str, call: Call, secrets: Iterable[Share | Index]) -> dict[str, Any]:
    """What the model is called with; a new cache is kept under its handle. Raises TransportError as `table_of`."""
    inputs: dict[str, Any] = dict(call.public)
    for item, held in zip(call.secret, secrets, strict=True):
        inputs[model_name(item)] = taken(state, item, held, item.shape)
    if call.cache is not None:
        inputs[CACHE] = state.cache(owner, call.cache)
    if call.encoded is not None:
        inputs["encoder_outputs"] = state.encoded(owner, call.encoded)
    return inputs


def run_alone(state: SessionState, owner: str, call: Call, secrets: Iterable[Share | Index]) -> CallResult:
    """Run the model for one call; nothing is opened. Raises TransportError for a vocabulary that is not the model's."""
    model, session, inputs = state.model, state.session, arguments(state, owner, call, secrets)
    result = run_model(model.get_encoder() if call.encode_to is not None else model, session, inputs)
    if call.encode_to is None:
        return answer(session, result, call.outputs)
    state.keep_encoded(owner, call.encode_to, result.last_hidden_state)
    return answer(session, ModelOutput(), ())


def run_model(model: nn.Module, session: Session, inputs: dict[str, Any]) -> ModelOutput:
    """The model's output; after it the cache's policy decides what stays."""
    session.numerics.tokens = None if session.config.expert_capacity is None else _present(inputs)
    result: ModelOutput = model(**inputs, return_dict=True)
    cache = inputs.get(CACHE)
    if isinstance(cache, SecretCache):
        with session.module("cache policy"):
            cache.evict(inputs.get("attention_mask"))
    return result


def _present(inputs: dict[str, Any]) -> Tensor | None:
    """Which columns of a text's rows are tokens, [rows, columns] of 1 and 0; None for what is no text."""
    given, mask = inputs.get("inputs_embeds"), inputs.get("attention_mask")
    if given is None or given.dim() != 3:
        return None
    rows, columns = given.shape[:2]
    if isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[0] == rows and mask.shape[1] >= columns:
        return (mask[:, -columns:] != 0).to(torch.int64)
    return torch.ones(rows, columns, dtype=torch.int64)


def outputs_message(result: CallResult) -> Outputs:
    """What a client is told before the outputs are opened to it: names, shapes and fractional bits."""
    return Outputs(result.class_, tuple(Output(name, tuple(f.shape), f.frac) for name, f in result.outputs))


def answer(session: Session, result: ModelOutput, wanted: Iterable[str]) -> CallResult:
    """What `reveal` lets a client have of the outputs that it wants, and the verdict of the range check."""
    outputs: list[tuple[str, Fixed]] = []
    ledger, reveal = session.protocol.ledger, session.config.reveal
    with ledger.scope(GUARD):
        checked = verdict(session, repeat)
    for name in wanted:
        value: Tensor | None = result.get(name)
        if not isinstance(value, SecretTensor):
            continue
        if reveal == "logits":
            outputs.append((name, value.to_fixed()))
        elif name == "logits":  # and nothing else, whatever the client asks for
            with ledger.scope(reveal):
                outputs.append((reveal, argmax(value.to_fixed())))
    if checked is not None:
        outputs.append((GUARD, checked))
    return CallResult(type(result).__name__, tuple(outputs))


# -- calls that a client has planned with `model.preprocess`, each with the changes of caches before it ----------------
@dataclass(frozen=True)
class PlannedCall:
    """A call of a plan. number, index: among its requests, its calls. last: ends it. positions: of all its caches."""

    plan: int
    number: int
    index: int
    call: Call
    edits: tuple[CacheEdit, ...]
    last: bool
    positions: int


class PreprocessingPlan:
    """The planned calls of one session, and which of them comes next."""

    def __init__(self, number: int, requests: Sequence[CallOrEdit], before: int = -1) -> None:
        """before: the number of the session's last plan. Raises ProtocolAbort for a number that does not rise."""
        if number <= before:
            raise ProtocolAbort(f"preprocessing plan {number} was prepared before; masks must never repeat")
        self.number = number
        self.calls = _planned_calls(number, requests)
        self._next = 0

    @property
    def finished(self) -> bool:
        """Whether every call was made."""
        return self._next == len(self.calls)

    def take(self, at: CallPlace) -> PlannedCall:
        """The call at this place, which must be the next one. Raises ProtocolAbort for another."""
        planned = None if self.finished else self.calls[self._next]
        if planned is None or at != (self.number, planned.number):
            raise ProtocolAbort(
                f"request {at[1]} of preprocessing plan {at[0]} is not what comes next; what was prepared is used in "
                "order and once, because masks must never repeat"
            )
        self._next += 1
        return planned


def _planned_calls(plan: int, requests: Sequence[CallOrEdit]) -> tuple[PlannedCall, ...]:
    """One for each call; changes of caches after the last one matter to nobody."""
    calls = [(number, request) for number, request in enumerate(requests) if isinstance(request, Call)]
    kept = (call for _, call in calls if call.secret and (call.cache or call.encode_to))
    held, start = sum(math.prod(call.secret[0].shape[:2]) for call in kept), 0
    found: list[PlannedCall] = []
    for number, call in calls:
        edits = tuple(edit for edit in requests[start:number] if not isinstance(edit, Call))
        found.append(PlannedCall(plan, number, len(found), call, edits, number == calls[-1][0], held))
        start = number + 1
    return tuple(found)
