"""Experts under protocol "assisted": servers hold them all, and see the same whichever a router chose."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tr
from private_llm_hf import AutoPrivateModelForCausalLM, patch, prepare_corrections
from private_llm_hf.checkpoint.miniature import filled
from private_llm_hf.checkpoint.sample_inputs import outputs, sample_inputs
from private_llm_hf.client import assisted_experts, assisted_model, product_servers
from private_llm_hf.client.assisted_experts import AssistedExperts, ExpertSizes, experts_at_servers
from private_llm_hf.client.open_weights import open_weights
from private_llm_hf.party.product_server import ProductServer
from private_llm_hf.tools.estimate import estimate
from private_llm_hf.wire.assisted import HEADER
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from private_llm.assisted.fixed_point import BYTES
from private_llm.assisted.masks import fresh_label
from private_llm.errors import ConfigError, DomainError, ProtocolAbort
from private_llm.kernels import ops
from private_llm.net.ledger import size
from tests.hf.compare import BATCH, GREEDY, worst
from tests.hf.models.test_assisted_families import of_type
from tests.hf.test_assisted import ASSISTED, ERROR
from tests.hf.test_remote import free_ports, running
from tests.hf.tools.test_estimate import entries

AT_SERVERS = replace(ASSISTED, experts="servers")
IDS = torch.tensor([[3, 4, 5, 9]])


def _deepseek() -> PreTrainedModel:
    torch.manual_seed(0)
    config = tr.DeepseekV3Config(
        hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=128, n_routed_experts=8, n_group=2, topk_group=1, num_experts_per_tok=2,
        first_k_dense_replace=1, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
        max_position_embeddings=64,
    )  # fmt: skip
    return filled(tr.DeepseekV3ForCausalLM(config).eval())


def built(kind: str) -> PreTrainedModel:
    return _deepseek() if kind == "deepseek_v3" else of_type(kind)


@contextmanager
def assisted(kind: str, **settings: object) -> Iterator[tuple[PreTrainedModel, PreTrainedModel]]:
    plain = built(kind)
    with patch(plain, replace(AT_SERVERS, **settings)) as private, torch.no_grad():
        yield plain, private


@pytest.mark.parametrize(
    "kind",
    [
        "mixtral", "gpt_oss", "deepseek_v3", "qwen3_moe", "olmoe",
        *(pytest.param(kind, marks=pytest.mark.full) for kind in ("qwen2_moe", "granitemoe", "minimax_m2", "glm4_moe")),
    ],
)  # fmt: skip
def test_mixtures_say_what_their_plaintext_says(kind: str) -> None:
    """The client holds no expert; a layer takes one exchange for their first weights, and one for their second."""
    with assisted(kind) as (plain, private):
        experts = [module for module in private.modules() if isinstance(module, AssistedExperts)]
        assert experts
        assert isinstance(experts[0], type(next(m for m in plain.modules() if ExpertSizes.of(m) is not None)))
        for each in experts:
            assert all(value.is_meta == (value.dim() == 3) for value in each.parameters(recurse=False))
        assert worst(private(**BATCH).logits, plain(**BATCH).logits, BATCH["attention_mask"]) < ERROR
        assert torch.equal(private.generate(**BATCH, **GREEDY), plain.generate(**BATCH, **GREEDY))
        if kind in ("mixtral", "gpt_oss", "qwen3_moe", "olmoe"):
            before = private.parties.exchanges
            private(IDS)
            assert private.parties.exchanges - before == 4 * plain.config.num_hidden_layers + 1


@pytest.mark.parametrize("way", ["eager", "batched_mm", "grouped_mm"])
def test_it_does_not_matter_how_transformers_would_compute_them(way: str) -> None:
    plain = of_type("mixtral")
    plain.set_experts_implementation(way)
    with patch(plain, AT_SERVERS) as private, torch.no_grad():
        assert worst(private(IDS).logits, plain(IDS).logits) < ERROR


def test_servers_see_the_same_requests_whichever_experts_were_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []
    hidden: list[Tensor] = []
    config = of_type("mixtral").config
    inner = config.num_local_experts * config.intermediate_size
    original = ProductServer.product

    def spy(self: ProductServer, x: Tensor, weight: Any, count: int) -> Tensor:
        seen.append((self.transport.me, count, weight.inputs, len(weight.lines), len(x)))
        if self.transport.me == 1 and weight.inputs == inner:
            hidden.append(ops.unpacked(x.clone(), (count, -1), 5))
        return original(self, x, weight, count)

    monkeypatch.setattr(ProductServer, "product", spy)
    with assisted("mixtral") as (_, private):
        found, chosen = [], []
        for ids in (torch.ones(1, 24, dtype=torch.int64), torch.arange(24)[None] + 5, torch.arange(24).flip(0)[None]):
            seen.clear()
            made = private(ids, output_router_logits=True)
            found.append(sorted(seen))
            chosen.append(torch.stack(made.router_logits).topk(2).indices.sort().values)
        assert found[0] == found[1] == found[2]
        assert not torch.equal(chosen[0], chosen[1])
        assert [each for each in found[0] if each[2] == config.hidden_size and each[3] == 2 * inner]
        down = torch.cat([each.view(-1) for each in hidden])  # most of it hides zeros
        counts = torch.bincount((down >> 32) & 0xFF, minlength=256).double()
        assert float(((counts - len(down) / 256) ** 2 / (len(down) / 256)).sum()) < 400  # chi-square, 255 degrees
        assert len(down.unique()) > 0.999 * len(down)


@pytest.mark.parametrize(("liar", "weight"), [(0, "down_proj"), (1, "gate_up_proj")])
def test_a_wrong_product_of_experts_is_named(liar: int, weight: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = ProductServer.product

    def lie(self: ProductServer, x: Tensor, held: Any, rows: int) -> Tensor:
        made = original(self, x, held, rows)
        if self.transport.me == liar and held.name.endswith(weight):
            made[-2] ^= 1
        return made

    monkeypatch.setattr(ProductServer, "product", lie)
    with (
        assisted("mixtral") as (_, private),
        pytest.raises(ProtocolAbort, match=rf"^party {liar} gave a wrong product for '.*experts\.{weight}'"),
    ):
        private(IDS)


def test_prepared_corrections_and_what_they_take(tmp_path: Path) -> None:
    plain, config = of_type("gpt_oss"), replace(AT_SERVERS, corrections=str(tmp_path / "masks"))
    told: list[str] = []
    prepare_corrections(plain, config, 20, notice=told.append)
    with patch(plain, config) as private, torch.no_grad():
        assert worst(private(IDS).logits, plain(IDS).logits) < ERROR
        assert private.parties.tokens_left == 16
        outs = sum(len(weight.factors) for weight, _ in private.parties._weights)
    assert told[0].startswith(f"{size(BYTES[16] * outs)} a token; 20 tokens")


@pytest.mark.parametrize("where", ["servers", "client"])
def test_an_estimate_counts_what_a_run_sends(where: str) -> None:
    plain, config = of_type("qwen3_moe"), replace(ASSISTED, experts=where)
    found = estimate(type(plain), plain.config, config, sequence=4, new_tokens=0)
    with patch(plain, config) as private, torch.no_grad():
        private.cost(reset=True)
        private(IDS)
        assert entries(found.costs) == entries(private.cost())


def test_bytes_are_those_of_all_experts() -> None:
    plain = of_type("mixtral")
    costs = [
        estimate(type(plain), plain.config, replace(ASSISTED, experts=where), sequence=1).costs
        for where in ("servers", "client")
    ]
    config = plain.config
    hidden, inner, count = config.hidden_size, config.intermediate_size, config.num_local_experts
    elements = hidden + count * inner + 2 * (2 * count * inner + hidden)
    exchange = 2 * HEADER.size + len(fresh_label())
    layers = config.num_hidden_layers
    assert costs[0].bytes_total - costs[1].bytes_total == layers * (BYTES[16] * elements + 2 * exchange)
    assert costs[0].rounds - costs[1].rounds == 2 * layers


def test_many_experts_and_many_rows_take_several_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = of_type("gpt_oss")
    sizes = next(iter(experts_at_servers(plain, "servers").values()))
    monkeypatch.setattr(assisted_experts, "MOST_INPUTS", 3 * sizes.inner)
    with patch(plain, AT_SERVERS) as private, torch.no_grad():
        assert worst(private(IDS).logits, plain(IDS).logits) < ERROR
        groups = -(-sizes.count // 3)
        assert private.parties.exchanges == plain.config.num_hidden_layers * (2 + 2 * groups) + 1
        assert "model.layers.0.mlp.experts.down_proj[3:6]" in private.parties._names
    monkeypatch.undo()
    with patch(plain, AT_SERVERS) as private, torch.no_grad():
        monkeypatch.setattr(product_servers, "_MACS_AT_ONCE", 3 * sizes.count * sizes.outer * sizes.hidden)
        ids = torch.arange(7)[None] + 3
        assert worst(private(ids).logits, plain(ids).logits) < ERROR


@pytest.mark.full
def test_servers_that_read_the_checkpoint(tmp_path: Path) -> None:
    """Whether the client leaves experts to them or not."""
    plain = of_type("mixtral")
    plain.save_pretrained(tmp_path)
    want = plain.generate(IDS, **GREEDY)
    remote = replace(ASSISTED, party_mode="remote", hosts=free_ports(2), allow_plain_loopback=True)
    with running(remote, [None, None], checkpoint=str(tmp_path), sessions=2):
        for where in ("servers", "client"):
            config = replace(remote, experts=where)
            with AutoPrivateModelForCausalLM.from_pretrained(str(tmp_path), config) as private:
                assert private.parties.stored
                assert torch.equal(private.generate(IDS, **GREEDY), want)
                assert private.cost().bytes_total < 2e6


def test_further_sessions_and_new_ones_ask_for_experts() -> None:
    with assisted("mixtral") as (plain, private), private.open_session() as second:
        private.reconnect()
        for model in (private, second):
            assert worst(model(IDS).logits, plain(IDS).logits) < ERROR
        assert private.parties.exchanges == second.parties.exchanges


def test_a_server_holds_what_clients_ask_for(tmp_path: Path) -> None:
    plain = of_type("mixtral")
    plain.save_pretrained(tmp_path)
    held = open_weights(str(tmp_path), torch.device("cpu")).weights
    with patch(plain, AT_SERVERS) as private:
        assert held.keys() == {*private.parties.digests}


# -- which experts servers hold --------------------------------------------------------------------------------------
def test_small_ones_stay_at_the_client_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = of_type("mixtral")
    of_experts = sum(value.numel() for name, value in plain.named_parameters() if ".experts." in name)
    assert not experts_at_servers(plain, "auto")
    assert len(experts_at_servers(plain, "servers")) == plain.config.num_hidden_layers
    assert not experts_at_servers(plain, "client")
    monkeypatch.setattr(assisted_experts, "_FITS", 4 * of_experts - 1)
    assert experts_at_servers(plain, "auto")
    with patch(plain, ASSISTED) as private, torch.no_grad():
        assert worst(private(IDS).logits, plain(IDS).logits) < ERROR
    with pytest.raises(ConfigError, match=r"^experts: protocol 'trio' has no such setting"):
        replace(ASSISTED, protocol="trio", weights="secret", experts="client")


def _experts(**settings: object) -> MixtralExperts:
    given = {"num_local_experts": 4, "hidden_size": 12, "intermediate_size": 6, "hidden_act": "silu", **settings}
    return MixtralExperts(SimpleNamespace(**given))


def _clamped(self: nn.Module, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """As transformers' own, with a limit that no other method knows."""
    made = torch.zeros_like(x)
    for row, (experts, shares) in enumerate(zip(index, weights, strict=True)):
        for expert, share in zip(experts, shares, strict=True):
            gate, up = (self.gate_up_proj[expert] @ x[row]).chunk(2)
            made[row] += share * (self.down_proj[expert] @ (self.act_fn(gate) * up.clamp(-100, 100)))
    return made


