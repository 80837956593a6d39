"""Ring convolutions on GPUs (Triton): products of digits of windows that are never written down.

Outputs of one group form a matrix [O / groups, positions] = kernel [O / groups, K] windows [K, positions],
K = depth kh kw, with the positions of all images side by side (late layers have few each); a program computes the
addresses of its piece of the windows and reads them where they lie in x.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from private_llm.kernels import shapes
from private_llm.kernels.matmul.planes import Tile, Tuner, add_up, digit_products, digit_shift, no_products, size_range
from private_llm.kernels.shapes import Pair

TUNER = Tuner((Tile(64, 32), Tile(32, 64), Tile(16, 64, warps=4)))
"""Tiles to try. An accumulator for each digit sum takes registers: of 64 bits, 64 x 64 spills 1 KB a thread."""
CHUNK = 8192  # k steps between two additions of the accumulators: 8 * 2^14 * 8192 = 2^30


@triton.jit
def _windows(  # type: ignore[no-untyped-def]  # noqa: ANN202
    x, o_k, o_p, m_k, m_p, height, width, area, columns, x_b, x_c, x_h, x_w,  # noqa: ANN001
    down, right, top, left, far_h, far_w, KH: tl.constexpr, KW: tl.constexpr,  # noqa: ANN001
):  # fmt: skip
    """Entries [BK, BN] of the windows: o_k = (c, i, j) in the kernel, o_p = (image, row, column) in the output."""
    x += (o_p // area).to(tl.int64)[None, :] * x_b
    o_p = o_p % area
    i_y = (o_p // columns * down - top)[None, :] + (o_k // KW % KH * far_h)[:, None]
    i_x = (o_p % columns * right - left)[None, :] + (o_k % KW * far_w)[:, None]
    inside = (i_y >= 0) & (i_y < height) & (i_x >= 0) & (i_x < width) & m_k[:, None] & m_p[None, :]
    o_c = (o_k // (KH * KW)).to(tl.int64)[:, None] * x_c
    return tl.load(x + o_c + i_y.to(tl.int64) * x_h + i_x.to(tl.int64) * x_w, mask=inside, other=0)


@triton.jit
def conv_kernel(  # type: ignore[no-untyped-def]  # noqa: ANN201
    x, w, out, groups, depth, M, N, height, width, area, columns, x_b, x_c, x_h, x_w,  # noqa: ANN001
    down, right, top, left, far_h, far_w,  # noqa: ANN001
    KH: tl.constexpr, KW: tl.constexpr, LIMBS: tl.constexpr, SHIFT: tl.constexpr, ADD: tl.constexpr,
    CHUNK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out [B, groups, M, area] (+)= w [groups, M, K] windows of x [B, groups depth, H, W]; N = B area."""
    i_m, i_n, i_g = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    K = depth * KH * KW
    o_m, o_p = i_m * BM + tl.arange(0, BM), i_n * BN + tl.arange(0, BN)
    m_m, m_p = o_m < M, o_p < N
    x += i_g.to(tl.int64) * depth * x_c
    p_w = w + (i_g.to(tl.int64) * M + o_m.to(tl.int64)) * K
    b_out = tl.zeros((BM, BN), dtype=out.dtype.element_ty)
    for i_chunk in range(0, K, CHUNK):
        accs = no_products(BM, BN, LIMBS)
        for i_k in range(i_chunk, min(i_chunk + CHUNK, K), BK):
            o_k = i_k + tl.arange(0, BK)
            m_k = o_k < K
            # [BM, BK], [BK, BN]
            b_w = tl.load(p_w[:, None] + o_k[None, :], mask=m_m[:, None] & m_k[None, :], other=0)
            b_x = _windows(
                x, o_k, o_p, m_k, m_p, height, width, area, columns, x_b, x_c, x_h, x_w,
                down, right, top, left, far_h, far_w, KH, KW,
            )  # fmt: skip
            accs = digit_products(accs, b_w + SHIFT, b_x + SHIFT, LIMBS)
        b_out = add_up(b_out, accs, LIMBS)
    i_image = (o_p // area).to(tl.int64)[None, :] * groups + i_g
    p_out = out + (i_image * M + o_m.to(tl.int64)[:, None]) * area + (o_p % area)[None, :]
    m_out = m_m[:, None] & m_p[None, :]
    if ADD:
        b_out += tl.load(p_out, mask=m_out, other=0)
    tl.store(p_out, b_out, mask=m_out)


def product(
    x: Tensor, w: Tensor, stride: Pair, padding: Pair, dilation: Pair, groups: int, onto: Tensor | None = None
) -> Tensor:  # fmt: skip
    """x * w modulo the ring size, added onto `onto` (contiguous, of the result's shape, changed in place) if given."""
    out = shapes.ring_conv2d(x, w, stride, padding, dilation, groups).zero_() if onto is None else onto
    batch, outputs, rows, columns = out.shape
    if not out.numel() or not w[0].numel():
        return out
    w, limbs = w.contiguous(), x.element_size()
    depth, high, wide = w.shape[1:]
    each, area = outputs // groups, rows * columns

    def launch(tile: Tile, into: Tensor, add: bool) -> None:
        grid = (triton.cdiv(each, tile.rows), triton.cdiv(batch * area, tile.columns), groups)
        conv_kernel[grid](
            x, w, into, groups, depth, each, batch * area, x.shape[2], x.shape[3], area, columns, *x.stride(),
            *stride, *padding, *dilation, KH=high, KW=wide, LIMBS=limbs, SHIFT=digit_shift(limbs),
            ADD=add, CHUNK=CHUNK, **tile.constants,
        )  # fmt: skip

    tile = TUNER.tiles[0]
    if out.is_cuda:
        key = (out.device, limbs, high, wide, stride, size_range(groups, each, depth, batch * area))
        tile = TUNER.best(key, lambda tried: launch(tried, torch.empty_like(out), False))
    launch(tile, out, onto is not None)
    return out
