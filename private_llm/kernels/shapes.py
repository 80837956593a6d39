"""What every kernel allocates: results by shape, without computing. Checks that do not need values are here too."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from private_llm.errors import DomainError

RING = (torch.int64, torch.int32)

Size = Sequence[int]
Pair = Sequence[int]


@lru_cache(maxsize=1024)
def broadcast(x: torch.Size, y: torch.Size) -> torch.Size:
    """`torch.broadcast_shapes`, which takes 20 microseconds; a model asks for the same few."""
    made: torch.Size = torch.broadcast_shapes(x, y)
    return made


def packed_words(count: int, f: int) -> int:
    """64-bit words that hold `count` fields of f bits."""
    return (count * f + 63) // 64


def check_product(x: Tensor, y: Tensor) -> None:
    """Raise DomainError unless x [..., M, K] and y [..., K, N] are ring tensors of one dtype."""
    if x.dim() < 2 or y.dim() < 2 or x.shape[-1] != y.shape[-2]:
        raise DomainError(f"ring_matmul: got {tuple(x.shape)} and {tuple(y.shape)}; want [..., M, K] and [..., K, N]")
    if x.dtype != y.dtype or x.dtype not in RING:
        raise DomainError(f"ring_matmul: got {x.dtype} and {y.dtype}; want int64 or int32, both the same")


def check_pair(x0: Tensor, y0: Tensor, x1: Tensor, y1: Tensor) -> None:
    """Raise DomainError unless both products have one shape."""
    if x0.shape != x1.shape or y0.shape != y1.shape:
        shapes = f"{tuple(x0.shape)} {tuple(y0.shape)} and {tuple(x1.shape)} {tuple(y1.shape)}"
        raise DomainError(f"a pair of products: got {shapes}; want two products of one shape")


def ring_matmul(x: Tensor, y: Tensor) -> Tensor:
    """[..., M, N]."""
    check_product(x, y)
    batch = broadcast(x.shape[:-2], y.shape[:-2])
    return x.new_empty((*batch, x.shape[-2], y.shape[-1]))


def ring_matmul_pair(x0: Tensor, y0: Tensor, x1: Tensor, y1: Tensor) -> Tensor:
    """[..., M, N]."""
    check_pair(x0, y0, x1, y1)
    return ring_matmul(x0, y0)


def check_listed(name: str, x: Tensor, y: Tensor, listed: Tensor, has: Size, wants: Size) -> None:
    """Raise DomainError unless x, y are ring matrices of one dtype, x of inner size `wants`, and the list fits."""
    if x.dim() != 2 or y.dim() != 2 or listed.dim() != 1 or tuple(has) != tuple(wants) or listed.dtype != torch.int64:
        raise DomainError(
            f"{name}: got {tuple(x.shape)}, {tuple(y.shape)} and {listed.dtype} numbers {tuple(listed.shape)}; want "
            + ("[M, K], [N, K]" if name.endswith("rows") else "[M, R], [K, N]")
            + " and int64 [R]"
        )
    if x.dtype != y.dtype or x.dtype not in RING:
        raise DomainError(f"{name}: got {x.dtype} and {y.dtype}; want int64 or int32, both the same")


def ring_matmul_rows(x: Tensor, y: Tensor, rows: Tensor) -> Tensor:
    """[M, R]."""
    check_listed("ring_matmul_rows", x, y, rows, x.shape[-1:], y.shape[1:])
    return x.new_empty((x.shape[0], rows.shape[0]))


def ring_matmul_rows_pair(x0: Tensor, y0: Tensor, x1: Tensor, y1: Tensor, rows: Tensor) -> Tensor:
    """[M, R]."""
    check_pair(x0, y0, x1, y1)
    return ring_matmul_rows(x0, y0, rows)


def ring_matmul_lines(x: Tensor, y: Tensor, lines: Tensor) -> Tensor:
    """[M, N]."""
    check_listed("ring_matmul_lines", x, y, lines, x.shape[-1:], lines.shape)
    return x.new_empty((x.shape[0], y.shape[1]))


def ring_matmul_lines_pair(x0: Tensor, y0: Tensor, x1: Tensor, y1: Tensor, lines: Tensor) -> Tensor:
    """[M, N]."""
    check_pair(x0, y0, x1, y1)
    return ring_matmul_lines(x0, y0, lines)


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


def check_conv2d(x: Tensor, w: Tensor) -> None:
    """Raise DomainError unless both are ring tensors of one dtype."""
    if x.dtype != w.dtype or x.dtype not in RING:
        raise DomainError(f"ring_conv2d: got {x.dtype} and {w.dtype}; want int64 or int32, both the same")


def ring_conv2d(x: Tensor, w: Tensor, stride: Pair, padding: Pair, dilation: Pair, groups: int) -> Tensor:
    """[B, O, rows, columns]."""
    check_conv2d(x, w)
    return x.new_empty(conv2d_size(x.shape, w.shape, stride, padding, dilation, groups))


def ring_conv2d_pair(
    x0: Tensor, w0: Tensor, x1: Tensor, w1: Tensor, stride: Pair, padding: Pair, dilation: Pair, groups: int
) -> Tensor:  # fmt: skip
    """[B, O, rows, columns]."""
    check_pair(x0, w0, x1, w1)
    return ring_conv2d(x0, w0, stride, padding, dilation, groups)


def transpose_bits(x: Tensor, rows: int) -> Tensor:
    """[rows, ceil(n / 64)] words."""
    return torch.empty((rows, (x.numel() + 63) // 64), dtype=torch.int64, device=x.device)


def check_fields(f: int) -> None:
    """Raise DomainError unless fields of f bits fit 64-bit elements, less one."""
    if not 1 <= f <= 63:
        raise DomainError(f"fields: got {f} bits; want 1 to 63")


def pack_fields(values: Tensor, f: int) -> Tensor:
    """[packed_words] of 64 bits, zero. Raises DomainError for elements of 32 bits, and an impossible f."""
    check_fields(f)
    if values.dtype != torch.int64:
        raise DomainError(f"fields: got {values.dtype}; want int64")
    return torch.zeros(packed_words(values.numel(), f), dtype=torch.int64, device=values.device)


def unpack_fields(words: Tensor, count: int, f: int) -> Tensor:
    """[count] of 64 bits. Raises DomainError for another number of words, and an impossible f."""
    check_fields(f)
    if words.dtype != torch.int64 or words.numel() != packed_words(count, f):
        raise DomainError(
            f"fields: got {words.numel()} {words.dtype}; want {packed_words(count, f)} int64 for {count} of {f} bits"
        )
    return torch.empty(count, dtype=torch.int64, device=words.device)


def trunc_helper(
    error: Tensor, g1: Tensor, g2: Tensor, z1: Tensor, rho1: Tensor, zeta1: Tensor, zeta2: Tensor, f: int, width: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """a1, a2, z2 like z1; rho2 packed and zero."""
    return torch.empty_like(z1), torch.empty_like(z1), torch.empty_like(z1), torch.zeros_like(rho1)


def trunc_open(
    mine: Tensor, theirs: Tensor, rho: Tensor, zeta: Tensor, f: int, width: int
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """w like mine; fields packed and zero."""
    return torch.empty_like(mine), torch.zeros_like(rho)


def trunc_close(
    w: Tensor, mine: Tensor, theirs: Tensor, z: Tensor, zeta: Tensor, f: int, width: int
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Two like w."""
    return torch.empty_like(w), torch.empty_like(w)


