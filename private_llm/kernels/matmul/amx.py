"""Ring matrix products on the byte tiles of CPUs with AMX (Numba, GIL-free; Intel from Sapphire Rapids on).

An instruction TDPBUUD multiplies 16 rows of 16 groups of four unsigned bytes with 16 such columns and adds the sums of
each group's four products to 32-bit accumulators, modulo 2^32. In memory, a 32-bit ring element *is* a group: its bytes
y_0 .. y_3. With f_s(x) = (x_s, x_{s-1}, x_{s-2}, x_{s-3}), bytes of negative index being zero, the group product
of f_s(x) and y is the sum of all x_i y_j with i + j = s, so

    x y = sum over s < 4 of 2^(8 s) (f_s(x) . y)  mod 2^32,

with no carries: the sums of many products may wrap, since they count modulo 2^(32 - 8 s) or less. A 64-bit element
is its low half l and its high half h, and x y = sum over s < 8 of 2^(8 s) (f_s(x) . l + f_{s-4}(x) . h) modulo 2^64.
There the sums of s < 4 must not wrap: (s + 1) 255^2 steps < 2^32, true up to 16512 steps a block.

So the left operand is packed as shifted groups f_s (`pack_left`), the right one is merely copied into tiles
(`pack_right`), and `panel` adds the product of two packed blocks onto a piece of the result. For `usable` processors
only: elsewhere these functions are never compiled. What was rejected:
docs/decisions/150-ring-products-use-amx-or-register-tiles.md.
"""

from __future__ import annotations

import ctypes
import platform
from functools import cache

import numpy as np
from llvmlite import binding
from numba import config

from private_llm.kernels.address import Zero, flat
from private_llm.kernels.compiling import compiled
from private_llm.kernels.matmul.amx_tiles import (
    TILE,
    TILE_BYTES,
    TILE_WORDS,
    add_line,
    configure,
    copy_line,
    one_column,
    place,
    release,
    shift_line,
    turn,
    two_columns,
)  # fmt: skip

ROWS_IN_CACHE = 128
"""Rows of x packed at a time: with 128 to 256 steps they take a quarter of the second-level cache."""
COLUMNS = 4 * TILE
"""Columns of y packed at a time; a panel of half of them fills two thirds of the first-level cache."""

BLOCK_BYTES = 1024
"""Bytes of a line of a block: 256 steps of 32 bits, 128 of 64."""

_EDGE, _SUMS = 64, 64 + 8 * TILE_WORDS
DESK_BYTES = _SUMS + 16 * TILE_BYTES
"""Scratch at `desk`, on a cache line: 64 bytes of tile shapes, a tile of elements, two tiles of sums per shift."""

_BYTE = np.uint8(0)


@compiled
def left_bytes(rows: int, steps: int, size: int) -> int:
    """Size of a packed left block; `size` is the bytes of a ring element, here and below."""
    return (rows + 15) // 16 * ((steps + 15) // 16) * TILE_BYTES * size


@compiled
def right_bytes(steps: int, columns: int, size: int) -> int:
    """Size of a packed right block."""
    return (columns + 15) // 16 * ((steps + 15) // 16) * TILE_BYTES * (size // 4)


@compiled
def pack_left(
    x: int, pitch: int, rows: int, steps: int, packed: int, desk: int, zero: Zero
) -> None:  # fmt: skip
    """Rows x + r pitch as shifted tiles [rows / 16][shift][steps / 16][16, 16]; steps beyond the last are zeros."""
    edge = flat(desk + _EDGE, TILE, zero)
    size = edge.itemsize
    tiles = (steps + 15) // 16
    run = tiles * TILE_BYTES
    for r in range(rows):
        to = packed + (r >> 4) * size * run + (r & 15) * 64
        line = x + r * pitch
        for t in range(steps >> 4):
            shift_line(line + t * 16 * size, to + t * TILE_BYTES, run, zero)
        if steps & 15:
            last = flat(line + (steps >> 4) * 16 * size, steps & 15, zero)
            edge[:] = 0
            for k in range(steps & 15):
                edge[k] = last[k]
            shift_line(desk + _EDGE, to + (tiles - 1) * TILE_BYTES, run, zero)


