"""Who reads results: found by calibration, fewer bytes, the same answers, and no harm from a wrong hint."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from private_llm_hf import patch
from private_llm_hf.checkpoint.calibration_runs import loaded_ranges
from transformers import PreTrainedModel

from private_llm.config import PrivateConfig
from private_llm.net.ledger import Cost
from private_llm.ranges import Ranges
from private_llm.tensor.fixed import READ_BITS
from tests.hf import tiny
from tests.hf.compare import LOGIT_ERROR
from tests.hf.massive import massive

IDS = torch.tensor([[7, 5, 9, 11, 3, 8], [5, 6, 7, 7, 9, 2]])
TRIO = PrivateConfig()
READ = {
    "llama": ({"self_attn", "mlp", "mlp.gate_proj", "mlp.up_proj"}, {"mlp.down_proj", "self_attn.q_proj"}),
    "opt": ({"self_attn", "fc1"}, {"fc2", "self_attn.v_proj", "self_attn.out_proj"}),
    "gpt2": ({"attn", "mlp.c_fc"}, {"mlp.c_proj", "attn.c_attn"}),
    "gpt_neox": ({"attention", "mlp.dense_h_to_4h"}, {"mlp.dense_4h_to_h", "attention.query_key_value"}),
    "gemma2": ({"mlp", "mlp.gate_proj", "mlp.up_proj"}, {"mlp.down_proj", "self_attn.o_proj"}),
}  # fmt: skip
"""Of each family modules of a layer that products alone read, and some that others read."""


def _ranges(model: PreTrainedModel, config: PrivateConfig = TRIO) -> Ranges:
    return loaded_ranges(model, config)


def _without(ranges: Ranges) -> Ranges:
    known = {name: {q: e for q, e in found.items() if q != "read"} for name, found in ranges.modules.items()}
    return Ranges({name: found for name, found in known.items() if found})


def _run(model: PreTrainedModel, ranges: Ranges, config: PrivateConfig = TRIO) -> tuple[torch.Tensor, Cost]:
    with patch(model, config, ranges=ranges) as private:
        private.cost(reset=True)
        logits = private(input_ids=IDS).logits
        return logits, private.cost()


def _error(model: PreTrainedModel, logits: torch.Tensor) -> float:
    with torch.no_grad():
        return float((logits - model(input_ids=IDS).logits).abs().max())


@pytest.mark.parametrize("family", READ)
def test_products_alone_read(family: str) -> None:
    known = _ranges(tiny.build(family)).modules
    layer = next(name for name in known if ".0." in name).partition(".0.")[0] + ".0."
    read, other = READ[family]
    assert {each for each in read if "read" not in known[layer + each]} == set()
    assert {each for each in other if "read" in known.get(layer + each, {})} == set()
    if "mlp.gate_proj" in read:  # both factors of the product that reads them have fewer bits
        assert known[layer + "mlp.gate_proj"]["read"] == known[layer + "mlp"]["output"] + READ_BITS


@pytest.mark.sampled(3)
@pytest.mark.parametrize("protocol", ["trio", "dealer"])
@pytest.mark.parametrize("family", ["llama", "opt", "gpt2"])
def test_fewer_bytes_and_the_same_answers(family: str, protocol: str) -> None:
    model, config = tiny.build(family), PrivateConfig(protocol=protocol)  # type: ignore[arg-type]
    ranges = _ranges(model)
    logits, cost = _run(model, ranges, config)
    before, usual = _run(model, _without(ranges), config)
    assert _error(model, logits) <= LOGIT_ERROR
    assert _error(model, before) <= LOGIT_ERROR
    assert cost.bytes_total < usual.bytes_total
    assert cost.rounds == usual.rounds


def test_massive_values_keep_their_room() -> None:
    model = massive("llama", 25_000.0)
    logits, _ = _run(model, _ranges(model))
    with torch.no_grad():
        truth = model(input_ids=IDS).logits
    assert float((logits - truth).abs().max()) / max(1.0, float(truth.abs().max()) / 30) <= 5e-3


def test_a_hint_that_is_too_small_costs_rounds_and_no_answer() -> None:
    model = tiny.build("llama")
    ranges = _ranges(model)
    known = {name: {**found, **({"read": 6} if "read" in found else {})} for name, found in ranges.modules.items()}
    logits, cost = _run(model, Ranges(known))
    assert _error(model, logits) <= LOGIT_ERROR
    assert cost.rounds > _run(model, ranges)[1].rounds


@pytest.mark.sampled(3)
@pytest.mark.parametrize("config", [
    PrivateConfig(protocol="quad"), PrivateConfig(truncation="exact"), PrivateConfig(adder="keys"),
    PrivateConfig(approximations="puma", plugins=("rivals",)),
])  # fmt: skip
def test_where_nothing_is_narrow_the_hint_changes_nothing(config: PrivateConfig) -> None:
    model = tiny.build("llama")
    ranges = _ranges(model)
    (logits, cost), (before, usual) = _run(model, ranges, config), _run(model, _without(ranges), config)
    assert (cost.bytes_total, cost.rounds) == (usual.bytes_total, usual.rounds)
    assert float((logits - before).abs().max()) <= 2 * LOGIT_ERROR


@pytest.mark.full
@pytest.mark.parametrize("weights", ["secret", "public"])
def test_repeated_steps_give_the_same(weights: str) -> None:
    """Programs of steps with narrow values, against Python: bit for bit, since masks are the same."""
    model = tiny.build("llama")
    config = PrivateConfig(weights=weights)  # type: ignore[arg-type]
    ranges = _ranges(model, config)
    answers = []
    for each in (config, replace(config, replay=False)):
        with patch(model, each, ranges=ranges) as private:
            made = private.generate(input_ids=IDS[:1], max_new_tokens=24, min_new_tokens=24, do_sample=False)
            answers.append(made)
    truth = model.generate(input_ids=IDS[:1], max_new_tokens=24, min_new_tokens=24, do_sample=False)
    assert torch.equal(answers[0], answers[1])
    assert torch.equal(answers[0], truth)


@pytest.mark.full
def test_a_prompt_of_one_token_goes_through_repeated_layers() -> None:
    """Whatever ranges its layers have, what attention gives has the bits of later steps."""
    model = tiny.build("llama")
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[1].self_attn.v_proj.weight.mul_(30)
    with patch(model, TRIO) as private:
        for prompt in (IDS[:1], IDS[:1, 3:4], IDS[1:, :1], IDS[:1, 3:4]):
            settings = {"max_new_tokens": 10, "min_new_tokens": 10, "do_sample": False}
            assert torch.equal(private.generate(input_ids=prompt, **settings), model.generate(prompt, **settings))
