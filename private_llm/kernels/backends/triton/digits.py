"""Ring elements as int8 digits, for the tensor cores of GPUs (Triton).

x = sum_i d_i 256^i modulo 2^64 with balanced digits -128 <= d_i < 128: the bytes of x + 0x80..80, minus 128. Of
products of digits only those with a digit sum s = i + j < L (L = 8, or 4 for 32 bits) are not a multiple of the ring
size, so 36 (10) products of int8 matrices make one of ring matrices.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _digit(b_x, i: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Balanced digit i of numbers to which 0x80..80 has been added."""
    return (((b_x >> (8 * i)) & 0xFF) - 128).to(tl.int8)


@triton.jit
def digit_products(accs, b_x, b_y, LIMBS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """accs[s] += sum over i + j = s of digit i of x [BM, BK] times digit j of y [BK, BN]."""
    new = ()
    for s in tl.static_range(LIMBS):
        b_acc = accs[s]
        for i in tl.static_range(s + 1):
            b_acc = tl.dot(_digit(b_x, i), _digit(b_y, s - i), b_acc, out_dtype=tl.int32)
        new = new + (b_acc,)  # type: ignore[assignment]  # noqa: RUF005 (Triton has no starred expressions)
    return new


@triton.jit
def no_products(BM: tl.constexpr, BN: tl.constexpr, LIMBS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN201
    """Accumulators [BM, BN] of zero, one for each sum of digit numbers."""
    b_zero = tl.zeros((BM, BN), dtype=tl.int32)
    accs = ()
    for _ in tl.static_range(LIMBS):
        accs = accs + (b_zero,)  # type: ignore[assignment]  # noqa: RUF005
    return accs


@triton.jit
def add_up(b_out, accs, LIMBS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """b_out + sum over s of accs[s] 256^s."""
    for s in tl.static_range(LIMBS):
        b_out += accs[s].to(b_out.dtype) << (8 * s)
    return b_out


def digit_shift(limbs: int) -> int:
    """0x80..80 as a signed ring element."""
    return int.from_bytes(bytes([0x80] * limbs), "little", signed=True)
