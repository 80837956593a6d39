"""Ring matrix products on the CPU: register tiles of vector multiply-adds (Numba, one thread, GIL-free).

Two layouts, chosen by how y lies in memory:

- `dot_product`, y given as [N, K] rows (a linear layer's weight, the key cache): lanes run along k.
- `row_product`, y given as [K, N] rows: lanes run along n.

Both read y once, almost in order, and never copy it. Measured on one AVX-512 core (768 x 3072, 64 bits):
3.6 GMAC/s for one row of x (29 GB/s of weights), 9 to 11 from four rows on, in both layouts. `torch.matmul`
on integers makes 0.1 to 0.5 for one row, 0.8 to 3.7 for eight, 5.5 to 8.7 for 128.

`dot_rows` and `add_lines` are the same with listed rows of y, which begin `pitch` elements after one another; the list
was checked with `inside`. A tile takes the place of each line of y from the list, so runs of consecutive rows go at the
rate of the whole matrix.
"""

from __future__ import annotations

import numpy as np

from private_llm.kernels.address import SIGNED, Array, Read, Written, Zero, flat
from private_llm.kernels.backends.cpu.tiles import VECTOR_BITS, WIDE, tile
from private_llm.kernels.compiling import compiled

VECTORS = 4 if WIDE else 2
"""Vectors of y per tile: four rows of x times four vectors fill half of 32 registers (two, of 16)."""
ROW_STEPS = 24
"""k steps per block of a row product: few enough that the strided lines of y share a first-level cache."""
DOT_STEPS = 512
"""k steps per block of a dot product with many rows of x: four rows of y then fit the first-level cache."""
ROWS_IN_CACHE = 64
"""Rows of x, and of the result, per block: they stay in the second-level cache."""
_WIDE_LINE = 512
"""Columns from which one row of x meets whole lines of y: panels of them lie too far apart to be read ahead."""
FEW_ROWS = 12
"""Up to this many rows of x stay in cache whole, so a dot product needs no blocks."""

_dot_block = tile(4, VECTORS, along_k=True)
_dot_line = tile(1, 2 * VECTORS, along_k=True)
_dot_one = tile(1, 1, along_k=True)
_row_block = tile(4, VECTORS, along_k=False)
_row_line = tile(1, VECTORS, along_k=False)
row_wide = tile(1, 4 * VECTORS, along_k=False)


@compiled
def rows_times_lines(
    xs: Array, x_at: int, x_pitch: int, rows: int, ys: Array, y_at: int, y_pitch: int, lines: int, steps: int,
    outs: Array, out_at: int, out_pitch: int,
) -> None:  # fmt: skip
    """All rows of x against up to 2 VECTORS lines of y, `steps` elements of each: whole vectors, at least one."""
    blocks = rows - rows % 4
    wide = lines == 2 * VECTORS
    for m in range(0, blocks, 4):
        x_m, out_m = x_at + m * x_pitch, out_at + m * out_pitch
        if wide:
            for half in range(0, 2 * VECTORS, VECTORS):
                y_half = y_at + half * y_pitch
                _dot_block(xs, x_m, x_pitch, ys, y_half, y_pitch, steps, outs, out_m + half, out_pitch)
        else:
            for i in range(4):
                for j in range(lines):
                    line = y_at + j * y_pitch
                    _dot_one(xs, x_m + i * x_pitch, 0, ys, line, 0, steps, outs, out_m + i * out_pitch + j, 0)
    for m in range(blocks, rows):
        x_m, out_m = x_at + m * x_pitch, out_at + m * out_pitch
        if wide:
            _dot_line(xs, x_m, 0, ys, y_at, y_pitch, steps, outs, out_m, 0)
        else:
            for j in range(lines):
                _dot_one(xs, x_m, 0, ys, y_at + j * y_pitch, 0, steps, outs, out_m + j, 0)


