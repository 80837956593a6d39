"""Every local kernel under one name: meta tensors get shapes, CPU tensors the fused Numba kernel.

All tensors are signed torch integers; the kernels see them as unsigned. Rows and packed fields are int64 words.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from private_llm.errors import DomainError, UnsupportedOp
from private_llm.kernels import cpu_bits, cpu_trunc, matmul

_UNSIGNED = {torch.int64: np.uint64, torch.int32: np.uint32}


def _np(t: Tensor) -> np.ndarray[Any, Any]:
    """The tensor's memory as unsigned numbers (CPU, contiguous)."""
    if t.device.type != "cpu":
        raise UnsupportedOp(f"no kernel for device {t.device}; want cpu tensors (or meta for cost counting)")
    return t.numpy().view(_UNSIGNED[t.dtype])


def packed_words(count: int, f: int) -> int:
    """64-bit words that hold `count` fields of f bits."""
    return (count * f + 63) // 64


def ring_matmul(x: Tensor, y: Tensor) -> Tensor:
    """torch.matmul modulo the ring size; x [..., M, K], y [..., K, N]; CPU: one thread."""
    if x.is_meta:
        return torch.matmul(x, y)
    return matmul.product(x, y)


def ring_matmul_pair(x0: Tensor, y0: Tensor, x1: Tensor, y1: Tensor) -> Tensor:
    """x0 y0 + x1 y1, both of one shape, as in `ring_matmul`, without a temporary of y's size."""
    if x0.is_meta:
        return torch.matmul(x0, y0)
    if x0.shape != x1.shape or y0.shape != y1.shape:
        shapes = f"{tuple(x0.shape)} {tuple(y0.shape)} and {tuple(x1.shape)} {tuple(y1.shape)}"
        raise DomainError(f"ring_matmul_pair: got {shapes}; want two products of one shape")
    return matmul.product(x1, y1, matmul.product(x0, y0))


def transpose_bits(x: Tensor, rows: int) -> Tensor:
    """Elements [n] to bit rows [rows, ceil(n/64)], least significant bit first."""
    out = torch.empty((rows, (x.numel() + 63) // 64), dtype=torch.int64, device=x.device)
    if not x.is_meta and x.numel():
        cpu_bits.transpose_words(_np(x.contiguous().view(-1)), _np(out))
    return out


def block_monomials(s: Tensor, low: int, blocks: np.ndarray[Any, Any], out: Tensor) -> None:
    """See `cpu_bits.block_monomials` (in place)."""
    if not s.is_meta:
        cpu_bits.block_monomials(_np(s), low, blocks, _np(out))


def block_carries(m: Tensor, low: int, blocks: np.ndarray[Any, Any], mono: Tensor, first: bool, out: Tensor) -> None:
    """See `cpu_bits.block_carries` (in place)."""
    if not m.is_meta:
        cpu_bits.block_carries(_np(m), low, blocks, _np(mono), first, _np(out))


def join_products(lam: Tensor, groups: np.ndarray[Any, Any], count: int, out: Tensor) -> None:
    """See `cpu_bits.join_products` (in place)."""
    if not lam.is_meta:
        cpu_bits.join_products(_np(lam), groups, count, _np(out))


def join_carries(
    b: Tensor, lam: Tensor, prod: Tensor, groups: np.ndarray[Any, Any], count: int, first: bool, out: Tensor
) -> None:
    """See `cpu_bits.join_carries` (in place)."""
    if not b.is_meta:
        cpu_bits.join_carries(_np(b), _np(lam), _np(prod), groups, count, first, _np(out))


def inject_products(bits: Tensor, lam: Tensor, weighted: np.ndarray[Any, Any], out: Tensor) -> None:
    """See `cpu_bits.inject_products` (in place)."""
    if not bits.is_meta and out.numel():
        cpu_bits.inject_products(_np(bits), _np(lam), weighted, _np(out))


def inject_terms(
    bits: Tensor, m: Tensor, mine: Tensor, shares: Tensor, weighted: np.ndarray[Any, Any], w: Tensor, c: Tensor,
    first: bool, out: Tensor,
) -> None:  # fmt: skip
    """See `cpu_bits.inject_terms` (in place)."""
    if not bits.is_meta and out.numel():
        cpu_bits.inject_terms(_np(bits), _np(m), _np(mine), _np(shares), weighted, _np(w), _np(c), first, _np(out))


def trunc_helper(
    error: Tensor, g1: Tensor, g2: Tensor, z1: Tensor, rho1: Tensor, zeta1: Tensor, zeta2: Tensor, f: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Party 0's step of the truncation: (a1, a2, z2, rho2); see `cpu_trunc.helper`."""
    a1, a2, z2 = torch.empty_like(z1), torch.empty_like(z1), torch.empty_like(z1)
    rho2 = torch.zeros(rho1.numel(), dtype=torch.int64, device=z1.device)
    if not z1.is_meta:
        cpu_trunc.helper(
            _np(error), _np(g1), _np(g2), _np(z1), _np(rho1), _np(zeta1), _np(zeta2),
            f, z1.element_size() * 8, _np(a1), _np(a2), _np(z2), _np(rho2),
        )  # fmt: skip
    return a1, a2, z2, rho2


def trunc_open(mine: Tensor, theirs: Tensor, rho: Tensor, zeta: Tensor, f: int) -> tuple[Tensor, Tensor]:
    """Evaluator's first step: (w, packed fields to exchange); see `cpu_trunc.opened`."""
    w = torch.empty_like(mine)
    packed = torch.zeros(rho.numel(), dtype=torch.int64, device=mine.device)
    if not mine.is_meta:
        cpu_trunc.opened(_np(mine), _np(theirs), _np(rho), _np(zeta), f, mine.element_size() * 8, _np(w), _np(packed))
    return w, packed


def trunc_close(w: Tensor, mine: Tensor, theirs: Tensor, z: Tensor, zeta: Tensor, f: int) -> tuple[Tensor, Tensor]:
    """Evaluator's last step: (value plus the other's mask, own mask); see `cpu_trunc.closed`."""
    half, own = torch.empty_like(w), torch.empty_like(w)
    if not w.is_meta:
        cpu_trunc.closed(
            _np(w), _np(mine), _np(theirs), _np(z), _np(zeta), f, w.element_size() * 8,
            _np(half), _np(own),
        )  # fmt: skip
    return half, own
