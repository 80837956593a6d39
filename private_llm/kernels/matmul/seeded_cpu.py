"""Ring products with a matrix that is not in memory: its lines are made from an AES key stream, tile by tile.

A tile of y is written into scratch that stays in the first or second cache, and multiplied from there by the tiles of
`amx` (16 rows of x and more) or of `matmul` (fewer, or no AMX). y is made as its lines lie in the stream: `turned`,
they are the N columns of y, K elements each (a linear layer's weight); else its K rows, N elements each. Each 128 rows
of x (byte tiles), or all of them (register tiles), make y once. For processors with AES instructions (`aes.usable()`).
What was rejected: docs/decisions/154-products-can-draw-masks-of-weights.md.
"""

from __future__ import annotations

import numpy as np

from private_llm.kernels.address import Keys, Read, Written, Zero, flat
from private_llm.kernels.compiling import compiled
from private_llm.kernels.matmul import amx
from private_llm.kernels.matmul.amx import BLOCK_BYTES, COLUMNS, DESK_BYTES, ROWS_IN_CACHE
from private_llm.kernels.matmul.cpu import (
    DOT_STEPS,
    ROW_STEPS,
    VECTORS,
    row_wide,
    rows_times_lines,
    rows_times_panel,
)
from private_llm.kernels.matmul.tiles import VECTOR_BITS
from private_llm.kernels.prg.aes import SPILL, write_lines

