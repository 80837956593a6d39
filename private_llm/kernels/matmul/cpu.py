"""Ring matrix products on the CPU: register tiles of vector multiply-adds (Numba, one thread, GIL-free).

Two layouts, chosen by how y lies in memory:

- `dot_product`, y given as [N, K] rows (a linear layer's weight, the key cache): lanes run along k.
- `row_product`, y given as [K, N] rows: lanes run along n.

Both read y once, almost in order, and never copy it, but for many rows on processors without AVX-512 (`pairs`).
Measured on one AVX-512 core (768 x 3072, 64 bits): 3.6 GMAC/s for one row of x (29 GB/s of weights), 9 to 11 from four
rows on, in both layouts. `torch.matmul` on integers makes 0.1 to 0.5 for one row, 0.8 to 3.7 for eight, 5.5 to 8.7 for
128.

`dot_rows` and `add_lines` are the same with listed rows of y, which begin `pitch` elements after one another; the list
was checked with `inside`. A tile takes the place of each line of y from the list (`numbers`, None for all lines in
order), so runs of consecutive rows go at the rate of the whole matrix.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from private_llm.kernels.address import SIGNED, Array, Read, Written, Zero, flat
from private_llm.kernels.compiling import compiled
from private_llm.kernels.matmul.pairs import pair_product
from private_llm.kernels.matmul.tiles import VECTOR_BITS, WIDE, tile

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
_IN_PAIRS, _MANY_ROWS = not WIDE, 16
"""Whether products of at least so many rows multiply pairs of steps at once: with AVX-512 it is no faster."""
FEW_ROWS = 12
"""Up to this many rows of x stay in cache whole, so a dot product needs no blocks."""

inlined = partial(compiled, inlined=True)
_dot_block = tile(4, VECTORS, along_k=True)
_dot_line = tile(1, 2 * VECTORS, along_k=True)
_dot_one = tile(1, 1, along_k=True)
_row_block = tile(4, VECTORS, along_k=False)
_row_line = tile(1, VECTORS, along_k=False)
row_wide = tile(1, 4 * VECTORS, along_k=False)


@inlined
def _number(numbers: Array | None, place: int) -> int:
    """Of the line at a place."""
    if numbers is None:
        return place
    return int(numbers[place])


@inlined
def rows_times_lines(
    xs: Array, x_at: int, x_pitch: int, rows: int, ys: Array, y_at: int, y_pitch: int, numbers: Array | None,
    first: int, lines: int, steps: int, outs: Array, out_at: int, out_pitch: int,
) -> None:  # fmt: skip
    """All rows of x against up to 2 VECTORS lines of y, `steps` elements of each: whole vectors, at least one."""
    blocks = rows - rows % 4
    wide = lines == 2 * VECTORS
    for m in range(0, blocks, 4):
        x_m, out_m = x_at + m * x_pitch, out_at + m * out_pitch
        if wide:
            for half in range(0, 2 * VECTORS, VECTORS):
                line, to = first + half, out_m + half
                _dot_block(xs, x_m, x_pitch, ys, y_at, y_pitch, numbers, line, steps, outs, to, out_pitch)
        else:
            for i in range(4):
                for j in range(lines):
                    x_i, to = x_m + i * x_pitch, out_m + i * out_pitch + j
                    _dot_one(xs, x_i, 0, ys, y_at, y_pitch, numbers, first + j, steps, outs, to, 0)
    for m in range(blocks, rows):
        x_m, out_m = x_at + m * x_pitch, out_at + m * out_pitch
        if wide:
            _dot_line(xs, x_m, 0, ys, y_at, y_pitch, numbers, first, steps, outs, out_m, 0)
        else:
            for j in range(lines):
                _dot_one(xs, x_m, 0, ys, y_at, y_pitch, numbers, first + j, steps, outs, out_m + j, 0)


@inlined
def dot_lines(
    xs: Array, x_at: int, x_pitch: int, rows: int, inner: int, ys: Array, y_at: int, y_pitch: int,
    numbers: Array | None, first: int, last: int, outs: Array, out_at: int, out_pitch: int,
) -> None:  # fmt: skip
    """out[:, first:last] += x y^T for lines first .. last - 1 of y."""
    lanes, begin = VECTOR_BITS // (8 * xs.itemsize), first
    if _IN_PAIRS and rows >= _MANY_ROWS:
        begin = pair_product(
            xs, x_at, x_pitch, rows, inner, ys, y_at, y_pitch, numbers, first, last, outs, out_at, out_pitch, True
        )  # fmt: skip
    whole = inner - inner % lanes
    block = max(whole, 1) if rows <= FEW_ROWS else DOT_STEPS
    for m in range(0, rows, ROWS_IN_CACHE):
        count, x_m, out_m = min(ROWS_IN_CACHE, rows - m), x_at + m * x_pitch, out_at + m * out_pitch
        for k in range(0, whole, block):
            steps = min(block, whole - k)
            for n in range(begin, last, 2 * VECTORS):
                lines = min(2 * VECTORS, last - n)
                rows_times_lines(
                    xs, x_m + k, x_pitch, count, ys, y_at + k, y_pitch, numbers, n, lines, steps, outs, out_m + n,
                    out_pitch,
                )  # fmt: skip
    if whole < inner:
        for m in range(rows):
            for n in range(first, last):
                line = y_at + _number(numbers, n) * y_pitch
                acc = outs[out_at + m * out_pitch + n]
                for k in range(whole, inner):
                    acc += xs[x_at + m * x_pitch + k] * ys[line + k]
                outs[out_at + m * out_pitch + n] = acc


@compiled
def dot_product(
    x: Read, y: Read, out: Written, batches: int, rows: int, inner: int, columns: int, step: int, zero: Zero,
) -> None:  # fmt: skip
    """out += x y^T modulo the word size; x [B, M, K], y [B, N, K], out [B, M, N] by address, contiguous.

    step: elements from one matrix of y to the next.
    """
    xs, ys = flat(x, batches * rows * inner, zero), flat(y, (batches - 1) * step + columns * inner, zero)
    outs = flat(out, batches * rows * columns, zero)
    for batch in range(batches):
        x_at, out_at = batch * rows * inner, batch * rows * columns
        dot_lines(xs, x_at, inner, rows, inner, ys, batch * step, inner, None, 0, columns, outs, out_at, columns)


@compiled
def dot_rows(
    x: int, y: int, listed: int, out: int, rows: int, inner: int, columns: int, pitch: int, first: int, last: int,
    zero: Zero,
) -> None:  # fmt: skip
    """out[:, first:last] += x y[listed[first:last]]^T modulo the word size; x [M, K], out [M, R] contiguous."""
    xs, ys, outs = flat(x, rows * inner, zero), flat(y, inner, zero), flat(out, rows * columns, zero)
    numbers = flat(listed, columns, SIGNED)
    dot_lines(xs, 0, inner, rows, inner, ys, 0, pitch, numbers, first, last, outs, 0, columns)


@inlined
def rows_times_panel(
    xs: Array, x_at: int, x_pitch: int, rows: int, ys: Array, y_at: int, y_pitch: int, numbers: Array | None,
    first: int, steps: int, outs: Array, out_at: int, out_pitch: int,
) -> None:  # fmt: skip
    """All rows of x against one panel of VECTORS vectors of columns of lines first .. first + steps - 1."""
    blocks = rows - rows % 4
    for m in range(0, blocks, 4):
        x_m, to = x_at + m * x_pitch, out_at + m * out_pitch
        _row_block(xs, x_m, x_pitch, ys, y_at, y_pitch, numbers, first, steps, outs, to, out_pitch)
    for m in range(blocks, rows):
        x_m, to = x_at + m * x_pitch, out_at + m * out_pitch
        _row_line(xs, x_m, 0, ys, y_at, y_pitch, numbers, first, steps, outs, to, 0)


@inlined
def row_lines(
    xs: Array, x_at: int, x_pitch: int, rows: int, inner: int, ys: Array, y_at: int, y_pitch: int,
    numbers: Array | None, first: int, last: int, outs: Array, out_at: int, out_pitch: int, edges: tuple[Array, Array],
) -> None:  # fmt: skip
    """out[:, first:last] += x y for these columns of `inner` lines of y. edges: as `edges_of`."""
    width = VECTORS * VECTOR_BITS // (8 * xs.itemsize)
    y_edge, out_edge = edges
    if _IN_PAIRS and rows >= _MANY_ROWS:
        first = pair_product(
            xs, x_at, x_pitch, rows, inner, ys, y_at, y_pitch, numbers, first, last, outs, out_at, out_pitch, False
        )  # fmt: skip
    if first == last:
        return
    for m in range(0, rows, ROWS_IN_CACHE):
        count, out_m = min(ROWS_IN_CACHE, rows - m), out_at + m * out_pitch
        for k in range(0, inner, ROW_STEPS):
            steps, x_k = min(ROW_STEPS, inner - k), x_at + m * x_pitch + k
            n = first
            while last - n >= width:
                y_n, to = y_at + n, out_m + n
                if rows == 1 and last - n >= 4 * width:
                    row_wide(xs, x_k, 0, ys, y_n, y_pitch, numbers, k, steps, outs, to, 0)
                    n += 4 * width
                else:
                    rows_times_panel(
                        xs, x_k, x_pitch, count, ys, y_n, y_pitch, numbers, k, steps, outs, to, out_pitch
                    )  # fmt: skip
                    n += width
            left = last - n
            if left:
                out_edge[: count * width] = 0
                for i in range(steps):
                    for j in range(left):
                        y_edge[i * width + j] = ys[y_at + _number(numbers, k + i) * y_pitch + n + j]
                rows_times_panel(xs, x_k, x_pitch, count, y_edge, 0, width, None, 0, steps, out_edge, 0, width)
                for i in range(count):
                    for j in range(left):
                        outs[out_m + i * out_pitch + n + j] += out_edge[i * width + j]


@compiled
def edges_of(xs: Array) -> tuple[Array, Array]:
    """Room for columns that do not fill a panel: of y, and of the result."""
    width = VECTORS * VECTOR_BITS // (8 * xs.itemsize)
    return np.zeros(ROW_STEPS * width, dtype=xs.dtype), np.zeros(ROWS_IN_CACHE * width, dtype=xs.dtype)


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
    edges = edges_of(xs)
    for batch in range(batches):
        x_at, out_at = batch * rows * inner, batch * rows * columns
        row_lines(
            xs, x_at, inner, rows, inner, ys, batch * step, columns, None, 0, columns, outs, out_at, columns, edges
        )


@compiled
def add_lines(
    x: int, y: int, listed: int, out: int, rows: int, inner: int, columns: int, pitch: int, first: int, last: int,
    zero: Zero,
) -> None:  # fmt: skip
    """out[:, first:last] += x y[listed, first:last] modulo the word size; x [M, R], out [M, N] contiguous."""
    xs, ys, outs = flat(x, rows * inner, zero), flat(y, columns, zero), flat(out, rows * columns, zero)
    numbers = flat(listed, inner, SIGNED)
    row_lines(xs, 0, inner, rows, inner, ys, 0, pitch, numbers, first, last, outs, 0, columns, edges_of(xs))


@compiled
def inside(listed: int, count: int, limit: int) -> bool:
    """Whether all numbers, int64 [count] by address, are 0 to limit - 1."""
    least, greatest = np.int64(0), np.int64(-1)
    for number in flat(listed, count, SIGNED):
        least, greatest = min(least, number), max(greatest, number)
    return bool(least >= 0 and greatest < limit)
