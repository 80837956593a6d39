"""Estimates of image models are the ledgers of real runs, byte for byte: VGG-16 and ResNet-18 at their own widths."""

from __future__ import annotations

import pytest
import torch
import transformers as tr
from private_llm_hf import Network, PrivateConfig, patch
from private_llm_hf.models.inputs import image_shape
from private_llm_hf.tools.estimate import estimate, model_class_of, named_shape
from torch import nn

from private_llm.errors import ConfigError
from tests.hf import images
from tests.hf.tools.test_estimate import entries

SMALL = {"ring": 32, "frac_bits": 10, "calibrate": False}


def both(model: nn.Module, pixels: torch.Tensor, config: PrivateConfig) -> None:
    """Estimate and run; compare every link, module, round and product."""
    whole = model if isinstance(model, tr.PreTrainedModel) else Network.of(model)
    found = estimate(type(whole), whole.config, config, 1, batch=len(pixels), image=pixels.shape[1:])
    with patch(model, config) as private, torch.no_grad():
        private(pixels)
        run = private.cost()
    assert entries(found.costs) == entries(run)
    assert found.costs.bytes_total == run.bytes_total > 0


@pytest.mark.sampled(9)
@pytest.mark.parametrize(("name", "settings"), [
    ("resnet-bottleneck", SMALL), ("mobilenet_v2", SMALL), ("small-resnet", {"adder": "ripple"}), ("mixed", {}),
    ("small-resnet", {**SMALL, "reveal": "class"}), ("small-resnet", {**SMALL, "protocol": "quad"}),
    ("mixed", {**SMALL, "protocol": "dealer"}), ("mixed", {"weights": "public"}),
    ("mobilenet_v2", {**SMALL, "weights": "public"}),
], ids=str)  # fmt: skip
def test_estimate_equals_the_ledger(name: str, settings: dict[str, object]) -> None:
    both(*images.build(name), PrivateConfig(timeout_s=60, **settings))  # type: ignore[arg-type]


def test_vgg16_as_published() -> None:
    """Full widths, one CIFAR image."""
    _, shape = images.NETWORKS["vgg16"]
    both(images.lively(images.vgg16()), images.images(shape, 1), PrivateConfig(timeout_s=60, **SMALL))  # type: ignore[arg-type]


@pytest.mark.full
def test_resnet18_as_published() -> None:
    """Full widths, an image of 32 x 32."""
    found = named_shape("resnet-18")
    assert found is not None
    both(images.lively(found[0](found[1])), images.images((3, 32, 32), 1), PrivateConfig(timeout_s=60, **SMALL))  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "megabytes"), [("lenet5", 0.43), ("alexnet", 8.26), ("vgg16-cifar10", 17.93)])
def test_built_in_networks_cost_less_than_the_reference_code(name: str, megabytes: float) -> None:
    """Per image of a batch of 16 in the 32-bit ring, client included; the C++ reference's own measured bytes."""
    found = named_shape(name)
    assert found is not None
    cost = estimate(*found, PrivateConfig(**SMALL), 1, batch=16)  # type: ignore[arg-type]
    assert 0.5 * megabytes < cost.costs.bytes_total / 16e6 < megabytes


@pytest.mark.parametrize("name", ["resnet-18", "resnet-50", "mobilenet-v2", "convnext-tiny"])
def test_built_in_shapes_of_transformers(name: str) -> None:
    found = named_shape(name)
    assert found is not None
    assert image_shape(found[1]) == (3, 224, 224)
    assert model_class_of(tr.AutoConfig.for_model("network", architectures=["Network"])) is Network


def test_an_image_size_is_needed_where_the_network_does_not_say() -> None:
    network = Network.of(images.small_lenet())
    with pytest.raises(ConfigError, match="does not say what images it takes"):
        estimate(Network, network.config, PrivateConfig(), 1)
