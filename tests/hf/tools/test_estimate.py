"""The estimate is the ledger of a real run: every byte on every link of every module, every round, every product."""

from __future__ import annotations

import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from private_llm_hf import PrivateConfig, patch
from private_llm_hf.checkpoint.calibration_runs import loaded_ranges
from private_llm_hf.client.costs import Costs
from private_llm_hf.tools.estimate import LayerCost, by_layer, estimate, model_class_of, named_shape
from private_llm_hf.tools.estimate_products import ProductExchange, ProductSpeed
from private_llm_hf.wire.assisted import HEADER
from transformers import PreTrainedModel

from private_llm.assisted.masks import fresh_label
from private_llm.errors import ConfigError, DomainError
from tests.cli.test_cli import Run, checkpoint, rows
from tests.hf import tiny
from tests.hf.massive import massive

__all__ = ["checkpoint"]  # a fixture

FOLDED = 4 * 2 * 64
"""Weights and biases of the small OPT's norms that are part of the layers that read them."""

SHAPES = ("opt-125m", "opt-6.7b", "llama-7b", "llama-8b", "llama-13b", "qwen3-8b", "bert-base", "gpt2")


def entries(costs: Costs) -> list[dict[str, dict[object, int]]]:
    return [
        {"sent": dict(ledger.sent), "rounds": dict(ledger.rounds), "macs": dict(ledger.macs)}
        for ledger in costs.ledgers
    ]


def real(model: PreTrainedModel, config: PrivateConfig, sequence: int, new: int) -> Costs:
    ids = torch.randint(3, 100, (2, sequence), generator=torch.Generator().manual_seed(5))
    private = patch(model, config)
    try:
        mask = torch.ones_like(ids)
        with torch.no_grad():
            if new:
                private.generation_config.eos_token_id = None
                private.generate(input_ids=ids, attention_mask=mask, max_new_tokens=new, do_sample=False)
            else:
                private(input_ids=ids, attention_mask=mask)
        return private.cost()
    finally:
        private.close()


@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    ("name", "new", "settings"),
    [
        ("opt", 3, {}),
        ("llama", 3, {}),
        ("bert", 0, {}),
        ("llama", 2, {"reveal": "token"}),
        ("gpt2", 0, {"adder": "ripple"}),
        ("llama", 2, {"adder": "keys"}),
        ("opt", 2, {"bandwidth_mbit": 1000.0, "latency_ms": 1.0}),
        ("llama", 3, {"weights": "public"}),
        ("opt", 2, {"weights": "public", "protocol": "quad"}),
        ("t5", 2, {"weights": "public", "protocol": "dealer"}),
        ("bloom", 0, {"weights": "public"}),
    ],
)
def test_estimate_equals_the_ledger(name: str, new: int, settings: dict[str, object]) -> None:
    config = PrivateConfig.from_dict({"timeout_s": 60, "calibrate": False, **settings})
    model = tiny.build(name)
    found = estimate(type(model), model.config, config, sequence=7, new_tokens=new, batch=2)
    run = real(model, config, 7, new)
    assert entries(found.costs) == entries(run)
    assert found.costs.bytes_total == run.bytes_total > 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_estimates_with_ranges_equal_the_ledger_of_a_calibrated_run(name: str) -> None:
    model, config = massive(name, 25_000.0), PrivateConfig(timeout_s=60)
    ranges = loaded_ranges(model, config)
    assert ranges.modules
    found = estimate(type(model), model.config, config, sequence=7, new_tokens=2, batch=2, ranges=ranges)
    assert entries(found.costs) == entries(real(model, config, 7, 2))


