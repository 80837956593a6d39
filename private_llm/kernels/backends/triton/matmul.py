"""Ring matrix products on GPUs (Triton): int8 digits on the tensor cores.

x = sum_i d_i 256^i modulo 2^64 with balanced digits -128 <= d_i < 128: the bytes of x + 0x80..80, minus 128.
Digits of one place sum s = i + j < L (L = 8, or 4 for 32 bits) share an int32 accumulator, so 36 (10) products of
int8 matrices make one of ring matrices; sum_s acc_s 256^s gives the result. An accumulator takes
at most L products of magnitude 2^14 per k: exact for chunks of K below 2^17 / L, after which it is added up.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from private_llm.kernels import shapes
from private_llm.kernels.backends.triton.tuning import Tile, Tuner, size_range

TUNER = Tuner(
    (Tile(64, 64), Tile(64, 64, stages=3), Tile(64, 32), Tile(32, 64), Tile(16, 64, warps=4), Tile(128, 64),
     Tile(128, 128, warps=16))
)  # fmt: skip
"""Tiles to try. Compiled for compute capability 9.0, the digits of 64 bits spill 1 KB a thread in the first, nothing in
64 x 32, 32 x 64 and 16 x 64, and 4 to 6 KB in the last two, which suit 32 bits (no spills up to 64 x 64)."""
CHUNK = 8192
"""k steps between two additions of the accumulators: 8 * 2^14 * 8192 = 2^30."""


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


@triton.jit
def matmul_kernel(  # type: ignore[no-untyped-def]  # noqa: ANN201
    x, y, listed, out, M, N, K, x_batch, x_row, x_col, y_batch, y_row, y_col,  # noqa: ANN001
    LIMBS: tl.constexpr, SHIFT: tl.constexpr, ADD: tl.constexpr, CHUNK: tl.constexpr,
    LISTED_N: tl.constexpr, LISTED_K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out [B, M, N] (+)= x y for strided x [B, M, K], y [B, K, N]; SHIFT is 0x80..80.

    LISTED_N, LISTED_K: column n (row k) of y is the one with number listed[n] (listed[k]).
    """
    i_m, i_n, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    o_m = (i_m * BM + tl.arange(0, BM)).to(tl.int64)
    o_n = (i_n * BN + tl.arange(0, BN)).to(tl.int64)
    m_m, m_n = o_m < M, o_n < N
    p_x = x + i_b * x_batch + o_m[:, None] * x_row
    o_yn = o_n
    if LISTED_N:
        o_yn = tl.load(listed + o_n, mask=m_n, other=0)
    p_y = y + i_b * y_batch + o_yn[None, :] * y_col
    b_out = tl.zeros((BM, BN), dtype=out.dtype.element_ty)
    for i_chunk in range(0, K, CHUNK):
        accs = no_products(BM, BN, LIMBS)
        for i_k in range(i_chunk, min(i_chunk + CHUNK, K), BK):
            o_k = (i_k + tl.arange(0, BK)).to(tl.int64)
            m_k = o_k < K
            o_yk = o_k
            if LISTED_K:
                o_yk = tl.load(listed + o_k, mask=m_k, other=0)
            # [BM, BK], [BK, BN]
            b_x = tl.load(p_x + o_k[None, :] * x_col, mask=m_m[:, None] & m_k[None, :], other=0) + SHIFT
            b_y = tl.load(p_y + o_yk[:, None] * y_row, mask=m_k[:, None] & m_n[None, :], other=0) + SHIFT
            accs = digit_products(accs, b_x, b_y, LIMBS)
        b_out = add_up(b_out, accs, LIMBS)
    p_out = out + i_b * M * N + o_m[:, None] * N + o_n[None, :]
    m_out = m_m[:, None] & m_n[None, :]
    if ADD:
        b_out += tl.load(p_out, mask=m_out, other=0)
    tl.store(p_out, b_out, mask=m_out)


def _stack(x: Tensor, batch: torch.Size) -> Tensor:
    return x.expand(*batch, *x.shape[-2:]).reshape(batch.numel(), *x.shape[-2:])


def product(x: Tensor, y: Tensor, onto: Tensor | None = None) -> Tensor:
    """x y modulo the ring size for x [..., M, K], y [..., K, N], added onto `onto` (contiguous) if given."""
    out = shapes.ring_matmul(x, y).zero_() if onto is None else onto
    rows, inner = x.shape[-2:]
    batch = out.shape[:-2]
    if not (out.numel() and inner):
        return out
    if y.dim() == 2:
        left, right = x.reshape(1, batch.numel() * rows, inner), y.unsqueeze(0)
    else:
        left, right = _stack(x, batch), _stack(y, batch)
    _run(left, right, out, onto is not None)
    return out


def rows_product(x: Tensor, y: Tensor, rows: Tensor, onto: Tensor | None = None) -> Tensor:
    """x y[rows]^T for x [M, K], y [N, K], added onto `onto` if given; the numbers were checked."""
    out = shapes.ring_matmul_rows(x, y, rows).zero_() if onto is None else onto
    if out.numel() and x.shape[1]:
        _run(x.unsqueeze(0), y.mT.unsqueeze(0), out, onto is not None, by_column=rows)
    return out


def lines_product(x: Tensor, y: Tensor, lines: Tensor, onto: Tensor | None = None) -> Tensor:
    """x y[lines] for x [M, R], y [K, N], added onto `onto` if given; the numbers were checked."""
    out = shapes.ring_matmul_lines(x, y, lines).zero_() if onto is None else onto
    if out.numel() and x.shape[1]:
        _run(x.unsqueeze(0), y.unsqueeze(0), out, onto is not None, by_row=lines)
    return out


def _run(
    left: Tensor, right: Tensor, out: Tensor, adds: bool, by_column: Tensor | None = None, by_row: Tensor | None = None
) -> None:
    """out [.., M, N] (+)= left [B, M, K] right [B, K, N], of which only listed columns or rows take part, if given."""
    inner, columns, limbs = left.shape[2], out.shape[-1], left.element_size()
    given = by_row if by_column is None else by_column
    listed = left if given is None else given.to(left.device).contiguous()

    def launch(tile: Tile, into: Tensor, add: bool) -> None:
        grid = (triton.cdiv(left.shape[1], tile.rows), triton.cdiv(columns, tile.columns), left.shape[0])
        matmul_kernel[grid](
            left, right, listed, into, left.shape[1], columns, inner, *left.stride(), *right.stride(),
            LIMBS=limbs, SHIFT=digit_shift(limbs), ADD=add, CHUNK=CHUNK, LISTED_N=by_column is not None,
            LISTED_K=by_row is not None, **tile.constants,
        )  # fmt: skip

    tile = TUNER.tiles[0]
    if out.is_cuda:
        layout = (by_column is None, by_row is None)
        key = (out.device, limbs, layout, size_range(left.shape[0], left.shape[1], inner, columns))
        tile = TUNER.best(key, lambda tried: launch(tried, torch.empty_like(out), False))
    launch(tile, out, adds)


def digit_shift(limbs: int) -> int:
    """0x80..80 as a signed ring element."""
    return int.from_bytes(bytes([0x80] * limbs), "little", signed=True)
