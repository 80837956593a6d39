"""Ring matrix products on GPUs (Triton): which kernel makes one, by its size.

A few rows (a decoded token is one) meet a matrix in integer multiplications, as fast as it is read: to take it apart
into digits would be for one use. Parts of K are summed by different programs and added to the result atomically. More
rows are multiplied on the tensor cores, digit by digit (`planes`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from private_llm.kernels import shapes
from private_llm.kernels.matmul import planes
from private_llm.kernels.matmul import seeded_triton as seeded_matmul
from private_llm.kernels.matmul.narrow import BYTES
from private_llm.kernels.matmul.planes import Tile, Tuner, size_range
from private_llm.kernels.seeded_tensor import SeededTensor, dense

MOST = 8
"""Rows of x. With a weight of 4096 x 4096 that lies turned, 1, 4 and 16 rows take 44, 77 and 302 us on an H200."""
TUNER = Tuner(
    tuple(
        Tile(1, columns, inner, warps, share=share)
        for columns, inner, warps, share in ((32, 128, 4, 2), (128, 32, 8, 4), (256, 16, 4, 8))
    )
)
"""Tiles to try; `share` is how many steps of K a program takes."""


@triton.jit
def few_rows_kernel(  # type: ignore[no-untyped-def]  # noqa: ANN201
    x, y, listed, out, M, N, K, x_batch, x_row, x_col, y_batch, y_row, y_col,  # noqa: ANN001
    LISTED_N: tl.constexpr, LISTED_K: tl.constexpr, ROWS: tl.constexpr, SHARE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out [B, M, N] += x y for x [B, M, K], y [B, K, N] of any strides, M <= ROWS; a program takes SHARE BK of K.

    LISTED_N, LISTED_K: column n (row k) of y is the one with number listed[n] (listed[k]).
    """
    i_n, i_part, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    o_n = (i_n * BN + tl.arange(0, BN)).to(tl.int64)
    m_n = o_n < N
    x += i_b * x_batch
    o_yn = o_n
    if LISTED_N:
        o_yn = tl.load(listed + o_n, mask=m_n, other=0)
    p_y = y + i_b * y_batch + o_yn[:, None] * y_col
    sums = ()
    for _ in tl.static_range(ROWS):
        sums = sums + (tl.zeros((BN,), dtype=out.dtype.element_ty),)  # type: ignore[assignment]  # noqa: RUF005
    for at in range(SHARE):
        o_k = ((i_part * SHARE + at) * BK + tl.arange(0, BK)).to(tl.int64)
        m_k = o_k < K
        o_yk = o_k
        if LISTED_K:
            o_yk = tl.load(listed + o_k, mask=m_k, other=0)
        # [BN, BK]
        b_y = tl.load(p_y + o_yk[None, :] * y_row, mask=m_n[:, None] & m_k[None, :], other=0)
        new = ()
        for m in tl.static_range(ROWS):
            b_x = tl.load(x + m * x_row + o_k * x_col, mask=m_k & (m + 0 * o_k < M), other=0)
            new = new + (sums[m] + tl.sum(b_y * b_x[None, :], axis=1),)  # type: ignore[assignment]  # noqa: RUF005
        sums = new
    for m in tl.static_range(ROWS):
        tl.atomic_add(out + (i_b * M + m) * N + o_n, sums[m], mask=m_n & (m + 0 * o_n < M), sem="relaxed")


def add_product(
    x: Tensor, y: Tensor, out: Tensor, by_column: Tensor | None = None, by_row: Tensor | None = None
) -> None:
    """out [B, M, N] += x y for x [B, M, K], y [B, K, N] of any strides, M <= MOST; y may be int16 or int8.

    by_column, by_row: of y only the listed columns, or rows, take part, in their order; int64 and contiguous.
    """
    batch, rows, inner = x.shape
    columns = out.shape[2]
    given = by_row if by_column is None else by_column
    listed = x if given is None else given

    def launch(tile: Tile, into: Tensor) -> None:
        grid = (triton.cdiv(columns, tile.columns), triton.cdiv(inner, tile.inner * tile.share), batch)
        few_rows_kernel[grid](
            x, y, listed, into, rows, columns, inner, *x.stride(), *y.stride(), LISTED_N=by_column is not None,
            LISTED_K=by_row is not None, ROWS=triton.next_power_of_2(rows), SHARE=tile.share, **tile.constants,
        )  # fmt: skip

    tile = TUNER.tiles[0]
    if out.is_cuda:
        layout = (y.stride(1) == 1, by_column is None, by_row is None)
        key = (out.device, out.dtype, y.dtype, layout, size_range(batch, rows, inner, columns))
        tile = TUNER.best(key, lambda tried: launch(tried, torch.zeros_like(out)))
    launch(tile, out)


