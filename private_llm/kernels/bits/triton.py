"""Bitsliced kernels on GPUs (Triton): transposition, carries of comparisons, bit injection.

Formulas as in `cpu_bits`; words are int64, one lane of the machine per word, one program per output row and
block of words. Which rows meet is data, so one compiled kernel serves every plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

WORDS = 256  # words per program of the row kernels
ELEMENTS = 256  # elements per program of the injection kernels
TRANSPOSED = 16  # words of 64 elements per program of the transposition
ROWS = 8  # rows of bits per program of the transposition: few elements still keep many processors busy
UNROLLED = 4  # rows whose loads the injection has under way at once


@triton.jit
def transpose_kernel(x, out, n, words, rows, BR: tl.constexpr, BW: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Bit r of element 64 w + l of x [n] becomes bit l of out[r, w]."""
    i_w, i_r = tl.program_id(0).to(tl.int64), tl.program_id(1)
    # [BW]
    o_w = i_w * BW + tl.arange(0, BW)
    # [64]
    o_l = tl.arange(0, 64)
    o_x = o_w[:, None] * 64 + o_l[None, :]
    # [BW, 64]
    b_x = tl.load(x + o_x, mask=o_x < n, other=0).to(tl.int64)
    m_w = o_w < words
    for at in range(BR):
        r = i_r * BR + at
        b_bits = ((b_x >> r) & 1) << o_l[None, :].to(tl.int64)
        tl.store(out + r * words + o_w, tl.sum(b_bits, axis=1), mask=m_w & (r + 0 * o_w < rows))


