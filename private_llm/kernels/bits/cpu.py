"""Bitsliced kernels on the CPU: transposition, carries of comparisons, bit injection (Numba, GIL-free).

Words are uint64; a row holds one bit of 64 elements per word, so one instruction works on 64 to 512
lanes (PIGEON's bitslicing). Tensors come as addresses (`address`) with their row counts; row orders are
those of `protocols.carry`. A call works on words begin .. end - 1 of all rows, so calls may share the work.
"""

from __future__ import annotations

import numpy as np

from private_llm.kernels.address import Array, Flags, Plan, Read, Written, Zero, flat, table
from private_llm.kernels.compiling import compiled


@compiled
def transpose_bits(
    x_at: Read, out_at: Written, rows: int, n: int, zero: Zero, words: int, begin: int, end: int
) -> None:  # fmt: skip
    """Bit r of element 64*w+l becomes bit l of out[r, w], for w from `begin`, a multiple of 8, to before `end`.

    x [n] of the type of `zero`, out [rows, words].

    Eight blocks of 64 elements go side by side, so each step of the recursive transposition
    (Knuth 7.1.3; Usuba) is one vector instruction. Elements of 32 bits begin with the first step done.
    """
    x, out = flat(x_at, n, zero), table(out_at, rows, words)
    buf = np.zeros((64, 8), dtype=np.uint64)
    half = x.itemsize == 4
    for w0 in range(begin, end, 8):
        lanes = min(8, end - w0)
        if n - 64 * w0 < 512:
            buf[:] = 0
        for lane in range(lanes):
            base = (w0 + lane) * 64
            count = min(64, n - base)
            if half:
                for r in range(min(32, count)):
                    buf[r, lane] = np.uint64(x[base + r])
                for r in range(32, count):
                    buf[r - 32, lane] |= np.uint64(x[base + r]) << np.uint64(32)
            else:
                for r in range(count):
                    buf[r, lane] = np.uint64(x[base + r])
        width = 16 if half else 32
        mask = np.uint64(0x0000FFFF0000FFFF) if half else np.uint64(0x00000000FFFFFFFF)
        while width:
            shift = np.uint64(width)
            for k in range(0, 32 if half else 64, 2 * width):
                for row in range(k, k + width):
                    for lane in range(8):
                        a, b = buf[row, lane], buf[row + width, lane]
                        t = ((a >> shift) ^ b) & mask
                        buf[row + width, lane] = b ^ t
                        buf[row, lane] = a ^ (t << shift)
            width >>= 1
            if width:
                mask ^= mask << np.uint64(width)
        for r in range(rows):
            for lane in range(lanes):
                out[r, w0 + lane] = buf[r, lane]


@compiled
def block_monomials(
    s_at: Read, out_at: Written, low: int, blocks: Plan, rows: int, out_rows: int, words: int, begin: int, end: int
) -> None:  # fmt: skip
    """All monomials of the bits of each block of s [rows, W]; `out` is xored with them. Helper side."""
    s, out = table(s_at, rows, words), table(out_at, out_rows, words)
    row, bit = 0, low
    for size in blocks:
        s0 = s[bit]
        if size == 1:
            for w in range(begin, end):
                out[row, w] ^= s0[w]
            row += 1
        elif size == 2:
            s1 = s[bit + 1]
            for w in range(begin, end):
                out[row, w] ^= s0[w]
                out[row + 1, w] ^= s1[w]
                out[row + 2, w] ^= s0[w] & s1[w]
            row += 3
        else:
            s1, s2 = s[bit + 1], s[bit + 2]
            for w in range(begin, end):
                a, b, c = s0[w], s1[w], s2[w]
                out[row, w] ^= a
                out[row + 1, w] ^= b
                out[row + 2, w] ^= a & b
                out[row + 3, w] ^= c
                out[row + 4, w] ^= c & a
                out[row + 5, w] ^= c & b
                out[row + 6, w] ^= c & b & a
            row += 7
        bit += size


