"""Batch norms at load: folded weights equal the norm exactly, whatever order a checkpoint comes in."""

from __future__ import annotations

import itertools

import pytest
import torch
import transformers as tr
from private_llm_hf.checkpoint.folds import FoldedBatchNorm, PrivateBatchNorm, fold_batch_norms
from private_llm_hf.checkpoint.model_spec import ModelSpec
from private_llm_hf.checkpoint.weights import stream_loaded
from private_llm_hf.vision.network import Network
from torch import nn

from private_llm.errors import PatchMismatch
from tests.hf import images

ROUNDING = 1e-12
"""Both sides compute in float64 on values of a size of 10."""


def folded(model: nn.Module) -> nn.Module:
    """The tree that parties build, with the weights that they get, in float64."""
    model = model if isinstance(model, tr.PreTrainedModel) else Network.of(model)
    spec = ModelSpec.of(type(model), model.config)
    made: dict[str, torch.Tensor] = {}
    stream_loaded(model, spec.source, spec.folding(lambda name, value: made.update({name: value.double()})))
    assert set(made) == set(spec.shared.shapes)
    assert {name: tuple(value.shape) for name, value in made.items()} == spec.shared.shapes
    spec.model.load_state_dict(made, strict=True, assign=True)
    for name, buffer in spec.model.named_buffers():
        assert buffer.numel() == 0, f"{name} is left"
    return spec.model


@pytest.mark.parametrize(
    "name", ["resnet-basic", "resnet-bottleneck", "mobilenet_v2", "small-lenet", "small-resnet", "mixed"]
)
def test_the_folded_tree_computes_the_same(name: str) -> None:
    model, pixels = images.build(name)
    model = model.double()
    want, got = images.logits(model, pixels.double()), images.logits(folded(model), pixels.double())
    assert (want - got).abs().max() <= ROUNDING * max(1.0, float(want.abs().max()))


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layers", [
    lambda bias, affine: [nn.Conv2d(2, 4, 3, groups=2, bias=bias), nn.BatchNorm2d(4, affine=affine), nn.Flatten()],
    lambda bias, affine: [nn.Flatten(), nn.Linear(32, 4, bias=bias), nn.BatchNorm1d(4, eps=0.5, affine=affine)],
    lambda bias, affine: [nn.BatchNorm2d(2, affine=affine), nn.Conv2d(2, 4, 3, bias=bias), nn.Flatten()],
])  # fmt: skip
def test_with_and_without_biases_gains_and_a_layer_before(layers: object, bias: bool, affine: bool) -> None:
    model = images.lively(nn.Sequential(*layers(bias, affine))).double()  # type: ignore[operator]
    pixels = images.images((2, 4, 4)).double()
    tree = folded(model)
    assert (model(pixels) - tree(pixels)).abs().max() <= ROUNDING
    kinds = [type(module) for module in tree.modules()]
    assert (FoldedBatchNorm in kinds) != (PrivateBatchNorm in kinds)


def test_a_norm_whose_input_is_used_twice_stays_a_norm() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.conv(x)
            return self.norm(y) + y

    model = images.lively(Branch()).double()
    pixels = images.images((1, 4, 4)).double()
    tree = folded(model)
    assert isinstance(tree.norm, PrivateBatchNorm)
    assert (model(pixels) - tree(pixels)).abs().max() <= ROUNDING


def test_a_layer_that_runs_twice_keeps_its_weights() -> None:
    conv = nn.Conv2d(2, 2, 1)
    model = images.lively(nn.Sequential(conv, nn.BatchNorm2d(2), conv)).double()
    pixels = images.images((2, 4, 4)).double()
    assert (model(pixels) - folded(model)(pixels)).abs().max() <= ROUNDING


def test_tensors_may_come_in_any_order() -> None:
    network = Network.of(images.lively(nn.Sequential(nn.Conv2d(1, 2, 1, bias=False), nn.BatchNorm2d(2))))
    spec = ModelSpec.of(Network, network.config)
    values = {name: value for name, value in network.state_dict().items() if value.is_floating_point()}
    results = []
    for order in itertools.permutations(values):
        made: dict[str, torch.Tensor] = {}
        sink = spec.folding(lambda name, value, made=made: made.update({name: value}))
        for name in order:
            sink(name, values[name])
        results.append(made)
    assert len(results) == 120
    assert all(set(made) == {"0.weight", "0.bias"} for made in results)
    assert all(torch.equal(made[name], results[0][name]) for made in results for name in made)


def test_a_norm_by_the_batch_is_refused() -> None:
    with pytest.raises(PatchMismatch, match="0: a batch norm without running statistics"):
        fold_batch_norms(nn.Sequential(nn.BatchNorm2d(2, track_running_stats=False)))
