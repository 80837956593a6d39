"""The patch plan: all modules of every supported architecture have a rule; the table says what stays public."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import transformers as tr
from private_llm_hf import PrivateConfig, patch
from private_llm_hf.checkpoint.weights import WeightList, skeleton
from private_llm_hf.client.costs import Costs
from private_llm_hf.patch_plan import make_patch_plan, unknown_modules

from private_llm.errors import PatchMismatch
from private_llm.net.transport import CLIENT
from tests.hf import tiny
from tests.hf.compare import LOGIT_ERROR, PADDED, worst
from tests.hf.conftest import PLAIN, TRIO


@pytest.mark.parametrize("name", list(tiny.ALL))
def test_every_parameter_is_in_the_plan_once(name: str) -> None:
    model = tiny.build(name)
    bare = skeleton(type(model), model.config)
    plan = make_patch_plan(bare, TRIO)
    assert plan.total == sum(parameter.numel() for parameter in model.parameters())
    assert plan.total == sum(math.prod(shape) for shape in WeightList.of(bare).shapes.values())
    listed = {row.name for row in plan.rows}
    holders = {name for name, module in model.named_modules() if list(module.parameters(recurse=False))}
    assert holders <= listed
    assert sum(row.parameters for row in plan.rows) == plan.total  # tied weights once
    assert 0 < plan.parameters(exclude_embeddings=True) < plan.total or name == "vit"


def test_the_table_merges_layers_and_names_what_is_public() -> None:
    text = str(make_patch_plan(tiny.build("llama"), TRIO))
    assert "model.layers.0-1.self_attn.q_proj" in text
    assert "LlamaRMSNorm" in text
    assert "sine and cosine tables" in text
    assert "secret-shared" in text
    assert "NOT protected" in str(make_patch_plan(tiny.build("llama"), PLAIN))
    assert "public" in str(make_patch_plan(tiny.build("llama"), PrivateConfig(weights="public"))).splitlines()[-1]


def test_explain_prints_and_returns_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    with patch(tiny.build("opt"), PLAIN) as model:
        plan = model.explain()
        assert model.num_parameters() == plan.total
    assert "OPTLearnedPositionalEmbedding" in capsys.readouterr().out


def test_a_module_with_parameters_of_its_own_is_unknown() -> None:
    model = tiny.build("opt")
    assert unknown_modules(model) == []
    model.model.decoder.layers[1].gate = torch.nn.Parameter(torch.zeros(1))
    assert unknown_modules(model) == ["model.decoder.layers.1 (OPTDecoderLayer)"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: setattr(model, "gate", torch.nn.Parameter(torch.zeros(1))), "weight 'gate' is not in"),
        (lambda model: model.register_buffer("mean", torch.zeros(2)), "weight 'mean' is not in"),
        (lambda model: model.lm_head.register_forward_hook(lambda *_: None), "'lm_head' has a forward hook"),
        (
            lambda model: setattr(model.model.decoder.layers[0].self_attn, "is_causal", False),
            "self_attn.is_causal' is False here, and True",
        ),
        (
            lambda model: setattr(model.model.decoder.layers[0], "activation_fn", torch.nn.Tanh()),
            r"layers.0.activation_fn .*Tanh, want .*ReLU",
        ),
    ],
)
def test_what_the_configuration_does_not_say_is_refused(
    change: Callable[[torch.nn.Module], None], message: str
) -> None:  # fmt: skip
    model = tiny.build("opt")
    change(model)
    with pytest.raises(PatchMismatch, match=message):
        patch(model, PLAIN)


def test_buffers_that_hold_weights_are_shared() -> None:
    """BART's logit bias is a buffer of the checkpoint: it reaches the parties as a share."""
    config = tr.BartConfig(
        vocab_size=128, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=64,
    )  # fmt: skip
    model = tr.BartForConditionalGeneration(config).eval()
    model.final_logits_bias += torch.linspace(-3, 3, 128)
    assert "final_logits_bias" in WeightList.of(skeleton(type(model), config)).shapes
    with patch(model, TRIO) as private, torch.no_grad():
        inputs = {"input_ids": PADDED, "decoder_input_ids": PADDED}
        assert worst(private(**inputs).logits, model(**inputs).logits) < LOGIT_ERROR


def test_costs_by_link_module_and_operation() -> None:
    with patch(tiny.build("opt"), TRIO) as model:
        assert model.cost().bytes_total == 0, "sharing the weights is not part of a call's cost"
        model(PADDED)
        costs = model.cost(reset=True)
        assert model.cost().bytes_total == 0
    assert isinstance(costs, Costs)
    links = costs.cost.sent
    assert sum(links.values()) == costs.bytes_total == costs.to_dict()["bytes_total"]
    assert {to for _, to in links} <= {0, 1, 2, CLIENT}
    assert links[(1, 2)] == links[(2, 1)], "the evaluators are symmetric"
    assert sum(sent for sent, _ in costs.by_module().values()) == costs.bytes_total
    assert sum(sent for sent, _ in costs.by_op().values()) == costs.bytes_total
    assert costs.by_module()["model.decoder.layers.0.fc1"][0] > 0
    assert "control" not in costs.by_op()
    assert 0 < costs.rounds < 1000


def test_seconds_and_gigabits_by_module_and_kind() -> None:
    with patch(tiny.build("opt"), TRIO) as model:
        model(PADDED)
        costs = model.cost(reset=True)
        assert not any(part.seconds for part in model.cost().modules().values())
        model(PADDED)
        again = model.cost()
    modules, kinds = costs.modules(), costs.layer_kinds()
    assert {name: (part.bytes_total, part.rounds) for name, part in modules.items() if part.bytes_total} == {
        name: counts for name, counts in costs.by_module().items() if counts[0]
    }
    assert sum(part.bytes_total for part in kinds.values()) == costs.bytes_total
    assert modules == again.modules(), "times take no part in comparisons"
    linear = kinds["Linear"]
    assert linear.seconds > 0
    assert linear.gbit_per_s == pytest.approx(linear.bytes_sent * 8e-9 / linear.seconds)
    assert linear.bytes_total / 4 <= linear.bytes_sent < linear.bytes_total  # party 0, 1 or 2, or the client
    assert {"LayerNorm", "Embedding", "OPTAttention"} <= {*kinds}
    assert not any("proj" in name for name in kinds), "joined products are of their layers' kind"
    assert "by kind, slowest party" in str(costs)
