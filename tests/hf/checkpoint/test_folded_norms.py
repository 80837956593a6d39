"""Norms in the layers that read them: which ones, the same results, and what is not sent any more."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tr
from private_llm_hf import api, patch
from private_llm_hf.api import share_checkpoint
from private_llm_hf.checkpoint.folds import Folder, fold_norms
from private_llm_hf.checkpoint.model_spec import ModelSpec, describe, folds_norms
from private_llm_hf.checkpoint.norm_readers import norm_readers
from private_llm_hf.checkpoint.share_files import ShareFile, share_path
from private_llm_hf.checkpoint.weights import stream_loaded
from private_llm_hf.models.handlers import register_handler, unregister_handler
from private_llm_hf.models.norms import FoldedNorm
from private_llm_hf.party.model_description import validate_model_description
from private_llm_hf.tools.compare import compare
from private_llm_hf.wire.commands import Description
from torch import nn
from transformers.models.llama import modeling_llama

from private_llm.config import PrivateConfig
from private_llm.errors import DomainError, PatchMismatch
from private_llm.sparsity_config import CometConfig
from private_llm.token_sharding import ShardingPlan
from tests.hf import tiny
from tests.hf.compare import LOGIT_ERROR, worst
from tests.hf.models import families

ROUNDING = 1e-5
"""Families normalise in float32 whatever they are given, rows of a size of 10."""

IDS = torch.tensor([[5, 6, 7, 8], [9, 8, 7, 6]])

QKV = ("q_proj", "k_proj", "v_proj")


def build(name: str) -> tr.PreTrainedModel:
    """A model whose norms have weights and biases that differ."""
    model = tiny.build(name) if name in tiny.ALL else families.build(name)
    torch.manual_seed(1)
    with torch.no_grad():
        for module in model.modules():
            if "Norm" in type(module).__name__:
                for value in module.parameters(recurse=False):
                    value.add_(0.3 * torch.randn_like(value))
    return model.eval()


def readers(model: tr.PreTrainedModel) -> dict[str, tuple[str, ...]]:
    return norm_readers(type(model), model.config)


@pytest.mark.parametrize(
    ("name", "norms"),
    [
        ("llama", {"model.layers.1.input_layernorm": QKV, "model.layers.1.post_attention_layernorm": ("gate_proj",
            "up_proj"), "model.norm": ("lm_head",)}),
        ("qwen3", {"model.layers.1.input_layernorm": QKV, "model.layers.1.post_attention_layernorm": ("gate_proj",
            "up_proj"), "model.norm": ("lm_head",)}),  # not those of queries and keys
        ("gemma2", {"model.layers.1.input_layernorm": QKV, "model.layers.1.pre_feedforward_layernorm": ("gate_proj",
            "up_proj")}),  # not those before a sum, nor the one before the embedding's table
        ("opt", {"model.decoder.layers.1.self_attn_layer_norm": ("k_proj", "v_proj", "q_proj"),
            "model.decoder.layers.1.final_layer_norm": ("fc1",)}),
        ("gpt2", {"transformer.h.1.ln_1": ("c_attn",), "transformer.h.1.ln_2": ("c_fc",)}),
        ("cohere", {"model.layers.1.input_layernorm": (*QKV, "gate_proj", "up_proj")}),  # two blocks read one norm
        ("falcon", {}),  # its layers are of a class of their own
        ("olmo", {}),  # its norms have no weights
        ("bert", {}),
        ("t5", {}),
    ],
)  # fmt: skip
def test_only_norms_that_linear_layers_alone_read(name: str, norms: dict[str, tuple[str, ...]]) -> None:
    found = {norm: tuple(layer.rpartition(".")[2] for layer in layers) for norm, layers in readers(build(name)).items()}
    assert {norm: layers for norm, layers in found.items() if ".0." not in norm} == norms
    assert len(found) == len(norms) + sum(".1." in norm for norm in norms)


def test_norms_that_a_sum_reads_are_left() -> None:
    assert readers(tiny.build("opt", do_layer_norm_before=False)) == {}


def test_norms_before_experts_are_left() -> None:
    config = tr.MixtralConfig(**tiny.LLAMA, num_local_experts=2)
    assert norm_readers(tr.MixtralForCausalLM, config) == {}


def test_a_tied_head_and_a_model_that_returns_its_norm_take_up_none() -> None:
    config = tiny.build("llama", tie_word_embeddings=True).config
    assert "model.norm" not in norm_readers(tr.LlamaForCausalLM, config)
    config.tie_word_embeddings = False
    assert "norm" not in norm_readers(tr.LlamaModel, config)


@pytest.mark.parametrize("part", ["LlamaRMSNorm", "LlamaMLP"])
def test_what_a_user_replaces_is_left(part: str) -> None:
    model = tiny.build("llama")
    kind = next(type(module) for module in model.modules() if type(module).__name__ == part)
    register_handler(kind, "the user's")(lambda original: original)
    try:
        assert not [norm for norm, layers in readers(model).items() if part == "LlamaRMSNorm" or "mlp" in layers[0]]
    finally:
        unregister_handler(kind)


def _gated(mlp: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = mlp.down_proj(mlp.gate_proj(x) * mlp.up_proj(y))
    return made


def _kept(mlp: Any, x: torch.Tensor) -> torch.Tensor:
    """The rows go into another tensor, which is used later."""
    copied = torch.zeros(x.shape, device=x.device)
    copied[:] = x
    return _gated(mlp, x, x) + copied


def _overwritten(mlp: Any, x: torch.Tensor) -> torch.Tensor:
    """Some rows are others when the last layer reads them."""
    gate, rows = mlp.gate_proj(x), x.view(-1, x.shape[-1])
    rows[0] = 0
    made: torch.Tensor = mlp.down_proj(gate * mlp.up_proj(x))
    return made


@pytest.mark.parametrize(
    ("forward", "layers"),
    [
        (lambda mlp, x: mlp.down_proj(mlp.gate_proj(x) * mlp.up_proj(input=x)), ("gate_proj", "up_proj")),
        (lambda mlp, x: _gated(mlp, x, x.to(torch.float32).view(x.shape)), ("gate_proj", "up_proj")),
        (lambda mlp, x: _gated(mlp, x, x + 1), ()),
        (_kept, ()),
        (_overwritten, ()),
    ],
    ids=["by name", "as it is", "changed", "kept", "overwritten"],
)
def test_no_use_of_a_norm_is_overlooked(
    monkeypatch: pytest.MonkeyPatch, forward: Callable[[Any, torch.Tensor], torch.Tensor], layers: tuple[str, ...]
) -> None:  # fmt: skip
    model = tiny.build("llama")
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", forward)
    found = readers(model).get("model.layers.1.post_attention_layernorm", ())
    assert found == tuple(f"model.layers.1.mlp.{layer}" for layer in layers)


@pytest.mark.parametrize("name", ["llama", "opt", "gpt2", "gemma2", "cohere", "stablelm", "nemotron", "phi3", "mpt"])
def test_the_folded_tree_computes_the_same_in_whatever_order_weights_come(name: str) -> None:
    model = build(name).double()
    spec = ModelSpec.of(type(model), model.config, fold_norms_too=True)
    tree = build(name).double()
    fold_norms(tree, spec.folded)
    assert any(isinstance(module, FoldedNorm) for module in tree.modules())
    source: dict[str, torch.Tensor] = {}
    stream_loaded(model, spec.source, source.__setitem__)
    before = {key: value.clone() for key, value in source.items()}
    for names in (list(source), list(reversed(source)), sorted(source)):
        made: dict[str, torch.Tensor] = {}
        sink = spec.folding(made.__setitem__)
        for each in names:
            sink(each, source[each])
        assert {key: tuple(value.shape) for key, value in made.items()} == spec.shared.shapes
        tree.load_state_dict(made, strict=False, assign=True)
        with torch.no_grad():
            assert worst(tree(IDS).logits, model(IDS).logits) <= ROUNDING
    assert all(torch.equal(value, before[key]) for key, value in source.items()), "the user's own model is as it was"


def test_half_precision_is_multiplied_in_single() -> None:
    model = build("llama").to(torch.bfloat16)
    spec = ModelSpec.of(type(model), model.config, fold_norms_too=True)
    made: dict[str, torch.Tensor] = {}
    stream_loaded(model, spec.source, spec.folding(made.__setitem__))
    layer = model.model.layers[0]
    exact = layer.self_attn.q_proj.weight.double() * layer.input_layernorm.weight.double()
    assert torch.equal(made["model.layers.0.self_attn.q_proj.weight"].double(), exact)


def test_only_what_waits_for_its_norm_is_held() -> None:
    model = build("llama")
    spec = ModelSpec.of(type(model), model.config, fold_norms_too=True)
    passed: list[str] = []
    sink = Folder(spec.norm_folds, set(spec.source.shapes), lambda name, _: passed.append(name))
    values = model.state_dict()
    for name in ("lm_head.weight", "model.layers.0.input_layernorm.weight", "model.layers.0.self_attn.q_proj.weight"):
        sink(name, values[name])
    assert passed == ["model.layers.0.self_attn.q_proj.weight"]
    sink("model.norm.weight", values["model.norm.weight"])
    assert passed[1:] == ["lm_head.weight"]
    with pytest.raises(DomainError, match=r"'model\.layers\.1\.input_layernorm\.weight'"):
        sink("model.layers.1.input_layernorm.weight", torch.full((64,), torch.nan))


@pytest.mark.sampled(20)
@pytest.mark.parametrize("name", ["llama", "opt", "gpt2", "stablelm", "cohere"])
@pytest.mark.parametrize("settings", [{}, {"protocol": "quad"}, {"weights_at_rest": "seeds"}, {"adder": "keys"}])
def test_private_logits_and_weights_of_the_model(name: str, settings: dict[str, object]) -> None:
    model = build(name)
    with torch.no_grad(), patch(model, PrivateConfig.from_dict(settings)) as private:
        assert worst(private(IDS).logits, model(IDS).logits) <= LOGIT_ERROR
        assert private.num_parameters() == model.num_parameters()
        becomes = {row.becomes for row in private.patch_plan.rows}
        assert any(each.endswith(" norm, its weight in the layers that read it") for each in becomes)


def _norms(model: tr.PreTrainedModel, monkeypatch: pytest.MonkeyPatch, fold: bool, calibrate: bool) -> tuple[int, int]:
    """Bytes and rounds of all norms of a step of one token."""
    monkeypatch.setattr(api, "folds_norms", lambda config: fold)
    with torch.no_grad(), patch(model, PrivateConfig(calibrate=calibrate)) as private:
        private.cost(reset=True)
        private(IDS[:1, :1])
        ledgers = private.cost().ledgers
    norms = {name for name, module in model.named_modules() if "norm" in name and not any(module.children())}
    sent = sum(count for each in ledgers for (scope, _, _), count in each.sent.items() if scope in norms)
    rounds = [sum(n for (scope, _), n in each.rounds.items() if scope in norms) for each in ledgers]
    return sent, max(rounds)


@pytest.mark.parametrize(("calibrate", "saved", "rounds"), [(True, 10_272, 0), (False, 9_600, 10)])
def test_a_product_an_element_is_not_sent(
    monkeypatch: pytest.MonkeyPatch, calibrate: bool, saved: int, rounds: int
) -> None:  # fmt: skip
    """5 norms of 64: 30 bytes an element (a product, less two bits that are dropped more) and 2 rounds a norm.

    Calibrated, 32.1 bytes in rounds that stay.
    """
    model = build("llama")
    bytes_before, rounds_before = _norms(model, monkeypatch, False, calibrate)
    bytes_after, rounds_after = _norms(model, monkeypatch, True, calibrate)
    assert bytes_before - bytes_after == saved
    assert rounds_before - rounds_after == rounds


def test_a_comparison_with_plaintext_does_not_mistake_a_folded_norm() -> None:
    model = build("opt")
    rows = {row.name: row for row in compare(model, IDS, PrivateConfig()).modules}
    norm = rows["model.decoder.layers.1.final_layer_norm"]
    assert norm.largest > 1.0
    assert all(row.error_max <= LOGIT_ERROR for row in rows.values())


def test_a_share_file_says_what_was_folded_and_old_ones_still_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("opt")
    model.save_pretrained(tmp_path / "model")
    config = PrivateConfig()
    share_checkpoint(str(tmp_path / "model"), tmp_path / "new", config)
    monkeypatch.setattr(api, "folds_norms", lambda config: False)
    share_checkpoint(str(tmp_path / "model"), tmp_path / "old", config)
    new, old = (ShareFile.open(share_path(tmp_path / each, 1), config, 1) for each in ("new", "old"))
    assert new.description.folded == readers(model)
    assert new.description.model == old.description.model
    norms = {f"{norm}.{own}" for norm in new.description.folded for own in ("weight", "bias")}
    assert set(old.shapes) - set(new.shapes) == norms
    facts = json.loads(json.dumps(old.description.to_dict()))
    del facts["folded"]
    assert Description.from_dict(facts) == old.description
    for file in (new, old):
        assert validate_model_description(file.description, 16) == file.shapes


@pytest.mark.parametrize(
    "folded",
    [
        {"model.layers.0.mlp": ("model.layers.0.mlp.up_proj",)},
        {"model.layers.7.input_layernorm": ("lm_head",)},
        {"model.norm": ()},
        {"model.norm": ("model.embed_tokens",)},
        {"model.norm": ("model.layers.0.mlp.down_proj",)},
        {"model.norm": ("lm_head", "lm_head")},
    ],
)
def test_a_description_with_other_norms_or_layers_is_refused(folded: dict[str, tuple[str, ...]]) -> None:
    model = tiny.build("llama")
    with pytest.raises(PatchMismatch, match="folded norms"):
        validate_model_description(describe(type(model), model.config, folded=folded), 16)


@pytest.mark.parametrize(
    "change",
    [
        {"weights": "public"},
        {"calibrate": False},
        {"sparsity": CometConfig()},
        {"protocol": "cascade", "plan": ShardingPlan(2, 2, 1, accept_weak_plan=True)},
    ],
)
def test_weights_without_bits_of_their_own_predictors_and_nodes_keep_their_norms(change: dict[str, object]) -> None:
    assert folds_norms(PrivateConfig())
    assert not folds_norms(PrivateConfig(**change))  # type: ignore[arg-type]


def test_layers_of_gpt2_and_of_pytorch_take_up_the_same() -> None:
    """A weight [inputs, outputs] and one [outputs, inputs], with a bias and without."""
    torch.manual_seed(0)
    norm, turned = nn.LayerNorm(4), tr.pytorch_utils.Conv1D(3, 4)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    nn.init.normal_(turned.bias)
    for bias, make in itertools.product((True, False), (_linear, lambda *_: turned)):
        layer: nn.Module = make(turned, bias)  # type: ignore[no-untyped-call]
        tree = nn.ModuleDict({"norm": norm, "layer": layer}).double()
        x = torch.randn(5, 4, dtype=torch.float64)
        want, values = layer(norm(x)), {name: value.clone() for name, value in tree.state_dict().items()}
        folds = fold_norms(tree, {"norm": ("layer",)})
        made: dict[str, torch.Tensor] = {}
        sink = Folder(folds, set(values), made.__setitem__)
        for name, value in values.items():
            sink(name, value)
        tree.load_state_dict(made, strict=True, assign=True)
        assert worst(tree["layer"](tree["norm"](x)), want) <= ROUNDING


def _linear(turned: nn.Module, bias: bool) -> nn.Module:
    layer = nn.Linear(4, 3, bias=bias)
    layer.weight.data = turned.weight.detach().t().clone()  # type: ignore[operator, union-attr]
    return layer
