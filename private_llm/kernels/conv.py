"""Ring convolutions: the choice of kernel for CPU tensors, and any convolution as a matrix product of windows."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from private_llm.kernels import cpu_conv, shapes
from private_llm.kernels.address import memory
from private_llm.kernels.shapes import Pair

_ZERO = {torch.int64: np.uint64(0), torch.int32: np.uint32(0)}


def product(
    x: Tensor, w: Tensor, stride: Pair, padding: Pair, dilation: Pair, groups: int, onto: Tensor | None = None
) -> Tensor:  # fmt: skip
    """x * w modulo the ring size, added onto `onto` (contiguous, of the result's shape, changed in place) if given."""
    shapes.check_conv2d(x, w)
    batch, outputs, rows, columns = shapes.conv2d_size(x.shape, w.shape, stride, padding, dilation, groups)
    out = x.new_zeros((batch, outputs, rows, columns)) if onto is None else onto
    depth, height, width = w.shape[1:]
    if not out.numel() or not w[0].numel():
        return out
    wide, w = _padded(x, padding).contiguous(), w.contiguous()
    volume, plane, line = wide[0].numel(), wide[0, 0].numel(), wide.shape[3]
    plan = np.array(
        [columns, rows * columns, volume, line, *stride, plane, height, width, *dilation, outputs, depth * plane]
    )
    operands, zero = (memory(wide), memory(w), memory(out), plan), _ZERO[x.dtype]
    positions = batch * rows * columns
    if depth == 1 and groups > 1:
        cpu_conv.depthwise(*operands, positions, zero)
    else:
        cpu_conv.tile_product(*operands, groups, math.prod(w.shape[1:]), positions, zero)
    return out


def _padded(x: Tensor, padding: Pair) -> Tensor:
    """Zeros above, below, left and right."""
    down, right = padding
    return torch.nn.functional.pad(x, (right, right, down, down)) if down or right else x


def operands(
    x: Tensor, w: Tensor, stride: Pair, padding: Pair, dilation: Pair, groups: int
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """A convolution as a matrix product: windows [B, groups, K, positions] and kernels [groups, O / groups, K]."""
    batch, outputs, rows, columns = shapes.conv2d_size(x.shape, w.shape, stride, padding, dilation, groups)
    depth, height, width = w.shape[1:]
    wide = _padded(x, padding)
    b, c, h, v = wide.stride()
    cut = wide.as_strided(
        (batch, groups, depth, height, width, rows, columns),
        (b, depth * c, c, dilation[0] * h, dilation[1] * v, stride[0] * h, stride[1] * v),
    )
    inner = depth * height * width
    return cut.reshape(batch, groups, inner, rows * columns), w.reshape(groups, outputs // groups, inner)