def test_public_weights_save_bytes_and_memory() -> None:
    model = tiny.build("opt")
    kind, config = type(model), model.config
    secret, public = (estimate(kind, config, PrivateConfig(weights=how), sequence=3) for how in ("secret", "public"))  # type: ignore[arg-type]
    assert public.costs.bytes_total < secret.costs.bytes_total
    count = sum(p.numel() for p in model.parameters())
    assert secret.weight_bytes == 16 * (count - FOLDED)  # two ring elements a weight
    assert public.weight_bytes == 12 * count  # float32, and one ring element
    assert public.seeds_bytes == ()


def test_layers_add_up_and_equal_layers_cost_the_same() -> None:
    model = tiny.build("opt")
    found = estimate(type(model), model.config, PrivateConfig(), sequence=6)
    layers = {layer.name: layer for layer in found.layers()}
    assert sum(layer.bytes_total for layer in layers.values()) == found.costs.bytes_total
    first, second = layers["model.decoder.layers.0"], layers["model.decoder.layers.1"]
    assert (first.sent, first.rounds, first.macs) == (second.sent, second.rounds, second.macs)
    assert [layer.name for layer in by_layer(found.costs)] == list(layers)


def test_memory_is_that_of_two_ring_elements_a_weight_and_of_the_cache() -> None:
    model = tiny.build("opt")
    found = estimate(type(model), model.config, PrivateConfig(), sequence=5, new_tokens=3)
    weights, matrices = (sum(p.numel() for p in model.parameters() if p.dim() > least) for least in (0, 1))
    weights -= FOLDED
    assert found.weight_bytes == 16 * weights
    small = 16 * (weights - matrices)
    assert found.seeds_bytes == (small, small + 8 * matrices, small + 8 * matrices)
    layers, width = model.config.num_hidden_layers, model.config.hidden_size
    assert found.cache_bytes == 2 * layers * width * (5 + 3 - 1) * 16  # keys and values, two elements of 8 bytes


@pytest.mark.parametrize("name", SHAPES)
def test_built_in_shapes_are_the_published_ones(name: str) -> None:
    parameters = {"opt-125m": 125e6, "opt-6.7b": 6.66e9, "llama-7b": 6.74e9, "llama-8b": 8.03e9, "llama-13b": 13.0e9,
                  "qwen3-8b": 8.19e9, "bert-base": 109e6, "gpt2": 124e6}  # fmt: skip
    found = named_shape(name)
    assert found is not None
    with torch.device("meta"):
        model = found[0](found[1])
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(parameters[name], rel=0.01)


@pytest.mark.full
def test_a_large_model_is_counted_without_weights() -> None:
    found = named_shape("llama-7b")
    assert found is not None
    counted = estimate(*found, PrivateConfig(), sequence=4)
    layers = [layer for layer in counted.layers() if ".layers." in layer.name]
    assert len(layers) == 32
    assert len({layer.bytes_total for layer in layers}) == 1
    # A matrix product sends at least three ring elements an output; a layer has these outputs for each of 4 tokens.
    assert layers[0].bytes_total > 4 * (4 * 4096 + 3 * 11008) * 24


def test_mistakes() -> None:
    model = tiny.build("bert")
    with pytest.raises(ConfigError, match="does not generate"):
        estimate(type(model), model.config, PrivateConfig(), sequence=3, new_tokens=1)
    with pytest.raises(ConfigError, match="got seq 0"):
        estimate(type(model), model.config, PrivateConfig(), sequence=0)
    with pytest.raises(DomainError, match="64"):
        estimate(type(model), model.config, PrivateConfig(), sequence=65)


def test_the_class_of_a_configuration() -> None:
    model = tiny.build("opt")
    assert model_class_of(model.config).__name__ == "OPTForCausalLM"


def test_help_lists_the_built_in_shapes(run: Run) -> None:
    from private_llm_cli.options import SHAPES
    from private_llm_hf.vision.networks import BUILDERS

    listed = json.loads(resources.files("private_llm_hf").joinpath("models", "shapes.json").read_text())
    assert sorted(SHAPES) == sorted([*listed, *BUILDERS])
    told = re.sub(r"\s+", "", run("estimate", "--help"))
    assert all(name in told for name in SHAPES)


