"""Ring convolutions on GPUs: windows laid out by torch, multiplied by the Triton matrix product."""

from __future__ import annotations

from torch import Tensor

from private_llm.kernels import conv, shapes, triton_matmul
from private_llm.kernels.shapes import Pair


def product(
    x: Tensor, w: Tensor, stride: Pair, padding: Pair, dilation: Pair, groups: int, onto: Tensor | None = None
) -> Tensor:  # fmt: skip
    """x * w modulo the ring size, plus `onto` if given."""
    made = shapes.ring_conv2d(x, w, stride, padding, dilation, groups)
    cut, kernel = conv.operands(x, w, stride, padding, dilation, groups)
    out = triton_matmul.product(kernel, cut).reshape(made.shape)
    return out if onto is None else out + onto
