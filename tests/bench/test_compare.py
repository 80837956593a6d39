"""Module by module against plaintext: small errors where all is well, the right name where it is not."""

from __future__ import annotations

import pytest
import torch
from private_llm_hf import PrivateConfig
from private_llm_hf.compare import compare

from tests.hf import tiny

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
