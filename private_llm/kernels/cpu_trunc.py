"""Fused local steps of the wrap-free truncation on the CPU (Numba, GIL-free), with f-bit packing.

Arrays are unsigned (32 or 64 bits). A packed array holds one f-bit field per element in ceil(n f / 64) words:
each full block of 512 elements is 64 rows of 8 lanes, lane l of row r being bits r f .. r f + f - 1 of the
f words base + 8 j + l (so packing is eight-lane vector work with uniform shifts); the rest follows back to back.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

Array = np.ndarray[Any, Any]

BLOCK = 512


@njit(nogil=True, cache=True)
def _unpack(words: Array, start: int, count: int, f: int, out: Array) -> None:
    """Fields of elements start .. start+count-1 (a full block, or the tail) into out [512]."""
    mask = np.uint64((1 << f) - 1)
    base = (start >> 9) * 8 * f
    if count == BLOCK:
        for r in range(64):
            at = r * f
            word = base + (at >> 6) * 8
            off = at & 63
            low = np.uint64(off)
            if off + f <= 64:
                for lane in range(8):
                    out[r * 8 + lane] = (words[word + lane] >> low) & mask
            else:
                high = np.uint64(64 - off)
                for lane in range(8):
                    out[r * 8 + lane] = ((words[word + lane] >> low) | (words[word + 8 + lane] << high)) & mask
        return
    for i in range(count):
        at = i * f
        word = base + (at >> 6)
        off = at & 63
        value = words[word] >> np.uint64(off)
        if off + f > 64:
            value |= words[word + 1] << np.uint64(64 - off)
        out[i] = value & mask


@njit(nogil=True, cache=True)
def _pack(fields: Array, start: int, count: int, f: int, words: Array) -> None:
    """The inverse of `_unpack` into zeroed words; fields must be below 2^f."""
    base = (start >> 9) * 8 * f
    if count == BLOCK:
        for r in range(64):
            at = r * f
            word = base + (at >> 6) * 8
            off = at & 63
            low = np.uint64(off)
            for lane in range(8):
                words[word + lane] |= fields[r * 8 + lane] << low
            if off + f > 64:
                high = np.uint64(64 - off)
                for lane in range(8):
                    words[word + 8 + lane] |= fields[r * 8 + lane] >> high
        return
    for i in range(count):
        at = i * f
        word = base + (at >> 6)
        off = at & 63
        words[word] |= fields[i] << np.uint64(off)
        if off + f > 64:
            words[word + 1] |= fields[i] >> np.uint64(64 - off)


@njit(nogil=True, cache=True)
def helper(
    error: Array, g1: Array, g2: Array, z1: Array, rho1: Array, zeta1: Array, zeta2: Array, f: int, bits: int,
    a1: Array, a2: Array, z2: Array, rho2: Array,
) -> None:  # fmt: skip
    """Party 0: R = error + g1 + g2; z2 = (R >> f) - z1; rho2 = msb(R) - rho1 mod 2^f; masks a1, a2 of the result."""
    mask = np.uint64((1 << f) - 1)
    kind = error.dtype.type
    up = kind(bits - f)
    down = kind(f)
    top = kind(bits - 1)
    r_f = np.empty(BLOCK, dtype=np.uint64)
    one_f = np.empty(BLOCK, dtype=np.uint64)
    two_f = np.empty(BLOCK, dtype=np.uint64)
    n = z1.size
    for start in range(0, n, BLOCK):
        count = min(BLOCK, n - start)
        _unpack(rho1, start, count, f, r_f)
        _unpack(zeta1, start, count, f, one_f)
        _unpack(zeta2, start, count, f, two_f)
        for j in range(count):
            i = start + j
            r = kind(error[i] + g1[i] + g2[i])  # Numba widens 32-bit sums
            rest = kind((r >> down) - z1[i])
            z2[i] = rest
            r_f[j] = (np.uint64(r >> top) - r_f[j]) & mask
            a1[i] = z1[i] + (kind(one_f[j]) << up)
            a2[i] = rest + (kind(two_f[j]) << up)
        _pack(r_f, start, count, f, rho2)


@njit(nogil=True, cache=True)
def opened(mine: Array, theirs: Array, rho: Array, zeta: Array, f: int, bits: int, w: Array, packed: Array) -> None:
    """Evaluator: w = mine + theirs + 2^(bits-2); packed = (1 - msb(w)) * rho + zeta mod 2^f, to be exchanged."""
    mask = np.uint64((1 << f) - 1)
    kind = w.dtype.type
    offset = kind(1) << kind(bits - 2)
    top = kind(bits - 1)
    r_f = np.empty(BLOCK, dtype=np.uint64)
    z_f = np.empty(BLOCK, dtype=np.uint64)
    n = w.size
    for start in range(0, n, BLOCK):
        count = min(BLOCK, n - start)
        _unpack(rho, start, count, f, r_f)
        _unpack(zeta, start, count, f, z_f)
        for j in range(count):
            i = start + j
            value = kind(mine[i] + theirs[i] + offset)
            w[i] = value
            wraps = np.uint64(1) - np.uint64(value >> top)
            z_f[j] = (z_f[j] + wraps * r_f[j]) & mask
        _pack(z_f, start, count, f, packed)


@njit(nogil=True, cache=True)
def closed(
    w: Array, mine: Array, theirs: Array, z: Array, zeta: Array, f: int, bits: int, half: Array, own: Array
) -> None:
    """Evaluator: own = z + zeta 2^(bits-f); half = (w >> f) + (mine + theirs) 2^(bits-f) - 2^(bits-2-f) - own."""
    kind = w.dtype.type
    up = kind(bits - f)
    down = kind(f)
    offset = kind(1) << kind(bits - 2 - f)
    m_f = np.empty(BLOCK, dtype=np.uint64)
    t_f = np.empty(BLOCK, dtype=np.uint64)
    z_f = np.empty(BLOCK, dtype=np.uint64)
    n = w.size
    for start in range(0, n, BLOCK):
        count = min(BLOCK, n - start)
        _unpack(mine, start, count, f, m_f)
        _unpack(theirs, start, count, f, t_f)
        _unpack(zeta, start, count, f, z_f)
        for j in range(count):
            i = start + j
            a = kind(z[i] + (kind(z_f[j]) << up))
            own[i] = a
            half[i] = (w[i] >> down) + (kind(m_f[j] + t_f[j]) << up) - offset - a
