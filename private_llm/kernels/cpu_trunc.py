"""Fused local steps of the wrap-free truncation on the CPU (Numba, GIL-free), with f-bit packing.

Arrays are unsigned (32 or 64 bits); packed arrays are uint64 words holding f-bit fields back to back,
with one spare word at the end so that a field may straddle.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

Array = np.ndarray[Any, Any]


@njit(nogil=True, cache=True, inline="always")
def _field(words: Array, i: int, f: int, mask: np.uint64) -> np.uint64:
    at = i * f
    word = at >> 6
    off = at & 63
    value = words[word] >> np.uint64(off)
    if off + f > 64:
        value |= words[word + 1] << np.uint64(64 - off)
    return np.uint64(value & mask)


@njit(nogil=True, cache=True, inline="always")
def _put(words: Array, i: int, f: int, value: np.uint64) -> None:
    at = i * f
    word = at >> 6
    off = at & 63
    words[word] |= value << np.uint64(off)
    if off + f > 64:
        words[word + 1] |= value >> np.uint64(64 - off)


@njit(nogil=True, cache=True)
def helper(
    error: Array,
    g1: Array,
    g2: Array,
    z1: Array,
    rho1: Array,
    zeta1: Array,
    zeta2: Array,
    f: int,
    bits: int,
    a1: Array,
    a2: Array,
    z2: Array,
    rho2: Array,
) -> None:
    """Party 0: R = error + g1 + g2; z2 = (R >> f) - z1; rho2 = msb(R) - rho1 mod 2^f; masks a1, a2 of the result."""
    mask = np.uint64((1 << f) - 1)
    kind = error.dtype.type
    up = kind(bits - f)
    down = kind(f)
    top = kind(bits - 1)
    for i in range(z1.size):
        r = kind(error[i] + g1[i] + g2[i])  # Numba widens 32-bit sums
        rest = (r >> down) - z1[i]
        z2[i] = rest
        _put(rho2, i, f, (np.uint64(r >> top) - _field(rho1, i, f, mask)) & mask)
        a1[i] = z1[i] + (kind(_field(zeta1, i, f, mask)) << up)
        a2[i] = rest + (kind(_field(zeta2, i, f, mask)) << up)


@njit(nogil=True, cache=True)
def opened(mine: Array, theirs: Array, rho: Array, zeta: Array, f: int, bits: int, w: Array, packed: Array) -> None:
    """Evaluator: w = mine + theirs + 2^(bits-2); packed = (1 - msb(w)) * rho + zeta mod 2^f, to be exchanged."""
    mask = np.uint64((1 << f) - 1)
    kind = w.dtype.type
    offset = kind(1) << kind(bits - 2)
    top = kind(bits - 1)
    for i in range(w.size):
        value = kind(mine[i] + theirs[i] + offset)
        w[i] = value
        field = _field(zeta, i, f, mask)
        if not (value >> top):
            field += _field(rho, i, f, mask)
        _put(packed, i, f, field & mask)


@njit(nogil=True, cache=True)
def closed(
    w: Array, mine: Array, theirs: Array, z: Array, zeta: Array, f: int, bits: int, half: Array, own: Array
) -> None:
    """Evaluator: own = z + zeta 2^(bits-f); half = (w >> f) + (mine + theirs) 2^(bits-f) - 2^(bits-2-f) - own."""
    mask = np.uint64((1 << f) - 1)
    kind = w.dtype.type
    up = kind(bits - f)
    down = kind(f)
    offset = kind(1) << kind(bits - 2 - f)
    for i in range(w.size):
        wraps = _field(mine, i, f, mask) + _field(theirs, i, f, mask)
        a = z[i] + (kind(_field(zeta, i, f, mask)) << up)
        own[i] = a
        half[i] = (w[i] >> down) + (kind(wraps & mask) << up) - offset - a
