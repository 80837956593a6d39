"""Ring convolutions: the choice of kernel for CPU tensors, and any convolution as a matrix product of windows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from private_llm.kernels import cpu_amx, cpu_conv, cpu_conv_amx, matmul, parallel, shapes
from private_llm.kernels.address import memory
from private_llm.kernels.cpu_conv import LANES
from private_llm.kernels.matmul import RATE
from private_llm.kernels.shapes import Pair

_ZERO: dict[torch.dtype, np.unsignedinteger[Any]] = {torch.int64: np.uint64(0), torch.int32: np.uint32(0)}


def product(
    x: Tensor, w: Tensor, stride: Pair, padding: Pair, dilation: Pair, groups: int, onto: Tensor | None = None
) -> Tensor:  # fmt: skip
    """x * w modulo the ring size, added onto `onto` (contiguous, of the result's shape, changed in place) if given."""
    shapes.check_conv2d(x, w)
    size = shapes.conv2d_size(x.shape, w.shape, stride, padding, dilation, groups)
    out = x.new_zeros(size) if onto is None else onto
    if not out.numel() or not w[0].numel():
        return out
    wide, w = _padded(x, padding).contiguous(), w.contiguous()
    _, outputs, rows, columns = size
    depth, height, width = w.shape[1:]
    volume, plane, line = wide[0].numel(), wide[0, 0].numel(), wide.shape[3]
    plan = np.array(
        [columns, rows * columns, volume, line, *stride, plane, height, width, *dilation, outputs, depth * plane]
    )
    _Task(memory(wide), memory(w), memory(out), plan, len(x), groups, outputs, w[0].numel(), _ZERO[x.dtype]).spread()
    return out


@dataclass(frozen=True)
class _Task:
    """out += x * w by address; `plan` as in `product`: what the kernels know of shapes, in their order."""

    x: int
    w: int
    out: int
    plan: np.ndarray[Any, Any]
    images: int
    groups: int
    outputs: int
    inner: int
    zero: np.unsignedinteger[Any]

    def run(self) -> None:
        """In one thread."""
        places, positions = (self.x, self.w, self.out, self.plan), self.images * self.plan[1]
        sizes = (self.groups, self.outputs, self.inner, positions)
        if self.groups > 1 and self.groups * self.plan[6] == self.plan[2]:  # one channel each
            cpu_conv.depthwise(*places, positions, self.zero)
        elif cpu_amx.usable() and matmul.tiled(self.outputs // self.groups, self.inner, positions):
            cpu_conv_amx.product(*places, *sizes, matmul.desk().address, self.zero)
        else:
            cpu_conv.tile_product(*places, *sizes, self.zero)

    def spread(self) -> None:
        """On as many threads as are worth it: each takes some images, or, of a single one, some outputs."""
        seconds = self.images * int(self.plan[1]) * self.outputs * self.inner / RATE
        pieces = parallel.threads(seconds)
        if self.images >= pieces:
            parallel.each(self._run_images, parallel.cuts(self.images, pieces))
        elif self.groups == 1:
            parallel.each(self._run_outputs, parallel.cuts(self.outputs, pieces, LANES))
        else:
            self.run()

    def _run_images(self, first: int, last: int) -> None:
        size = self.zero.itemsize
        x, out = first * int(self.plan[2]) * size, first * int(self.plan[1] * self.plan[11]) * size
        replace(self, images=last - first, x=self.x + x, out=self.out + out).run()

    def _run_outputs(self, first: int, last: int) -> None:
        size = self.zero.itemsize
        w, out = first * self.inner * size, first * int(self.plan[1]) * size
        replace(self, outputs=last - first, w=self.w + w, out=self.out + out).run()


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
