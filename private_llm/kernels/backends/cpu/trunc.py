"""Fused local steps of the wrap-free truncation on the CPU (Numba, GIL-free), with packed fields.

Operands are addresses (`address`) of n elements of the type of `zero` (uint32 or uint64), or of packed words. Packed
arrays hold one f-bit field per element in ceil(n f / 64) words: each full block of 512 elements is 64 rows of
8 lanes, lane l of row r being bits r f .. r f + f - 1 of the f words base + 8 j + l (so packing is eight-lane vector
work with uniform shifts); the rest follows back to back. A call works on elements begin .. end - 1, whole blocks or
up to the last element, so calls may share the work.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from private_llm.kernels.address import WORD, Read, Written, Zero, flat
from private_llm.kernels.compiling import compiled

Array = np.ndarray[Any, Any]

BLOCK = 512


@compiled
def unpack(words: Array, start: int, count: int, f: int, out: Array) -> None:
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


@compiled
def pack(fields: Array, start: int, count: int, f: int, words: Array) -> None:
    """The inverse of `unpack` into zeroed words; fields must be below 2^f."""
    base = (start >> 9) * 8 * f
    if count == BLOCK:
        for r in range(64):
            at = r * f
            word = base + (at >> 6) * 8
            off = at & 63
            low = np.uint64(off)
            for lane in range(8):
                words[word + lane] |= np.uint64(fields[r * 8 + lane]) << low
            if off + f > 64:
                high = np.uint64(64 - off)
                for lane in range(8):
                    words[word + 8 + lane] |= np.uint64(fields[r * 8 + lane]) >> high
        return
    for i in range(count):
        at = i * f
        word = base + (at >> 6)
        off = at & 63
        words[word] |= np.uint64(fields[i]) << np.uint64(off)
        if off + f > 64:
            words[word + 1] |= np.uint64(fields[i]) >> np.uint64(64 - off)


@compiled
def clear(words: Array, n: int, f: int, begin: int, end: int) -> None:
    """Zeros where fields of elements begin .. end - 1 are going to be packed; whole blocks, or up to the last of n."""
    at = (begin >> 9) * 8 * f
    last = len(words) if end == n else (end >> 9) * 8 * f
    words[at:last] = WORD


@compiled
def pack_fields(values: Read, words: Written, f: int, n: int, zero: Zero, begin: int, end: int) -> None:
    """The lowest f bits of n elements as packed fields."""
    source, made = flat(values, n, zero), flat(words, (n * f + 63) // 64, WORD)
    kind = source.dtype.type
    mask = kind((kind(1) << kind(f)) - kind(1))
    fields = np.empty(BLOCK, dtype=kind)
    clear(made, n, f, begin, end)
    for start in range(begin, end, BLOCK):
        count = min(BLOCK, n - start)
        for j in range(count):
            fields[j] = source[start + j] & mask
        pack(fields, start, count, f, made)


@compiled
def unpack_fields(words: Read, values: Written, f: int, n: int, zero: Zero, begin: int, end: int) -> None:
    """The inverse of `pack_fields`: elements below 2^f."""
    made, source = flat(values, n, zero), flat(words, (n * f + 63) // 64, WORD)
    for start in range(begin, end, BLOCK):
        count = min(BLOCK, n - start)
        unpack(source, start, count, f, made[start : start + count])


@compiled
def trunc_helper(
    error: Read, g1: Read, g2: Read, z1: Read, rho1: Read, zeta1: Read, zeta2: Read, a1: Written, a2: Written,
    z2: Written, rho2: Written, f: int, width: int, n: int, zero: Zero, begin: int, end: int,
) -> None:  # fmt: skip
    """Party 0: R = error + g1 + g2; z2 = (R >> f) - z1; rho2 = msb(R) - rho1 mod 2^width; masks a1, a2."""
    errors, first, second, mask1 = flat(error, n, zero), flat(g1, n, zero), flat(g2, n, zero), flat(z1, n, zero)
    out1, out2, rests = flat(a1, n, zero), flat(a2, n, zero), flat(z2, n, zero)
    words = (n * width + 63) // 64
    rho, zetas1, zetas2 = flat(rho1, words, WORD), flat(zeta1, words, WORD), flat(zeta2, words, WORD)
    packed = flat(rho2, words, WORD)
    kind = errors.dtype.type
    mask = kind((1 << width) - 1)
    bits = errors.itemsize * 8
    up = kind(bits - f)
    down = kind(f)
    top = kind(bits - 1)
    r_f = np.empty(BLOCK, dtype=kind)
    one_f = np.empty(BLOCK, dtype=kind)
    two_f = np.empty(BLOCK, dtype=kind)
    for start in range(begin, end, BLOCK):
        count = min(BLOCK, n - start)
        unpack(rho, start, count, width, r_f)
        unpack(zetas1, start, count, width, one_f)
        unpack(zetas2, start, count, width, two_f)
        stop = start + count
        error_b, first_b, second_b = errors[start:stop], first[start:stop], second[start:stop]
        mask_b = mask1[start:stop]
        out1_b, out2_b, rest_b = out1[start:stop], out2[start:stop], rests[start:stop]
        for j in range(count):
            r = kind(error_b[j] + first_b[j] + second_b[j])  # Numba widens 32-bit sums
            rest = kind((r >> down) - mask_b[j])
            rest_b[j] = rest
            r_f[j] = kind((r >> top) - r_f[j]) & mask
            out1_b[j] = mask_b[j] + kind(one_f[j] << up)
            out2_b[j] = rest + kind(two_f[j] << up)
        pack(r_f, start, count, width, packed)


@compiled
def trunc_open(
    mine: Read, theirs: Read, rho: Read, zeta: Read, w: Written, packed: Written, f: int, width: int, n: int,
    zero: Zero, begin: int, end: int,
) -> None:  # fmt: skip
    """Evaluator: w = mine + theirs + 2^(bits-2); packed = (1 - msb(w)) * rho + zeta mod 2^width, to be exchanged."""
    first, second, out = flat(mine, n, zero), flat(theirs, n, zero), flat(w, n, zero)
    words = (n * width + 63) // 64
    rhos, zetas, fields = flat(rho, words, WORD), flat(zeta, words, WORD), flat(packed, words, WORD)
    kind = out.dtype.type
    mask = kind((1 << width) - 1)
    bits = out.itemsize * 8
    offset = kind(1) << kind(bits - 2)
    top = kind(bits - 1)
    r_f = np.empty(BLOCK, dtype=kind)
    z_f = np.empty(BLOCK, dtype=kind)
    for start in range(begin, end, BLOCK):
        count = min(BLOCK, n - start)
        unpack(rhos, start, count, width, r_f)
        unpack(zetas, start, count, width, z_f)
        stop = start + count
        first_b, second_b, out_b = first[start:stop], second[start:stop], out[start:stop]
        for j in range(count):
            value = kind(first_b[j] + second_b[j] + offset)
            out_b[j] = value
            wraps = kind(kind(1) - (value >> top))
            z_f[j] = kind(z_f[j] + wraps * r_f[j]) & mask
        pack(z_f, start, count, width, fields)


@compiled
def trunc_close(
    w: Read, mine: Read, theirs: Read, z: Read, zeta: Read, half: Written, own: Written, f: int, width: int, n: int,
    zero: Zero, begin: int, end: int,
) -> None:  # fmt: skip
    """Evaluator: own = z + zeta 2^(bits-f); half = (w >> f) + (mine + theirs) 2^(bits-f) - 2^(bits-2-f) - own."""
    values, masks, halves, owns = flat(w, n, zero), flat(z, n, zero), flat(half, n, zero), flat(own, n, zero)
    words = (n * width + 63) // 64
    first, second, zetas = flat(mine, words, WORD), flat(theirs, words, WORD), flat(zeta, words, WORD)
    kind = values.dtype.type
    bits = values.itemsize * 8
    up = kind(bits - f)
    down = kind(f)
    offset = kind(1) << kind(bits - 2 - f)
    m_f = np.empty(BLOCK, dtype=kind)
    t_f = np.empty(BLOCK, dtype=kind)
    z_f = np.empty(BLOCK, dtype=kind)
    for start in range(begin, end, BLOCK):
        count = min(BLOCK, n - start)
        unpack(first, start, count, width, m_f)
        unpack(second, start, count, width, t_f)
        unpack(zetas, start, count, width, z_f)
        stop = start + count
        value_b, mask_b, half_b, own_b = values[start:stop], masks[start:stop], halves[start:stop], owns[start:stop]
        for j in range(count):
            a = kind(mask_b[j] + (kind(z_f[j]) << up))
            own_b[j] = a
            half_b[j] = (value_b[j] >> down) + kind(kind(m_f[j] + t_f[j]) << up) - offset - a


# -- a checked truncation  ------------------------------------------------------------------------
@compiled
def check_told(
    w: Read, t1: Read, t2: Read, t3: Read, half: Read, own: Read, u: Written, high: Written, beta: Written,
    value: Written, f: int, n: int, zero: Zero, begin: int, end: int,
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
    for start in range(begin, end, BLOCK):
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
def check_piece(
    e: Read, g1: Read, g2: Read, t1: Read, t2: Read, t3: Read, fields: Written, u: Written, f: int, n: int, zero: Zero,
    begin: int, end: int,
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
    for start in range(begin, end, BLOCK):
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
def check_part(
    r: Read, beta: Read, theirs: Read, high: Read, a1: Read, a2: Read, made: Written, value: Written, f: int, n: int,
    zero: Zero, begin: int, end: int,
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
    for start in range(begin, end, BLOCK):
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
def check_opening(
    first: Read, second: Read, e: Read, g1: Read, g2: Read, r: Written, value: Written, n: int, zero: Zero, begin: int,
    end: int,
) -> None:  # fmt: skip
    """r = e + g1 + g2; value = first + second + r + 2^(bits-2)."""
    x, y, a, b, c = flat(first, n, zero), flat(second, n, zero), flat(e, n, zero), flat(g1, n, zero), flat(g2, n, zero)
    sums, values = flat(r, n, zero), flat(value, n, zero)
    kind = sums.dtype.type
    offset = kind(1) << kind(sums.itemsize * 8 - 2)
    for i in range(begin, end):
        total = kind(a[i] + b[i] + c[i])
        sums[i] = total
        values[i] = x[i] + y[i] + total + offset
