from __future__ import annotations

import pytest
import torch
from private_llm_hf.sparsity.sites import Site, find_sites
from transformers import BertForMaskedLM, PhiConfig, PhiForCausalLM

from private_llm.errors import ConfigError, PatchMismatch
from tests.hf.sparsity.models import RELU, batch, sparse
from tests.hf.tiny import build

FIRST = {
    "opt": ("model.decoder.layers.0.fc1", "model.decoder.layers.0.fc2", ("q_proj", "k_proj", "v_proj"), "out_proj"),
    "gpt2": ("transformer.h.0.mlp.c_fc", "transformer.h.0.mlp.c_proj", ("c_attn",), "c_proj"),
    "llama": (
        "model.layers.0.mlp.gate_proj", "model.layers.0.mlp.down_proj", ("q_proj", "k_proj", "v_proj"), "o_proj",
    ),
    "bert": (
        "encoder.layer.0.intermediate.dense", "encoder.layer.0.output.dense", ("query", "key", "value"), "dense",
    ),
    "t5": (
        "encoder.block.0.layer.1.DenseReluDense.wi", "encoder.block.0.layer.1.DenseReluDense.wo", ("q", "k", "v"), "o",
    ),
    "vit": ("layers.0.mlp.fc1", "layers.0.mlp.fc2", ("q_proj", "k_proj", "v_proj"), "o_proj"),
}  # fmt: skip


@pytest.mark.parametrize("name", RELU)
def test_blocks_are_found_in_every_family(name: str) -> None:
    model = sparse(name)
    sites = find_sites(model, batch(name))
    neurons = [site for site in sites if site.kind == "ffn"]
    heads = [site for site in sites if site.kind == "heads"]
    first, last, readers, output = FIRST[name]
    assert (neurons[0].name, neurons[0].writer) == (first, last)
    assert neurons[0].width == 64
    assert neurons[0].units == model.get_submodule(last).weight.shape[0 if name == "gpt2" else 1]
    assert tuple(reader.split(".")[-1] for reader in heads[0].readers) == readers
    assert heads[0].writer.split(".")[-1] == output
    assert {site.units for site in heads} == {4}
    blocks, attentions = ([0, 1, 0, 1], 6) if name == "t5" else ([0, 1], 2)
    assert [site.layer for site in neurons] == blocks, "the head of the model is no layer"
    assert len(heads) == attentions, "an encoder-decoder attends to itself twice and across once"
    assert len({site.name for site in sites}) == len(sites)
    assert sites.index(heads[0]) < sites.index(neurons[0]), "in the order in which they run"


def test_gate_and_up_read_the_same_input() -> None:
    (first, *_) = find_sites(sparse("llama"), batch("llama"), ("ffn",))
    assert [name.split(".")[-1] for name in first.readers] == ["gate_proj", "up_proj"]


def test_a_block_as_wide_as_its_input_does_not_take_up_for_the_last_layer() -> None:
    model = build("llama", hidden_act="relu", intermediate_size=64)
    (first, *_) = find_sites(model, batch("llama"), ("ffn",))
    assert [name.split(".")[-1] for name in (*first.readers, first.writer)] == ["gate_proj", "up_proj", "down_proj"]


def test_the_head_of_a_masked_model_is_no_layer() -> None:
    model = build("bert", BertForMaskedLM, hidden_act="relu")
    sites = find_sites(model, batch("bert"))
    assert [site.layer for site in sites if site.kind == "ffn"] == [0, 1]


def test_cross_attention_reads_the_decoder_for_queries_alone() -> None:
    cross = [site for site in find_sites(sparse("t5"), batch("t5"), ("heads",)) if "EncDec" in site.name]
    assert [site.readers for site in cross] == [(site.name,) for site in cross]
    assert all(site.name.endswith(".q") for site in cross)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "vit"])
def test_a_model_without_zeros_is_refused(name: str) -> None:
    with pytest.raises(PatchMismatch, match=r"no feed-forward block whose activation makes exact zeros .*relufy"):
        find_sites(build(name), batch(name), ("ffn",))
    assert find_sites(build(name), batch(name), ("heads",))


def test_a_fused_gate_is_refused_not_mistaken() -> None:
    with pytest.raises(PatchMismatch, match="no activation after a linear layer"):
        find_sites(build("phi3", hidden_act="relu"), batch("phi3"), ("ffn",))


def test_finding_leaves_the_model_as_it_was() -> None:
    model = sparse("opt").train()
    find_sites(model, batch("opt"))
    assert model.training
    assert not any(module._forward_hooks for module in model.modules())
    assert all(value.grad is None for value in model.parameters())
    assert torch.is_grad_enabled()


def test_sites_survive_json() -> None:
    site = find_sites(sparse("llama"), batch("llama"), ("ffn",))[0]
    assert Site.from_dict(site.to_dict()) == site
    with pytest.raises(ConfigError, match=r"unknown key.*other"):
        Site.from_dict({**site.to_dict(), "other": 1})


def test_a_feed_forward_block_beside_attention_reads_no_queries() -> None:
    """Phi's two blocks read the same input; here FC1 is as wide as the queries."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = PhiForCausalLM(PhiConfig(**sizes, vocab_size=64, hidden_act="relu"))
    (site,) = find_sites(model, {"input_ids": torch.ones(1, 3, dtype=torch.long)}, ("ffn",))
    assert site.readers == ("model.layers.0.mlp.fc1",)
