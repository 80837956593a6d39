"""Descriptions of plain networks: what they say, what they refuse, and that they run as the module did."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from private_llm_hf.vision.description import check_description
from private_llm_hf.vision.network import Network, NetworkConfig
from private_llm_hf.vision.networks import BUILDERS
from torch import nn
from transformers import AutoModelForImageClassification

from private_llm.errors import PatchMismatch
from tests.hf import images


@pytest.mark.parametrize("name", images.NETWORKS)
def test_a_network_computes_what_the_module_did(name: str, tmp_path: Path) -> None:
    model, pixels = images.build(name)
    network = Network.of(model)
    with torch.no_grad():
        assert torch.equal(network(pixels), model(pixels))
    assert {k: v.data_ptr() for k, v in network.named_parameters()} == {
        k: v.data_ptr() for k, v in model.named_parameters()
    }, "the same memory under the same names"
    network.save_pretrained(tmp_path)
    again = AutoModelForImageClassification.from_pretrained(tmp_path)
    assert isinstance(again, Network)
    with torch.no_grad():
        assert torch.equal(again(pixels), model(pixels))
    assert json.loads((tmp_path / "config.json").read_text())["network"] == network.config.network


@pytest.mark.parametrize(("name", "weights", "relus"), [
    ("lenet5", 61_706, 6_508), ("alexnet", 9_368_746, 126_976), ("vgg16-cifar10", 14_914_378, 276_992),
    ("vgg16-imagenet", 138_357_544, 13_555_712), ("vgg16-imagenet-average", 138_357_544, 13_555_712),
    ("resnet50-average", 25_557_032, 9_608_704),
])  # fmt: skip
def test_the_networks_of_the_literature(name: str, weights: int, relus: int) -> None:
    """Sizes that their papers and PIGEON's engine state."""
    build, shape = BUILDERS[name]
    with torch.device("meta"):
        model = build()
        seen = []
        for module in model.modules():
            if isinstance(module, nn.ReLU):
                module.register_forward_hook(lambda module, inputs, output: seen.append(output.numel()))
        model(torch.empty(1, *shape))
    assert sum(parameter.numel() for parameter in model.parameters()) == weights
    assert sum(seen) == relus


@pytest.mark.parametrize(("name", "pools"), [("vgg16-imagenet-average", 5), ("resnet50-average", 1)])
def test_average_pools_stand_in_for_max_pools(name: str, pools: int) -> None:
    with torch.device("meta"):
        kinds = [type(module) for module in BUILDERS[name][0]().modules()]
    assert kinds.count(nn.AvgPool2d) == pools
    assert nn.MaxPool2d not in kinds


def test_training_mode_is_left_as_it_was() -> None:
    model = images.Mixed().train()
    model.norm.eval()
    Network.of(model)
    assert model.training
    assert not model.norm.training
    assert model.stem.training


# -- in-place operations ----------------------------------------------------------------------------------------------
class _Body(nn.Module):
    def __init__(self, run: Callable[[torch.Tensor, nn.Module], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.run = nn.Linear(4, 4), run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self.layer(x), self.layer)


@pytest.mark.parametrize("run", [
    lambda y, layer: F.relu(y, inplace=True) + y,
    lambda y, layer: layer(F.relu(F.dropout(y, training=False), inplace=True)) + y,
    lambda y, layer: (F.relu(y) + y) * 2.0,
    lambda y, layer: F.relu(layer(y), inplace=True) + y,
])  # fmt: skip
def test_in_place_activations_change_what_later_steps_read(run: Any) -> None:
    torch.manual_seed(0)
    model, x = _Body(run), torch.randn(3, 4)
    with torch.no_grad():
        assert torch.equal(Network.of(model)(x), model(x))


def test_an_in_place_write_through_a_view_is_refused() -> None:
    model = _Body(lambda y, layer: F.relu(y.reshape(2, -1), inplace=True).reshape(-1, 4) + y)
    with pytest.raises(PatchMismatch, match="is read after an in-place operation on a view of it"):
        Network.of(model)


# -- what cannot be described ------------------------------------------------------------------------------------------
def _free_weight() -> nn.Module:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.gain

    return Scale()


def _hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_forward_hook(lambda module, inputs, output: output * 2)
    return model


def _doubled(layer: int | None) -> Callable[[], nn.Module]:
    """A network of which one layer, or the whole, has a forward of its own."""

    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 2))
        part = model if layer is None else model[layer]
        part.forward = lambda x: 2 * x  # type: ignore[method-assign]
        return model

    return make


def _deciding() -> nn.Module:
    return _Body(lambda y, layer: layer(y) if y.sum() > 0 else y)


