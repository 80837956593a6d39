"""What every kernel allocates: results by shape, without computing. Checks that do not need values are here too."""

from __future__ import annotations

import torch
from torch import Tensor

from private_llm.errors import DomainError

RING = (torch.int64, torch.int32)


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
        raise DomainError(f"ring_matmul_pair: got {shapes}; want two products of one shape")


def ring_matmul(x: Tensor, y: Tensor) -> Tensor:
    """[..., M, N]."""
    check_product(x, y)
    batch = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    return x.new_empty((*batch, x.shape[-2], y.shape[-1]))


def ring_matmul_pair(x0: Tensor, y0: Tensor, x1: Tensor, y1: Tensor) -> Tensor:
    """[..., M, N]."""
    check_pair(x0, y0, x1, y1)
    return ring_matmul(x0, y0)


def transpose_bits(x: Tensor, rows: int) -> Tensor:
    """[rows, ceil(n / 64)] words."""
    return torch.empty((rows, (x.numel() + 63) // 64), dtype=torch.int64, device=x.device)


def trunc_helper(
    error: Tensor, g1: Tensor, g2: Tensor, z1: Tensor, rho1: Tensor, zeta1: Tensor, zeta2: Tensor, f: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """a1, a2, z2 like z1; rho2 packed and zero."""
    return torch.empty_like(z1), torch.empty_like(z1), torch.empty_like(z1), torch.zeros_like(rho1)


def trunc_open(mine: Tensor, theirs: Tensor, rho: Tensor, zeta: Tensor, f: int) -> tuple[Tensor, Tensor]:
    """w like mine; fields packed and zero."""
    return torch.empty_like(mine), torch.zeros_like(rho)


def trunc_close(w: Tensor, mine: Tensor, theirs: Tensor, z: Tensor, zeta: Tensor, f: int) -> tuple[Tensor, Tensor]:
    """Two like w."""
    return torch.empty_like(w), torch.empty_like(w)


def chacha20(key: Tensor, nonce: Tensor, counter: int, words: int) -> Tensor:
    """[words] of 32 bits."""
    if key.numel() != 8 or nonce.numel() != 3 or key.dtype != torch.int32 or nonce.dtype != torch.int32:
        raise DomainError(
            f"chacha20: got a key of {key.numel()} {key.dtype} and a nonce of {nonce.numel()} {nonce.dtype}; "
            "want 8 and 3 int32 words"
        )
    if not (counter >= 0 and counter + (words + 15) // 16 <= 1 << 32):
        raise DomainError(
            f"chacha20: got {words} words from block {counter}; want blocks 0 to 2^32 - 1 (use another nonce)"
        )
    return torch.empty(words, dtype=torch.int32, device=key.device)


def nothing(*arguments: object) -> None:
    """Operations that only change an argument allocate nothing."""