@compiled
def pack_right(
    y: int, pitch: int, steps: int, columns: int, packed: int, desk: int, zero: Zero
) -> None:  # fmt: skip
    """Rows y + k pitch as tiles [columns / 16][half][steps / 16][16, 16]; what y has not stays as it was."""
    edge = flat(desk + _EDGE, TILE, zero)
    size = edge.itemsize
    run = (steps + 15) // 16 * TILE_BYTES
    whole, rest = columns >> 4, columns & 15
    for k in range(steps):
        line = y + k * pitch
        for c in range(whole):
            copy_line(line + c * 16 * size, packed + c * (size // 4) * run + 64 * k, run, zero)
        if rest:
            last = flat(line + whole * 16 * size, rest, zero)
            for n in range(rest):
                edge[n] = last[n]
            copy_line(desk + _EDGE, packed + whole * (size // 4) * run + 64 * k, run, zero)


@compiled
def pack_right_turned(
    y: int, pitch: int, steps: int, columns: int, packed: int, desk: int, zero: Zero
) -> None:  # fmt: skip
    """The same as `pack_right` of y given by columns y + n pitch."""
    edge = flat(desk + _EDGE, TILE_WORDS, zero)
    size = edge.itemsize
    run = (steps + 15) // 16 * TILE_BYTES
    for c in range((columns + 15) // 16):
        width = min(16, columns - 16 * c)
        for t in range((steps + 15) // 16):
            depth = min(16, steps - 16 * t)
            to = packed + c * (size // 4) * run + t * TILE_BYTES
            first = y + 16 * c * pitch + t * 16 * size
            if width == 16 and depth == 16:
                turn(first, pitch, to, run, zero)
            else:
                for n in range(width):
                    line = flat(first + n * pitch, depth, zero)
                    for k in range(depth):
                        edge[16 * n + k] = line[k]
                turn(desk + _EDGE, 16 * size, to, run, zero)


@compiled
def panel(
    left: int, right: int, rows: int, steps: int, columns: int, out: int, pitch: int, desk: int,
    zero: Zero,
) -> None:  # fmt: skip
    """Row r of out at out + r pitch += (left right)[r], for up to 32 columns; between `begin` and `end`."""
    edge = flat(desk + _EDGE, TILE, zero)
    sums = desk + _SUMS
    size = edge.itemsize
    tiles = (steps + 15) // 16
    run = tiles * TILE_BYTES
    other = right + run * (size // 4)
    whole, rest = columns >> 4, columns & 15
    for m in range((rows + 15) // 16):
        for pair in range(size // 2):
            shift = size - 1 - 2 * pair
            first = left + (m * size + place(shift, size)) * run
            second = left + (m * size + place(shift - 1, size)) * run
            depth = 2 * tiles if shift > 3 else tiles
            if columns > TILE:
                two_columns(first, second, right, other, depth, sums + pair * 4 * TILE_BYTES)
            else:
                one_column(first, second, right, right, depth, sums + pair * 4 * TILE_BYTES)
        for r in range(min(16, rows - 16 * m)):
            to = out + (16 * m + r) * pitch
            for c in range(whole):
                add_line(sums + c * TILE_BYTES + 64 * r, to + c * 16 * size, zero)
            if rest:
                last = flat(to + whole * 16 * size, rest, zero)
                edge[:] = 0
                add_line(sums + whole * TILE_BYTES + 64 * r, desk + _EDGE, zero)
                for n in range(rest):
                    last[n] += edge[n]


@compiled
def panels(
    left: int, right: int, rows: int, steps: int, columns: int, out: int, pitch: int, desk: int,
    zero: Zero,
) -> None:  # fmt: skip
    """As `panel`, for up to `COLUMNS` columns."""
    size = flat(desk, 0, zero).itemsize
    for c in range(0, columns, 2 * TILE):
        some, to = min(2 * TILE, columns - c), out + c * size
        panel(left, right + right_bytes(steps, c, size), rows, steps, some, to, pitch, desk, zero)


@compiled
def begin(rows: int, desk: int) -> None:
    """Take the tiles: as many rows as left blocks of `rows` rows fill, 16 for right ones, 64 bytes each."""
    config = flat(desk, 64, _BYTE)
    config[:] = 0
    config[0] = 1
    for t in range(8):
        config[16 + 2 * t] = 64
        config[48 + t] = min(rows, TILE) if t < 6 else TILE
    configure(desk)


@compiled
def end() -> None:
    """Give the tiles back."""
    release()


@compiled
def product(
    x: int, y: int, out: int, batches: int, rows: int, inner: int, columns: int, turned: bool, desk: int,
    zero: Zero,
) -> None:  # fmt: skip
    """out += x y modulo the word size; x [B, M, K], y [B, K, N] or, if `turned`, [B, N, K], out [B, M, N]."""
    size = flat(x, 0, zero).itemsize
    block = BLOCK_BYTES // size
    right = desk + DESK_BYTES
    left = right + right_bytes(min(inner, block), COLUMNS, size)
    begin(rows, desk)
    for batch in range(batches):
        for m in range(0, rows, ROWS_IN_CACHE):
            count = min(ROWS_IN_CACHE, rows - m)
            for k in range(0, inner, block):
                steps = min(block, inner - k)
                pack_left(x + ((batch * rows + m) * inner + k) * size, inner * size, count, steps, left, desk, zero)
                for n in range(0, columns, COLUMNS):
                    width = min(COLUMNS, columns - n)
                    if turned:
                        start = y + ((batch * columns + n) * inner + k) * size
                        pack_right_turned(start, inner * size, steps, width, right, desk, zero)
                    else:
                        start = y + ((batch * inner + k) * columns + n) * size
                        pack_right(start, columns * size, steps, width, right, desk, zero)
                    to = out + ((batch * rows + m) * columns + n) * size
                    panels(left, right, count, steps, width, to, columns * size, desk, zero)
    end()


PRODUCT_BYTES = right_bytes.py_func(256, COLUMNS, 4) + left_bytes.py_func(ROWS_IN_CACHE, 256, 4)
"""Packed blocks of a `product`; as many for both rings."""


class Desk:
    """Scratch memory of one thread: `DESK_BYTES` for this module, then `extra` bytes for packed blocks."""

    def __init__(self, extra: int) -> None:
        self._held = np.empty(DESK_BYTES + extra + 64, dtype=np.uint8)
        start = self._held.ctypes.data
        self.address = start + -start % 64


_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18
"""Linux on x86-64: system call arch_prctl(2), ARCH_REQ_XCOMP_PERM, the state component of tile data."""


@cache
def usable() -> bool:
    """Whether this processor has byte tiles, the compiler targets it, and the kernel lets this process use them."""
    if platform.system() != "Linux" or platform.machine() != "x86_64" or config.CPU_NAME or config.CPU_FEATURES:
        return False
    has = binding.get_host_cpu_features()
    if not all(has.get(name, False) for name in ("amx-tile", "amx-int8", "avx512f", "avx512bw")):
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0)
