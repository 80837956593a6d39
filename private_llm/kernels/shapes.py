"""What every kernel allocates: results by shape, without computing. Checks that do not need values are here too."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from private_llm.errors import DomainError

RING = (torch.int64, torch.int32)

Size = Sequence[int]
Pair = tuple[int, int]


@lru_cache(maxsize=1024)
def broadcast(x: torch.Size, y: torch.Size) -> torch.Size:
    """`torch.broadcast_shapes`, which takes 20 microseconds; a model asks for the same few."""
    made: torch.Size = torch.broadcast_shapes(x, y)
    return made


def check_ring(name: str, x: Tensor, y: Tensor) -> None:
    """Raise DomainError unless both are ring tensors of one dtype."""
    if x.dtype != y.dtype or x.dtype not in RING:
        raise DomainError(f"{name}: got {x.dtype} and {y.dtype}; want int64 or int32, both the same")


def check_product(x: Tensor, y: Tensor) -> None:
    """Raise DomainError unless x [..., M, K] and y [..., K, N] are ring tensors of one dtype."""
    if x.dim() < 2 or y.dim() < 2 or x.shape[-1] != y.shape[-2]:
        raise DomainError(f"ring_matmul: got {tuple(x.shape)} and {tuple(y.shape)}; want [..., M, K] and [..., K, N]")
    check_ring("ring_matmul", x, y)


def unlike_pair(x0: Tensor, y0: Tensor, x1: Tensor, y1: Tensor) -> DomainError:
    """The error for two products that do not have one shape."""
    shapes = f"{tuple(x0.shape)} {tuple(y0.shape)} and {tuple(x1.shape)} {tuple(y1.shape)}"
    return DomainError(f"a pair of products: got {shapes}; want two products of one shape")


def ring_matmul(x: Tensor, y: Tensor) -> Tensor:
    """[..., M, N]."""
    check_product(x, y)
    batch = broadcast(x.shape[:-2], y.shape[:-2])
    return x.new_empty((*batch, x.shape[-2], y.shape[-1]))


def listed_size(name: str, x: Tensor, y: Tensor, listed: Tensor) -> tuple[int, int]:
    """(M, N) of the operands of `name`: x [M, K], y, and int64 `listed`, rows of y. Raises DomainError for other sizes
    or two dtypes.
    """
    turned = name == "ring_matmul_rows"
    wanted = y.shape[1:] if turned else listed.shape
    if x.dim() != 2 or y.dim() != 2 or listed.dim() != 1 or x.shape[-1:] != wanted or listed.dtype != torch.int64:
        raise DomainError(
            f"{name}: got {tuple(x.shape)}, {tuple(y.shape)} and {listed.dtype} numbers {tuple(listed.shape)}; want "
            + ("[M, K], [N, K]" if turned else "[M, R], [K, N]")
            + " and int64 [R]"
        )
    check_ring(name, x, y)
    return x.shape[0], listed.shape[0] if turned else y.shape[1]


def conv2d_size(
    x: Size, w: Size, stride: Pair, padding: Pair, dilation: Pair, groups: int
) -> tuple[int, int, int, int]:  # fmt: skip
    """(B, O, rows, columns) of a convolution of sizes x [B, C, H, W] and w [O, C / groups, kh, kw].

    Raises DomainError for sizes that do not fit each other, a stride or dilation below 1, and a padding below 0.
    """
    if len(x) != 4 or len(w) != 4 or groups < 1 or x[1] != groups * w[1] or w[0] % groups:
        raise DomainError(
            f"ring_conv2d: got {tuple(x)}, {tuple(w)} and {groups} groups; "
            "want [B, C, H, W] and [O, C / groups, kh, kw]"
        )
    if min(stride) < 1 or min(dilation) < 1 or min(padding) < 0:
        raise DomainError(f"ring_conv2d: got stride {stride}, padding {padding}, dilation {dilation}; want positive")
    spans = [x[2 + i] + 2 * padding[i] - dilation[i] * (w[2 + i] - 1) - 1 for i in range(2)]
    if min(spans) < 0:
        raise DomainError(f"ring_conv2d: windows of {tuple(w[2:])} do not fit {tuple(x[2:])} with padding {padding}")
    return x[0], w[0], spans[0] // stride[0] + 1, spans[1] // stride[1] + 1


def ring_conv2d(x: Tensor, w: Tensor, stride: Pair, padding: Pair, dilation: Pair, groups: int) -> Tensor:
    """[B, O, rows, columns]."""
    check_ring("ring_conv2d", x, w)
    return x.new_empty(conv2d_size(x.shape, w.shape, stride, padding, dilation, groups))