@compiled
def dot_product(
    x: Read, y: Read, out: Written, batches: int, rows: int, inner: int, columns: int, step: int, zero: Zero,
) -> None:  # fmt: skip
    """out += x y^T modulo the word size; x [B, M, K], y [B, N, K], out [B, M, N] by address, contiguous.

    step: elements from one matrix of y to the next.
    """
    xs, ys = flat(x, batches * rows * inner, zero), flat(y, (batches - 1) * step + columns * inner, zero)
    outs = flat(out, batches * rows * columns, zero)
    lanes = VECTOR_BITS // (8 * xs.itemsize)
    whole = inner - inner % lanes
    block = max(whole, 1) if rows <= FEW_ROWS else DOT_STEPS
    for batch in range(batches):
        for m_first in range(0, rows, ROWS_IN_CACHE):
            m_last = min(rows, m_first + ROWS_IN_CACHE)
            for k in range(0, whole, block):
                steps = min(block, whole - k)
                for n in range(0, columns, 2 * VECTORS):
                    x_at, y_at = (batch * rows + m_first) * inner + k, batch * step + n * inner + k
                    out_at, lines = (batch * rows + m_first) * columns + n, min(2 * VECTORS, columns - n)
                    count = m_last - m_first
                    rows_times_lines(xs, x_at, inner, count, ys, y_at, inner, lines, steps, outs, out_at, columns)
        if whole < inner:
            for m in range(batch * rows, (batch + 1) * rows):
                for n in range(columns):
                    y_at = batch * step + n * inner
                    acc = outs[m * columns + n]
                    for k in range(whole, inner):
                        acc += xs[m * inner + k] * ys[y_at + k]
                    outs[m * columns + n] = acc


@compiled
def rows_times_panel(
    xs: Array, x_at: int, x_pitch: int, rows: int, ys: Array, y_at: int, y_pitch: int, steps: int, outs: Array,
    out_at: int, out_pitch: int,
) -> None:  # fmt: skip
    """All rows of x against one panel of VECTORS vectors of columns."""
    blocks = rows - rows % 4
    for m in range(0, blocks, 4):
        _row_block(xs, x_at + m * x_pitch, x_pitch, ys, y_at, y_pitch, steps, outs, out_at + m * out_pitch, out_pitch)
    for m in range(blocks, rows):
        _row_line(xs, x_at + m * x_pitch, 0, ys, y_at, y_pitch, steps, outs, out_at + m * out_pitch, 0)


@compiled
def _one_row(xs: Array, ys: Array, outs: Array, inner: int, columns: int) -> None:
    """out [N] += x [K] y [K, N], eight lines of y at a time: read in order, with the result in the first cache."""
    whole = inner - inner % 8
    for k in range(0, whole, 8):
        a, b, c, d, e, f, g, h = xs[k], xs[k + 1], xs[k + 2], xs[k + 3], xs[k + 4], xs[k + 5], xs[k + 6], xs[k + 7]
        lines = ys[k * columns : (k + 8) * columns]
        y0, y1, y2, y3 = lines[:columns], lines[columns:], lines[2 * columns :], lines[3 * columns :]
        y4, y5, y6, y7 = lines[4 * columns :], lines[5 * columns :], lines[6 * columns :], lines[7 * columns :]
        for n in range(columns):
            outs[n] += (
                a * y0[n] + b * y1[n] + c * y2[n] + d * y3[n] + e * y4[n] + f * y5[n] + g * y6[n] + h * y7[n]
            )  # fmt: skip
    for k in range(whole, inner):
        a, line = xs[k], ys[k * columns : (k + 1) * columns]
        for n in range(columns):
            outs[n] += a * line[n]


@compiled
def row_product(
    x: Read, y: Read, out: Written, batches: int, rows: int, inner: int, columns: int, step: int, zero: Zero,
) -> None:  # fmt: skip
    """out += x y modulo the word size; x [B, M, K], y [B, K, N], out [B, M, N] by address, contiguous.

    step: as `dot_product`.
    """
    xs, ys = flat(x, batches * rows * inner, zero), flat(y, (batches - 1) * step + inner * columns, zero)
    outs = flat(out, batches * rows * columns, zero)
    if rows == 1 and columns >= _WIDE_LINE:
        for batch in range(batches):
            line, end = ys[batch * step : batch * step + inner * columns], (batch + 1) * columns
            _one_row(xs[batch * inner : (batch + 1) * inner], line, outs[batch * columns : end], inner, columns)
        return
    width = VECTORS * VECTOR_BITS // (8 * xs.itemsize)
    y_edge = np.zeros(ROW_STEPS * width, dtype=xs.dtype)
    out_edge = np.zeros(ROWS_IN_CACHE * width, dtype=xs.dtype)
    for batch in range(batches):
        for m in range(0, rows, ROWS_IN_CACHE):
            count = min(ROWS_IN_CACHE, rows - m)
            for k in range(0, inner, ROW_STEPS):
                steps = min(ROW_STEPS, inner - k)
                x_at = (batch * rows + m) * inner + k
                n = 0
                while columns - n >= width:
                    y_at = batch * step + k * columns + n
                    out_at = (batch * rows + m) * columns + n
                    if rows == 1 and columns - n >= 4 * width:
                        row_wide(xs, x_at, 0, ys, y_at, columns, steps, outs, out_at, 0)
                        n += 4 * width
                    else:
                        rows_times_panel(xs, x_at, inner, count, ys, y_at, columns, steps, outs, out_at, columns)
                        n += width
                left = columns - n
                if left:
                    out_edge[:] = 0
                    for i in range(steps):
                        for j in range(left):
                            y_edge[i * width + j] = ys[batch * step + (k + i) * columns + n + j]
                    rows_times_panel(xs, x_at, inner, count, y_edge, 0, width, steps, out_edge, 0, width)
                    for i in range(count):
                        for j in range(left):
                            outs[(batch * rows + m + i) * columns + n + j] += out_edge[i * width + j]