def test_estimate_of_a_folder(run: Run, checkpoint: Path) -> None:
    (found,) = rows(run, "estimate", str(checkpoint), "--seq", "5", "--new", "2", "--gmacs", "1", "--latency", "10")
    layers = found["layers"]
    assert isinstance(layers, list)
    assert sum(layer["bytes"] for layer in layers) == found["bytes_total"]
    assert sum(layer["rounds"] for layer in layers) == found["rounds"]
    assert isinstance(found["seconds"], float)
    assert isinstance(found["rounds"], int)
    assert found["seconds"] > found["rounds"] * 0.01
    (one,) = rows(run, "estimate", str(checkpoint), "--seq", "5", "--new", "1", "--gmacs", "1", "--latency", "10")
    first, rate = found["seconds_first_token"], found["tokens_per_second"]
    assert isinstance(first, float)
    assert isinstance(rate, float)
    assert first == pytest.approx(one["seconds"])
    assert first + 1 / rate == pytest.approx(found["seconds"])
    assert one["tokens_per_second"] is None
    told = run("estimate", str(checkpoint), "--seq", "5", "--new", "2", "--gmacs", "1")
    assert "time to first token" in told
    assert "tokens per second after it" in told


def test_seconds_are_of_bits_rounds_and_products() -> None:
    """Of the busiest link and party: 8 Mbit at 100 Mbit/s, 3 rounds of 2 ms, and 10^9 products at 2 * 10^9 a second."""
    cost = LayerCost("layer", {(0, 1): 1_000_000, (1, 0): 400_000}, 3, {0: 10**9, 1: 10**8})
    assert cost.seconds(100, 2, 2) == pytest.approx(0.08 + 0.006 + 0.5)


