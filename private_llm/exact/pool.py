"""Maxima and sums over windows of images; exact, in rings of 32 and 64 bits.

A maximum over kh x kw is taken along the width first and then along the height: with stride 2 and a 3 x 3 window
that is 6 comparisons an output, not 8, and as many levels. Places outside the image stand for minus infinity; the
windows at the border meet one of their own entries twice instead. Sums are local.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from private_llm.errors import DomainError
from private_llm.exact.maximum import concatenated, larger
from private_llm.kernels.shapes import Pair
from private_llm.tensor.fixed import Fixed

Span = tuple[int, int]


def output_size(size: int, kernel: int, stride: int, padding: int, dilation: int, ceil: bool) -> int:
    """Number of windows along a dimension, as PyTorch counts them; sizes in entries. Raises DomainError for none."""
    room = size + 2 * padding - dilation * (kernel - 1) - 1
    count = (room + stride - 1 if ceil else room) // stride + 1
    if ceil and (count - 1) * stride >= size + padding:
        count -= 1  # the last window would lie outside altogether
    if count < 1:
        raise DomainError(f"pooling: windows of {dilation * (kernel - 1) + 1} do not fit into {size} + 2 * {padding}")
    return count


def max_pool2d(x: Fixed, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, ceil: bool) -> Fixed:
    """Maxima over windows of [..., H, W], |x| < 2^20: each of the two dimensions costs k - 1 comparisons an output.

    57 bytes a comparison (trio, 18 fractional bits, 64-bit ring), ceil(log2 kw) + ceil(log2 kh) levels of 5 rounds.
    Raises DomainError if no window fits or a window lies outside the image altogether.
    """
    for dim in (-1, -2):
        x = _max_along(x, dim, kernel[dim], stride[dim], padding[dim], dilation[dim], ceil)
    return x


def _max_along(x: Fixed, dim: int, kernel: int, stride: int, padding: int, dilation: int, ceil: bool) -> Fixed:
    size = x.shape[dim]
    starts = torch.arange(output_size(size, kernel, stride, padding, dilation, ceil)) * stride - padding
    places = starts + dilation * torch.arange(kernel).unsqueeze(1)  # [kernel, outputs]
    inside = (places >= 0) & (places < size)
    if not bool(inside.any(0).all()):
        raise DomainError(f"max pooling: with padding {padding} a window of {kernel} lies outside the image")
    own = places.gather(0, inside.int().argmax(0, keepdim=True))
    entries = [_picked(x, dim, row) for row in torch.where(inside, places, own)]
    while len(entries) > 1:
        half = len(entries) // 2
        top = larger(concatenated(entries[:half], 0), concatenated(entries[half : 2 * half], 0), coarse=False)
        count = entries[0].shape[0]
        entries = [_rows(top, k * count, (k + 1) * count) for k in range(half)] + entries[2 * half :]
    return entries[0]


def _picked(x: Fixed, dim: int, index: Tensor) -> Fixed:
    return x.view(lambda part: part.index_select(dim, index.to(part.device)))


def _rows(x: Fixed, start: int, stop: int) -> Fixed:
    return x.view(lambda part: part[start:stop])


def spans(size: int, kernel: int, stride: int, padding: int, ceil: bool) -> list[Span]:
    """Windows (first, last + 1) of an average pool along one dimension; they may begin and end outside the image."""
    starts = [window * stride - padding for window in range(output_size(size, kernel, stride, padding, 1, ceil))]
    return [(start, start + kernel) for start in starts]


def adaptive_spans(size: int, count: int) -> list[Span]:
    """`count` windows (first, last + 1) of an adaptive average pool along one dimension of `size` entries."""
    return [(window * size // count, -(-(window + 1) * size // count)) for window in range(count)]


def window_sums(part: Tensor, dim: int, windows: Sequence[Span]) -> Tensor:
    """Sums over windows along `dim` (-1 or -2) of a part, zeros outside; that extent becomes len(windows). Linear."""
    before, after = max(0, -windows[0][0]), max(0, windows[-1][1] - part.shape[dim])
    if before or after:
        part = torch.nn.functional.pad(part, (before, after) if dim == -1 else (0, 0, before, after))
    first, count = windows[0][0] + before, len(windows)
    lengths = {stop - start for start, stop in windows}
    steps = {later[0] - earlier[0] for earlier, later in itertools.pairwise(windows)} or {1}
    if len(lengths) > 1 or len(steps) > 1:
        sums = [part.narrow(dim, a + before, b - a).sum(dim, keepdim=True, dtype=part.dtype) for a, b in windows]
        return torch.cat(sums, dim)
    (step,), (length,) = steps, lengths
    made = _strided(part, dim, first, step, count)
    for k in range(1, length):
        made = made + _strided(part, dim, first + k, step, count)
    return made


def _strided(part: Tensor, dim: int, first: int, step: int, count: int) -> Tensor:
    places = slice(first, first + (count - 1) * step + 1, step)
    return part[..., places] if dim == -1 else part[..., places, :]
