"""Ring convolutions on byte tiles: windows go straight into the tiles of the right operand.

64 bits by shifted copies of the weights (amx.py), 32 bits by planes of bytes of both (amx_planes.py).
"""

from __future__ import annotations

import numpy as np

from private_llm.kernels.address import Array, Zero, flat
from private_llm.kernels.backends.cpu import amx_planes
from private_llm.kernels.backends.cpu.amx import (
    BLOCK_BYTES,
    DESK_BYTES,
    ROWS_IN_CACHE,
    begin,
    end,
    pack_left,
    panel,
    right_bytes,
)  # fmt: skip
from private_llm.kernels.backends.cpu.amx_planes import PLANES_BYTES, STEPS, pack_rows, split_steps
from private_llm.kernels.backends.cpu.amx_tiles import TILE_BYTES, copy_line, release
from private_llm.kernels.backends.cpu.conv import LANES, entries, neighbours, places, spread
from private_llm.kernels.compiling import compiled

PANEL = 32
"""Windows at a time."""
BLOCK = 6 * STEPS
"""Entries of windows at a time, in 32 bits: with a panel and 16 rows of weights they fill the first-level cache."""
_WORD = np.uint32(0)


@compiled
def _windows(
    x: int, spots: Array, width: int, offsets: Array, steps: int, packed: int, edge: Array,
    zero: Zero,
) -> None:  # fmt: skip
    """Entries of `width` windows as tiles [width / 16][half][steps / 16][16, 16] at `packed`."""
    size = edge.itemsize
    run = (steps + LANES - 1) // LANES * TILE_BYTES
    for first in range(0, width, LANES):
        to = packed + first // LANES * (size // 4) * run
        if neighbours(spots, first):
            start = x + spots[first] * size
            for k in range(steps):
                copy_line(start + offsets[k] * size, to + 64 * k, run, zero)
        else:
            for k in range(steps):
                xs = flat(x + offsets[k] * size, 1, zero)
                for n in range(LANES):
                    edge[n] = xs[spots[first + n]]
                copy_line(edge.ctypes.data, to + 64 * k, run, zero)


@compiled
def product(
    x: int, w: int, out: int, geometry: Array, groups: int, outputs: int, inner: int, positions: int, desk: int,
    zero: Zero,
) -> None:  # fmt: skip
    """The same as `cpu_conv.tile_product`; `desk` as for `cpu_amx.product`."""
    image, made = geometry[1], geometry[11]
    outs = flat(out, positions * made, zero)
    size, each = outs.itemsize, outputs // groups
    block = BLOCK_BYTES // size
    right = desk + DESK_BYTES
    left = right + right_bytes(min(inner, block), PANEL, size)
    spots, offsets = np.empty(PANEL, dtype=np.int64), np.empty(block, dtype=np.int64)
    line, edge = np.empty(LANES, dtype=outs.dtype), np.empty(ROWS_IN_CACHE * PANEL, dtype=outs.dtype)
    begin(each, desk)
    for o in range(0, outputs, each):
        for m in range(o, o + each, ROWS_IN_CACHE):
            rows = min(ROWS_IN_CACHE, o + each - m)
            for k in range(0, inner, block):
                steps = min(block, inner - k)
                pack_left(w + (m * inner + k) * size, inner * size, rows, steps, left, desk, zero)
                entries(k, steps, geometry, offsets)
                for n in range(0, positions, PANEL):
                    width = min(PANEL, positions - n)
                    places(n, width, geometry, spots)
                    _windows(x + o // each * geometry[12] * size, spots, width, offsets, steps, right, line, zero)
                    if n // image == (n + width - 1) // image:
                        to = out + ((n // image * made + m) * image + n % image) * size
                        panel(left, right, rows, steps, width, to, image * size, desk, zero)
                    else:
                        edge[:] = 0
                        panel(left, right, rows, steps, width, edge.ctypes.data, PANEL * size, desk, zero)
                        spread(edge, PANEL, rows, n, width, outs, m * image, geometry)
    end()


@compiled
def _window_planes(
    x: int, spots: Array, width: int, offsets: Array, steps: int, packed: int, edge: Array
) -> None:  # fmt: skip
    """Entries of `width` windows as planes at `packed`; `offsets` go on, with any valid ones, to a multiple of four."""
    run = (steps + STEPS - 1) // STEPS * PLANES_BYTES
    for first in range(0, width, LANES):
        near, start = neighbours(spots, first), x + spots[first] * 4
        for k in range(0, steps, 4):
            to = packed + first // LANES * run + k // STEPS * PLANES_BYTES + k % STEPS // 4 * 64
            if near:
                split_steps(
                    start + offsets[k] * 4, start + offsets[k + 1] * 4, start + offsets[k + 2] * 4,
                    start + offsets[k + 3] * 4, to,
                )  # fmt: skip
            else:
                for i in range(4):
                    xs = flat(x + offsets[k + i] * 4, 1, _WORD)
                    for n in range(LANES):
                        edge[LANES * i + n] = xs[spots[first + n]]
                at = edge.ctypes.data
                split_steps(at, at + 64, at + 128, at + 192, to)


@compiled
def product_by_planes(
    x: int, w: int, out: int, geometry: Array, groups: int, outputs: int, inner: int, positions: int, desk: int
) -> None:  # fmt: skip
    """`product` in 32 bits."""
    image, made = geometry[1], geometry[11]
    outs, each = flat(out, positions * made, _WORD), outputs // groups
    right = desk + 64
    left = right + PANEL * BLOCK * 4
    sums = left + ROWS_IN_CACHE * BLOCK * 4
    spots, offsets = np.empty(PANEL, dtype=np.int64), np.empty(BLOCK + 4, dtype=np.int64)
    line, edge = np.empty(STEPS, dtype=np.uint32), np.empty(ROWS_IN_CACHE * PANEL, dtype=np.uint32)
    amx_planes.begin(desk)
    for o in range(0, outputs, each):
        for m in range(o, o + each, ROWS_IN_CACHE):
            rows = min(ROWS_IN_CACHE, o + each - m)
            for k in range(0, inner, BLOCK):
                steps = min(BLOCK, inner - k)
                pack_rows(w + (m * inner + k) * 4, inner * 4, rows, steps, left, line)
                entries(k, steps, geometry, offsets)
                offsets[steps : steps + 4] = offsets[steps - 1]
                for n in range(0, positions, PANEL):
                    width = min(PANEL, positions - n)
                    places(n, width, geometry, spots)
                    _window_planes(x + o // each * geometry[12] * 4, spots, width, offsets, steps, right, line)
                    if n // image == (n + width - 1) // image:
                        to = out + ((n // image * made + m) * image + n % image) * 4
                        amx_planes.panel(left, right, rows, steps, width, to, image * 4, sums, line)
                    else:
                        edge[:] = 0
                        amx_planes.panel(left, right, rows, steps, width, edge.ctypes.data, PANEL * 4, sums, line)
                        spread(edge, PANEL, rows, n, width, outs, m * image, geometry)
    release()
