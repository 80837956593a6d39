"""Works on single operations: products, comparisons and the approximated functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from private_llm.approx import activations, chosen, norms
from private_llm.exact.argmax import argmax as fixed_argmax
from private_llm.protocols.session import Session
from private_llm.tensor.fixed import Fixed
from private_llm_cli.bench.work import Shape, Work


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


def relu(shape: Shape) -> Work:
    """max(x, 0) for x ~ N(0, 4)."""
    return _work("relu", shape, (shape,), lambda x: activations.relu(x[0]), lambda v: torch.relu(v[0]), (4.0,))


def gelu(shape: Shape) -> Work:
    """GELU (erf) on [-8, 8]."""
    return _wide("gelu", shape, lambda x: chosen.gelu(x, "none"), F.gelu)


def silu(shape: Shape) -> Work:
    """SiLU on [-8, 8]."""
    return _wide("silu", shape, activations.silu, F.silu)


def softmax(shape: Shape) -> Work:
    """Softmax over the last dimension of scores ~ N(0, 3)."""
    return _work("softmax", shape, (shape,), lambda x: chosen.softmax(x[0]), lambda v: v[0].softmax(-1), (3.0,))


def layernorm(shape: Shape) -> Work:
    """Layer norm over the last dimension with secret gain and bias, x ~ N(0, 2)."""
    inputs = (shape, shape[-1:], shape[-1:])
    return replace(_work(
        "layernorm", shape, inputs, lambda x: norms.layer_norm(x[0], x[1], x[2], 1e-5),
        lambda v: F.layer_norm(v[0], shape[-1:], v[1], v[2], 1e-5), (2.0, 1.0, 0.5),
    ), rows=False)  # fmt: skip


def argmax(shape: Shape) -> Work:
    """Index of the largest of each row, x ~ N(0, 3); exact."""
    return _work(
        "argmax", shape, (shape,), lambda x: fixed_argmax(x[0]), lambda v: v[0].argmax(-1).to(torch.float64), (3.0,)
    )


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


def _wide(name: str, shape: Shape, run: Callable[[Fixed], Fixed], truth: Callable[[Tensor], Tensor]) -> Work:
    """A pointwise function over all of [-8, 8]."""
    return _work(name, shape, (shape,), lambda x: run(x[0]), lambda v: truth(v[0]), (8.0,), uniform=True)
