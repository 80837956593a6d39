"""Tiny image models: one of every family, with random weights and batch norms that do something."""

from __future__ import annotations

import torch
import transformers as tr
from private_llm_hf.vision.networks import alexnet, lenet5, vgg16, vgg16_imagenet
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from train_cnn import small_lenet, small_resnet

HF = {
    "resnet-basic": (
        tr.ResNetForImageClassification,
        lambda: tr.ResNetConfig(
            embedding_size=8, hidden_sizes=[8, 12], depths=[1, 1], layer_type="basic", num_labels=5
        ),
        (3, 16, 16),
    ),
    "resnet-bottleneck": (
        tr.ResNetForImageClassification,
        lambda: tr.ResNetConfig(
            embedding_size=8, hidden_sizes=[16, 24], depths=[1, 2], layer_type="bottleneck", num_labels=5
        ),
        (3, 16, 16),
    ),
    "mobilenet_v2": (
        tr.MobileNetV2ForImageClassification,
        lambda: tr.MobileNetV2Config(
            depth_multiplier=0.1, min_depth=4, depth_divisible_by=4, output_stride=8, image_size=16, num_labels=5
        ),
        (3, 16, 16),
    ),
    "mobilenet_v1": (
        tr.MobileNetV1ForImageClassification,
        lambda: tr.MobileNetV1Config(depth_multiplier=0.05, min_depth=4, image_size=16, num_labels=5),
        (3, 16, 16),
    ),
    "regnet": (
        tr.RegNetForImageClassification,
        lambda: tr.RegNetConfig(
            embedding_size=8, hidden_sizes=[8, 12], depths=[1, 1], groups_width=4, layer_type="y", num_labels=5
        ),
        (3, 16, 16),
    ),
    "efficientnet": (
        tr.EfficientNetForImageClassification,
        lambda: tr.EfficientNetConfig(
            in_channels=[8, 4],
            out_channels=[4, 8],
            kernel_sizes=[3, 5],
            strides=[1, 2],
            num_block_repeats=[1, 1],
            expand_ratios=[1, 2],
            width_coefficient=0.25,
            depth_coefficient=1.0,
            hidden_dim=320,
            image_size=16,
            num_labels=5,
        ),
        (3, 16, 16),
    ),
    "convnext": (
        tr.ConvNextForImageClassification,
        lambda: tr.ConvNextConfig(
            num_stages=2, hidden_sizes=[8, 12], depths=[1, 1], layer_scale_init_value=0.5, image_size=16, num_labels=5
        ),
        (3, 16, 16),
    ),
}


class Mixed(nn.Module):
    """Functions beside modules, branches, in-place activations, sizes read from shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 6, 3, padding="same", dilation=2)
        self.depthwise = nn.Conv2d(6, 6, 3, padding=1, groups=6, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.alone = nn.BatchNorm2d(6)
        self.act = nn.ReLU(inplace=True)
        self.head = nn.Linear(108, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.stem(x))
        y = self.norm(self.depthwise(x))
        kept = self.act(y)
        y = self.alone(y + kept)
        y = torch.cat([nn.functional.avg_pool2d(y, 2), nn.functional.max_pool2d(x, 2)], dim=1)
        y = nn.functional.adaptive_avg_pool2d(y, 3)
        y = nn.functional.dropout(y, 0.5, self.training)
        return nn.functional.log_softmax(self.head(y.view(y.size(0), -1)), dim=1)


NETWORKS = {
    "lenet5": (lenet5, (1, 28, 28)),
    "alexnet": (alexnet, (3, 32, 32)),
    "vgg16": (lambda: vgg16(width=4), (3, 32, 32)),
    "vgg16-imagenet": (lambda: vgg16_imagenet(classes=7, width=2, size=32), (3, 32, 32)),
    "small-lenet": (small_lenet, (1, 8, 8)),
    "small-resnet": (lambda: small_resnet(width=4), (1, 8, 8)),
    "mixed": (Mixed, (2, 8, 8)),
}


def images(shape: tuple[int, ...], batch: int = 2) -> torch.Tensor:
    """The same every time."""
    return torch.randn(batch, *shape, generator=torch.Generator().manual_seed(3))


def lively(model: nn.Module) -> nn.Module:
    """Weights of variance 2 / fan-in, biases, and statistics as after training."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, (2.0 / parameter[0].numel()) ** 0.5)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.1)
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                if module.weight is not None:
                    module.weight.uniform_(0.5, 1.5)
                module.running_mean.normal_(0.0, 0.3)
                module.running_var.uniform_(0.5, 2.0)
    return model.eval()


def build(name: str) -> tuple[nn.Module, torch.Tensor]:
    """A model and a batch of two images for it."""
    if name in HF:
        cls, config, shape = HF[name]
        return lively(cls(config())), images(shape)
    make, shape = NETWORKS[name]
    return lively(make()), images(shape)


def logits(model: nn.Module, pixels: torch.Tensor) -> torch.Tensor:
    """Of a transformers model or a plain network."""
    with torch.no_grad():
        out = model(pixels)
    return out if isinstance(out, torch.Tensor) else out.logits