# -- listed rows of y, read where they lie ----------------------------------------------------------------------------
_listed_dot_block = tile(4, VECTORS, along_k=True, listed=True)
_listed_dot_line = tile(1, 2 * VECTORS, along_k=True, listed=True)
_listed_dot_one = tile(1, 1, along_k=True, listed=True)
_listed_row_block = tile(4, VECTORS, along_k=False, listed=True)
_listed_row_line = tile(1, VECTORS, along_k=False, listed=True)
_listed_row_wide = tile(1, 4 * VECTORS, along_k=False, listed=True)


@compiled
def inside(listed: int, count: int, limit: int) -> bool:
    """Whether all numbers, int64 [count] by address, are 0 to limit - 1."""
    least, greatest = np.int64(0), np.int64(-1)
    for number in flat(listed, count, SIGNED):
        least, greatest = min(least, number), max(greatest, number)
    return bool(least >= 0 and greatest < limit)


@compiled
def dot_rows(
    x: int, y: int, listed: int, out: int, rows: int, inner: int, columns: int, pitch: int, first: int, last: int,
    zero: Zero,
) -> None:  # fmt: skip
    """out[:, first:last] += x y[listed[first:last]]^T modulo the word size; x [M, K], out [M, R] contiguous."""
    xs, ys, outs = flat(x, rows * inner, zero), flat(y, inner, zero), flat(out, rows * columns, zero)
    numbers = flat(listed, columns, SIGNED)
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
                            _listed_dot_block(
                                xs, x_at, inner, ys, k, pitch, numbers, n + half, steps, outs, out_at + half, columns
                            )
                    else:
                        for i in range(4):
                            _listed_dot_one(
                                xs, x_at + i * inner, 0, ys, k, pitch, numbers, n, steps, outs, out_at + i * columns, 0
                            )
                for m in range(m_blocks, m_last):
                    x_at, out_at = m * inner + k, m * columns + n
                    if wide:
                        _listed_dot_line(xs, x_at, 0, ys, k, pitch, numbers, n, steps, outs, out_at, 0)
                    else:
                        _listed_dot_one(xs, x_at, 0, ys, k, pitch, numbers, n, steps, outs, out_at, 0)
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
def _rows_times_listed(
    xs: Array, x_at: int, x_pitch: int, rows: int, ys: Array, y_at: int, y_pitch: int, numbers: Array, first: int,
    steps: int, outs: Array, out_at: int, out_pitch: int,
) -> None:  # fmt: skip
    """All rows of x against one panel of VECTORS vectors of columns of listed lines."""
    blocks = rows - rows % 4
    for m in range(0, blocks, 4):
        _listed_row_block(
            xs, x_at + m * x_pitch, x_pitch, ys, y_at, y_pitch, numbers, first, steps, outs, out_at + m * out_pitch,
            out_pitch,
        )  # fmt: skip
    for m in range(blocks, rows):
        _listed_row_line(
            xs, x_at + m * x_pitch, 0, ys, y_at, y_pitch, numbers, first, steps, outs, out_at + m * out_pitch, 0
        )


@compiled
def add_lines(
    x: int, y: int, listed: int, out: int, rows: int, inner: int, columns: int, pitch: int, first: int, last: int,
    zero: Zero,
) -> None:  # fmt: skip
    """out[:, first:last] += x y[listed, first:last] modulo the word size; x [M, R], out [M, N] contiguous."""
    xs, ys, outs = flat(x, rows * inner, zero), flat(y, columns, zero), flat(out, rows * columns, zero)
    numbers = flat(listed, inner, SIGNED)
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
                    _listed_row_wide(xs, x_at, 0, ys, n, pitch, numbers, k, steps, outs, out_at, 0)
                    n += 4 * width
                else:
                    _rows_times_listed(xs, x_at, inner, count, ys, n, pitch, numbers, k, steps, outs, out_at, columns)
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