def chacha20(key: Tensor, counter: Tensor, offset: int, out: Tensor) -> None:
    """Raises DomainError for another key or counter, and for other results than whole blocks."""
    for name, x, count, dtype in (("key", key, 8, torch.int32), ("counter", counter, 1, torch.int64)):
        if x.numel() != count or x.dtype != dtype:
            raise DomainError(f"chacha20: got a {name} of {x.numel()} {x.dtype}; want {count} {dtype}")
    if out.dtype != torch.int32 or out.numel() % 16 or not out.is_contiguous():
        raise DomainError(
            f"chacha20: got room for {out.numel()} {out.dtype}, strides {out.stride()}; want contiguous int32 words in "
            "whole blocks of 16"
        )


def gather_rows(table: Tensor, index: Tensor) -> Tensor:
    """[n, W]. Raises DomainError unless the table has two dimensions and the numbers are int64 [n]."""
    if table.dim() != 2 or index.dim() != 1 or index.dtype != torch.int64:
        raise DomainError(
            f"gather_rows: got a table {tuple(table.shape)} and {index.dtype} numbers {tuple(index.shape)}; want "
            "[rows, width] and int64 [n]"
        )
    return table.new_empty((index.shape[0], table.shape[1]))


def nothing(*arguments: object) -> None:
    """Operations that only change an argument allocate nothing."""
