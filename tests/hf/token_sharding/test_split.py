"""First layers under secret sharing, the rest on nodes: plaintext's tokens; nodes get states, no token."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest
import torch
import transformers as tr
from private_llm_hf import PrivateConfig, patch
from private_llm_hf.client.preprocess import GeneratePlan
from private_llm_hf.token_sharding.cut import Cut
from torch import Tensor
from transformers import PreTrainedModel

from private_llm.errors import ConfigError, PartyFailed, PatchMismatch, ProtocolAbort, TransportError, WeakProtection
from private_llm.net.local import LocalMesh, LocalTransport
from private_llm.net.transport import CLIENT
from private_llm.token_sharding import ShardingPlan
from tests.hf import tiny
from tests.hf.compare import LOGIT_ERROR, worst
from tests.recording import Alter, Message, RecordingTransport

PLAN = ShardingPlan(3, 3, 1, accept_weak_plan=True)  # for models with grouped queries
GREEDY = {"max_new_tokens": 4, "do_sample": False}


def settings(protocol: str = "trio", split: int = 1, plan: ShardingPlan = PLAN, **more: object) -> PrivateConfig:
    return PrivateConfig.from_dict({"protocol": protocol, "plan": plan, "split": split, "timeout_s": 60, **more})


def text() -> dict[str, Tensor]:
    ids = torch.randint(3, 100, (2, 13), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    return {"input_ids": ids, "attention_mask": mask}


class Listening(LocalMesh):
    """Keeps every message of every endpoint; `alter` changes what one endpoint sends."""

    def __init__(self, config: PrivateConfig, liar: int = -1, alter: Alter | None = None) -> None:
        super().__init__(config.endpoints, timeout=config.timeout_s)
        self._liar, self._alter = liar, alter
        self.ends: dict[int, RecordingTransport] = {}

    def transport(self, endpoint: int) -> LocalTransport:
        alter = self._alter if endpoint == self._liar else None
        made = RecordingTransport(super().transport(endpoint), payloads=True, alter=alter)
        self.ends[endpoint] = made
        return made  # type: ignore[return-value]

    def got(self, endpoint: int) -> list[Message]:
        return [m for m in self.ends[endpoint].messages if m.direction == "received"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("protocol", ["trio", "dealer", "quad"])
def test_every_protocol_before_the_nodes(protocol: str) -> None:
    model, batch = tiny.build("opt"), text()
    with patch(model, settings(protocol)) as private, torch.no_grad():
        assert worst(private(**batch).logits, model(**batch).logits, batch["attention_mask"]) < LOGIT_ERROR
        assert torch.equal(private.generate(**batch, **GREEDY), model.generate(**batch, **GREEDY))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma3_text", "gpt_neox", "bloom"])
def test_decoders(name: str) -> None:
    model, batch = tiny.build(name), text()
    with patch(model, settings()) as private, torch.no_grad():
        assert worst(private(**batch).logits, model(**batch).logits, batch["attention_mask"]) < LOGIT_ERROR
        assert torch.equal(private.generate(**batch, **GREEDY), model.generate(**batch, **GREEDY))


@pytest.mark.parametrize("name", ["bert", "distilbert", "modernbert"])
def test_encoders(name: str) -> None:
    model, batch = tiny.build(name), text()
    with patch(model, settings()) as private, torch.no_grad():
        out, want = private(**batch), model(**batch)
    assert worst(out.last_hidden_state, want.last_hidden_state, batch["attention_mask"]) < LOGIT_ERROR


def deeper() -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 64}
    return tr.LlamaForCausalLM(tr.LlamaConfig(num_hidden_layers=4, **sizes)).eval()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("split", [2, 3])
def test_deeper_splits_with_beams_and_embeddings(split: int) -> None:
    model = deeper()
    ids = torch.randint(3, 60, (1, 14), generator=torch.Generator().manual_seed(5))
    with patch(model, settings(split=split)) as private, torch.no_grad():
        beams = {"max_new_tokens": 5, "do_sample": False, "num_beams": 3}
        assert torch.equal(private.generate(ids, **beams), model.generate(ids, **beams))
        embeds = model.get_input_embeddings()(ids)
        assert worst(private(inputs_embeds=embeds).logits, model(ids).logits) < LOGIT_ERROR


@pytest.mark.full
def test_processes_and_a_classifier() -> None:
    torch.manual_seed(0)
    config = tiny.build("bert").config
    config.num_labels = 3
    model, batch = tr.BertForSequenceClassification(config).eval(), text()
    with patch(model, settings(party_mode="processes")) as private, torch.no_grad():
        assert worst(private(**batch).logits, model(**batch).logits) < LOGIT_ERROR


# -- who sees what ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("protocol", ["trio", "quad"])
def test_nodes_get_the_states_of_their_rows_and_nothing_of_the_client_s(protocol: str) -> None:
    model, config = tiny.build("opt"), settings(protocol)
    ids = text()["input_ids"]
    mesh = Listening(config)
    with patch(model, config, mesh=mesh) as private, torch.no_grad():
        for end in mesh.ends.values():
            end.messages.clear()
        private(ids)
        states = model(ids, output_hidden_states=True).hidden_states[1]
    for node in range(PLAN.nodes):
        endpoint = config.parties + node
        assert {m.tag for m in mesh.got(endpoint) if m.peer == CLIENT} <= {"control"}
        reveals = [m for m in mesh.got(endpoint) if m.peer < config.parties]
        if node >= PLAN.alpha:
            assert not reveals
            continue
        rows = PLAN.rows_of_comp(node, 0, 13)
        opened = [m.payload.view(2, len(rows), -1) for m in reveals if m.tag == "reveal" and m.payload is not None]
        found = (opened[0] - opened[1]).double() / 2**config.frac_bits
        assert float((found - states[:, rows]).abs().max()) < 1e-3
    for party in range(config.parties):
        assert not [m for m in mesh.got(party) if m.peer >= config.parties and m.peer != CLIENT]


def test_closing_ends_parties_and_nodes() -> None:
    private = patch(tiny.build("opt"), settings())
    private.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("party ")]


def test_what_the_cut_costs() -> None:
    """Each row of states once from each of parties 1 and 2: 8 bytes an element."""
    model, config = tiny.build("llama"), settings()
    ids = text()["input_ids"]
    with patch(model, config) as private, torch.no_grad():
        private(ids)
        sent = private.cost().cost.sent
    crossing = {(f, t - 3): n for (f, t), n in sent.items() if f < 3 <= t < CLIENT}
    width = model.config.hidden_size
    assert crossing == {
        (party, node): 2 * len(PLAN.rows_of_comp(node, 0, 13)) * width * 8 for party in (1, 2) for node in range(3)
    }


@pytest.mark.sampled(3)
@pytest.mark.parametrize("liar", range(4))
def test_a_lying_party_is_noticed_by_the_node_that_opens(liar: int) -> None:
    def alter(index: int, tag: str, payload: Tensor) -> Tensor:
        if not tag.startswith("reveal"):
            return payload
        changed = payload.clone()
        changed.view(-1)[0] += 1
        return changed

    config = settings("quad", timeout_s=20)
    mesh = Listening(config, liar, alter)
    with patch(tiny.build("opt"), config, mesh=mesh) as private, torch.no_grad():
        with pytest.raises(ProtocolAbort, match="opened different results"):
            private(text()["input_ids"])
        with pytest.raises(PartyFailed, match="session is over"):
            private(text()["input_ids"])


# -- refusals --------------------------------------------------------------------------------------------------
def test_splits_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match="want 1 to 1 for a model of 2 layers"):
        patch(tiny.build("llama"), settings(split=2))
    with pytest.raises(ConfigError, match="split: got 0"):
        settings(split=0)
    with pytest.raises(ConfigError, match="want a protocol of secret shares"):
        settings("cascade")
    with pytest.raises(ConfigError, match="leave out reveal, parallel_sessions"):
        settings(reveal="token")
    with pytest.raises(PatchMismatch, match="this is encoder-decoder"):
        patch(tiny.build("t5"), settings())
    with patch(tiny.build("opt"), settings()) as private, pytest.raises(ConfigError, match="not before a split"):
        private.preprocess(GeneratePlan(prompt=12, new_tokens=2))


def test_a_shortened_model_keeps_what_belongs_to_its_layers() -> None:
    model = tiny.build("gemma3_text")
    cut = Cut.of(type(model), model.config, 1)
    short = cut.shortened(model.config)
    assert (short.num_hidden_layers, short.layer_types) == (1, model.config.layer_types[:1])
    names = [name for name, _ in model.named_parameters()]
    assert {name for name in names if cut.belongs_before(name)} == {n for n in names if n.startswith("model.layers.0.")}


@pytest.mark.full
def test_loading_warns_of_attacks_beyond_searches() -> None:
    """Decoders and encoders, with and without a split; whoever accepts weakness has read it."""
    plan = ShardingPlan(3, 3, 1)
    cascade = PrivateConfig.from_dict({"protocol": "cascade", "plan": plan, "timeout_s": 60})
    with pytest.warns(WeakProtection, match="Use 'trio'"):
        patch(tiny.build("opt"), cascade).close()
    with pytest.warns(WeakProtection):
        patch(tiny.build("opt"), settings(plan=plan)).close()
    with pytest.warns(WeakProtection):
        patch(tiny.build("bert"), cascade).close()
    with pytest.warns(WeakProtection, match="likelihood"):
        patch(tiny.build("bert"), settings(plan=plan)).close()
    with warnings.catch_warnings():
        warnings.simplefilter("error", WeakProtection)
        patch(tiny.build("opt"), settings(plan=ShardingPlan(3, 3, 1, accept_weak_plan=True))).close()


@pytest.mark.parametrize(
    ("endpoint", "said"),
    [*((n, "hidden states go to CompNodes, 3 to 5; got") for n in (1, 3 + PLAN.alpha, CLIENT, -1)),
     ("3", "control message from the client: Forward.slices.*got '3'; want a whole number")],
)  # fmt: skip
def test_states_go_to_comp_nodes_only(endpoint: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that names a party, an AttnNode or itself gets an error from the parties, and nobody any state."""
    with patch(tiny.build("opt"), settings()) as private, torch.no_grad():
        honest = private.parties.ask
        monkeypatch.setattr(
            private.parties, "ask", lambda call, secrets, slices: honest(call, secrets, ((endpoint, (0,)),))
        )
        with pytest.raises(TransportError, match=rf"party \d: {said}"):
            private(**text())
