"""Ring convolutions of CPU tensors: padding, the choice of kernel, threads."""

import numpy as np
from torch import Tensor
from torch.nn.functional import pad

from private_llm.kernels import matmul, parallel, shapes
from private_llm.kernels.address import ZERO, Array, Zero
from private_llm.kernels.conv import cpu as cpu_conv
from private_llm.kernels.conv.cpu import LANES
from private_llm.kernels.matmul import RATE
from private_llm.kernels.matmul import amx as cpu_amx
from private_llm.kernels.parallel import addresses
from private_llm.kernels.shapes import Pair

_SIDE_BY_SIDE = 4  # from as many images on


def product(
    x: Tensor, w: Tensor, stride: Pair, padding: Pair, dilation: Pair, groups: int, onto: Tensor | None = None
) -> Tensor:  # fmt: skip
    """x * w modulo the ring size, added onto `onto` (contiguous, of the result's shape, changed in place) if given."""
    shapes.check_ring("ring_conv2d", x, w)
    size = shapes.conv2d_size(x.shape, w.shape, stride, padding, dilation, groups)
    made = out = x.new_zeros(size) if onto is None else onto
    if not out.numel() or not w[0].numel():
        return out
    wide, w, images, (above, beside) = x.contiguous(), w.contiguous(), len(x), padding
    together = stride[1] == 1 and size[3] % LANES and images >= _SIDE_BY_SIDE and (groups == 1 or w.shape[1] > 1)
    if together:  # a single image whose rows hold the rows of all images entry by entry
        _, channels, height, width = x.shape
        turned = pad(wide.permute(1, 2, 3, 0), (0, 0, beside, beside, above, above)).contiguous()
        wide = turned.view(1, channels, height + 2 * above, (width + 2 * beside) * images)
        made = x.new_zeros((1, *size[1:3], size[3] * images))
        dilation = (dilation[0], dilation[1] * images)
    elif max(padding):
        wide = pad(wide, (beside, beside, above, above)).contiguous()
    (_, outputs, rows, columns), (_, depth, height, width) = made.shape, w.shape
    image, plane, volume = rows * columns, wide[0, 0].numel(), wide[0].numel()
    # what the kernels know of shapes, in their order: of the padded images, the weights and the windows
    geometry = np.array(
        [columns, image, volume, wide.shape[3], *stride, plane, height, width, *dilation, outputs, depth * plane]
    )
    _spread(addresses(wide, w, made), geometry, (len(wide), groups, outputs, w[0].numel()), ZERO[x.dtype])
    if together:
        out.view(images, -1).add_(made.view(-1, images).T)
    return out


def _spread(at: list[int], geometry: Array, sizes: tuple[int, int, int, int], zero: Zero) -> None:
    """out += x * w by address, of padded images, on as many threads as are worth it: each takes some images, or, of a
    single one, some outputs. sizes: images, groups, outputs, entries of a window.
    """
    (x, w, out), (images, groups, outputs, inner) = at, sizes
    _, image, volume = map(int, geometry[:3])
    pieces = parallel.threads(images * image * outputs * inner / RATE)

    def some_images(first: int, last: int) -> None:
        places = x + first * volume * zero.itemsize, w, out + first * image * outputs * zero.itemsize
        _run(places, geometry, (last - first, groups, outputs, inner), zero)

    def some_outputs(first: int, last: int) -> None:
        places = x, w + first * inner * zero.itemsize, out + first * image * zero.itemsize
        _run(places, geometry, (images, groups, last - first, inner), zero)

    if images >= pieces:
        parallel.run_parallel(some_images, parallel.split_range(images, pieces))
    elif groups == 1:
        parallel.run_parallel(some_outputs, parallel.split_range(outputs, pieces, LANES))
    else:
        some_images(0, images)


def _run(places: tuple[int, int, int], geometry: Array, sizes: tuple[int, int, int, int], zero: Zero) -> None:
    images, groups, outputs, inner = sizes
    positions = images * geometry[1]
    if groups > 1 and groups * geometry[6] == geometry[2]:  # one channel each
        cpu_conv.depthwise(*places, geometry, positions, zero)
    elif cpu_amx.usable() and matmul.tiled(outputs // groups, inner, positions):
        desk = matmul.desk().address  # as large as either needs
        if zero.itemsize == 4:
            cpu_conv.product_by_planes(*places, geometry, groups, outputs, inner, positions, desk)
        else:
            cpu_conv.byte_product(*places, geometry, groups, outputs, inner, positions, desk, zero)
    else:
        cpu_conv.tile_product(*places, geometry, groups, outputs, inner, positions, zero)
