"""Networks of images as users run them: a plain `nn.Sequential`, patched, on a batch of images."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from private_llm_cli.bench.whole import WholeWork
from private_llm_cli.bench.work import Shape

if TYPE_CHECKING:
    from private_llm_hf import ForwardPlan


def lenet(shape: Shape) -> WholeWork:
    """LeNet-5; batch x channels x height x width (28 x 28)."""
    from private_llm_hf.vision.networks import lenet5

    return _network("lenet", shape, lenet5)


def alexnet(shape: Shape) -> WholeWork:
    """AlexNet in CIFAR shape."""
    from private_llm_hf.vision.networks import alexnet as build

    return _network("alexnet", shape, build)


def vgg16(shape: Shape) -> WholeWork:
    """VGG-16 with average pools in CIFAR shape."""
    from private_llm_hf.vision.networks import vgg16 as build

    return _network("vgg16", shape, build)


def vgg16_imagenet(shape: Shape) -> WholeWork:
    """VGG-16 with average pools in ImageNet shape; batch x channels x height x width x filters of the first layer."""
    from private_llm_hf.vision.networks import vgg16_imagenet as build

    *images, width = shape
    make = partial(build, width=width, size=images[-1], pool=nn.AvgPool2d)
    return _network("vgg16-imagenet", shape, make, tuple(images))


def resnet50(shape: Shape) -> WholeWork:
    """ResNet-50 with average pools; batch x channels x height x width x filters of the first layer."""
    from private_llm_hf.vision.networks import resnet50 as build

    *images, width = shape
    return _network("resnet50", shape, partial(build, width=width), tuple(images))


def _network(name: str, shape: Shape, make: Callable[[], nn.Module], pixels: Shape | None = None) -> WholeWork:
    """Random weights of variance 2 / fan-in, which keeps activations in the range of trained networks.

    pixels: batch x channels x height x width, if `shape` says more than that.
    """
    taken = pixels or shape

    def build() -> nn.Module:
        with torch.device("meta"):
            model = make()
        random = np.random.default_rng(3)
        made = {
            key: torch.from_numpy(random.normal(*_normal(key, value), tuple(value.shape)).astype(np.float32))
            for key, value in model.named_parameters()
        }
        made |= {key: _statistic(key, value) for key, value in model.named_buffers()}
        model.load_state_dict(made, assign=True)
        return model.eval()

    images = torch.from_numpy(np.random.default_rng(4).normal(0.0, 1.0, taken).astype(np.float32))

    def call(model: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401 - a private model
        return model(images), images

    def truth(model: Any, asked: Tensor) -> Tensor:  # noqa: ANN401 - the plaintext model
        logits: Tensor = model(asked.double())
        return logits

    def plan() -> ForwardPlan:
        from private_llm_hf import ForwardPlan

        return ForwardPlan({"pixel_values": taken})

    return WholeWork(name, shape, build, call, truth, plan)


def _normal(name: str, weight: Tensor) -> tuple[float, float]:
    """Mean and deviation of a weight. Gains of norms are below 1, so that sums over residual blocks stay small."""
    if weight.ndim > 1:
        return 0.0, (2.0 / weight[0].numel()) ** 0.5
    return (0.7 if name.endswith("weight") else 0.0), 0.1


def _statistic(name: str, buffer: Tensor) -> Tensor:
    """A batch norm's running mean 0 and variance 1."""
    value = 1.0 if name.endswith("running_var") else 0.0
    return torch.full(tuple(buffer.shape), value, dtype=buffer.dtype)
