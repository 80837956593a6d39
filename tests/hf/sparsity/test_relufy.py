"""Swapped activations: what they compute, and that a saved model is loaded as what it is, or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from private_llm_hf import PrivateConfig, patch
from private_llm_hf.sparsity.relufy import ACTIVATIONS, ReluKind, load_relufied
from private_llm_hf.sparsity.sites import ReLULinear, ShiftedReLU, find_sites, zeroes
from relufy import relufy, save_relufied
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from private_llm.errors import ConfigError, PatchMismatch
from tests.hf.sparsity.models import batch
from tests.hf.tiny import build

NATIVE = [
    ("gpt2", "relu"), ("gpt2", "relu2"), ("gpt2", "shifted-relu"), ("llama", "relu"), ("llama", "relu2"),
    ("llama", "shifted-relu"), ("bert", "shifted-relu"), ("t5", "relu2"), ("falcon", "relu"), ("gemma2", "relu"),
    ("vit", "relu"),
]  # fmt: skip
OURS = [("qwen2", "shifted-relu"), ("llama", "drelu"), ("t5", "shifted-relu"), ("gemma2", "drelu")]


def answer(model: PreTrainedModel, name: str) -> torch.Tensor:
    with torch.no_grad():
        return model(**batch(name))[0]


@pytest.mark.parametrize(("name", "activation"), NATIVE)
def test_transformers_loads_what_it_has_a_name_for(name: str, activation: ReluKind, tmp_path: Path) -> None:
    model = build(name)
    before = answer(model, name)
    made = relufy(model, batch(name), activation, shift=0.3)
    assert made.native
    assert not torch.allclose(answer(model, name), before, atol=1e-3)
    assert find_sites(model, batch(name), ("ffn",))
    save_relufied(model, made, tmp_path, {"note": 1})
    assert torch.equal(answer(type(model).from_pretrained(tmp_path).eval(), name), answer(model, name))
    assert torch.equal(answer(load_relufied(tmp_path), name), answer(model, name))
    assert json.loads((tmp_path / "relufied.json").read_text())["report"] == {"note": 1}


@pytest.mark.parametrize(("name", "activation"), OURS)
def test_what_transformers_lacks_fails_there_and_loads_here(name: str, activation: ReluKind, tmp_path: Path) -> None:
    model = build(name)
    made = relufy(model, batch(name), activation, shift=0.3)
    assert not made.native
    save_relufied(model, made, tmp_path, {})
    with pytest.raises((KeyError, ValueError), match="private_llm"):
        type(model).from_pretrained(tmp_path)
    assert torch.equal(answer(load_relufied(tmp_path), name), answer(model, name))
    assert find_sites(load_relufied(tmp_path), batch(name), ("ffn",))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_gated_block_computes_the_formula(activation: ReluKind) -> None:
    model = build("llama")
    mlp = model.model.layers[0].mlp
    gate, up, down = (layer.weight for layer in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
    relufy(model, batch("llama"), activation, shift=0.25)
    x = torch.randn(4, 64)
    g, u = x @ gate.T, x @ up.T
    want = {
        "relu": F.relu(g) * u, "relu2": F.relu(g) ** 2 * u, "shifted-relu": F.relu(g - 0.25) * u,
        "drelu": F.relu(g) * F.relu(u),
    }[activation]  # fmt: skip
    torch.testing.assert_close(mlp(x), want @ down.T)


def test_a_shift_goes_into_the_bias_of_an_ungated_block() -> None:
    model = build("gpt2")
    mlp = model.transformer.h[1].mlp
    bias = mlp.c_fc.bias.detach().clone()
    relufy(model, batch("gpt2"), "shifted-relu", shift=0.25)
    assert torch.equal(mlp.c_fc.bias, bias - 0.25)
    assert type(mlp.act) is nn.ReLU


def test_drelu_is_sparser_than_relu() -> None:
    def active(activation: ReluKind) -> float:
        model, seen = build("llama"), []
        relufy(model, batch("llama"), activation)
        model.model.layers[0].mlp.down_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        answer(model, "llama")
        return float((seen[0] != 0).float().mean())

    assert 0.15 < active("drelu") < 0.35 < active("relu") < 0.65


def test_tuning_reaches_the_layers_that_were_replaced() -> None:
    model = build("llama")
    relufy(model, batch("llama"), "drelu")
    up = model.model.layers[0].mlp.up_proj
    assert isinstance(up, ReLULinear)
    assert "model.layers.0.mlp.up_proj.weight" in dict(model.named_parameters())
    model(**batch("llama")).logits.square().mean().backward()
    assert up.weight.grad is not None
    assert bool(up.weight.grad.any())


@pytest.mark.parametrize(
    ("name", "activation", "message"),
    [
        ("opt", "relu", "its activation is 'relu' already"),
        ("t5", "relu", "its activation is 'relu' already"),
        ("gpt2", "drelu", "needs a gate and an up projection"),
        ("phi3", "relu", "no feed-forward block"),
        ("bloom", "relu", "lacks the name of its activation"),
    ],
)
def test_models_that_cannot_be_changed_are_refused(name: str, activation: ReluKind, message: str) -> None:
    model = build(name)
    before = answer(model, name)
    with pytest.raises(PatchMismatch, match=message):
        relufy(model, batch(name), activation)
    assert torch.equal(answer(model, name), before)


@pytest.mark.parametrize("activation", ["relu2", "shifted-relu", "drelu"])
def test_private_runs_take_what_transformers_has_and_refuse_the_rest(activation: ReluKind) -> None:
    model = build("llama")
    with torch.no_grad():
        for value in model.parameters():
            if value.ndim > 1:
                value.mul_(0.3)
    made = relufy(model, batch("llama"), activation, shift=0.2)
    ids = batch("llama")["input_ids"][:1]
    if not made.native:
        with pytest.raises(PatchMismatch, match=r"up_proj .*ReLULinear"):
            patch(model, PrivateConfig(reveal="logits"))
        return
    with patch(model, PrivateConfig(reveal="logits")) as private, torch.no_grad():
        torch.testing.assert_close(private(input_ids=ids).logits, model(input_ids=ids).logits, atol=1e-3, rtol=0)


def test_bad_settings_and_foreign_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="got 'elu'"):
        relufy(build("gpt2"), batch("gpt2"), "elu")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="shift: got nan"):
        relufy(build("gpt2"), batch("gpt2"), "shifted-relu", shift=float("nan"))
    with pytest.raises(ConfigError, match=r"no relufied\.json"):
        load_relufied(tmp_path)
    model = build("gpt2")
    save_relufied(model, relufy(model, batch("gpt2"), "relu"), tmp_path, {})
    path = tmp_path / "relufied.json"
    for old, new, message in (
        ('"activation": "relu"', '"activation": "elu"', "got 'elu'"),
        ('"native"', '"natives"', r"unknown key.*natives"),
    ):
        text = path.read_text()
        path.write_text(text.replace(old, new))
        with pytest.raises(ConfigError, match=message):
            load_relufied(tmp_path)
        path.write_text(text)


@pytest.mark.parametrize(
    ("activation", "makes_zeros"),
    [
        (nn.ReLU(), True), (nn.ReLU6(), True), (ShiftedReLU(1.0), True), (ShiftedReLU(-0.5), True),
        (transformers.activations.ReLUSquaredActivation(), True), (nn.GELU(), False), (nn.GELU("tanh"), False),
        (nn.SiLU(), False), (nn.Tanh(), False), (nn.Sigmoid(), False), (nn.Hardswish(), False),
    ],
    ids=str,
)  # fmt: skip
def test_activations_that_make_zeros(activation: nn.Module, makes_zeros: bool) -> None:
    assert zeroes(activation) is makes_zeros
