"""Building a party's model: what is replaced, what is refused, what cannot leave, and what its cost depends on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from private_llm_hf.kv_cache.attention_interface import private_attention
from private_llm_hf.party.model import build_party_model, empty_model, meta_parameters
from torch import Tensor, nn
from transformers import PreTrainedModel

import tests.hf.tiny as tiny
from private_llm.config import PrivateConfig
from private_llm.errors import DomainError, PatchMismatch, PlaintextLeak, PrivateLLMError, UnsupportedOp
from private_llm.nn.modules import PrivateRMSNorm
from private_llm.protocols.session import Session, meta_session
from private_llm.tensor.secret import SecretIndex, SecretTensor
from tests.harness import meta_fixed
from tests.hf.party.parties import LOGIT_ERROR, description, error, ids, private_twin, tokens, weights_of
from tests.tensor.secrets import fixed, noise, opened, plain_session, secret


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def test_norms_and_hand_spelled_activations_are_replaced() -> None:
    gemma = private_twin(tiny.build("gemma2"), plain_session())
    norms = [m for m in gemma.modules() if isinstance(m, PrivateRMSNorm)]
    assert len(norms) == 9
    assert {norm.offset for norm in norms} == {1.0}
    assert not [name for name, m in gemma.named_modules() if type(m).__name__ == "Gemma2RMSNorm"]
    gpt2 = private_twin(tiny.build("gpt2"), plain_session())
    assert {m.approximate for m in gpt2.modules() if isinstance(m, torch.nn.GELU)} == {"tanh"}


def test_tied_weights_stay_one_parameter_and_buffers_stay_public() -> None:
    party = private_twin(tiny.build("llama", tie_word_embeddings=True), plain_session())
    assert party.lm_head.weight is party.model.embed_tokens.weight
    assert all(isinstance(p, SecretTensor) for p in party.parameters())
    assert all(not isinstance(b, SecretTensor) and b.device.type == "cpu" for b in party.buffers())
    t5 = private_twin(tiny.build("t5"), plain_session())
    assert t5.shared.weight is t5.encoder.embed_tokens.weight is t5.decoder.embed_tokens.weight


def test_progress_is_reported_by_each_weight_and_each_module_that_runs() -> None:
    """A client that hears of no progress takes a party that computes for long for a dead one."""
    model, session = tiny.build("llama"), plain_session()
    shares = {name: fixed(session, weight) for name, weight in weights_of(model).items()}
    told: list[str] = []
    party = build_party_model(
        *description(model), shares, session, lambda: told.append(session.protocol.ledger.scope_name)
    )
    assert len(told) == len(list(party.parameters()))
    told.clear()
    party(inputs_embeds=party.get_input_embeddings()(tokens(session, ids(1, 3))))
    modules = {name for name, module in party.named_modules() if name and not isinstance(module, nn.ModuleList)}
    assert len(told) == len(modules)
    assert {"", "model", "model.layers.1", "model.layers.1.self_attn"} <= {*told} <= {"", *modules}
    with pytest.raises(PlaintextLeak):
        party.model.layers[0](None)
    assert session.protocol.ledger.scope_name == ""


def _with_weights(changes: dict[str, Tensor | None]) -> PreTrainedModel:
    model, session = tiny.build("opt"), plain_session()
    weights = {**weights_of(model), **changes}
    shares = {n: fixed(session, w) for n, w in weights.items() if w is not None}
    return build_party_model(*description(model), shares, session)


def test_missing_surplus_and_misshapen_weights_are_named() -> None:
    name = "model.decoder.layers.1.fc1.weight"
    with pytest.raises(PatchMismatch, match=f"missing: {name}"):
        _with_weights({name: None})
    with pytest.raises(PatchMismatch, match="not expected: extra"):
        _with_weights({"extra": torch.ones(1)})
    with pytest.raises(PatchMismatch, match=rf"{name}.*got \(2, 2\); want \(96, 64\)"):
        _with_weights({name: torch.ones(2, 2)})


def test_a_plain_weight_among_secret_ones_is_refused() -> None:
    model, session = tiny.build("opt"), plain_session()
    shares = {n: fixed(session, w) for n, w in weights_of(model).items()}
    shares["model.decoder.layers.1.fc1.weight"] = torch.zeros(96, 64)
    with pytest.raises(PatchMismatch, match=r"neither shared nor public.*fc1"):
        build_party_model(*description(model), shares, session)


def test_unknown_classes_and_architectures_are_refused() -> None:
    config, _ = description(tiny.build("opt"))
    for name in ("NoSuchModel", "AutoModel", "set_seed"):
        with pytest.raises(PatchMismatch, match="want a PreTrainedModel"):
            build_party_model(config, name, {}, plain_session())
    with pytest.raises(PatchMismatch, match="architecture 'vit_mae' is of a kind that is not run"):
        build_party_model({"model_type": "vit_mae"}, "ViTMAEModel", {}, plain_session())
    with pytest.raises(PatchMismatch, match="unknown architecture 'no such type'"):
        build_party_model({**config, "model_type": "no such type"}, "OPTForCausalLM", {}, plain_session())


def test_a_causal_module_without_a_mask_is_refused() -> None:
    """Transformers runs without any mask, and without a warning, when only the attention function is registered."""
    module = nn.Module()
    module.is_causal = True
    q = secret(plain_session(), noise(1, 2, 3, 4))
    with pytest.raises(DomainError, match="causal"):
        private_attention(module, q, q, q, None)
    with pytest.raises(UnsupportedOp, match="secret query"):
        private_attention(module, noise(1, 2, 3, 4), q, q, None)


@pytest.mark.parametrize("kind", ["public", "secret"])
def test_a_mask_may_be_added_to_scores(kind: str) -> None:
    """Large negative numbers forbid, others shift scores; a position bias comes on top."""
    session, values = plain_session(), noise(1, 2, 3, 4)
    causal = torch.ones(3, 3, dtype=torch.bool).tril()
    bias, more = noise(1, 2, 3, 3, seed=1).float(), noise(1, 2, 3, 3, seed=2).float()
    q = secret(session, values)
    added = (bias if kind == "public" else secret(session, bias)).masked_fill(~causal, torch.finfo(torch.float32).min)
    out, _ = private_attention(nn.Module(), q, q, q, added, 0.5, position_bias=more)
    scores = (values @ values.transpose(-1, -2) * 0.5 + bias + more).masked_fill(~causal, -torch.inf)
    assert (opened(out).transpose(1, 2) - scores.softmax(-1) @ values).abs().max() < 1e-3


def test_shares_cannot_be_saved_as_a_checkpoint(tmp_path: Path) -> None:
    party = private_twin(tiny.build("llama"), plain_session())
    with pytest.raises(PlaintextLeak):
        party.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))
    assert not list(tmp_path.glob("*.bin"))
    with pytest.raises(PlaintextLeak):
        torch.save(party.state_dict(), tmp_path / "weights.pt")


def test_resizing_the_vocabulary_is_refused() -> None:
    party = private_twin(tiny.build("llama"), plain_session())
    with pytest.raises(PrivateLLMError):
        party.resize_token_embeddings(140)


def test_a_half_precision_config_does_not_reach_the_party() -> None:
    model = tiny.build("llama")
    model.config.dtype = torch.float16
    party = private_twin(model, plain_session())
    assert party.config.dtype is torch.float32
    assert party.dtype is torch.float32


def _meta_run(name: str, number: int, length: int = 7) -> Session:
    """A prefill and a cached step of one trio party on shares without values."""
    session = meta_session(PrivateConfig(), number)
    config, kind = description(tiny.build(name))
    party = build_party_model(config, kind, meta_parameters(empty_model(config, kind), session), session)
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, :3] = 0
    cache = party.new_cache()
    for fresh in (length, 1):
        index = session.protocol.receive_index(2 * fresh, 128)
        embeds = party.get_input_embeddings()(SecretIndex(session, index, (2, fresh)))
        out = party(inputs_embeds=embeds, attention_mask=mask, past_key_values=cache, return_dict=True)
        assert tuple(out.logits.shape) == (2, fresh, 128)
        assert out.logits.value(masked=True).share.parts[0].is_meta
        mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
    return session


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", tiny.DECODERS)
@pytest.mark.parametrize("number", [0, 1, 2])
def test_every_decoder_runs_on_meta_shares_and_books_costs_by_module(name: str, number: int) -> None:
    ledger = _meta_run(name, number).protocol.ledger
    assert ledger.scope_name == ""
    scopes = {scope for scope, _, _ in ledger.sent}
    assert "lm_head" in scopes
    output = 2 * (7 + 1) * 128 * 8
    fields = sum(-(-2 * n * 128 * 18 // 64) * 8 for n in (7, 1))
    sent = sum(n for (scope, _, _), n in ledger.sent.items() if scope == "lm_head")
    if name != "gemma2":  # gemma2 also caps its logits
        assert sent == output + fields  # one ring element and 18 bits per logit from each party, nothing else


def _meta_secret(session: Session, *shape: int) -> SecretTensor:
    return SecretTensor(meta_fixed(session, shape, session.frac))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", [*tiny.ENCODERS, "vit", "t5"])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_encoders_vision_and_t5_run_on_meta_shares(name: str, number: int) -> None:
    session = meta_session(PrivateConfig(), number)
    config, kind = description(tiny.build(name))
    party = build_party_model(config, kind, meta_parameters(empty_model(config, kind), session), session)
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, 5:] = 0
    if name == "vit":
        out = party(pixel_values=_meta_secret(session, 2, 3, 16, 16), return_dict=True).last_hidden_state
    elif name == "t5":
        given = {"inputs_embeds": _meta_secret(session, 2, 7, 64), "attention_mask": mask}
        started = _meta_secret(session, 2, 3, 64)
        out = party(**given, decoder_inputs_embeds=started, past_key_values=party.new_cache(), return_dict=True).logits
    else:
        given = {"inputs_embeds": _meta_secret(session, 2, 7, 64), "attention_mask": mask}
        if name == "roberta":
            given["position_ids"] = mask.cumsum(-1) * mask + 1
        out = party(**given, return_dict=True).last_hidden_state
    assert out.value(masked=True).share.parts[0].is_meta
    assert session.protocol.ledger.cost().total > 0


def test_the_last_bound_is_not_vacuous() -> None:
    """A model whose one weight is changed by 1 % is told apart by the bound of the comparisons."""
    model, session = tiny.build("opt"), plain_session()
    party = private_twin(model, session)
    text = ids(1, 5)
    out = party(inputs_embeds=party.get_input_embeddings()(tokens(session, text)), return_dict=True)
    assert error(out.logits, model(text).logits) <= LOGIT_ERROR
    model.model.decoder.layers[1].fc2.weight.mul_(1.01)
    assert error(out.logits, model(text).logits) > LOGIT_ERROR


def test_building_a_tree_without_weights_disturbs_no_other_thread() -> None:
    """Parties may be threads of the user's process, which goes on making modules of its own."""
    config, kind = description(tiny.build("opt"))
    made: list[torch.device] = []
    stop = threading.Event()

    def other() -> None:
        while not stop.is_set() or not made:
            made.append(nn.Linear(2, 2).weight.device)

    thread = threading.Thread(target=other)
    thread.start()
    for _ in range(3):
        assert empty_model(config, kind).lm_head.weight.device.type == "meta"
    stop.set()
    thread.join()
    assert {device.type for device in made} == {"cpu"}
    assert nn.Linear(2, 2).weight.device.type == "cpu"