@pytest.mark.full
def test_estimate_shows_what_keys_and_a_stated_network_change(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    """Far away keys are chosen, and take fewer rounds; nearby, on a thin line, circuits of fewest bytes."""
    ranges = tmp_path / "ranges.json"
    run("calibrate", str(checkpoint), "--out", str(ranges))

    def of(latency: str, bandwidth: str, *more: str) -> dict[str, Any]:
        how = ("--seq", "5", "--new", "2", "--gmacs", "1", "--latency", latency, "--bandwidth", bandwidth)
        return rows(run, "estimate", str(checkpoint), *how, *more)[0]

    default, unknown, keys, auto = (
        of("20", "100", *more)
        for more in (
            ("--ranges", str(ranges)), ("--adder", "keys"), ("--adder", "keys", "--ranges", str(ranges)),
            ("--adder", "auto", "--ranges", str(ranges)),
        )
    )  # fmt: skip
    assert [each["adder"] for each in (default, unknown, keys, auto)] == ["prefix", "keys", "keys", "auto"]
    assert keys["rounds"] < unknown["rounds"] < default["rounds"]
    assert auto["rounds"] <= keys["rounds"] + 10
    assert max(keys["seconds"], auto["seconds"]) < default["seconds"]
    thin, ripples = of("0", "0.01"), of("0", "0.01", "--adder", "auto")
    assert ripples["bytes_total"] < thin["bytes_total"]
    assert ripples["rounds"] > thin["rounds"]
    assert ", adder keys" in run("estimate", str(checkpoint), "--seq", "5", "--gmacs", "1", "--adder", "keys")


@pytest.mark.parametrize(("name", "new"), [("llama", 3), ("gpt2", 2), ("t5", 2), ("bert", 0), ("vit", 0)])
def test_products_are_counted_as_a_run_counts_them(name: str, new: int) -> None:
    """Every byte and exchange of every layer under 'assisted', of the prompt and of each token."""
    config = PrivateConfig(protocol="assisted", timeout_s=60)
    model = tiny.build(name)
    found = estimate(type(model), model.config, config, sequence=7, new_tokens=new, batch=2)
    if name == "vit":
        with patch(model, config) as private, torch.no_grad():
            side = model.config.image_size
            private(pixel_values=torch.zeros(2, model.config.num_channels, side, side))
            run = private.cost()
    else:
        run = real(model, config, 7, new)
    assert entries(found.costs) == entries(run)
    assert len(found.exchanges) == run.rounds > 0
    if found.prompt is not None:
        first = real(model, config, 7, 1)
        assert entries(found.prompt.costs) == entries(first)


def test_one_server_with_corrections_gets_the_masked_rows_alone(tmp_path: Path) -> None:
    model = tiny.build("llama")
    two, one = (
        estimate(type(model), model.config, PrivateConfig(protocol="assisted", corrections=folder), sequence=7)
        for folder in (None, str(tmp_path))
    )
    sent = {link: count for link, count in two.costs.cost.sent.items() if 0 not in link}
    assert one.costs.cost.sent == {(255, 0): sent[255, 1], (0, 255): sent[1, 255]}
    assert one.costs.rounds == two.costs.rounds


def test_products_take_the_time_of_their_parts() -> None:
    speed = ProductSpeed(one_row=2.0, many_rows=8.0, elements=1.0, beside=0.5)
    one, many = (ProductExchange("head", rows, 1000, 2000, own=0.25) for rows in (1, 100))
    rest = 0.5 + 0.25 + 2 * 0.001
    assert one.seconds(8.0, 1.0, speed) == pytest.approx(rest + 5 * 5000 / 1e6 + 1e-3 + 5e-6)
    assert many.seconds(8.0, 1.0, speed) == pytest.approx(rest + 5 * 500_000 / 1e6 + 25e-3 + 5e-4)


def test_large_models_of_products_take_no_memory_of_their_weights() -> None:
    shape = named_shape("llama-7b")
    assert shape is not None
    found = estimate(*shape, PrivateConfig(protocol="assisted"), sequence=4, new_tokens=2)
    config = shape[1]
    inputs = config.num_hidden_layers * (3 * config.hidden_size + config.intermediate_size) + config.hidden_size
    outputs = config.num_hidden_layers * (5 * config.hidden_size + 2 * config.intermediate_size) + config.vocab_size
    exchanges = 4 * config.num_hidden_layers + 1
    assert found.prompt is not None
    later = found.costs.bytes_total - found.prompt.costs.bytes_total
    assert later == 5 * (inputs + 2 * outputs) + exchanges * (2 * HEADER.size + len(fresh_label()))
    assert found.costs.rounds == 2 * exchanges
    assert found.weight_bytes == 2 * (6_738_415_616 - config.vocab_size * config.hidden_size - 65 * config.hidden_size)


@pytest.mark.full
def test_the_command_prices_products(run: Run) -> None:
    arguments = ("estimate", "opt-125m", "--protocol", "assisted", "--seq", "8", "--new", "3", "--gmacs", "1500")
    found = json.loads(run(*arguments, "--json"))
    assert found["one_row"] == found["many_rows"] == found["gmacs"] == 1500
    assert found["seconds"] > found["seconds_first_token"] > 0.098  # 49 rounds, two milliseconds each
    assert found["rounds"] == 3 * 49
    assert sum(layer["bytes"] for layer in found["layers"]) == found["bytes_total"]
    assert "corrections" not in found
    one = json.loads(run(*arguments, "--corrections", "--json"))
    assert one["corrections"]["rows"] == 8 + 2
    saved = found["bytes_total"] - one["bytes_total"]  # of labels and answers; a head answers three rows alone
    assert 0 < saved < one["corrections"]["bytes"] + 3 * 49 * 100
    assert one["corrections"]["seconds"] > 0
    told = run(*arguments, "--corrections")
    assert "corrections on disk, 10 rows of each weight" in told
    assert "rounds, each an exchange (two latencies) with the servers" in told
    assert "memory of the client" in told
