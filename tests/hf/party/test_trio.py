"""Whole models under trio against plaintext; costs depend on public shapes alone, and meta runs predict them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from private_llm_hf.party.model import build_party_model
from torch import Tensor
from transformers import PreTrainedModel

import tests.hf.tiny as tiny
from private_llm.config import PrivateConfig
from private_llm.net.ledger import Ledger
from private_llm.protocols.session import Session, meta_session
from private_llm.tensor.fixed import Fixed
from private_llm.tensor.secret import SecretTensor
from tests.harness import TRIO, meta_fixed, run_parties
from tests.hf.party.parties import LOGIT_ERROR, VOCABULARY, description, ids, weights_of

PROMPT, NEXT = (2, 6), (2, 1)
MASK = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])


def _program(model: PreTrainedModel) -> Callable[..., list[Fixed]]:
    """Prefill with left padding and one cached step: logits of both. Secrets: two one-hot inputs, then the weights."""
    config, kind = description(model)
    names = list(weights_of(model))

    def run(session: Session, prompt: Fixed, following: Fixed, *weights: Fixed) -> list[Fixed]:
        party = build_party_model(config, kind, dict(zip(names, weights, strict=True)), session)
        cache, mask, logits = party.new_cache(), MASK, []
        with torch.no_grad():
            for rows in (prompt, following):
                embeds = party.get_input_embeddings()(SecretTensor(rows))
                public = {"attention_mask": mask}
                if kind != "BloomForCausalLM":
                    public["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)[:, -rows.shape[1] :]
                out = party(inputs_embeds=embeds, past_key_values=cache, return_dict=True, **public)
                logits.append(out.logits.to_fixed())
                mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
        return logits

    return run


def _inputs(model: PreTrainedModel, seed: int) -> tuple[list[Tensor], list[int]]:
    rows = [F.one_hot(ids(*shape, seed=seed + n), VOCABULARY).double() for n, shape in enumerate((PROMPT, NEXT))]
    weights = list(weights_of(model).values())
    return [*rows, *weights], [0, 0, *([TRIO.frac_bits] * len(weights))]


def _books(ledger: Ledger) -> tuple[dict[object, int], ...]:
    return dict(ledger.sent), dict(ledger.rounds), dict(ledger.macs)


@pytest.mark.full
@pytest.mark.parametrize("name", ["opt", "llama", "bloom"])
def test_a_whole_model(name: str) -> None:
    model = tiny.build(name)
    inputs, fracs = _inputs(model, seed=1)
    first = run_parties(TRIO, _program(model), inputs, fracs)
    with torch.no_grad():
        plain = model(
            input_ids=ids(*PROMPT, seed=1),
            attention_mask=MASK,
            use_cache=True,
            **({} if name == "bloom" else {"position_ids": (MASK.cumsum(-1) - 1).clamp(min=0)}),
        )
        mask = torch.cat([MASK, torch.ones(2, 1, dtype=torch.long)], 1)
        following = model(
            input_ids=ids(*NEXT, seed=2),
            attention_mask=mask,
            past_key_values=plain.past_key_values,
            **({} if name == "bloom" else {"position_ids": mask.cumsum(-1)[:, -1:] - 1}),
        )
    assert (first.values[0] - plain.logits)[MASK.bool()].abs().max() <= LOGIT_ERROR
    assert (first.values[1] - following.logits).abs().max() <= LOGIT_ERROR

    other = tiny.build(name, seed=5)
    changed, _ = _inputs(other, seed=7)
    second = run_parties(TRIO, _program(other), changed, fracs)
    assert [_books(ledger) for ledger in first.ledgers] == [_books(ledger) for ledger in second.ledgers]

    for number, ledger in enumerate(first.ledgers):
        session = meta_session(TRIO, number)
        shapes = [tuple(x.shape) for x in inputs]
        _program(model)(session, *[meta_fixed(session, s, f) for s, f in zip(shapes, fracs, strict=True)])
        assert _books(session.protocol.ledger) == _books(ledger)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["llama", "gpt2", "falcon"])
def test_a_whole_model_with_public_weights(name: str) -> None:
    """An open-weight model: the same text stays secret, every linear layer is local up to its truncation."""
    model = tiny.build(name)
    config, kind = description(model)
    settings = PrivateConfig(weights="public")

    def run(session: Session, prompt: Fixed) -> Fixed:
        party = build_party_model(config, kind, weights_of(model), session)
        with torch.no_grad():
            embeds = party.get_input_embeddings()(SecretTensor(prompt))
            out = party(inputs_embeds=embeds, attention_mask=torch.ones(1, 5, dtype=torch.long), return_dict=True)
        return out.logits.to_fixed()

    text = ids(1, 5)
    done = run_parties(settings, run, [F.one_hot(text, VOCABULARY).double()], [0])
    with torch.no_grad():
        assert (done.value - model(text).logits).abs().max() <= LOGIT_ERROR
    assert "matmul" not in {tag for scope, tag in done.ledgers[1].rounds if scope.endswith(("lm_head", "dense"))}