@triton.jit
def _row(base, i_row, words, o_w, MISSING: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Words o_w of row i_row; MISSING where there is no such row."""
    p_row = base + i_row.to(tl.int64) * words + o_w
    return tl.load(p_row, mask=o_w < tl.where(i_row < 0, 0, words), other=MISSING)


@triton.jit
def _xor_into(base, i_row, words, o_w, m_w, b_value):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    p_row = base + i_row.to(tl.int64) * words + o_w
    tl.store(p_row, tl.load(p_row, mask=m_w, other=0) ^ b_value, mask=m_w)


@triton.jit
def row_products_kernel(x, factors, out, words, BW: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """out[r] ^= a b c ^ a d, the rows of x named in factors[r]; missing factors are 1, a missing d is 0."""
    i_w, i_r = tl.program_id(0), tl.program_id(1)
    o_w = i_w.to(tl.int64) * BW + tl.arange(0, BW)
    m_w = o_w < words
    # [BW]
    b_a = _row(x, tl.load(factors + 4 * i_r), words, o_w, -1)
    b_b = _row(x, tl.load(factors + 4 * i_r + 1), words, o_w, -1)
    b_c = _row(x, tl.load(factors + 4 * i_r + 2), words, o_w, -1)
    b_d = _row(x, tl.load(factors + 4 * i_r + 3), words, o_w, 0)
    _xor_into(out, i_r, words, o_w, m_w, b_a & ((b_b & b_c) ^ b_d))


@triton.jit
def block_carries_kernel(m, mono, rows, out, words, count, one, BW: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """out[j], out[count + j - 1] ^= share of (g, p) of block j; `one` is -1 at the first evaluator, else 0."""
    i_w, i_j = tl.program_id(0), tl.program_id(1)
    o_w = i_w.to(tl.int64) * BW + tl.arange(0, BW)
    m_w = o_w < words
    rows += 10 * i_j
    # [BW] each: bits of m, then monomials of s
    b_a = _row(m, tl.load(rows), words, o_w, -1)
    b_b = _row(m, tl.load(rows + 1), words, o_w, -1)
    b_c = _row(m, tl.load(rows + 2), words, o_w, -1)
    b_0 = _row(mono, tl.load(rows + 3), words, o_w, 0)
    b_1 = _row(mono, tl.load(rows + 4), words, o_w, 0)
    b_10 = _row(mono, tl.load(rows + 5), words, o_w, 0)
    b_2 = _row(mono, tl.load(rows + 6), words, o_w, 0)
    b_20 = _row(mono, tl.load(rows + 7), words, o_w, 0)
    b_21 = _row(mono, tl.load(rows + 8), words, o_w, 0)
    b_210 = _row(mono, tl.load(rows + 9), words, o_w, 0)
    b_ab = b_a & b_b
    b_g = (b_c & (b_2 ^ (b_b & b_1) ^ (b_ab & b_0) ^ (b_a & b_10))) ^ (b_b & b_21) ^ (b_ab & b_20) ^ (b_a & b_210)
    _xor_into(out, i_j, words, o_w, m_w, b_g)
    if i_j > 0:
        b_p = (
            (b_c & ((b_ab & one) ^ (b_b & b_0) ^ (b_a & b_1) ^ b_10))
            ^ (b_ab & b_2)
            ^ (b_b & b_20)
            ^ (b_a & b_21)
            ^ b_210
        )
        _xor_into(out, count + i_j - 1, words, o_w, m_w, b_p)


@triton.jit
def join_carries_kernel(b, lam, prod, rows, out, words, made, one, BW: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """out[j], out[made + j - 1] ^= share of the joined (g, p) of group j."""
    i_w, i_j = tl.program_id(0), tl.program_id(1)
    o_w = i_w.to(tl.int64) * BW + tl.arange(0, BW)
    m_w = o_w < words
    rows += 13 * i_j
    i_g0, i_g1, i_g2 = tl.load(rows), tl.load(rows + 1), tl.load(rows + 2)
    i_p0, i_p1, i_p2 = tl.load(rows + 3), tl.load(rows + 4), tl.load(rows + 5)
    # [BW] each: masked bits, masks, products of masks
    b_g0, b_g1, b_g2 = _row(b, i_g0, words, o_w, 0), _row(b, i_g1, words, o_w, 0), _row(b, i_g2, words, o_w, 0)
    b_p1, b_p2 = _row(b, i_p1, words, o_w, -1), _row(b, i_p2, words, o_w, -1)
    l_g0, l_g1 = _row(lam, i_g0, words, o_w, 0), _row(lam, i_g1, words, o_w, 0)
    l_g2 = _row(lam, i_g2, words, o_w, 0)
    l_p1, l_p2 = _row(lam, i_p1, words, o_w, 0), _row(lam, i_p2, words, o_w, 0)
    b_highest = _row(prod, tl.load(rows + 6), words, o_w, 0)
    b_p2p1 = _row(prod, tl.load(rows + 7), words, o_w, 0)
    b_p2g0 = _row(prod, tl.load(rows + 8), words, o_w, 0)
    b_p1g0 = _row(prod, tl.load(rows + 9), words, o_w, 0)
    b_value = (b_g2 & one) ^ l_g2
    b_value ^= (b_p2 & b_g1 & one) ^ (b_p2 & l_g1) ^ (b_g1 & l_p2) ^ b_highest
    b_value ^= (b_p2 & b_p1 & b_g0 & one) ^ (b_p1 & b_g0 & l_p2) ^ (b_p2 & b_g0 & l_p1) ^ (b_p2 & b_p1 & l_g0)
    b_value ^= (b_g0 & b_p2p1) ^ (b_p1 & b_p2g0) ^ (b_p2 & b_p1g0)
    _xor_into(out, i_j, words, o_w, m_w, b_value)
    if i_j > 0:
        b_p0, l_p0 = _row(b, i_p0, words, o_w, -1), _row(lam, i_p0, words, o_w, 0)
        b_p2p0 = _row(prod, tl.load(rows + 10), words, o_w, 0)
        b_p1p0 = _row(prod, tl.load(rows + 11), words, o_w, 0)
        b_p2p1p0 = _row(prod, tl.load(rows + 12), words, o_w, 0)
        b_value = (b_p2 & b_p1 & b_p0 & one) ^ (b_p1 & b_p0 & l_p2) ^ (b_p2 & b_p0 & l_p1) ^ (b_p2 & b_p1 & l_p0)
        b_value ^= (b_p0 & b_p2p1) ^ (b_p1 & b_p2p0) ^ (b_p2 & b_p1p0) ^ b_p2p1p0
        _xor_into(out, made + i_j - 1, words, o_w, m_w, b_value)


@triton.jit
def _bit(row, o_n, m_n):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    b_word = tl.load(row + (o_n >> 6), mask=m_n, other=0)
    return (b_word >> (o_n & 63)) & 1


@triton.jit
def inject_products_kernel(bits, lam, extra, out, n, words, BN: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """out[k] = s_k - out[k]; out[extra[k]] = s_k lam - out[extra[k]] where there is such a row."""
    i_n, i_k = tl.program_id(0), tl.program_id(1)
    o_n = i_n.to(tl.int64) * BN + tl.arange(0, BN)
    m_n = o_n < n
    # [BN]
    p_out = out + i_k.to(tl.int64) * n + o_n
    b_out = tl.load(p_out, mask=m_n, other=0)
    b_s = _bit(bits + i_k.to(tl.int64) * words, o_n, m_n).to(b_out.dtype)
    tl.store(p_out, b_s - b_out, mask=m_n)
    i_extra = tl.load(extra + i_k)
    if i_extra >= 0:
        p_out = out + i_extra.to(tl.int64) * n + o_n
        b_lam = tl.load(lam + o_n, mask=m_n, other=0)
        tl.store(p_out, b_s * b_lam - tl.load(p_out, mask=m_n, other=0), mask=m_n)


@triton.jit
def inject_terms_kernel(  # type: ignore[no-untyped-def]  # noqa: ANN201
    bits, m, mine, shares, s_lam, extra, w, c, out, n, words, rows, w_pitch, c_pitch,  # noqa: ANN001
    W_EACH: tl.constexpr, C_EACH: tl.constexpr, FIRST: tl.constexpr, UNROLL: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """out += sum_k c_k [b_k] + w_k [b_k x], where [.] is this evaluator's share; s_lam: its shares of s_k lam."""
    o_n = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    m_n = o_n < n
    # [BN]
    b_out = tl.load(out + o_n, mask=m_n, other=0)
    b_m = tl.load(m + o_n, mask=m_n, other=0)
    b_mine = tl.load(mine + o_n, mask=m_n, other=0)
    p_s, p_s_lam = shares + o_n, s_lam + o_n
    p_w, p_c = w + W_EACH * o_n, c + C_EACH * o_n
    for i_k in tl.range(rows, loop_unroll_factor=UNROLL):
        # no branch, so that loads of several rows are under way at once
        i_used = (tl.load(extra + i_k) >= 0).to(tl.int32)
        m_used = m_n & (i_used + 0 * o_n > 0)
        b_b = _bit(bits, o_n, m_n).to(b_out.dtype)
        b_sign = 1 - 2 * b_b
        b_known = b_sign * tl.load(p_s, mask=m_n, other=0)
        if FIRST:
            b_known += b_b
        b_out += tl.load(p_c, mask=m_n, other=0) * b_known
        b_s_lam = tl.load(p_s_lam, mask=m_used, other=0)
        b_out += tl.load(p_w, mask=m_used, other=0) * (b_known * b_m - b_b * b_mine - b_sign * b_s_lam)
        p_s_lam += n * i_used
        bits += words
        p_s += n
        p_w += w_pitch
        p_c += c_pitch
    tl.store(out + o_n, b_out, mask=m_n)


# -- which rows meet --------------------------------------------------------------------------------------------------
NONE = -1
"""A row that does not exist. A block or group smaller than three is one of three whose missing part changes nothing: a
block gets a lowest bit with m = 1, s = 0, a group a highest member with generate 0 and propagate 1."""


def monomial_factors(low: int, blocks: Sequence[int]) -> list[list[int]]:
    """Per monomial, the three rows of s whose product it is, and no further term."""
    table, bit = [], low
    for size in blocks:
        for subset in range(1, 1 << size):
            chosen = [bit + i for i in range(size) if subset >> i & 1]
            table.append(chosen + [NONE] * (4 - len(chosen)))
        bit += size
    return table


def block_rows(low: int, blocks: Sequence[int]) -> list[list[int]]:
    """Per block: rows of the bits 0..2 in m, then of the monomials 0, 1, 10, 2, 20, 21, 210 of s."""
    table, bit, row = [], low, 0
    for size in blocks:
        missing = 3 - size
        bits = [NONE] * missing + [bit + i for i in range(size)]
        monomials = [NONE] * 7
        for subset in range(1, 1 << size):
            monomials[(subset << missing) - 1] = row + subset - 1
        table.append(bits + monomials)
        bit += size
        row += (1 << size) - 1
    return table


def _members(base: int, size: int, count: int) -> list[int]:
    """Rows of g0, g1, g2, p0, p1, p2 (block 0 has no propagate)."""
    generates = [base + i for i in range(size)] + [NONE] * (3 - size)
    propagates = [count + base + i - 1 if base + i else NONE for i in range(size)] + [NONE] * (3 - size)
    return generates + propagates


def product_factors(groups: Sequence[int], count: int) -> list[list[int]]:
    """Per mask product a b c, or a b c + a d: a, b, c and d."""
    table, base = [], 0
    for j, size in enumerate(groups):
        g0, g1, _, p0, p1, p2 = _members(base, size, count)
        if size == 3:
            table += [[p2, p1, g0, g1], [p2, p1, NONE, NONE], [p2, g0, NONE, NONE], [p1, g0, NONE, NONE]]
            table += [[p2, p0, NONE, NONE], [p1, p0, NONE, NONE], [p2, p1, p0, NONE]] if j else []
        else:
            table += [[p1, g0, NONE, NONE]]
            table += [[p1, p0, NONE, NONE]] if j else []
        base += size
    return table


def join_rows(groups: Sequence[int], count: int) -> list[list[int]]:
    """Per group: its six members, then the products p2p1g0 + p2g1, p2p1, p2g0, p1g0, p2p0, p1p0, p2p1p0."""
    table, base, row = [], 0, 0
    for j, size in enumerate(groups):
        made = [0, 1, 2, 3, 4, 5, 6] if size == 3 else [3, 5]
        products = [NONE] * 7
        for place in made if j else [place for place in made if place < 4]:
            products[place] = row
            row += 1
        table.append(_members(base, size, count) + products)
        base += size
    return table


def extra_rows(weighted: Sequence[bool]) -> list[int]:
    """Per bit row, where its second message row lies (NONE without a weight)."""
    table, row = [], len(weighted)
    for used in weighted:
        table.append(row if used else NONE)
        row += int(used)
    return table


@cache
def _table(device: torch.device, make: Callable[..., Sequence[Any]], *plan: int | tuple[int, ...]) -> Tensor:
    return torch.tensor(make(*plan), dtype=torch.int32, device=device)


def _ints(sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(size) for size in sizes)


def transpose_bits(x: Tensor, rows: int, out: Tensor) -> None:
    """See `ops.transpose_bits`; out [rows, ceil(n/64)]."""
    words = out.shape[1]
    grid = (triton.cdiv(words, TRANSPOSED), triton.cdiv(rows, ROWS))
    transpose_kernel[grid](x, out, x.numel(), words, rows, BR=ROWS, BW=TRANSPOSED)


def _row_products(x: Tensor, factors: Tensor, out: Tensor) -> None:
    words = x.shape[1]
    row_products_kernel[(triton.cdiv(words, WORDS), factors.shape[0])](x, factors, out, words, BW=WORDS)


def block_monomials(s: Tensor, low: int, blocks: Sequence[int], out: Tensor) -> None:
    """See `ops.block_monomials`."""
    _row_products(s, _table(s.device, monomial_factors, low, _ints(blocks)), out)


def block_carries(m: Tensor, mono: Tensor, low: int, blocks: Sequence[int], first: bool, out: Tensor) -> None:
    """See `ops.block_carries`."""
    words, count = m.shape[1], len(blocks)
    rows = _table(m.device, block_rows, low, _ints(blocks))
    grid = (triton.cdiv(words, WORDS), count)
    block_carries_kernel[grid](m, mono, rows, out, words, count, -1 if first else 0, BW=WORDS)


def join_products(lam: Tensor, groups: Sequence[int], count: int, out: Tensor) -> None:
    """See `ops.join_products`."""
    _row_products(lam, _table(lam.device, product_factors, _ints(groups), count), out)


def join_carries(
    b: Tensor, lam: Tensor, prod: Tensor, groups: Sequence[int], count: int, first: bool, out: Tensor
) -> None:
    """See `ops.join_carries`."""
    words, made = b.shape[1], len(groups)
    rows = _table(b.device, join_rows, _ints(groups), count)
    grid = (triton.cdiv(words, WORDS), made)
    join_carries_kernel[grid](b, lam, prod, rows, out, words, made, -1 if first else 0, BW=WORDS)


def inject_products(bits: Tensor, lam: Tensor, weighted: Sequence[bool], out: Tensor) -> None:
    """See `ops.inject_products`."""
    n = out.shape[1]
    extra = _table(out.device, extra_rows, _ints(weighted))
    inject_products_kernel[(triton.cdiv(n, ELEMENTS), bits.shape[0])](
        bits, lam, extra, out, n, bits.shape[1], BN=ELEMENTS
    )  # fmt: skip


def inject_terms(
    bits: Tensor, m: Tensor, mine: Tensor, shares: Tensor, w: Tensor, c: Tensor, weighted: Sequence[bool],
    first: bool, out: Tensor,
) -> None:  # fmt: skip
    """See `ops.inject_terms`."""
    n, rows = out.numel(), bits.shape[0]
    extra = _table(out.device, extra_rows, _ints(weighted))
    inject_terms_kernel[(triton.cdiv(n, ELEMENTS),)](
        bits, m, mine, shares, shares[rows:], extra, w, c, out, n, bits.shape[1], rows, w.shape[1], c.shape[1],
        W_EACH=int(w.shape[1] > 1), C_EACH=int(c.shape[1] > 1), FIRST=bool(first), UNROLL=UNROLLED,
        BN=ELEMENTS,
    )  # fmt: skip
