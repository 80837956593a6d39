"""Module by module against plaintext: small errors where all is well, the right name where it is not."""

from __future__ import annotations

import pytest
import torch
import transformers as tr
from private_llm_hf import Network, PrivateConfig
from private_llm_hf.compare import compare
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
