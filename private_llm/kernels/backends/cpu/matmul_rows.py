"""Ring products with listed rows of y, read where they lie: the tiles of `matmul`, whose lines may be anywhere.

A tile takes the place of each line of y from the list, so runs of consecutive rows go at the rate of the whole
matrix. Rows of y begin `pitch` elements after one another; the list was checked with `inside`.
"""

from __future__ import annotations

import numpy as np

from private_llm.kernels.address import Array, Zero, flat
from private_llm.kernels.backends.cpu.matmul import (
    DOT_STEPS,
    FEW_ROWS,
    ROW_STEPS,
    ROWS_IN_CACHE,
    VECTORS,
    rows_times_panel,
)
from private_llm.kernels.backends.cpu.tiles import VECTOR_BITS, tile
from private_llm.kernels.compiling import compiled

_NUMBER = np.int64(0)

_dot_block = tile(4, VECTORS, along_k=True, listed=True)
_dot_line = tile(1, 2 * VECTORS, along_k=True, listed=True)
_dot_one = tile(1, 1, along_k=True, listed=True)
_row_block = tile(4, VECTORS, along_k=False, listed=True)
_row_line = tile(1, VECTORS, along_k=False, listed=True)
_row_wide = tile(1, 4 * VECTORS, along_k=False, listed=True)


@compiled
def inside(listed: int, count: int, limit: int) -> bool:
    """Whether all numbers, int64 [count] by address, are 0 to limit - 1."""
    least, greatest = np.int64(0), np.int64(-1)
    for number in flat(listed, count, _NUMBER):
        least, greatest = min(least, number), max(greatest, number)
    return bool(least >= 0 and greatest < limit)


@compiled
def dot_rows(
    x: int, y: int, listed: int, out: int, rows: int, inner: int, columns: int, pitch: int, first: int, last: int,
    zero: Zero,
) -> None:  # fmt: skip
    """out[:, first:last] += x y[listed[first:last]]^T modulo the word size; x [M, K], out [M, R] contiguous."""
    xs, ys, outs = flat(x, rows * inner, zero), flat(y, inner, zero), flat(out, rows * columns, zero)
    numbers = flat(listed, columns, _NUMBER)
    lanes = VECTOR_BITS // (8 * xs.itemsize)
    whole = inner - inner % lanes
    block = max(whole, 1) if rows <= FEW_ROWS else DOT_STEPS
    for m_first in range(0, rows, ROWS_IN_CACHE):
        m_last = min(rows, m_first + ROWS_IN_CACHE)
        m_blocks = m_last - (m_last - m_first) % 4
        for k in range(0, whole, block):
            steps = min(block, whole - k)
            n = first
            while n < last:
                wide = last - n >= 2 * VECTORS
                for m in range(m_first, m_blocks, 4):
                    x_at, out_at = m * inner + k, m * columns + n
                    if wide:
                        for half in range(0, 2 * VECTORS, VECTORS):
                            _dot_block(
                                xs, x_at, inner, ys, k, pitch, numbers, n + half, steps, outs, out_at + half, columns
                            )
                    else:
                        for i in range(4):
                            _dot_one(
                                xs, x_at + i * inner, 0, ys, k, pitch, numbers, n, steps, outs, out_at + i * columns, 0
                            )
                for m in range(m_blocks, m_last):
                    x_at, out_at = m * inner + k, m * columns + n
                    if wide:
                        _dot_line(xs, x_at, 0, ys, k, pitch, numbers, n, steps, outs, out_at, 0)
                    else:
                        _dot_one(xs, x_at, 0, ys, k, pitch, numbers, n, steps, outs, out_at, 0)
                n += 2 * VECTORS if wide else 1
    if whole < inner:
        for m in range(rows):
            for n in range(first, last):
                y_at = numbers[n] * pitch
                acc = outs[m * columns + n]
                for k in range(whole, inner):
                    acc += xs[m * inner + k] * ys[y_at + k]
                outs[m * columns + n] = acc


@compiled
def _rows_times_lines(
    xs: Array, x_at: int, x_pitch: int, rows: int, ys: Array, y_at: int, y_pitch: int, numbers: Array, first: int,
    steps: int, outs: Array, out_at: int, out_pitch: int,
) -> None:  # fmt: skip
    """All rows of x against one panel of VECTORS vectors of columns of listed lines."""
    blocks = rows - rows % 4
    for m in range(0, blocks, 4):
        _row_block(
            xs, x_at + m * x_pitch, x_pitch, ys, y_at, y_pitch, numbers, first, steps, outs, out_at + m * out_pitch,
            out_pitch,
        )  # fmt: skip
    for m in range(blocks, rows):
        _row_line(xs, x_at + m * x_pitch, 0, ys, y_at, y_pitch, numbers, first, steps, outs, out_at + m * out_pitch, 0)


@compiled
def add_lines(
    x: int, y: int, listed: int, out: int, rows: int, inner: int, columns: int, pitch: int, first: int, last: int,
    zero: Zero,
) -> None:  # fmt: skip
    """out[:, first:last] += x y[listed, first:last] modulo the word size; x [M, R], out [M, N] contiguous."""
    xs, ys, outs = flat(x, rows * inner, zero), flat(y, columns, zero), flat(out, rows * columns, zero)
    numbers = flat(listed, inner, _NUMBER)
    width = VECTORS * VECTOR_BITS // (8 * xs.itemsize)
    y_edge = np.zeros(ROW_STEPS * width, dtype=xs.dtype)
    out_edge = np.zeros(ROWS_IN_CACHE * width, dtype=xs.dtype)
    for m in range(0, rows, ROWS_IN_CACHE):
        count = min(ROWS_IN_CACHE, rows - m)
        for k in range(0, inner, ROW_STEPS):
            steps = min(ROW_STEPS, inner - k)
            x_at = m * inner + k
            n = first
            while last - n >= width:
                out_at = m * columns + n
                if rows == 1 and last - n >= 4 * width:
                    _row_wide(xs, x_at, 0, ys, n, pitch, numbers, k, steps, outs, out_at, 0)
                    n += 4 * width
                else:
                    _rows_times_lines(xs, x_at, inner, count, ys, n, pitch, numbers, k, steps, outs, out_at, columns)
                    n += width
            left = last - n
            if left:
                out_edge[:] = 0
                for i in range(steps):
                    for j in range(left):
                        y_edge[i * width + j] = ys[numbers[k + i] * pitch + n + j]
                rows_times_panel(xs, x_at, inner, count, y_edge, 0, width, steps, out_edge, 0, width)
                for i in range(count):
                    for j in range(left):
                        outs[(m + i) * columns + n + j] += out_edge[i * width + j]
