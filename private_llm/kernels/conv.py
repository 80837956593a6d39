"""Ring convolutions of CPU tensors: padding, the choice of kernel, threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn.functional import pad

from private_llm.kernels import matmul, parallel, shapes
from private_llm.kernels.address import ZERO, Zero, addresses
from private_llm.kernels.backends.cpu import amx as cpu_amx
from private_llm.kernels.backends.cpu import conv as cpu_conv
from private_llm.kernels.backends.cpu.conv import LANES
from private_llm.kernels.matmul import RATE
from private_llm.kernels.shapes import Pair

_SIDE_BY_SIDE = 4
"""From as many images on."""


def product(
    x: Tensor, w: Tensor, stride: Pair, padding: Pair, dilation: Pair, groups: int, onto: Tensor | None = None
) -> Tensor:  # fmt: skip
    """x * w modulo the ring size, added onto `onto` (contiguous, of the result's shape, changed in place) if given."""
    shapes.check_ring("ring_conv2d", x, w)
    size = shapes.conv2d_size(x.shape, w.shape, stride, padding, dilation, groups)
    out = x.new_zeros(size) if onto is None else onto
    if not out.numel() or not w[0].numel():
        return out
    x, w = x.contiguous(), w.contiguous()
    if stride[1] == 1 and size[3] % LANES and len(x) >= _SIDE_BY_SIDE and (groups == 1 or w.shape[1] > 1):
        _side_by_side(x, w, out, stride[0], padding, dilation, groups)
        return out
    (above, beside), wide = padding, x
    if max(padding):
        wide = pad(x, (beside, beside, above, above)).contiguous()
    geometry = _geometry(wide, w, size[2:], stride, dilation)
    images, weights, made = addresses(wide, w, out)
    _Task(images, weights, made, geometry, len(x), groups, len(w), w[0].numel(), ZERO[x.dtype]).spread()
    return out


def _geometry(wide: Tensor, w: Tensor, size: Sequence[int], stride: Pair, dilation: Pair) -> np.ndarray[Any, Any]:
    """What the kernels know of shapes, in their order: of the padded images, the weights and the windows."""
    (rows, columns), plane, line = size, wide[0, 0].numel(), wide.shape[3]
    outputs, depth, height, width = w.shape
    image, volume, group = rows * columns, wide[0].numel(), depth * plane
    return np.array([columns, image, volume, line, *stride, plane, height, width, *dilation, outputs, group])


def _side_by_side(
    x: Tensor, w: Tensor, out: Tensor, down: int, padding: Pair, dilation: Pair, groups: int
) -> None:  # fmt: skip
    """out += x * w, as a single image whose rows hold the rows of all images entry by entry."""
    (images, _, height, width), (above, beside) = x.shape, padding
    turned = pad(x.permute(1, 2, 3, 0), (0, 0, beside, beside, above, above))
    wide = turned.contiguous().view(1, -1, height + 2 * above, (width + 2 * beside) * images)
    _, outputs, rows, columns = out.shape
    made = x.new_zeros((outputs, rows, columns * images))
    geometry = _geometry(wide, w, made.shape[1:], (down, 1), (dilation[0], dilation[1] * images))
    line, weights, sums = addresses(wide, w, made)
    _Task(line, weights, sums, geometry, 1, groups, outputs, w[0].numel(), ZERO[x.dtype]).spread()
    out.view(images, -1).add_(made.view(-1, images).T)


@dataclass(frozen=True)
class _Task:
    """out += x * w by address, of padded images; for `geometry` see `_geometry`."""

    x: int
    w: int
    out: int
    geometry: np.ndarray[Any, Any]
    images: int
    groups: int
    outputs: int
    inner: int
    zero: Zero

    def run(self) -> None:
        """In one thread."""
        places, positions = (self.x, self.w, self.out, self.geometry), self.images * self.geometry[1]
        sizes = (self.groups, self.outputs, self.inner, positions)
        if self.groups > 1 and self.groups * self.geometry[6] == self.geometry[2]:  # one channel each
            cpu_conv.depthwise(*places, positions, self.zero)
        elif cpu_amx.usable() and matmul.tiled(self.outputs // self.groups, self.inner, positions):
            desk = matmul.desk()  # as large as either needs
            if self.zero.itemsize == 4:
                cpu_conv.product_by_planes(*places, *sizes, desk.address)
            else:
                cpu_conv.byte_product(*places, *sizes, desk.address, self.zero)
        else:
            cpu_conv.tile_product(*places, *sizes, self.zero)

    def spread(self) -> None:
        """On as many threads as are worth it: each takes some images, or, of a single one, some outputs."""
        seconds = self.images * int(self.geometry[1]) * self.outputs * self.inner / RATE
        pieces = parallel.threads(seconds)
        if self.images >= pieces:
            parallel.run_parallel(self._run_images, parallel.split_range(self.images, pieces))
        elif self.groups == 1:
            parallel.run_parallel(self._run_outputs, parallel.split_range(self.outputs, pieces, LANES))
        else:
            self.run()

    def _run_images(self, first: int, last: int) -> None:
        size = self.zero.itemsize
        x, out = first * int(self.geometry[2]) * size, first * int(self.geometry[1] * self.geometry[11]) * size
        replace(self, images=last - first, x=self.x + x, out=self.out + out).run()

    def _run_outputs(self, first: int, last: int) -> None:
        size = self.zero.itemsize
        w, out = first * self.inner * size, first * int(self.geometry[1]) * size
        replace(self, outputs=last - first, w=self.w + w, out=self.out + out).run()
