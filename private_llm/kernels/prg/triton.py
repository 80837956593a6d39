"""ChaCha20 key streams on GPUs (Triton): the block function of RFC 8439, one block of 64 bytes per lane.

A lane stores its block as four vectors of 16 bytes. The number of the first block lies in device memory, so that a
captured launch makes other blocks in each replay once that number has moved on.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCKS, WARPS = 128, 4  # blocks of 16 words per program, and its warps: a block a lane, in 31 registers


@triton.jit
def _turn(x, places: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    return (x << places) | (x >> (32 - places))


@triton.jit
def _quarter(a, b, c, d):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """The quarter round of RFC 8439, 2.1."""
    a += b
    d = _turn(d ^ a, 16)
    c += d
    b = _turn(b ^ c, 12)
    a += b
    d = _turn(d ^ a, 8)
    c += d
    b = _turn(b ^ c, 7)
    return a, b, c, d


@triton.jit
def _word(source, place: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    return tl.load(source + place).to(tl.uint32, bitcast=True)


@triton.jit
def block_words(key, n0, n1, n2, t):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """The 16 words of each block: counters t and nonce words n0, n1, n2, all uint32; t of any shape. key [8] int32."""
    b_none = t ^ t
    k0, k1, k2, k3 = b_none + _word(key, 0), b_none + _word(key, 1), b_none + _word(key, 2), b_none + _word(key, 3)
    k4, k5, k6, k7 = b_none + _word(key, 4), b_none + _word(key, 5), b_none + _word(key, 6), b_none + _word(key, 7)
    n0, n1, n2 = b_none + n0, b_none + n1, b_none + n2
    c0, c1, c2, c3 = b_none + 0x61707865, b_none + 0x3320646E, b_none + 0x79622D32, b_none + 0x6B206574
    x0, x1, x2, x3, x4, x5, x6, x7 = c0, c1, c2, c3, k0, k1, k2, k3
    x8, x9, x10, x11, x12, x13, x14, x15 = k4, k5, k6, k7, t, n0, n1, n2
    for _ in range(10):
        x0, x4, x8, x12 = _quarter(x0, x4, x8, x12)
        x1, x5, x9, x13 = _quarter(x1, x5, x9, x13)
        x2, x6, x10, x14 = _quarter(x2, x6, x10, x14)
        x3, x7, x11, x15 = _quarter(x3, x7, x11, x15)
        x0, x5, x10, x15 = _quarter(x0, x5, x10, x15)
        x1, x6, x11, x12 = _quarter(x1, x6, x11, x12)
        x2, x7, x8, x13 = _quarter(x2, x7, x8, x13)
        x3, x4, x9, x14 = _quarter(x3, x4, x9, x14)
    return (
        x0 + c0, x1 + c1, x2 + c2, x3 + c3, x4 + k0, x5 + k1, x6 + k2, x7 + k3, x8 + k4, x9 + k5, x10 + k6, x11 + k7,
        x12 + t, x13 + n0, x14 + n1, x15 + n2,
    )  # fmt: skip


@triton.jit
def _put(out, place: tl.constexpr, inside, a, b, c, d):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Words `place` to `place` + 3 of the blocks [BB] at out: a lane stores 16 bytes at once."""
    b_words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (a.shape[0], 4))  # the first join is the slower one
    p_out = out + tl.arange(0, a.shape[0])[:, None] * 16 + place + tl.arange(0, 4)[None, :]
    tl.store(p_out, b_words.to(tl.int32, bitcast=True), mask=inside[:, None])


@triton.jit(do_not_specialize=["offset", "blocks"])
def chacha20_kernel(key, counter, offset: tl.int64, out, blocks, BB: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Blocks counter + offset and on; key [8] int32, counter [1] int64, out [blocks, 16] int32."""
    i_first = tl.program_id(0).to(tl.int64) * BB
    # [BB]
    o_b = i_first + tl.arange(0, BB)
    b_number = tl.load(counter) + offset + o_b
    x = block_words(key, (b_number >> 32).to(tl.uint32), 0, 0, b_number.to(tl.uint32))
    out, inside = out + i_first * 16, o_b < blocks
    _put(out, 0, inside, x[0], x[1], x[2], x[3])
    _put(out, 4, inside, x[4], x[5], x[6], x[7])
    _put(out, 8, inside, x[8], x[9], x[10], x[11])
    _put(out, 12, inside, x[12], x[13], x[14], x[15])


def chacha20(key: Tensor, counter: Tensor, offset: int, out: Tensor) -> None:
    """Overwrite out, whole blocks; see `ops.chacha20`."""
    blocks = out.numel() // 16
    chacha20_kernel[(triton.cdiv(blocks, BLOCKS),)](key, counter, offset, out, blocks, BB=BLOCKS, num_warps=WARPS)
