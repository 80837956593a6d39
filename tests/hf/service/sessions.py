"""All parties of a service as threads, and one client that sends what several sessions ask and opens their answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from private_llm_hf.party.calls import CallResult
from private_llm_hf.party.model import build_party_model
from private_llm_hf.party.session_state import SessionState
from private_llm_hf.service.batch import BatchedRequest, run_batch
from private_llm_hf.service.checks import batch_key, check_call
from private_llm_hf.wire.commands import OPENED, CacheEdit, Call, Tokens, Values
from torch import Tensor
from transformers import PreTrainedModel

from private_llm.config import PrivateConfig
from private_llm.net.ledger import Cost, Ledger, merge
from private_llm.net.transport import Transport
from private_llm.protocols.ends import ClientEnd
from private_llm.protocols.session import Session
from private_llm.ring.ring import Ring
from private_llm.tensor.fixed import Fixed
from tests.hf.party.parties import description, weights_of
from tests.session import run_session


@dataclass(frozen=True, eq=False)
class Ask:
    """What a session asks: token ids [rows, length] (int64) or embeddings [rows, length, width], and public facts.

    Embeddings of whole numbers are ring elements, whatever a client of this library would send.
    """

    owner: str
    given: Tensor
    cache: int | None = 1
    public: dict[str, Any] = field(default_factory=dict)
    vocabulary: int = 128
    outputs: tuple[str, ...] = OPENED

    @property
    def call(self) -> Call:
        """The request."""
        shape = tuple(self.given.shape)
        item = Tokens("input_ids", shape, self.vocabulary) if self.given.dim() == 2 else Values("inputs_embeds", shape)
        return Call(self.public, (item,), self.cache, None, None, self.outputs)


@dataclass
class Done:
    """A batch that ran: what each session opened, whether its requests were of one kind, and its cost."""

    opened: list[dict[str, Tensor]]
    alike: bool
    cost: Cost

    @property
    def logits(self) -> list[Tensor]:
        """Of each session."""
        return [each["logits"] for each in self.opened]


Look = Callable[[SessionState], object]
Step = Sequence[Ask] | tuple[str, CacheEdit] | Look
"""A batch, a change of a session's cache, or something done with what is kept (at every party; party 0's result
counts).
"""


def run_service(config: PrivateConfig, model: PreTrainedModel, steps: Sequence[Step]) -> list[Any]:
    """Run all steps in order at all parties: a `Done` for each batch, and what each look returned."""
    details, weights = description(model), weights_of(model)
    answers: list[list[CallResult]] = []
    ledgers: list[list[Ledger]] = [[] for _ in range(config.parties)]
    alike: list[bool] = []
    looked: list[object] = []
    computed = [threading.Semaphore(0) for _ in steps]  # some parties need no message, and may be passes ahead

    def at_party(session: Session, transport: Transport) -> None:
        protocol = session.protocol
        shares = {n: Fixed(session, protocol.receive_input(tuple(w.shape)), session.frac) for n, w in weights.items()}
        party = build_party_model(*details, shares, session)
        state = SessionState(party, session)
        for place, step in enumerate(steps):
            if callable(step):
                result = step(state)
                if session.party == 0:
                    looked.append(result)
            elif isinstance(step, tuple):
                state.edit(*step)
            else:
                parts, kinds = [], set()
                for ask in step:
                    check_call(state, ask.owner, ask.call)
                    past = 0 if ask.cache is None else state.past(ask.owner, ask.cache)
                    kinds.add(batch_key(party, config, ask.call, past))
                    parts.append(BatchedRequest(ask.owner, ask.call, (_received(session, ask),)))
                transport.ledger.reset()
                made = run_batch(state, parts)
                ledgers[session.party].append(copied(transport.ledger))
                if session.party == 0:
                    answers.append(made)
                    alike.append(len(kinds) == 1 and None not in kinds)
                computed[place].release()
                for answer in made:
                    for _, fixed in answer.outputs:
                        protocol.reveal_to_client(fixed.share)

    def at_client(client: ClientEnd) -> list[Any]:
        ring = Ring(config.ring)
        for weight in weights.values():
            client.share(ring.encode(weight, config.frac_bits))
        found: list[Any] = []
        for place, step in enumerate(steps):
            if callable(step) or isinstance(step, tuple):
                found.append(None)
                continue
            for ask in step:
                if ask.given.dim() == 2:
                    client.share_index(ask.given.reshape(-1), ask.vocabulary)
                elif ask.given.dtype == torch.int64:
                    client.share(ask.given)
                else:
                    client.share(ring.encode(ask.given, config.frac_bits))
            for _ in range(config.parties):
                if not computed[place].acquire(timeout=60.0):
                    raise TimeoutError("a party did not finish a batch")
            number = sum(isinstance(each, Done) for each in found)
            opened = [
                {name: ring.decode(client.open(tuple(fixed.shape)), fixed.frac) for name, fixed in answer.outputs}
                for answer in answers[number]
            ]
            found.append(Done(opened, alike[number], merge([each[number] for each in ledgers])))
        return found

    found = run_session(config, at_party, at_client, timeout=60.0)
    results = iter(looked)
    done = [next(results) if callable(step) else each for step, each in zip(steps, found, strict=True)]
    return [each for each, step in zip(done, steps, strict=True) if not isinstance(step, tuple)]


def _received(session: Session, ask: Ask) -> Any:
    if ask.given.dim() == 2:
        return session.protocol.receive_index(ask.given.numel(), ask.vocabulary)
    return session.protocol.receive_input(tuple(ask.given.shape))


def copied(ledger: Ledger) -> Ledger:
    """What it counts now: bytes and rounds."""
    made = Ledger(ledger.party)
    made.sent.update(ledger.sent)
    made.rounds.update(ledger.rounds)
    return made
