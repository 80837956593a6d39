"""Image networks of the literature as plain `nn.Sequential`, in the shapes that PIGEON's engine was measured with.

Sources: LeCun et al. 1998 (LeNet-5; with ReLU and average pooling as there), Krizhevsky et al. 2012 (AlexNet, cut to
CIFAR size), Simonyan and Zisserman 2015 (VGG-16), He et al. 2016 (residual blocks, ResNet-50). PIGEON runs both
ImageNet networks with average pools in place of max pools.
"""

from collections.abc import Callable, Sequence
from functools import partial
from importlib import resources
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from private_llm.errors import ConfigError


def lenet5(classes: int = 10) -> nn.Sequential:
    """Images [B, 1, 28, 28]; 6,508 ReLU an image."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.AvgPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, classes),
    )  # fmt: skip


def alexnet(classes: int = 10) -> nn.Sequential:
    """Images [B, 3, 32, 32]; 126,976 ReLU an image."""
    return nn.Sequential(
        nn.Conv2d(3, 56, 3, padding=1), nn.ReLU(), nn.AvgPool2d(3, 2, 1),
        nn.Conv2d(56, 128, 5, padding=2), nn.ReLU(), nn.AvgPool2d(3, 2, 1),
        nn.Conv2d(128, 192, 3, padding=1), nn.ReLU(),
        nn.Conv2d(192, 192, 3, padding=1), nn.ReLU(),
        nn.Conv2d(192, 128, 3, padding=1), nn.ReLU(), nn.AvgPool2d(3, 2, 1),
        nn.Flatten(),
        nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, classes),
    )  # fmt: skip


def vgg16(classes: int = 10, width: int = 64) -> nn.Sequential:
    """Images [B, 3, 32, 32], average pooling, 512-256-256 head; 276,992 ReLU an image with the usual width."""
    top = 8 * width
    return nn.Sequential(
        *_vgg_features(width, nn.AvgPool2d),
        nn.Flatten(),
        nn.Linear(top, top // 2), nn.ReLU(), nn.Linear(top // 2, top // 2), nn.ReLU(), nn.Linear(top // 2, classes),
    )  # fmt: skip


def vgg16_imagenet(
    classes: int = 1000, width: int = 64, size: int = 224, pool: type[nn.Module] = nn.MaxPool2d
) -> nn.Sequential:
    """Images [B, 3, size, size], size a multiple of 32; 4096-4096 head; with max pooling as published."""
    top, hidden = 8 * width * (size // 32) ** 2, 64 * width
    return nn.Sequential(
        *_vgg_features(width, pool),
        nn.Flatten(),
        nn.Linear(top, hidden), nn.ReLU(), nn.Dropout(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout(),
        nn.Linear(hidden, classes),
    )  # fmt: skip


def _vgg_features(width: int, pool: type[nn.Module]) -> Sequence[nn.Module]:
    layers: list[nn.Module] = []
    channels = 3
    for factor, depth in ((1, 2), (2, 2), (4, 3), (8, 3), (8, 3)):
        for _ in range(depth):
            layers += [nn.Conv2d(channels, factor * width, 3, padding=1), nn.ReLU()]
            channels = factor * width
        layers.append(pool(kernel_size=2))
    return layers


def shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    """What a residual block adds: its input, or a projection of it."""
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


class Bottleneck(nn.Module):
    """A 3 x 3 convolution between two of 1 x 1, and the input, or its projection, added."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.first = nn.Sequential(nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.third = nn.Sequential(nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs))
        self.shortcut = shortcut(inputs, outputs, stride)
        self.last = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """[B, inputs, H, W] to [B, 4 width, H/stride, W/stride]."""
        made: Tensor = self.last(self.third(self.second(self.first(x))) + self.shortcut(x))
        return made


def resnet50(classes: int = 1000, width: int = 64, pool: type[nn.Module] = nn.AvgPool2d) -> nn.Sequential:
    """Images [B, 3, H, W], H and W multiples of 32; with an average pool after the stem."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
        pool(kernel_size=3, stride=2, padding=1),
    ]  # fmt: skip
    inputs = width
    for stage, depth in enumerate((3, 4, 6, 3)):
        for place in range(depth):
            layers.append(Bottleneck(inputs, width << stage, 2 if stage and not place else 1))
            inputs = 4 * width << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


BUILDERS: dict[str, tuple[Callable[[], nn.Sequential], tuple[int, int, int]]] = {
    "lenet5": (lenet5, (1, 28, 28)),
    "alexnet": (alexnet, (3, 32, 32)),
    "vgg16-cifar10": (vgg16, (3, 32, 32)),
    "vgg16-imagenet": (vgg16_imagenet, (3, 224, 224)),
    "vgg16-imagenet-average": (partial(vgg16_imagenet, pool=nn.AvgPool2d), (3, 224, 224)),
    "resnet50-average": (resnet50, (3, 224, 224)),
}
"""Networks by name with the image shape they are made for."""


# -- handwritten digits, and the small network that is trained on them ------------------------------------------------
HELD_OUT = 5  # every fifth image is never trained on: 360 of 1797


def _bundled(name: str) -> Path:
    found = Path(str(resources.files("private_llm_hf").joinpath(name)))
    if not found.exists():
        raise ConfigError(f"{name} is not part of this installation")
    return found


def digits(held_out: bool) -> tuple[Tensor, Tensor]:
    """Images [N, 1, 8, 8] from 0 to 1 and labels [N]: the held-out ones, or all others. Raises ConfigError."""
    found = load_file(_bundled("data/digits.safetensors"))
    kept = (torch.arange(len(found["labels"])) % HELD_OUT == 0) == held_out
    return found["images"][kept].unsqueeze(1) / 16.0, found["labels"][kept].to(torch.int64)


def digits_model() -> str:
    """The folder of the bundled network. Raises ConfigError if this installation lacks it."""
    return str(_bundled("digits_model"))
