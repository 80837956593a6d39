"""Fused local steps of the checked truncation (`checks`) on the CPU (Numba, GIL-free); operands as in `trunc`."""

from __future__ import annotations

from typing import Any

import numpy as np

from private_llm.kernels.address import WORD, flat
from private_llm.kernels.backends.cpu.trunc import BLOCK, pack, unpack
from private_llm.kernels.compiling import compiled

Zero = np.unsignedinteger[Any]


@compiled
def told(
    w: int, t1: int, t2: int, t3: int, half: int, own: int, f: int, n: int, zero: Zero,
    u: int, high: int, beta: int, value: int,
) -> None:  # fmt: skip
    """u = t1 + t3 2^(bits-f); high = (~w >> f) - t1; beta = 1 - msb(w) - t2 mod 2^f; value = half + own + u."""
    opened, masks, halves, owns = flat(w, n, zero), flat(t1, n, zero), flat(half, n, zero), flat(own, n, zero)
    masks_out, highs, values = flat(u, n, zero), flat(high, n, zero), flat(value, n, zero)
    words = (n * f + 63) // 64
    second, third, packed = flat(t2, words, WORD), flat(t3, words, WORD), flat(beta, words, WORD)
    kind = opened.dtype.type
    mask = kind((1 << f) - 1)
    bits = opened.itemsize * 8
    up, down, top = kind(bits - f), kind(f), kind(bits - 1)
    t_f = np.empty(BLOCK, dtype=kind)
    s_f = np.empty(BLOCK, dtype=kind)
    for start in range(0, n, BLOCK):
        count = min(BLOCK, n - start)
        unpack(second, start, count, f, t_f)
        unpack(third, start, count, f, s_f)
        for j in range(count):
            i = start + j
            turned = kind(~opened[i])
            t_f[j] = kind((turned >> top) - t_f[j]) & mask
            highs[i] = kind((turned >> down) - masks[i])
            made = kind(masks[i] + kind(s_f[j] << up))
            masks_out[i] = made
            values[i] = halves[i] + owns[i] + made
        pack(t_f, start, count, f, packed)


@compiled
def piece(
    e: int, g1: int, g2: int, t1: int, t2: int, t3: int, f: int, n: int, zero: Zero, fields: int, u: int
) -> None:  # fmt: skip
    """fields = msb(e + g1 + g2) t2 + t3 mod 2^f; u = t1 + t3 2^(bits-f)."""
    error, one, two = flat(e, n, zero), flat(g1, n, zero), flat(g2, n, zero)
    masks, masks_out = flat(t1, n, zero), flat(u, n, zero)
    words = (n * f + 63) // 64
    second, third, packed = flat(t2, words, WORD), flat(t3, words, WORD), flat(fields, words, WORD)
    kind = one.dtype.type
    mask = kind((1 << f) - 1)
    bits = one.itemsize * 8
    up, top = kind(bits - f), kind(bits - 1)
    t_f = np.empty(BLOCK, dtype=kind)
    s_f = np.empty(BLOCK, dtype=kind)
    for start in range(0, n, BLOCK):
        count = min(BLOCK, n - start)
        unpack(second, start, count, f, t_f)
        unpack(third, start, count, f, s_f)
        for j in range(count):
            i = start + j
            masks_out[i] = masks[i] + kind(s_f[j] << up)
            r = kind(error[i] + one[i] + two[i])
            t_f[j] = kind((r >> top) * t_f[j] + s_f[j]) & mask
        pack(t_f, start, count, f, packed)


@compiled
def part(
    r: int, beta: int, theirs: int, high: int, a1: int, a2: int, f: int, n: int, zero: Zero, made: int, value: int
) -> None:  # fmt: skip
    """made = (~r >> f) + (msb(r) beta + theirs) 2^(bits-f) - 2^(bits-2-f) - high; value = made + a1 + a2."""
    masked, highs, first, second = flat(r, n, zero), flat(high, n, zero), flat(a1, n, zero), flat(a2, n, zero)
    parts, values = flat(made, n, zero), flat(value, n, zero)
    words = (n * f + 63) // 64
    known, told_fields = flat(beta, words, WORD), flat(theirs, words, WORD)
    kind = masked.dtype.type
    bits = masked.itemsize * 8
    up, down, top = kind(bits - f), kind(f), kind(bits - 1)
    offset = kind(1) << kind(bits - 2 - f)
    b_f = np.empty(BLOCK, dtype=kind)
    t_f = np.empty(BLOCK, dtype=kind)
    for start in range(0, n, BLOCK):
        count = min(BLOCK, n - start)
        unpack(known, start, count, f, b_f)
        unpack(told_fields, start, count, f, t_f)
        for j in range(count):
            i = start + j
            field = kind((masked[i] >> top) * b_f[j] + t_f[j])
            turned = kind(~masked[i])
            own = kind((turned >> down) + kind(field << up) - offset - highs[i])
            parts[i] = own
            values[i] = own + first[i] + second[i]


@compiled
def opening(first: int, second: int, e: int, g1: int, g2: int, n: int, zero: Zero, r: int, value: int) -> None:
    """r = e + g1 + g2; value = first + second + r + 2^(bits-2)."""
    x, y, a, b, c = flat(first, n, zero), flat(second, n, zero), flat(e, n, zero), flat(g1, n, zero), flat(g2, n, zero)
    sums, values = flat(r, n, zero), flat(value, n, zero)
    kind = sums.dtype.type
    offset = kind(1) << kind(sums.itemsize * 8 - 2)
    for i in range(n):
        total = kind(a[i] + b[i] + c[i])
        sums[i] = total
        values[i] = x[i] + y[i] + total + offset
