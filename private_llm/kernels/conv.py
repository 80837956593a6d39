"""Ring convolutions of CPU tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from private_llm.kernels import matmul, shapes
from private_llm.kernels.shapes import Pair


def product(
    x: Tensor, w: Tensor, stride: Pair, padding: Pair, dilation: Pair, groups: int, onto: Tensor | None = None
) -> Tensor:  # fmt: skip
    """x * w modulo the ring size, added onto `onto` (contiguous, of the result's shape, changed in place) if given."""
    shapes.check_conv2d(x, w)
    batch, outputs, rows, columns = shapes.conv2d_size(x.shape, w.shape, stride, padding, dilation, groups)
    out = x.new_zeros((batch, outputs, rows, columns)) if onto is None else onto
    if not out.numel() or not w[0].numel():
        return out
    cut, kernel = operands(x, w, stride, padding, dilation, groups)
    matmul.product(kernel, cut, out.view(batch, groups, outputs // groups, rows * columns))
    return out


def operands(
    x: Tensor, w: Tensor, stride: Pair, padding: Pair, dilation: Pair, groups: int
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """A convolution as a matrix product: windows [B, groups, K, positions] and kernels [groups, O / groups, K]."""
    batch, outputs, rows, columns = shapes.conv2d_size(x.shape, w.shape, stride, padding, dilation, groups)
    depth, height, width = w.shape[1:]
    wide = torch.nn.functional.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    b, c, h, v = wide.stride()
    cut = wide.as_strided(
        (batch, groups, depth, height, width, rows, columns),
        (b, depth * c, c, dilation[0] * h, dilation[1] * v, stride[0] * h, stride[1] * v),
    )
    inner = depth * height * width
    return cut.reshape(batch, groups, inner, rows * columns), w.reshape(groups, outputs // groups, inner)