GAP = 64
"""Bytes between lines in scratch: blocks of the stream spill over, and lines must not all meet one set of a cache."""
_WIDE = 4
"""Panels of columns in a line of a register tile: 1 KB."""
LINES_BYTES = GAP + 256 * (BLOCK_BYTES // 4 + GAP) + SPILL
"""Scratch for lines: 256 steps of 64 columns in 32 bits take most."""
REGISTER_BYTES = GAP + SPILL + max(
    2 * VECTORS * (8 * DOT_STEPS + GAP), ROW_STEPS * (_WIDE * VECTORS * VECTOR_BITS // 8 + GAP)
)  # fmt: skip
"""Scratch for lines of register tiles."""


@compiled
def in_byte_tiles(
    x: int, x_pitch: int, keys: int, start: int, turned: bool, rows: int, inner: int, columns: int, first: int,
    last: int, out: int, out_pitch: int, desk: int, zero: Zero,
) -> None:  # fmt: skip
    """out[:, first:last] += (x y)[:, first:last]; x [M, K] and out [M, ..] by address with the pitch of their rows.

    y [K, N]: its lines follow each other in the stream, from element `start` on. Pitches and start count elements. Of
    the scratch at `desk`, DESK_BYTES + LINES_BYTES + amx.PRODUCT_BYTES are used.
    """
    size = flat(x, 0, zero).itemsize
    block = BLOCK_BYTES // size
    lines = desk + DESK_BYTES + GAP
    right = desk + DESK_BYTES + (LINES_BYTES + 63) // 64 * 64
    left = right + amx.right_bytes(min(inner, block), COLUMNS, size)
    amx.begin(rows, desk)
    for m in range(0, rows, ROWS_IN_CACHE):
        count = min(ROWS_IN_CACHE, rows - m)
        for k in range(0, inner, block):
            steps = min(block, inner - k)
            amx.pack_left(x + (m * x_pitch + k) * size, x_pitch * size, count, steps, left, desk, zero)
            for n in range(first, last, COLUMNS):
                width = min(COLUMNS, last - n)
                if turned:
                    pitch = BLOCK_BYTES + GAP
                    write_lines(keys, (start + n * inner + k) * size, inner * size, width, steps * size, lines, pitch)
                    amx.pack_right_turned(lines, pitch, steps, width, right, desk, zero)
                else:
                    pitch = COLUMNS * size + GAP
                    at = (start + k * columns + n) * size
                    write_lines(keys, at, columns * size, steps, width * size, lines, pitch)
                    amx.pack_right(lines, pitch, steps, width, right, desk, zero)
                to = out + (m * out_pitch + n) * size
                amx.panels(left, right, count, steps, width, to, out_pitch * size, desk, zero)
    amx.end()


@compiled
def in_register_tiles(
    x: Read, x_pitch: int, keys: Keys, start: int, turned: bool, rows: int, inner: int, columns: int, first: int,
    last: int, out: Written, out_pitch: int, desk: Written, zero: Zero,
) -> None:  # fmt: skip
    """The same by register tiles, as `matmul` has them, in REGISTER_BYTES of scratch."""
    if turned:
        _dot_product(x, x_pitch, keys, start, rows, inner, first, last, out, out_pitch, desk + GAP, zero)
    else:
        _row_product(x, x_pitch, keys, start, rows, inner, columns, first, last, out, out_pitch, desk + GAP, zero)


@compiled
def _dot_product(
    x: int, x_pitch: int, keys: int, start: int, rows: int, inner: int, first: int, last: int, out: int,
    out_pitch: int, lines: int, zero: Zero,
) -> None:  # fmt: skip
    xs, outs = flat(x, (rows - 1) * x_pitch + inner, zero), flat(out, (rows - 1) * out_pitch + last, zero)
    size = xs.itemsize
    lanes = VECTOR_BITS // (8 * size)
    gap = DOT_STEPS * size + GAP
    pitch = gap // size
    ys = flat(lines, 2 * VECTORS * pitch, zero)
    for n in range(first, last, 2 * VECTORS):
        count = min(2 * VECTORS, last - n)
        for k in range(0, inner, DOT_STEPS):
            steps = min(DOT_STEPS, inner - k)
            write_lines(keys, (start + n * inner + k) * size, inner * size, count, steps * size, lines, gap)
            whole = steps - steps % lanes
            if whole:
                rows_times_lines(xs, k, x_pitch, rows, ys, 0, pitch, None, 0, count, whole, outs, n, out_pitch)
            if whole < steps:
                for m in range(rows):
                    for j in range(count):
                        acc = outs[m * out_pitch + n + j]
                        for i in range(whole, steps):
                            acc += xs[m * x_pitch + k + i] * ys[j * pitch + i]
                        outs[m * out_pitch + n + j] = acc


@compiled
def _row_product(
    x: int, x_pitch: int, keys: int, start: int, rows: int, inner: int, columns: int, first: int, last: int, out: int,
    out_pitch: int, lines: int, zero: Zero,
) -> None:  # fmt: skip
    xs, outs = flat(x, (rows - 1) * x_pitch + inner, zero), flat(out, (rows - 1) * out_pitch + last, zero)
    size = xs.itemsize
    width = VECTORS * VECTOR_BITS // (8 * size)
    gap = _WIDE * width * size + GAP
    pitch = gap // size
    ys = flat(lines, ROW_STEPS * pitch, zero)
    edge = np.zeros(ROWS_IN_CACHE * width, dtype=xs.dtype)
    for n in range(first, last, _WIDE * width):
        count = min(_WIDE * width, last - n)
        panels = (count + width - 1) // width
        for k in range(0, inner, ROW_STEPS):
            steps = min(ROW_STEPS, inner - k)
            length = panels * width * size  # what lies beyond the last column is multiplied, too, and left out
            write_lines(keys, (start + k * columns + n) * size, columns * size, steps, length, lines, gap)
            if rows == 1 and count == _WIDE * width:
                row_wide(xs, k, 0, ys, 0, pitch, None, 0, steps, outs, n, 0)
                continue
            for c in range(0, count - count % width, width):
                rows_times_panel(xs, k, x_pitch, rows, ys, c, pitch, None, 0, steps, outs, n + c, out_pitch)
            left = count % width
            if left:
                for m in range(0, rows, ROWS_IN_CACHE):
                    some = min(ROWS_IN_CACHE, rows - m)
                    edge[:] = 0
                    at = m * x_pitch + k
                    rows_times_panel(xs, at, x_pitch, some, ys, count - left, pitch, None, 0, steps, edge, 0, width)
                    for i in range(some):
                        for j in range(left):
                            outs[(m + i) * out_pitch + n + count - left + j] += edge[i * width + j]
