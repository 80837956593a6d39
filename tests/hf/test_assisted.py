"""Protocol "assisted": transformers' models at the client, products of masked rows at two servers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import transformers
from private_llm_hf import AutoPrivateModelForCausalLM, PrivateConfig, patch
from private_llm_hf.client.launch import start_parties
from private_llm_hf.party.product_server import ProductServer
from torch import Tensor, nn
from transformers import PreTrainedModel

from private_llm.assisted.fixed_point import BYTES
from private_llm.errors import ConfigError, DomainError, PartyFailed, PatchMismatch, PlaintextLeak, ProtocolAbort
from private_llm.net.transport import CLIENT
from tests.hf import tiny
from tests.hf.compare import BATCH, GREEDY, worst
from tests.hf.test_remote import free_ports, running

ASSISTED = PrivateConfig(protocol="assisted", timeout_s=30)
ERROR = 1e-3
"""Half a unit of 2^-15 of the largest weight in each product: with 64 inputs around 2 and weights up to 0.5 some 1e-4 a
layer, which ten layers pass on."""


@contextmanager
def assisted(kind: str, **settings: object) -> Iterator[tuple[PreTrainedModel, PreTrainedModel]]:
    """A tiny model of a family and its assisted self."""
    plain = tiny.build(kind)
    with patch(plain, replace(ASSISTED, **settings)) as private:
        yield plain, private


@pytest.mark.parametrize("kind", ["opt", "gpt2", "llama", "gemma2", "falcon", "bloom", "phi3"])
def test_decoders_say_what_their_plaintext_says(kind: str) -> None:
    with assisted(kind) as (plain, private), torch.no_grad():
        got, want = private(**BATCH).logits, plain(**BATCH).logits
        assert worst(got, want, BATCH["attention_mask"]) < ERROR
        assert torch.equal(private.generate(**BATCH, **GREEDY), plain.generate(**BATCH, **GREEDY))
        beams = {"max_new_tokens": 4, "num_beams": 3, "do_sample": False}
        assert torch.equal(private.generate(**BATCH, **beams), plain.generate(**BATCH, **beams))


@pytest.mark.parametrize("kind", ["bert", "distilbert", "modernbert", "t5", "vit"])
def test_encoders_and_images(kind: str) -> None:
    plain = tiny.build(kind)
    arguments = dict(BATCH)
    if kind == "t5":
        arguments["decoder_input_ids"] = BATCH["input_ids"]
    if kind == "vit":
        size = plain.config.image_size
        arguments = {"pixel_values": torch.randn(2, plain.config.num_channels, size, size)}
    with patch(plain, ASSISTED) as private, torch.no_grad():
        got, want = private(**arguments), plain(**arguments)
        for name in want.keys() & {"logits", "last_hidden_state", "pooler_output"}:
            assert worst(got[name], want[name]) < ERROR


def test_sampling_is_transformers_own() -> None:
    with assisted("llama") as (plain, private):
        said = []
        for model in (private, plain):
            torch.manual_seed(5)
            said.append(model.generate(**BATCH, max_new_tokens=5, do_sample=True, top_k=20))
        assert torch.equal(*said)


def test_it_is_the_models_own_class_without_weights_of_linear_layers() -> None:
    with assisted("llama") as (plain, private):
        assert isinstance(private, type(plain))
        names = [name for name, module in plain.named_modules() if type(module) is nn.Linear]
        assert all(private.get_submodule(name).weight.is_meta for name in names)
        assert private.num_parameters() == plain.num_parameters()
        assert not any(
            value.is_meta
            for name, value in private.named_parameters()
            if not name.endswith("_proj.weight") and "lm_head" not in name
        )
        with pytest.raises(PlaintextLeak, match="servers hold"):
            private.save_pretrained("anywhere")
        assert not private.training


def test_bytes_and_exchanges_are_those_of_the_shapes() -> None:
    """Queries, keys and values travel together, and so do gate and up: four exchanges a layer, and one for the head."""
    with assisted("llama") as (plain, private), torch.no_grad():
        private.cost(reset=True)
        private(input_ids=torch.tensor([[1, 2, 3]]))
        before = private.parties.exchanges
        private(input_ids=torch.tensor([[7, 5, 9]]))
        costs, config = private.cost(), plain.config
        hidden, inner = config.hidden_size, config.intermediate_size
        heads = config.num_key_value_heads * (hidden // config.num_attention_heads)
        up = config.num_hidden_layers * (3 * hidden + inner) + hidden
        down = config.num_hidden_layers * (hidden + 2 * heads + hidden + 2 * inner + hidden) + config.vocab_size
        assert private.parties.exchanges - before == 4 * config.num_hidden_layers + 1 == before
        assert costs.rounds == 2 * before
        assert costs.bytes_total == 2 * 3 * BYTES * (up + 2 * down)


def test_servers_see_masked_rows_or_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Server 1's rows are uniform whatever the input is, and no two are alike; server 0 gets no value at all."""
    seen: dict[int, list[Tensor]] = {0: [], 1: []}
    original = ProductServer.product

    def spy(self: ProductServer, rows: Tensor, weight: Tensor) -> Tensor:
        seen[self.transport.me].append(rows.clone())
        return original(self, rows, weight)

    monkeypatch.setattr(ProductServer, "product", spy)
    with assisted("llama") as (_, private), torch.no_grad():
        for _ in range(3):
            private(input_ids=torch.ones(1, 40, dtype=torch.int64))  # the same rows again and again
    for server, rows in seen.items():
        low = torch.cat([(each & 0xFF).view(-1) for each in rows])
        high = torch.cat([((each >> 32) & 0xFF).view(-1) for each in rows])
        for part in (low, high):
            counts = torch.bincount(part, minlength=256).double()
            expected = len(part) / 256
            assert float(((counts - expected) ** 2 / expected).sum()) < 400, server  # chi-square, 255 degrees
        values = torch.cat([each.view(-1) for each in rows])
        assert len(values.unique()) > 0.999 * len(values)


