"""Pooling of secret images [B, C, H, W] or [C, H, W]."""

import torch
import torch.nn.functional as F

from private_llm.errors import DomainError, UnsupportedOp
from private_llm.exact.pool import Span, adaptive_spans, max_pool2d, spans, window_sums
from private_llm.kernels.shapes import Pair
from private_llm.ranges import REACH
from private_llm.tensor.dispatch import TorchArg, implements
from private_llm.tensor.ops_conv import pair
from private_llm.tensor.ops_view import mean_of
from private_llm.tensor.range_check import watch_compared
from private_llm.tensor.secret import SecretTensor


def _check(name: str, x: SecretTensor, kernel: Pair, padding: Pair) -> None:
    if x.ndim not in (3, 4):
        raise DomainError(f"{name}: got shape {tuple(x.shape)}; want [batch, channels, height, width]")
    if any(2 * pad > size for pad, size in zip(padding, kernel, strict=True)):
        raise DomainError(f"{name}: got padding {padding}; want at most half of the window {kernel}")


@implements(torch.max_pool2d, F.max_pool2d)
def max_pool2d_rule(
    x: SecretTensor, kernel_size: TorchArg, stride: TorchArg = None, padding: TorchArg = 0, dilation: TorchArg = 1,
    ceil_mode: bool = False, return_indices: bool = False,
) -> SecretTensor:  # fmt: skip
    """Maxima over windows of [B, C, H, W] or [C, H, W]; `exact.pool.max_pool2d`, at its cost, |x| < 2^20.

    Raises UnsupportedOp for return_indices, DomainError for other shapes, padding above half the window, no window.
    """
    if return_indices:
        raise UnsupportedOp("max_pool2d with return_indices: where a maximum was stays secret")
    kernel = pair(kernel_size)
    _check("max_pool2d", x, kernel, pair(padding))
    step = kernel if stride is None or stride == [] else pair(stride)
    watch_compared(x, x.session.frac + REACH)
    return SecretTensor(max_pool2d(x.to_fixed(), kernel, step, pair(padding), pair(dilation), ceil_mode))


@implements(F.avg_pool2d)
def avg_pool2d_rule(
    x: SecretTensor, kernel_size: TorchArg, stride: TorchArg = None, padding: TorchArg = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None,
) -> SecretTensor:  # fmt: skip
    """Means over windows of [B, C, H, W] or [C, H, W], in range wherever the mean is (tensor/ops_view.py).

    Local where windows count fewer than 16 entries, or all the same power of two (18 fractional bits, 64-bit ring);
    else 1 truncation of the outputs, 1 round. Windows of more than 2^f entries truncate their sums. Raises DomainError
    for other shapes, a padding above half the window, or no window.
    """
    kernel, pads = pair(kernel_size), pair(padding)
    _check("avg_pool2d", x, kernel, pads)
    step = kernel if stride is None or stride == [] else pair(stride)
    rows, columns = (spans(x.shape[dim], kernel[dim], step[dim], pads[dim], ceil_mode) for dim in (-2, -1))
    outside = pads if count_include_pad else (0, 0)
    sizes = _lengths(rows, x.shape[-2], outside[0]), _lengths(columns, x.shape[-1], outside[1])
    return _means(x, rows, columns, sizes, divisor_override)


@implements(F.adaptive_avg_pool2d)
def adaptive_avg_pool2d_rule(x: SecretTensor, output_size: TorchArg) -> SecretTensor:
    """Means over as many windows (height, width) as asked for: [.., H, W] to [.., height, width].

    None keeps that extent. Cost, error and DomainError as `avg_pool2d_rule`.
    """
    _check("adaptive_avg_pool2d", x, (1, 1), (0, 0))
    wanted = (output_size, output_size) if output_size is None or isinstance(output_size, int) else output_size
    rows, columns = (
        adaptive_spans(x.shape[dim], x.shape[dim] if count is None else count)
        for dim, count in zip((-2, -1), wanted, strict=True)
    )
    return _means(x, rows, columns, (_lengths(rows, x.shape[-2]), _lengths(columns, x.shape[-1])))


@implements(F.adaptive_avg_pool1d)
def adaptive_avg_pool1d_rule(x: SecretTensor, output_size: TorchArg) -> SecretTensor:
    """Means over as many windows of the last dimension of [B, C, L]; else as `adaptive_avg_pool2d_rule`."""
    count = output_size if isinstance(output_size, int) else output_size[0]
    made = adaptive_avg_pool2d_rule(x.viewed(lambda part: part.unsqueeze(-2)), (1, count))
    return made.viewed(lambda part: part.squeeze(-2))


def _lengths(windows: list[Span], size: int, padding: int = 0) -> list[int]:
    """How many entries count in each window."""
    return [min(stop, size + padding) - max(start, -padding) for start, stop in windows]


def _means(
    x: SecretTensor, rows: list[Span], columns: list[Span], sizes: tuple[list[int], list[int]],
    divisor: int | None = None,
) -> SecretTensor:  # fmt: skip
    """Sums over windows divided by their (public) sizes, or all by one number."""
    tall, wide = sizes
    counts: int | torch.Tensor
    if divisor is not None:
        counts = divisor
    elif len({*tall}) == len({*wide}) == 1:
        counts = tall[0] * wide[0]
    else:
        counts = torch.outer(torch.tensor(tall), torch.tensor(wide))
    longest = max(stop - start for start, stop in columns), max(stop - start for start, stop in rows)
    across, down = (lambda part: window_sums(part, -1, columns)), (lambda part: window_sums(part, -2, rows))
    return SecretTensor(mean_of(x, across, down, longest, counts))
