"""The local steps of a checked truncation (protocols/quad/arithmetic.py), fused on the CPU.

Elsewhere (GPUs, meta tensors) each is a composition of the kernels in `ops`, which is also what the tests compare
the fused ones with. All operands are rows [n] of ring elements, or words of f-bit fields as `ops.trunc_helper` packs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from private_llm.kernels import ops
from private_llm.kernels.address import ZERO, addresses
from private_llm.kernels.backends.cpu import trunc as cpu_trunc


def opening(first: Tensor, second: Tensor, summands: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """(R, first + second + R + 2^(bits-2)) with R the sum of the summands."""
    e, g1, g2 = summands
    if not first.is_cpu:
        r = e + g1 + g2
        return r, first + second + r + (1 << (r.element_size() * 8 - 2))
    r, value = torch.empty_like(g1), torch.empty_like(g1)
    operands = addresses(first, second, e, g1, g2)
    cpu_trunc.opening(*operands, r.numel(), ZERO[r.dtype], *addresses(r, value))
    return r, value


def told(
    w: Tensor, t1: Tensor, t2: Tensor, t3: Tensor, half: Tensor, own: Tensor, f: int, composed: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(u, high, beta, value): the new mask, what party 0 is told of w, and the value to be recorded.

    u = t1 + t3 2^(bits-f); high = (~w >> f) - t1; beta = 1 - msb(w) - t2 mod 2^f; value = half + own + u.
    """
    if composed or not w.is_cpu:
        none, no_fields = torch.zeros_like(w), torch.zeros_like(t2)
        u, _, high, beta = ops.trunc_helper(~w, none, none, t1, t2, t3, no_fields, f, f)
        return u, high, beta, half + own + u
    u, high, value, beta = torch.empty_like(w), torch.empty_like(w), torch.empty_like(w), torch.zeros_like(t2)
    operands = addresses(w, t1, t2, t3, half, own)
    cpu_trunc.told(*operands, f, w.numel(), ZERO[w.dtype], *addresses(u, high, beta, value))
    return u, high, beta, value


def piece(
    summands: tuple[Tensor, Tensor, Tensor], t1: Tensor, t2: Tensor, t3: Tensor, f: int, composed: bool = False
) -> tuple[Tensor, Tensor]:
    """(fields, u): fields = msb(R) t2 + t3 mod 2^f; u = t1 + t3 2^(bits-f), with R the sum of the summands."""
    e, g1, g2 = summands
    if composed or not t1.is_cpu:
        r = e + g1 + g2
        w, fields = ops.trunc_open(_turned(r), torch.zeros_like(r), t2, t3, f, f)
        return fields, ops.trunc_close(w, fields, torch.zeros_like(t2), t1, t3, f, f)[1]
    fields, u = torch.zeros_like(t2), torch.empty_like(t1)
    operands = addresses(e, g1, g2, t1, t2, t3)
    cpu_trunc.piece(*operands, f, t1.numel(), ZERO[t1.dtype], *addresses(fields, u))
    return fields, u


def part(
    r: Tensor, beta: Tensor, theirs: Tensor, high: Tensor, a1: Tensor, a2: Tensor, f: int, composed: bool = False
) -> tuple[Tensor, Tensor]:
    """(made, made + a1 + a2): made = (~r >> f) + (msb(r) beta + theirs) 2^(bits-f) - 2^(bits-2-f) - high."""
    if composed or not r.is_cpu:
        none = torch.zeros_like(beta)
        w, fields = ops.trunc_open(_turned(r), torch.zeros_like(r), beta, none, f, f)
        made = ops.trunc_close(w, fields, theirs, high, none, f, f)[0]
        return made, made + a1 + a2
    made, value = torch.empty_like(r), torch.empty_like(r)
    operands = addresses(r, beta, theirs, high, a1, a2)
    cpu_trunc.part(*operands, f, r.numel(), ZERO[r.dtype], *addresses(made, value))
    return made, value


def _turned(r: Tensor) -> Tensor:
    """~r less the 2^(bits-2) that `ops.trunc_open` adds."""
    return ~r - (1 << (r.element_size() * 8 - 2))