@pytest.mark.parametrize("liar", [0, 1])
def test_a_wrong_product_ends_the_call_and_names_the_server(liar: int, monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = ProductServer.product, []

    def lie(self: ProductServer, rows: Tensor, weight: Tensor) -> Tensor:
        made = original(self, rows, weight)
        if self.transport.me == liar:
            calls.append(1)
            if len(calls) == 7:
                made[-1, -1] += 1 << 39  # what a check modulo two would overlook half the time
        return made

    monkeypatch.setattr(ProductServer, "product", lie)
    shown: list[int] = []
    with assisted("llama") as (_, private):
        with pytest.raises(ProtocolAbort, match=rf"^party {liar} gave a wrong product for 'model\.layers\.1") as told:
            private.generate(**BATCH, max_new_tokens=4, streamer=_Noting(shown))
        assert "withheld" in str(told.value)
        assert shown == [2]  # the prompt
        with pytest.raises(PartyFailed, match="over"):
            private(**BATCH)


class _Noting:
    def __init__(self, shown: list[int]) -> None:
        self._shown = shown

    def put(self, value: Tensor) -> None:
        self._shown.append(len(value))

    def end(self) -> None:
        """Nothing to do."""


def test_two_sessions_do_not_disturb_each_other() -> None:
    with assisted("opt") as (plain, one), patch(plain, ASSISTED) as two, torch.no_grad():
        first, second = (torch.tensor([[3, 4, 5]]), torch.tensor([[9, 8]]))
        for _ in range(2):
            assert worst(one(first).logits, plain(first).logits) < ERROR
            assert worst(two(second).logits, plain(second).logits) < ERROR


def test_processes_and_hosts_compute_the_same(checkpoint: object) -> None:
    plain = tiny.build("llama")
    want = plain.generate(**BATCH, **GREEDY)
    with patch(plain, replace(ASSISTED, party_mode="processes")) as private:
        assert torch.equal(private.generate(**BATCH, **GREEDY), want)
    remote = replace(ASSISTED, party_mode="remote", hosts=free_ports(2), allow_plain_loopback=True)
    with running(remote, [None, None], sessions=2) as lines:
        for _ in range(2):
            with AutoPrivateModelForCausalLM.from_pretrained(str(checkpoint), remote) as private:
                assert torch.equal(private.generate(**BATCH, **GREEDY), want)
    assert [line for line in lines if line.startswith("session 2 ended")]


def test_a_tensor_that_was_written_to_is_asked_for_again() -> None:
    with assisted("llama") as (plain, private), torch.inference_mode():
        attention, original = private.model.layers[0].self_attn, plain.model.layers[0].self_attn
        x = torch.randn(1, 3, plain.config.hidden_size)
        before = private.parties.exchanges
        assert worst(attention.q_proj(x), original.q_proj(x)) < ERROR
        assert worst(attention.v_proj(x), original.v_proj(x)) < ERROR
        assert private.parties.exchanges == before + 1
        x += 1
        assert worst(attention.k_proj(x), original.k_proj(x)) < ERROR
        assert private.parties.exchanges == before + 2


def test_drafts_of_transformers_work() -> None:
    with assisted("llama") as (plain, private):
        more = {"prompt_lookup_num_tokens": 2, **GREEDY}
        ids = torch.tensor([[5, 6, 7, 5, 6]])
        assert torch.equal(private.generate(ids, **more), plain.generate(ids, **more))


def test_settings_of_shares_are_refused() -> None:
    for setting in ({"ring": 32}, {"reveal": "token"}, {"split": 1}, {"device": "cuda"}, {"parallel_sessions": 2}):
        with pytest.raises(ConfigError, match=f"^{next(iter(setting))}: .* no such setting"):
            replace(ASSISTED, **setting)  # type: ignore[arg-type]
    assert ASSISTED.weights == "public"
    assert ASSISTED.endpoints == 2


def test_unfit_values_name_their_layer() -> None:
    plain = tiny.build("llama")
    with torch.no_grad():
        plain.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(DomainError, match=r"weight of 'model.layers.1.mlp.gate_proj.model.layers.1.mlp.up_"):
        patch(plain, ASSISTED)
    with assisted("llama") as (plain, private), torch.no_grad():
        states = torch.full((1, 2, plain.config.hidden_size), float("inf"))
        with pytest.raises(DomainError, match=r"model\.layers\.0\.self_attn\.q_proj\+.*finite"):
            private(inputs_embeds=states)


def test_experts_with_rows_of_their_own_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = tiny.build("llama")
    for layer in plain.model.layers:
        layer.experts = nn.ModuleList([nn.Linear(4, 4)])
    made = type("LlamaForCausalLM", (transformers.LlamaForCausalLM,), {})

    def build(self: PreTrainedModel, config: object) -> None:
        transformers.LlamaForCausalLM.__init__(self, config)
        for layer in self.model.layers:
            layer.experts = nn.ModuleList([nn.Linear(4, 4)])

    made.__init__ = build  # type: ignore[misc]
    from private_llm_hf.client.assisted_model import open_assisted

    with pytest.raises(PatchMismatch, match="which experts were chosen"):
        open_assisted(made, plain.config, lambda *_: None, start_parties(ASSISTED), None)


def test_training_is_refused_and_nothing_is_recorded_for_it() -> None:
    with assisted("opt") as (_, private):
        with pytest.raises(NotImplementedError, match="inference only"):
            private.train()
        assert not private(torch.tensor([[3, 4]])).logits.requires_grad


def test_a_server_that_is_asked_the_wrong_way_ends_the_session() -> None:
    from private_llm_hf.wire.assisted import Multiply
    from private_llm_hf.wire.commands import send_message

    with assisted("opt") as (_, private):
        links = private.parties.transport
        assert links.me == CLIENT
        send_message(links, 1, Multiply(0, 1, "a label"))
        with pytest.raises((PartyFailed, ConnectionError), match="server 0 multiplies masks"):
            private(torch.tensor([[3, 4]]))
