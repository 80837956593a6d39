"""Networks of images through the door that users take: a plain `nn.Sequential`, patched, on a batch of images."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from private_llm.bench.whole import WholeWork
from private_llm.bench.work import Shape

if TYPE_CHECKING:
    from private_llm_hf import ForwardPlan


def lenet(shape: Shape) -> WholeWork:
    """LeNet-5; batch x channels x height x width (28 x 28)."""
    from private_llm_hf.networks import lenet5

    return _network("lenet", shape, lenet5)


def alexnet(shape: Shape) -> WholeWork:
    """AlexNet in CIFAR shape."""
    from private_llm_hf.networks import alexnet as build

    return _network("alexnet", shape, build)


def vgg16(shape: Shape) -> WholeWork:
    """VGG-16 with average pools in CIFAR shape."""
    from private_llm_hf.networks import vgg16 as build

    return _network("vgg16", shape, build)


def _network(name: str, shape: Shape, make: Callable[[], nn.Module]) -> WholeWork:
    """Random weights of variance 2 / fan-in, which keeps activations in the range of trained networks."""

    def build() -> nn.Module:
        with torch.device("meta"):
            model = make()
        random = np.random.default_rng(3)
        made = {
            key: torch.from_numpy(random.normal(0.0, _deviation(value), tuple(value.shape)).astype(np.float32))
            for key, value in model.named_parameters()
        }
        model.load_state_dict(made, assign=True)
        return model.eval()

    images = torch.from_numpy(np.random.default_rng(4).normal(0.0, 1.0, shape).astype(np.float32))

    def call(model: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401 - a private model
        return model(images), images

    def truth(model: Any, asked: Tensor) -> Tensor:  # noqa: ANN401 - the plaintext model
        logits: Tensor = model(asked.double())
        return logits

    def plan() -> ForwardPlan:
        from private_llm_hf import ForwardPlan

        return ForwardPlan({"pixel_values": shape})

    return WholeWork(name, shape, build, call, truth, plan)


def _deviation(weight: Tensor) -> float:
    return (2.0 / weight[0].numel()) ** 0.5 if weight.ndim > 1 else 0.1