@compiled
def block_carries(
    m_at: Read, mono_at: Read, out_at: Written, low: int, blocks: Plan, first: bool, rows: int, mono_rows: int,
    words: int, begin: int, end: int,
) -> None:  # fmt: skip
    """Xor shares of (g, p) of each block from public bits m [rows, W] and shared monomials; xored into out.

    g2 = m2 s2 ^ (m2 ^ s2) g10 with g10 = m1 s1 ^ (m1 ^ s1) m0 s0;  p = (m2 ^ s2)(m1 ^ s1)(m0 ^ s0).
    Only the `first` evaluator adds the terms without s.
    """
    count, part, width = blocks.size, slice(begin, end), end - begin
    m, mono, out = table(m_at, rows, words), table(mono_at, mono_rows, words), table(out_at, 2 * count - 1, words)
    one = np.uint64(0xFFFFFFFFFFFFFFFF) if first else np.uint64(0)
    ones, none = np.full(width, np.uint64(0xFFFFFFFFFFFFFFFF)), np.zeros(width, np.uint64)
    row, bit = 0, low
    for j in range(count):
        size, g = blocks[j], out[j, part]
        # a smaller block is one of three whose lowest bits have m = 1 and s = 0: they generate nothing, and pass on
        m0, m1 = m[bit, part] if size == 3 else ones, m[bit + size - 2, part] if size > 1 else ones
        m2, r3 = m[bit + size - 1, part], mono[row + (1 << (size - 1)) - 1, part]
        r1, r5 = (mono[row + size - 2, part], mono[row + 3 * size - 4, part]) if size > 1 else (none, none)
        r0, r2, r4, r6 = none, none, none, none
        if size == 3:
            r0, r2, r4, r6 = mono[row, part], mono[row + 2, part], mono[row + 4, part], mono[row + 6, part]
        for w in range(width):
            a, b, c = m0[w], m1[w], m2[w]
            ab = a & b
            g[w] ^= (c & (r3[w] ^ (b & r1[w]) ^ (ab & r0[w]) ^ (a & r2[w]))) ^ (b & r5[w]) ^ (ab & r4[w]) ^ (a & r6[w])
        if j > 0:
            p = out[count + j - 1, part]
            for w in range(width):
                a, b = m0[w], m1[w]
                ab = a & b
                p[w] ^= (
                    (m2[w] & ((ab & one) ^ (b & r0[w]) ^ (a & r1[w]) ^ r2[w]))
                    ^ (ab & r3[w])
                    ^ (b & r4[w])
                    ^ (a & r5[w])
                    ^ r6[w]
                )
        row += (1 << size) - 1
        bit += size


@compiled
def join_products(
    lam_at: Read, out_at: Written, groups: Plan, count: int, out_rows: int, words: int, begin: int, end: int
) -> None:  # fmt: skip
    """Products of masks that a level of joins needs, xored into out. Helper side.

    Rows of `lam`: count generates, then count-1 propagates (index j-1 for block j).
    Order per group of three: p2g1 ^ p2p1g0, p2p1, p2g0, p1g0 (and p2p0, p1p0, p2p1p0); of two: p1g0 (p1p0).
    """
    lam, out = table(lam_at, 2 * count - 1, words), table(out_at, out_rows, words)
    row = base = 0
    for j in range(groups.size):
        if groups[j] == 3:
            g0, g1 = lam[base], lam[base + 1]
            p1, p2 = lam[count + base], lam[count + base + 1]
            for w in range(begin, end):
                out[row, w] ^= p2[w] & (g1[w] ^ (p1[w] & g0[w]))
                out[row + 1, w] ^= p2[w] & p1[w]
                out[row + 2, w] ^= p2[w] & g0[w]
                out[row + 3, w] ^= p1[w] & g0[w]
            row += 4
            if j > 0:
                p0 = lam[count + base - 1]
                for w in range(begin, end):
                    out[row, w] ^= p2[w] & p0[w]
                    out[row + 1, w] ^= p1[w] & p0[w]
                    out[row + 2, w] ^= p2[w] & p1[w] & p0[w]
                row += 3
        else:
            g0, p1 = lam[base], lam[count + base]
            for w in range(begin, end):
                out[row, w] ^= p1[w] & g0[w]
            row += 1
            if j > 0:
                p0 = lam[count + base - 1]
                for w in range(begin, end):
                    out[row, w] ^= p1[w] & p0[w]
                row += 1
        base += groups[j]


@compiled
def join_carries(
    b_at: Read, lam_at: Read, prod_at: Read, out_at: Written, groups: Plan, count: int, first: bool, prod_rows: int,
    words: int, begin: int, end: int,
) -> None:  # fmt: skip
    """Xor shares of the joined (g, p) from masked rows b, this evaluator's mask shares and product shares."""
    one = np.uint64(0xFFFFFFFFFFFFFFFF) if first else np.uint64(0)
    made, part, width = groups.size, slice(begin, end), end - begin
    b, lam = table(b_at, 2 * count - 1, words), table(lam_at, 2 * count - 1, words)
    prod, out = table(prod_at, prod_rows, words), table(out_at, 2 * made - 1, words)
    ones, none = np.full(width, np.uint64(0xFFFFFFFFFFFFFFFF)), np.zeros(width, np.uint64)
    row = base = 0
    for j in range(made):
        g, three = out[j, part], groups[j] == 3
        bg0, bg1, lg0, lg1 = b[base, part], b[base + 1, part], lam[base, part], lam[base + 1, part]
        bp1, lp1 = b[count + base, part], lam[count + base, part]
        # a group of two is one of three whose highest member generates nothing, and passes on
        bg2, lg2 = (b[base + 2, part], lam[base + 2, part]) if three else (none, none)
        bp2, lp2 = (b[count + base + 1, part], lam[count + base + 1, part]) if three else (ones, none)
        q0, q1, q2 = (prod[row, part], prod[row + 1, part], prod[row + 2, part]) if three else (none, none, none)
        q3 = prod[row + 3, part] if three else prod[row, part]
        for w in range(width):
            x, y, z = bp2[w], bp1[w], bg0[w]
            u = bg1[w]
            g[w] ^= (
                (bg2[w] & one)
                ^ lg2[w]
                ^ (x & u & one)
                ^ (x & lg1[w])
                ^ (u & lp2[w])
                ^ q0[w]
                ^ (x & y & z & one)
                ^ (y & z & lp2[w])
                ^ (x & z & lp1[w])
                ^ (x & y & lg0[w])
                ^ (z & q1[w])
                ^ (y & q2[w])
                ^ (x & q3[w])
            )
        row += 4 if three else 1
        if j > 0:
            p = out[made + j - 1, part]
            bp0, lp0 = b[count + base - 1, part], lam[count + base - 1, part]
            q4, q5, q6 = (
                (prod[row, part], prod[row + 1, part], prod[row + 2, part]) if three else (none, prod[row, part], none)
            )
            for w in range(width):
                x, y, z = bp2[w], bp1[w], bp0[w]
                p[w] ^= (
                    (x & y & z & one)
                    ^ (y & z & lp2[w])
                    ^ (x & z & lp1[w])
                    ^ (x & y & lp0[w])
                    ^ (z & q1[w])
                    ^ (y & q4[w])
                    ^ (x & q5[w])
                    ^ q6[w]
                )
            row += 3 if three else 1
        base += groups[j]


