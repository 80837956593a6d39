"""ChaCha20 key streams on GPUs (Triton): the block function of RFC 8439, one block of 64 bytes per lane."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCKS = 128
"""Blocks of 16 words per program."""


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
    """A word of key or nonce."""
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
def chacha20_kernel(key, nonce, out, counter, words, BB: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Words of blocks counter + o_b; key [8], nonce [3] int32, out [words] int32."""
    # [BB]
    o_b = tl.program_id(0).to(tl.int64) * BB + tl.arange(0, BB)
    b_words = block_words(key, _word(nonce, 0), _word(nonce, 1), _word(nonce, 2), (o_b + counter).to(tl.uint32))
    for place in tl.static_range(16):
        o_out = o_b * 16 + place
        tl.store(out + o_out, b_words[place].to(tl.int32, bitcast=True), mask=o_out < words)


def chacha20(key: Tensor, nonce: Tensor, counter: int, words: int, out: Tensor) -> None:
    """Overwrite out [words] with the key stream from block `counter` on; see `reference.chacha20`."""
    chacha20_kernel[(triton.cdiv(words, 16 * BLOCKS),)](key, nonce, out, counter, words, BB=BLOCKS)
