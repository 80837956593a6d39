"""Module by module against plaintext: small errors where all is well, the right name where it is not."""

from __future__ import annotations

import pytest
import torch
import transformers as tr
from private_llm_hf import Network, PrivateConfig
from private_llm_hf.tools.compare import compare
from torch import nn

from tests.hf import images, tiny

IDS = torch.tensor([[3, 5, 8, 13], [21, 34, 55, 89]])


@pytest.mark.parametrize("name", ["opt", "llama", "bert", "t5"])
def test_errors_are_small_everywhere(name: str) -> None:
    model = tiny.build(name)
    found = compare(model, IDS, PrivateConfig())
    assert found.stopped is None
    leaves = {name for name, module in model.named_modules() if not list(module.children()) and name}
    seen = {row.name for row in found.modules}
    assert len(seen & leaves) > 8
    # Two layers of functions with errors below 1e-4 each, gains of about one between them.
    assert max(row.error_max for row in found.modules) < 5e-3
    assert all(row.error_mean <= row.error_max for row in found.modules)


@pytest.mark.parametrize("name", ["resnet-bottleneck", "mobilenet_v2", "convnext", "mixed"])
def test_images(name: str) -> None:
    model, pixels = images.build(name)
    model = model if isinstance(model, tr.PreTrainedModel) else Network.of(model)
    found = compare(model, pixels, PrivateConfig())
    assert found.stopped is None
    convolutions = {name for name, module in model.named_modules() if isinstance(module, nn.Conv2d)}
    assert convolutions <= {row.name for row in found.modules}
    assert max(row.error_max for row in found.modules) < 5e-3


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("llama", "model.layers.1.mlp.down_proj"), ("bert", "encoder.layer.1.output.dense"),
        ("t5", "decoder.block.1.layer.2.DenseReluDense.wo"), ("resnet-basic", "classifier.1"),
        ("mixed", "head"),
    ],
)  # fmt: skip
def test_every_kind_of_model_is_followed_to_the_module_that_leaves_the_ring(name: str, module: str) -> None:
    if name in tiny.DECODERS | tiny.ENCODERS | tiny.OTHERS:
        model, given = tiny.build(name), IDS
    else:
        model, given = images.build(name)
        model = model if isinstance(model, tr.PreTrainedModel) else Network.of(model)
    with torch.no_grad():
        model.get_submodule(module).weight.mul_(1e9)
    stopped = compare(model, given, PrivateConfig()).stopped
    assert stopped is not None
    assert f"in module '{module}' reaches 2^" in stopped
    assert "a 64-bit ring holds a value before truncation below 2^62" in stopped


class Loud(nn.Module):
    """A product by public numbers that leaves the ring without any protocol step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 2, 3), nn.Linear(2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images to logits."""
        x = self.first(x) * 3e7
        return self.second((x * 3e7).mean((2, 3)) * 1e-14)


def test_a_local_step_that_leaves_the_ring_is_named() -> None:
    torch.manual_seed(0)
    found = compare(Network.of(Loud().eval()), torch.rand(2, 1, 8, 8), PrivateConfig())
    assert found.stopped is not None
    assert "torch.Tensor.mul" in found.stopped
    assert "a 64-bit ring holds a value below 2^63" in found.stopped
    assert [row.name for row in found.modules] == ["first"]


def test_a_function_that_needs_the_wide_ring_is_named() -> None:
    model, pixels = images.build("efficientnet")
    found = compare(model, pixels, PrivateConfig(ring=32, frac_bits=10))
    assert found.stopped is not None
    assert found.stopped.startswith("module 'efficientnet.")
    assert "need a 64-bit ring" in found.stopped


def test_the_module_that_leaves_the_ring_is_named() -> None:
    model = tiny.build("opt")
    layer = model.get_submodule("model.decoder.layers.1")
    with torch.no_grad():
        for part in (layer.fc1, layer.fc2):
            part.weight.mul_(1e6)  # products of 1e12 times a few are beyond 2^(62 - 36) = 6.7e7
    found = compare(model, IDS, PrivateConfig())
    assert found.stopped is not None
    assert "model.decoder.layers.1" in found.stopped
    assert "model.decoder.layers.0" in {row.name for row in found.modules}
    assert "model.decoder.layers.1" not in {row.name for row in found.modules}
