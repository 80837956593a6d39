"""Works on single operations: products, comparisons and the approximated functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from private_llm.bench.work import Shape, Work
from private_llm.protocols.session import Session
from private_llm.tensor.fixed import Fixed


def relu(shape: Shape) -> Work:
    """max(x, 0)."""
    return _unary("relu", shape, lambda x: x.choose(x.proto.invert(x.below([0.0])), [1], [0.0]), torch.relu, 4.0)


def mul(shape: Shape) -> Work:
    """Elementwise product of two secrets, truncated."""
    return Work("mul", shape, (shape, shape), _mul, lambda v: v[0] * v[1], (2.0, 2.0))


def matmul(shape: Shape) -> Work:
    """[M, K] x [K, N], both secret, truncated; the shape is M x K x N."""
    m, k, n = shape
    return Work("matmul", shape, ((m, k), (k, n)), _matmul, lambda v: v[0] @ v[1], (1.0, 1.0))


def _mul(session: Session, inputs: Sequence[Fixed]) -> Fixed:
    return inputs[0].mul(inputs[1])


def _matmul(session: Session, inputs: Sequence[Fixed]) -> Fixed:
    return inputs[0].matmul(inputs[1])


def _unary(
    name: str, shape: Shape, run: Callable[[Fixed], Fixed], truth: Callable[[Tensor], Tensor], spread: float,
    uniform: bool = False,
) -> Work:  # fmt: skip
    """A function of one secret tensor."""

    def work(session: Session, inputs: Sequence[Fixed]) -> Fixed:
        return run(inputs[0])

    return Work(name, shape, (shape,), work, lambda values: truth(values[0]), (spread,), uniform)