MOST_STACKED = 65535
"""Matrices that one call of a kernel takes."""


def product(x: Tensor, y: Tensor, onto: Tensor | None = None) -> Tensor:
    """x y modulo the ring size for x [..., M, K], y [..., K, N], added onto `onto` (contiguous) if given."""
    out = shapes.ring_matmul(x, y).zero_() if onto is None else onto
    x, y = dense(x), _in_memory_or_2d(y)
    rows, inner = x.shape[-2:]
    batch = out.shape[:-2]
    if not (out.numel() and inner):
        return out
    if y.dim() == 2:
        left, right = x.reshape(1, batch.numel() * rows, inner), y if isinstance(y, SeededTensor) else y.unsqueeze(0)
    else:
        left, right = _stack(x, batch), _stack(y, batch)
    made = out.view(left.shape[0], left.shape[1], out.shape[-1])
    few = left.shape[1] <= MOST
    if isinstance(right, SeededTensor):
        if few:
            seeded_matmul.few_rows(left[0], right, made[0])
        else:
            planes.add_product(left, right, made, onto is not None, seeded_matmul.take_apart)
        return out
    for some in range(0, len(made), MOST_STACKED):
        part = slice(some, some + MOST_STACKED)
        if few:
            add_product(left[part], right[part], made[part])
        else:
            planes.add_product(left[part], right[part], made[part], onto is not None)
    return out


def pair(x0: Tensor, y0: Tensor, x1: Tensor, y1: Tensor) -> Tensor:
    """x0 y0 + x1 y1, both of one shape. A few rows meet a matrix in memory and one that is made in one kernel."""
    y0, y1 = _in_memory_or_2d(y0), _in_memory_or_2d(y1)
    made, held = ((x0, y0), (x1, y1)) if isinstance(y0, SeededTensor) else ((x1, y1), (x0, y0))
    rows = x0.shape[:-1].numel()
    if not isinstance(made[1], SeededTensor) or isinstance(held[1], SeededTensor) or not 0 < rows <= MOST:
        return product(x1, y1, product(x0, y0))
    out = shapes.ring_matmul(x0, y0).zero_()
    left, other = (x.reshape(rows, -1) for x, _ in (made, held))
    seeded_matmul.few_rows(left, made[1], out.view(rows, -1), other, held[1])
    return out


def narrow(x: Tensor, weight: Tensor) -> Tensor:
    """int64 [M, N] equal to x weight^T modulo 2^40; x int64 [M, K], weight int16 [N, K] with elements below 32640.

    For an int8 weight modulo 2^32. Digits have 8 bits.
    """
    out = x.new_zeros(1, len(x), len(weight))
    if len(x) <= MOST:
        add_product(x[None], weight.mT[None], out)
        return out[0]
    width = weight.element_size()
    rows, lines = planes.take_apart(x[None], BYTES[8 * width]), max(planes.BYTES // (width * weight.shape[1]), 1)
    parts = [out.new_empty(1, len(x), len(some)) for some in weight.split(lines)]
    for part, some in zip(parts, weight.split(lines), strict=True):
        some = some.short() if width == 1 else some  # digits are taken of wider numbers
        planes.product_of_planes(rows, planes.take_apart(some[None], width), part, False)
    return torch.cat(parts, dim=2)[0]


def _in_memory_or_2d(y: Tensor) -> Tensor:
    """A matrix whose tiles kernels make stays as it is; anything else is made whole, if it is not in memory."""
    return y if isinstance(y, SeededTensor) and y.on_gpus and y.dim() == 2 else dense(y)


def listed_product(x: Tensor, y: Tensor, listed: Tensor, turned: bool, onto: Tensor | None = None) -> Tensor:
    """`ops.ring_matmul_rows` if `turned`, else `ops.ring_matmul_lines`; the numbers were checked and lie on the GPU."""
    size = shapes.listed_size("ring_matmul_rows" if turned else "ring_matmul_lines", x, y, listed)
    out = x.new_zeros(size) if onto is None else onto
    y = dense(y)
    if not (out.numel() and x.shape[1]):
        return out
    if len(x) > MOST:
        found = y.index_select(0, listed)
        return product(x, found.mT if turned else found, out)
    y, listed = y.mT if turned else y, listed.contiguous()
    by_column, by_row = (listed, None) if turned else (None, listed)
    add_product(x.unsqueeze(0), y.unsqueeze(0), out.unsqueeze(0), by_column, by_row)
    return out


def _stack(x: Tensor, batch: torch.Size) -> Tensor:
    return x.expand(*batch, *x.shape[-2:]).reshape(batch.numel(), *x.shape[-2:])