def _two_inputs() -> nn.Module:
    class Two(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x + y

    return Two()


@pytest.mark.parametrize(("make", "said"), [
    (_free_weight, r"gain \(weight used outside a module\)"),
    (_hooked, r"0 \(Linear with hooks\)"),
    (_doubled(0), r"0 \(Linear with a forward of this one object\)"),
    (_doubled(None), "Sequential with a forward of this one object"),
    (_deciding, "its forward cannot be followed"),
    (_two_inputs, "input y"),
    (lambda: nn.Sequential(nn.Conv2d(1, 1, 3, padding_mode="reflect")), r"Conv2d with padding_mode='reflect'"),
    (lambda: nn.Sequential(nn.Conv2d(1, 1, 2, padding="same")), "Conv2d with uneven padding"),
    (lambda: nn.Sequential(nn.BatchNorm2d(2, track_running_stats=False)), "track_running_stats=False"),
    (lambda: nn.Sequential(nn.MaxPool2d(2, return_indices=True)), "return_indices=True"),
    (lambda: nn.Sequential(nn.AvgPool2d(2, divisor_override=3)), "divisor_override=3"),
    (lambda: _Body(lambda y, layer: F.avg_pool2d(y, 2, divisor_override=3)), "AvgPool2d with arguments"),
    (lambda: _Body(lambda y, layer: F.avg_pool2d(y, 2, 2, 0, False, True, 3)), "AvgPool2d with arguments"),
    (lambda: nn.Sequential(nn.LayerNorm((2, 2))), "LayerNorm over 2 dimensions"),
    (lambda: nn.Sequential(nn.Softmax(dim=1), nn.Linear(2, 2)), "may only be the last step"),
    (lambda: _Body(lambda y, layer: torch.linalg.inv(y)), r"1 part\(s\): linalg_inv;"),
    (lambda: _Body(lambda y, layer: (y, y)), "want one tensor"),
    (lambda: nn.utils.parametrizations.weight_norm(nn.Conv2d(1, 1, 1)), "ParametrizedConv2d|cannot be followed|weight"),
])  # fmt: skip
def test_refused_with_its_name(make: Callable[[], nn.Module], said: str) -> None:
    with pytest.raises(PatchMismatch, match=said):
        Network.of(make())


def test_names_that_collide_are_refused() -> None:
    model = nn.Sequential()
    model.add_module("dtype", nn.Linear(2, 2))
    with pytest.raises(PatchMismatch, match=r"module name 'dtype' is taken .* rename it"):
        Network.of(model)


# -- descriptions from somebody else ---------------------------------------------------------------------------
def _good() -> dict[str, Any]:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3), nn.Softmax(dim=1))
    found: dict[str, Any] = copy.deepcopy(Network.of(model).config.network)
    return found


def test_a_good_description_passes() -> None:
    assert check_description(_good()) == _good()


def _set(*path: str | int, value: object) -> Callable[[dict[str, Any]], None]:
    def change(description: dict[str, Any]) -> None:
        here: Any = description
        for key in path[:-1]:
            here = here[key]
        here[path[-1]] = value

    return change


@pytest.mark.parametrize(("change", "said"), [
    (_set("more", value=1), "want an object with modules, steps and head"),
    (_set("steps", value=[]), "at least one step"),
    (_set("modules", "0", "type", value="Embedding"), r"module '0': want a type of the list Conv2d"),
    (_set("modules", "0", "type", value=["Conv2d"]), "want a type of the list"),
    (_set("modules", "0", "device", value="cuda"), r"want \['bias', 'dilation'"),
    (_set("modules", "0", "in_channels", value=0), "in_channels may not be 0"),
    (_set("modules", "0", "in_channels", value=True), "in_channels may not be True"),
    (_set("modules", "0", "kernel_size", value=[3, 3, 3]), "kernel_size may not be"),
    (_set("modules", "0", "kernel_size", value=1 << 40), "kernel_size may not be"),
    (_set("modules", "0", "bias", value="yes"), "bias may not be 'yes'"),
    (_set("modules", "3", "out_features", value=2.5), "out_features may not be 2.5"),
    (_set("steps", 0, "module", value="9"), "step 1 calls neither"),
    (_set("steps", 0, value={"function": "eval", "args": []}), "step 1 calls neither"),
    (_set("steps", 0, value={"function": "add", "module": "0", "args": []}), "step 1 calls neither"),
    (_set("steps", 0, value=["0"]), "step 1 is not a call"),
    (_set("steps", 0, "args", value=[{"value": 1}]), "step 1 takes something"),
    (_set("steps", 0, "args", value=[{"value": -1}]), "step 1 takes something"),
    (_set("steps", 0, "args", value=["x"]), "step 1 takes something"),
    (_set("steps", 0, "args", value=[[[[[1]]]]]), "step 1 takes something"),
    (_set("steps", 0, "args", value={"value": 0}), "malformed arguments"),
    (_set("head", value="3"), "the head '3' is not the last step"),
    (_set("head", value=None), "Softmax may only be the last step"),
])  # fmt: skip
def test_a_bad_description_is_refused_before_it_is_built(change: Callable[[dict[str, Any]], None], said: str) -> None:
    description = _good()
    change(description)
    with pytest.raises(PatchMismatch, match=said):
        check_description(description)
    with torch.device("meta"), pytest.raises(PatchMismatch, match=said):
        Network(NetworkConfig(network=description))


def test_sizes_are_picked_from_shapes_only() -> None:
    description = _good()
    description["steps"] = [
        {"function": "item", "args": [{"value": 0}, 0]},
        *({**step, "args": [{"value": place + 1 if place else 0}]} for place, step in enumerate(description["steps"])),
    ]
    with pytest.raises(Exception, match="'item' picks one size of a shape"):
        Network(NetworkConfig(network=description))(torch.zeros(1, 1, 4, 4))
