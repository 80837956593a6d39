"""Fused local steps of the wrap-free truncation on GPUs (Triton); formulas and packing as in `cpu_trunc`.

One program takes one block of 512 elements. Fields straddle words, so packing ors each field into the one
or two zeroed words it touches, atomically: the order does not matter.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 512


@triton.jit
def _places(i_start, n, F: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Word, following word and bit offset of each field: eight interleaved streams in a full block, else one."""
    # [BLOCK]
    o = tl.arange(0, BLOCK).to(tl.int64)
    full = i_start + BLOCK <= n
    o_bit = tl.where(full, o >> 3, o) * F
    o_word = (i_start >> 6) * F + tl.where(full, (o_bit >> 6) * 8 + (o & 7), o_bit >> 6)
    return o_word, o_word + tl.where(full, 8, 1), o_bit & 63


@triton.jit
def _load_fields(words, o_word, o_next, o_off, m_n, F: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Fields below 2^F, uint64."""
    m_spill = m_n & (o_off + F > 64)
    # [BLOCK]
    b_low = tl.load(words + o_word, mask=m_n, other=0).to(tl.uint64, bitcast=True) >> o_off.to(tl.uint64)
    b_high = tl.load(words + o_next, mask=m_spill, other=0).to(tl.uint64, bitcast=True)
    b_high = b_high << tl.where(m_spill, 64 - o_off, 0).to(tl.uint64)
    return (b_low | b_high) & ((1 << F) - 1)


@triton.jit
def _or_fields(words, b_fields, o_word, o_next, o_off, m_n, F: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    m_spill = m_n & (o_off + F > 64)
    b_low = (b_fields << o_off.to(tl.uint64)).to(tl.int64, bitcast=True)
    b_high = (b_fields >> tl.where(m_spill, 64 - o_off, 0).to(tl.uint64)).to(tl.int64, bitcast=True)
    tl.atomic_or(words + o_word, b_low, mask=m_n, sem="relaxed")
    tl.atomic_or(words + o_next, b_high, mask=m_spill, sem="relaxed")


@triton.jit
def _load_ring(x, o_n, m_n, BITS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Ring elements as unsigned numbers, so that shifts are logical."""
    b_x = tl.load(x + o_n, mask=m_n, other=0)
    if BITS == 64:
        return b_x.to(tl.uint64, bitcast=True)
    else:
        return b_x.to(tl.uint32, bitcast=True)


@triton.jit
def _store_ring(x, b_x, o_n, m_n, BITS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    if BITS == 64:
        tl.store(x + o_n, b_x.to(tl.int64, bitcast=True), mask=m_n)
    else:
        tl.store(x + o_n, b_x.to(tl.int32, bitcast=True), mask=m_n)


@triton.jit
def pack_kernel(values, words, n, F: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """The lowest F bits of each element."""
    i_start = tl.program_id(0).to(tl.int64) * BLOCK
    o_n = i_start + tl.arange(0, BLOCK)
    m_n = o_n < n
    o_word, o_next, o_off = _places(i_start, n, F, BLOCK)
    # [BLOCK]
    b_fields = _load_ring(values, o_n, m_n, 64) & ((1 << F) - 1)
    _or_fields(words, b_fields, o_word, o_next, o_off, m_n, F)


@triton.jit
def unpack_kernel(words, values, n, F: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """The inverse."""
    i_start = tl.program_id(0).to(tl.int64) * BLOCK
    o_n = i_start + tl.arange(0, BLOCK)
    m_n = o_n < n
    o_word, o_next, o_off = _places(i_start, n, F, BLOCK)
    _store_ring(values, _load_fields(words, o_word, o_next, o_off, m_n, F), o_n, m_n, 64)


@triton.jit
def helper_kernel(  # type: ignore[no-untyped-def]  # noqa: ANN201
    error, g1, g2, z1, rho1, zeta1, zeta2, a1, a2, z2, rho2, n,  # noqa: ANN001
    F: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """R = error + g1 + g2; z2 = (R >> f) - z1; rho2 = msb(R) - rho1; a_i = z_i + zeta_i 2^(bits-f)."""
    i_start = tl.program_id(0).to(tl.int64) * BLOCK
    o_n = i_start + tl.arange(0, BLOCK)
    m_n = o_n < n
    o_word, o_next, o_off = _places(i_start, n, WIDTH, BLOCK)
    # [BLOCK]
    b_r = _load_ring(error, o_n, m_n, BITS) + _load_ring(g1, o_n, m_n, BITS) + _load_ring(g2, o_n, m_n, BITS)
    b_z1 = _load_ring(z1, o_n, m_n, BITS)
    b_z2 = (b_r >> F) - b_z1
    b_rho = (b_r >> (BITS - 1)).to(tl.uint64) - _load_fields(rho1, o_word, o_next, o_off, m_n, WIDTH)
    b_one = _load_fields(zeta1, o_word, o_next, o_off, m_n, WIDTH).to(b_r.dtype)
    b_two = _load_fields(zeta2, o_word, o_next, o_off, m_n, WIDTH).to(b_r.dtype)
    _store_ring(z2, b_z2, o_n, m_n, BITS)
    _store_ring(a1, b_z1 + (b_one << (BITS - F)), o_n, m_n, BITS)
    _store_ring(a2, b_z2 + (b_two << (BITS - F)), o_n, m_n, BITS)
    _or_fields(rho2, b_rho & ((1 << WIDTH) - 1), o_word, o_next, o_off, m_n, WIDTH)


@triton.jit
def open_kernel(  # type: ignore[no-untyped-def]  # noqa: ANN201
    mine, theirs, rho, zeta, w, packed, n,  # noqa: ANN001
    F: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """w = mine + theirs + 2^(bits-2); packed = (1 - msb(w)) rho + zeta mod 2^width."""
    i_start = tl.program_id(0).to(tl.int64) * BLOCK
    o_n = i_start + tl.arange(0, BLOCK)
    m_n = o_n < n
    o_word, o_next, o_off = _places(i_start, n, WIDTH, BLOCK)
    # [BLOCK]
    b_w = _load_ring(mine, o_n, m_n, BITS) + _load_ring(theirs, o_n, m_n, BITS) + (1 << (BITS - 2))
    _store_ring(w, b_w, o_n, m_n, BITS)
    b_rho = _load_fields(rho, o_word, o_next, o_off, m_n, WIDTH)
    b_zeta = _load_fields(zeta, o_word, o_next, o_off, m_n, WIDTH)
    b_stays = tl.where((b_w >> (BITS - 1)) == 0, b_rho, 0 * b_rho)
    _or_fields(packed, (b_stays + b_zeta) & ((1 << WIDTH) - 1), o_word, o_next, o_off, m_n, WIDTH)


@triton.jit
def close_kernel(  # type: ignore[no-untyped-def]  # noqa: ANN201
    w, mine, theirs, z, zeta, half, own, n,  # noqa: ANN001
    F: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """own = z + zeta 2^(bits-f); half = (w >> f) + (mine + theirs) 2^(bits-f) - 2^(bits-2-f) - own."""
    i_start = tl.program_id(0).to(tl.int64) * BLOCK
    o_n = i_start + tl.arange(0, BLOCK)
    m_n = o_n < n
    o_word, o_next, o_off = _places(i_start, n, WIDTH, BLOCK)
    # [BLOCK]
    b_w = _load_ring(w, o_n, m_n, BITS)
    b_zeta = _load_fields(zeta, o_word, o_next, o_off, m_n, WIDTH).to(b_w.dtype)
    b_wraps = _load_fields(mine, o_word, o_next, o_off, m_n, WIDTH)
    b_wraps += _load_fields(theirs, o_word, o_next, o_off, m_n, WIDTH)
    b_own = _load_ring(z, o_n, m_n, BITS) + (b_zeta << (BITS - F))
    b_half = (b_w >> F) + (b_wraps.to(b_w.dtype) << (BITS - F)) - (1 << (BITS - 2 - F)) - b_own
    _store_ring(own, b_own, o_n, m_n, BITS)
    _store_ring(half, b_half, o_n, m_n, BITS)


def _launch(kernel: Any, like: Tensor, *arguments: Tensor, **sizes: int) -> None:  # noqa: ANN401 - Triton's
    """A program for each block of elements of `like`, if there are any."""
    n = like.numel()
    if n:
        kernel[(triton.cdiv(n, BLOCK),)](*arguments, n, **sizes, BLOCK=BLOCK)


def pack_fields(values: Tensor, f: int, words: Tensor) -> None:
    """See `ops.pack_fields`; words must be zero, as all packed results."""
    _launch(pack_kernel, values, values, words, F=f)


def unpack_fields(words: Tensor, f: int, values: Tensor) -> None:
    """See `ops.unpack_fields`."""
    _launch(unpack_kernel, values, words, values, F=f)


def trunc_helper(
    error: Tensor, g1: Tensor, g2: Tensor, z1: Tensor, rho1: Tensor, zeta1: Tensor, zeta2: Tensor, f: int, width: int,
    *made: Tensor,
) -> None:  # fmt: skip
    """See `ops.trunc_helper`."""
    bits = z1.element_size() * 8
    _launch(helper_kernel, z1, error, g1, g2, z1, rho1, zeta1, zeta2, *made, F=f, WIDTH=width, BITS=bits)


def trunc_open(mine: Tensor, theirs: Tensor, rho: Tensor, zeta: Tensor, f: int, width: int, *made: Tensor) -> None:
    """See `ops.trunc_open`."""
    bits = mine.element_size() * 8
    _launch(open_kernel, mine, mine, theirs, rho, zeta, *made, F=f, WIDTH=width, BITS=bits)


def trunc_close(
    w: Tensor, mine: Tensor, theirs: Tensor, z: Tensor, zeta: Tensor, f: int, width: int, *made: Tensor
) -> None:  # fmt: skip
    """See `ops.trunc_close`."""
    bits = w.element_size() * 8
    _launch(close_kernel, w, w, mine, theirs, z, zeta, *made, F=f, WIDTH=width, BITS=bits)
