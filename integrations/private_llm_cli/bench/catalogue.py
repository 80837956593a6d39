"""Every benchmark by name: how to make it, its usual shape, and a tiny one for tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from private_llm.errors import ConfigError, meant
from private_llm_cli.bench import cnn, functions, layers, whole
from private_llm_cli.bench.whole import WholeWork
from private_llm_cli.bench.work import Shape, Work


@dataclass(frozen=True)
class Entry:
    """make: from a shape to a work. usual, tiny: shapes. dims: what the numbers of a shape mean.

    `count` (--n) replaces the number of elements, rows, images or tokens: the second size where tokens are, or else
    the first.
    """

    make: Callable[[Shape], Work | WholeWork]
    usual: Shape
    tiny: Shape
    dims: str


_MILLION = 1_000_000
_LAYER = (1, 128, 768, 12, 3072)
_TINY_LAYER = (2, 5, 16, 2, 24)
_IMAGE_DIMS = "batch x channels x height x width"
_LAYER_DIMS = "batch x tokens x hidden x heads x feed-forward"
ENTRIES: dict[str, Entry] = {
    "relu": Entry(functions.relu, (_MILLION,), (1000,), "elements"),
    "mul": Entry(functions.mul, (_MILLION,), (1000,), "elements"),
    "matmul": Entry(functions.matmul, (128, 768, 3072), (8, 16, 12), "M x K x N"),
    "matmuls": Entry(functions.matmuls, (8, 128, 20), (2, 9, 3), "matrices side by side x size x times"),
    "gelu": Entry(functions.gelu, (128, 3072), (4, 25), "rows x columns"),
    "silu": Entry(functions.silu, (128, 3072), (4, 25), "rows x columns"),
    "softmax": Entry(functions.softmax, (12, 128, 128), (2, 3, 7), "heads x queries x keys"),
    "layernorm": Entry(functions.layernorm, (128, 768), (3, 16), "rows x columns"),
    "argmax": Entry(functions.argmax, (1, 50272), (3, 21), "rows x columns"),
    "opt-layer": Entry(layers.opt_layer, _LAYER, _TINY_LAYER, _LAYER_DIMS),
    "bert-layer": Entry(layers.bert_layer, _LAYER, _TINY_LAYER, _LAYER_DIMS),
    "opt-decode": Entry(layers.opt_decode, _LAYER, _TINY_LAYER, _LAYER_DIMS.replace("tokens", "cached tokens")),
    "gpt2-forward": Entry(
        whole.gpt2_forward, (1, 32, 768, 12, 12, 50257), (2, 4, 16, 2, 1, 40),
        "batch x tokens x hidden x heads x layers x vocabulary",
    ),
    "generate": Entry(whole.generate, (1, 16, 32), (1, 4, 2), "batch x prompt tokens x new tokens"),
    "smollm2": Entry(whole.smollm2, (1, 37), (1, 3), "batch x tokens"),
    "lenet": Entry(cnn.lenet, (16, 1, 28, 28), (1, 1, 28, 28), _IMAGE_DIMS),
    "alexnet": Entry(cnn.alexnet, (16, 3, 32, 32), (1, 3, 32, 32), _IMAGE_DIMS),
    "vgg16": Entry(cnn.vgg16, (16, 3, 32, 32), (1, 3, 32, 32), _IMAGE_DIMS),
    "resnet50": Entry(cnn.resnet50, (1, 3, 224, 224, 64), (1, 3, 32, 32, 4), f"{_IMAGE_DIMS} x filters"),
    "vgg16-imagenet": Entry(cnn.vgg16_imagenet, (1, 3, 224, 224, 64), (1, 3, 32, 32, 4), f"{_IMAGE_DIMS} x filters"),
}  # fmt: skip
NAMES = tuple(ENTRIES)
INSTALLED_APART = ("smollm2",)
"""Works of models that are neither bundled nor made of random numbers: run only when they are named."""
LARGE = ("resnet50", "vgg16-imagenet")
"""Works that take minutes and gigabytes: run only when they are named."""


def make(name: str, shape: Shape | None = None, count: int | None = None, tiny: bool = False) -> Work | WholeWork:
    """The work `name` at `shape` (default: its usual one). Raises ConfigError for unknown names and wrong shapes."""
    entry = ENTRIES.get(name)
    if entry is None:
        raise ConfigError(f"unknown benchmark {name!r}{meant([name], NAMES)}; known: {', '.join(NAMES)}")
    default = entry.tiny if tiny else entry.usual
    chosen = shape or default
    if count is not None:
        if count < 1:
            raise ConfigError(f"n: got {count}; want at least 1")
        place = 1 if "tokens" in entry.dims else 0
        chosen = (*chosen[:place], count, *chosen[place + 1 :])
    if len(chosen) != len(default) and len(default) > 1:
        raise ConfigError(f"benchmark {name!r}: got {len(chosen)} sizes; want {len(default)}: {entry.dims}")
    sizes = dict(zip(entry.dims.split(" x "), chosen, strict=False))
    if sizes.get("hidden", 0) % sizes.get("heads", 1):
        raise ConfigError(
            f"benchmark {name!r}: got hidden {sizes['hidden']}; want a multiple of {sizes['heads']} heads"
        )
    return entry.make(chosen)