def _free(self: nn.Module, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    return _clamped(self, x / 1000, index, weights) * 0 + MixtralExperts.forward.__wrapped__(self, x, index, weights)


@pytest.mark.parametrize(("forward", "taken"), [(_clamped, False), (_free, True)])
def test_a_class_that_computes_something_else_stays(forward: Callable[..., Tensor], taken: bool) -> None:
    experts = _experts()
    experts.__class__ = type("Other", (MixtralExperts,), {"forward": forward})
    assert bool(experts_at_servers(nn.ModuleList([experts]), "servers")) == taken


def test_equal_sizes_do_not_confuse_the_trial() -> None:
    for sizes in ({"hidden_size": 6}, {"hidden_size": 4}, {"intermediate_size": 4}, {"num_local_experts": 1}):
        assert experts_at_servers(nn.ModuleList([_experts(**sizes)]), "servers")


@pytest.mark.parametrize("kind", ["switch_transformers", "nllb-moe", "llama4_text"])
def test_experts_of_other_forms_stay_at_the_client(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear layers of their own, and tensors that no forward of transformers' interface reads: servers see none."""
    plain = of_type(kind)
    given = sample_inputs(plain)
    with patch(plain, AT_SERVERS) as private, torch.no_grad():
        assert not any("expert" in name and ".shared_expert." not in name for name in private.parties._names)
        want, got = outputs(plain, given), outputs(private, given)
        for name, value in want.items():
            assert worst(got[name], value) <= ERROR * max(1.0, float(value.abs().max())), name


def test_a_client_without_room_for_experts_says_so_before_it_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = of_type("qwen3_moe")
    monkeypatch.setattr(assisted_model, "memory_bytes", lambda: 1000)
    with pytest.raises(
        ConfigError, match=r"memory: 0.0 GB of this model stay .* the largest is '\S*experts.*has 0.0 GB"
    ):
        patch(plain, replace(ASSISTED, experts="client"))
    estimate(type(plain), plain.config, replace(ASSISTED, experts="client"), sequence=1)  # reads no weights


def test_unfit_values_name_their_experts() -> None:
    plain = of_type("mixtral")
    with torch.no_grad():
        next(m for m in plain.modules() if isinstance(m, MixtralExperts)).down_proj[1, 2, 3] = float("nan")
    with pytest.raises(DomainError, match=re.escape("weight of 'model.layers.0.mlp.experts.down_proj'")):
        patch(plain, AT_SERVERS)


def test_other_types_and_no_rows() -> None:
    with assisted("gpt_oss") as (plain, private):
        want = plain(IDS).logits
        private.half()
        assert worst(private(IDS).logits.float(), want) < 0.05
        experts = next(m for m in private.modules() if isinstance(m, AssistedExperts))
        none = torch.empty(0, 2)
        assert experts(torch.empty(0, plain.config.hidden_size), none.long(), none).shape == (0, 32)