@compiled
def _spread(word: np.uint64, ones: Array) -> None:
    """All ones in the elements whose bit of `word` is set, zeros in the others: conditions without branches."""
    for i in range(64):
        ones[i] = ones.dtype.type(0) - ones.dtype.type((word >> np.uint64(i)) & np.uint64(1))


@compiled
def inject_products(
    bits_at: Read, lam_at: Read, out_at: Written, weighted: Flags, rows: int, out_rows: int, n: int, zero: Zero,
    words: int, begin: int, end: int,
) -> None:  # fmt: skip
    """Helper side of bit injection: out -= masks; rows s_k for all k, then s_k * lam for weighted rows. out [R, n]."""
    bits, lams = table(bits_at, rows, words), flat(lam_at, n, zero)
    out = flat(out_at, out_rows * n, zero).reshape(out_rows, n)
    ones = np.empty(64, dtype=out.dtype)
    none = out.dtype.type(0)
    for word in range(begin, end):
        start, stop = 64 * word, min(64 * word + 64, n)
        lam = lams[start:stop]
        extra = rows
        for k in range(rows):
            _spread(bits[k, word], ones)
            line = out[k, start:stop]
            for i in range(stop - start):
                line[i] = none - ones[i] - line[i]
            if weighted[k]:
                line = out[extra, start:stop]
                for i in range(stop - start):
                    line[i] = (lam[i] & ones[i]) - line[i]
                extra += 1


@compiled
def inject_terms(
    bits_at: Read, m_at: Read, mine_at: Read, shares_at: Read, w_at: Read, c_at: Read, out_at: Written, weighted: Flags,
    first: bool, rows: int, share_rows: int, w_each: int, c_each: int, n: int, zero: Zero, words: int, begin: int,
    end: int,
) -> None:  # fmt: skip
    """Adds a share of sum_k b_k (w_k x + c_k) to out [n]: b = B ^ s, x = m - λ, b x = B m - B λ + (1-2B)(s m - s λ)."""
    bits = table(bits_at, rows, words)
    shares = flat(shares_at, share_rows * n, zero).reshape(share_rows, n)
    ms, mines, outs = flat(m_at, n, zero), flat(mine_at, n, zero), flat(out_at, n, zero)
    w = flat(w_at, rows * w_each, zero).reshape(rows, w_each)
    c = flat(c_at, rows * c_each, zero).reshape(rows, c_each)
    same_w, same_c = _lines(w), _lines(c)
    ones = np.empty(64, dtype=outs.dtype)
    none = outs.dtype.type(0)
    known = none - outs.dtype.type(1) if first else none  # terms without shares count once
    for word in range(begin, end):
        start, stop = 64 * word, min(64 * word + 64, n)
        m, mine, out = ms[start:stop], mines[start:stop], outs[start:stop]
        extra = rows
        for k in range(rows):
            _spread(bits[k, word], ones)
            sigma = shares[k, start:stop]
            constant = same_c[k] if c_each == 1 else c[k, start:stop]
            for i in range(stop - start):
                out[i] += constant[i] * ((sigma[i] ^ ones[i]) - ones[i] - (ones[i] & known))
            if weighted[k]:
                rest = shares[extra, start:stop]
                weight = same_w[k] if w_each == 1 else w[k, start:stop]
                for i in range(stop - start):
                    part = sigma[i] * m[i] - rest[i]
                    part = (part ^ ones[i]) - ones[i] + (ones[i] & ((m[i] & known) - mine[i]))
                    out[i] += weight[i] * part
                extra += 1


@compiled
def _lines(factors: Array) -> Array:
    """The first factor of each row, 64 times."""
    made = np.empty((factors.shape[0], 64), dtype=factors.dtype)
    for k in range(factors.shape[0]):
        made[k, :] = factors[k, 0]
    return made
