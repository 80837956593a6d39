"""Every benchmark by name: how to make it, its usual shape, and a tiny one for tests."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor

from bench import layers, whole
from bench.whole import WholeWork
from bench.work import Shape, Work
from private_llm.approx import norms
from private_llm.approx import softmax as softmaxes
from private_llm.errors import ConfigError, meant
from private_llm.exact.maximum import argmax as fixed_argmax
from private_llm.nn.activations import ACTIVATIONS, Activation
from private_llm.protocols.session import Session
from private_llm.tensor.fixed import Fixed


# -- Works on single operations: products, comparisons and the approximated functions ---------------------------------
def _simple(
    name: str, run: Callable[[Fixed], Fixed], truth: Callable[[Tensor], Tensor], spread: float, uniform: bool = False
) -> Callable[[Shape], Work]:
    """A work of one input: normal of this deviation, or uniform up to it."""
    return lambda shape: _work(
        name, shape, (shape,), lambda x: run(x[0]), lambda v: truth(v[0]), (spread,), uniform=uniform
    )


def _pointwise(made: Activation, spread: float = 8.0, uniform: bool = True) -> Callable[[Shape], Work]:
    """A function that has a record."""
    run, op, more = made.compute, cast("Callable[..., Any]", made.ops[0]), made.example
    return _simple(made.name, lambda x: run(x, *more), lambda v: op(v, *more), spread, uniform)


def mul(shape: Shape) -> Work:
    """Elementwise product of two secrets, truncated."""
    return _work("mul", shape, (shape, shape), lambda x: x[0].mul(x[1]), lambda v: v[0] * v[1], (2.0,))


def matmul(shape: Shape) -> Work:
    """[M, K] x [K, N], both secret, truncated; the shape is M x K x N."""
    m, k, n = shape
    return replace(
        _work("matmul", shape, ((m, k), (k, n)), lambda x: x[0].matmul(x[1]), lambda v: v[0] @ v[1], (1.0,)), rows=False
    )


def matmuls(shape: Shape) -> Work:
    """`times` products after each other of pairs of square matrices side by side; the shape is pairs x size x times."""
    pairs, size, times = shape

    def run(x: Sequence[Fixed]) -> Fixed:
        for _ in range(times - 1):
            x[0].matmul(x[1])
        return x[0].matmul(x[1])

    inputs = ((pairs, size, size),) * 2
    return _work("matmuls", shape, inputs, run, lambda v: v[0] @ v[1], (0.5,))


def layernorm(shape: Shape) -> Work:
    """Layer norm over the last dimension with secret gain and bias, x ~ N(0, 2)."""
    inputs = (shape, shape[-1:], shape[-1:])
    return replace(_work(
        "layernorm", shape, inputs, lambda x: norms.layer_norm(x[0], x[1], x[2], 1e-5),
        lambda v: F.layer_norm(v[0], shape[-1:], v[1], v[2], 1e-5), (2.0, 1.0, 0.5),
    ), rows=False)  # fmt: skip


def _work(
    name: str, shape: Shape, inputs: tuple[Shape, ...], run: Callable[[Sequence[Fixed]], Fixed],
    truth: Callable[[Sequence[Tensor]], Tensor], spread: tuple[float, ...], uniform: bool = False,
) -> Work:  # fmt: skip
    """A work without weights, on rows."""

    def work(session: Session, values: Sequence[Fixed]) -> Fixed:
        return run(values)

    return Work(
        name, shape, inputs, lambda session, _: work, lambda values, _: truth(values), spread, uniform, rows=True
    )


# -- the catalogue -------------------------------------------------------------------------------------------------
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
_ROWS = (128, 3072), (4, 25), "rows x columns"
_IMAGENET = (1, 3, 224, 224, 64), (1, 3, 32, 32, 4), f"{_IMAGE_DIMS} x filters"
_LAYER_DIMS = "batch x tokens x hidden x heads x feed-forward"
_FUNCTIONS = {made.name: made for made in ACTIVATIONS}
ENTRIES: dict[str, Entry] = {
    "relu": Entry(_pointwise(_FUNCTIONS["relu"], 4.0, uniform=False), (_MILLION,), (1000,), "elements"),
    "mul": Entry(mul, (_MILLION,), (1000,), "elements"),
    "matmul": Entry(matmul, (128, 768, 3072), (8, 16, 12), "M x K x N"),
    "matmuls": Entry(matmuls, (8, 128, 20), (2, 9, 3), "matrices side by side x size x times"),
    **{name: Entry(_pointwise(made), *_ROWS) for name, made in _FUNCTIONS.items() if name != "relu"},
    "softmax": Entry(
        _simple("softmax", softmaxes.softmax, lambda v: v.softmax(-1), 3.0), (12, 128, 128), (2, 3, 7),
        "heads x queries x keys",
    ),
    "layernorm": Entry(layernorm, (128, 768), (3, 16), "rows x columns"),
    "argmax": Entry(
        _simple("argmax", fixed_argmax, lambda v: v.argmax(-1).double(), 3.0), (1, 50272), (3, 21), "rows x columns",
    ),
    "opt-layer": Entry(layers.opt_layer, _LAYER, _TINY_LAYER, _LAYER_DIMS),
    "bert-layer": Entry(layers.bert_layer, _LAYER, _TINY_LAYER, _LAYER_DIMS),
    "opt-decode": Entry(layers.opt_decode, _LAYER, _TINY_LAYER, _LAYER_DIMS.replace("tokens", "cached tokens")),
    "gpt2-forward": Entry(
        whole.gpt2_forward, (1, 32, 768, 12, 12, 50257), (2, 4, 16, 2, 1, 40),
        "batch x tokens x hidden x heads x layers x vocabulary",
    ),
    "generate": Entry(whole.generate, (1, 16, 32), (1, 4, 2), "batch x prompt tokens x new tokens"),
    "smollm2": Entry(whole.smollm2, (1, 37), (1, 3), "batch x tokens"),
    "smollm2-prefix": Entry(whole.smollm2, (1, 512, 16), (1, 4, 3), "batch x prefix tokens x tokens"),
    "lenet": Entry(partial(layers.network, "lenet"), (16, 1, 28, 28), (1, 1, 28, 28), _IMAGE_DIMS),
    "alexnet": Entry(partial(layers.network, "alexnet"), (16, 3, 32, 32), (1, 3, 32, 32), _IMAGE_DIMS),
    "vgg16": Entry(partial(layers.network, "vgg16"), (16, 3, 32, 32), (1, 3, 32, 32), _IMAGE_DIMS),
    "resnet50": Entry(partial(layers.network, "resnet50"), *_IMAGENET),
    "vgg16-imagenet": Entry(partial(layers.network, "vgg16-imagenet"), *_IMAGENET),
}  # fmt: skip
NAMES = tuple(ENTRIES)
INSTALLED_APART = ("smollm2", "smollm2-prefix")
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
