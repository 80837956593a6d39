"""Ring convolutions on the CPU (Numba, one thread, GIL-free): windows made tile by tile, never as one matrix.

The output [B, O, rows, columns] of a group is the product of its weights [O, K] with windows [K, positions], where K
counts (channel, window row, window column) and positions run through all images of the batch. Both loops over K and
over positions are blocked; a tile of windows is copied from the (zero-padded) images straight into the layout that
the inner product reads, stays in the first-level cache, and meets all rows of the weights. Rows of few columns would
break such tiles into scattered pieces; there the images of a batch are laid side by side, entry by entry:
a convolution of B images with rows of n windows is one of a single image with rows of B n windows.

- `tile_product`, on the register tiles of `matmul/cpu.py`;
- `byte_product` of 64 bits, by shifted copies of the weights (amx.py), and `product_by_planes` of 32 bits, by planes of
  bytes of both (amx_tiles.py): on byte tiles, windows go straight into the tiles of the right operand;
- `depthwise`, where every channel is a group of its own: no sum over channels, so no windows at all.
"""

from __future__ import annotations

import numpy as np

from private_llm.kernels.address import Array, Zero, flat
from private_llm.kernels.compiling import compiled
from private_llm.kernels.matmul import cpu as cpu_matmul
from private_llm.kernels.matmul.amx import (
    BLOCK_BYTES,
    DESK_BYTES,
    ROWS_IN_CACHE,
    begin,
    end,
    pack_left,
    panel,
    right_bytes,
)
from private_llm.kernels.matmul.amx_tiles import (
    PLANES_BYTES,
    STEPS,
    TILE_BYTES,
    copy_line,
    pack_rows,
    planes_panel,
    split_steps,
)
from private_llm.kernels.matmul.tiles import VECTOR_BITS

LANES = 16  # windows side by side


@compiled
def places(first: int, width: int, geometry: Array, found: Array) -> None:
    """Where the windows of the flat positions first .. first + width - 1 begin in the padded images."""
    columns, image, volume, line, down, right, _, _, _, _, _, _, _ = geometry
    found[:] = 0
    for n in range(width):
        batch, rest = (first + n) // image, (first + n) % image
        found[n] = batch * volume + rest // columns * down * line + rest % columns * right


@compiled
def entries(first: int, steps: int, geometry: Array, found: Array) -> None:
    """Where the entries first .. first + steps - 1 of a window lie, counted from its first one."""
    _, _, _, line, _, _, plane, height, width, gap_h, gap_w, _, _ = geometry
    for k in range(steps):
        channel, rest = (first + k) // (height * width), (first + k) % (height * width)
        found[k] = channel * plane + rest // width * gap_h * line + rest % width * gap_w


@compiled
def neighbours(places: Array, first: int) -> bool:
    """Whether 16 windows begin one after the other."""
    follow = True
    for n in range(1, LANES):
        follow = follow and places[first + n] == places[first] + n
    return follow


@compiled
def _windows(
    xs: Array, at: int, places: Array, width: int, offsets: Array, steps: int, tile: Array, pitch: int
) -> None:
    """Entries of `width` windows, and of those beside them up to a multiple of 16, as lines of a tile."""
    for first in range(0, width, LANES):
        if neighbours(places, first):
            for k in range(steps):
                start, to = at + places[first] + offsets[k], k * pitch + first
                for n in range(LANES):
                    tile[to + n] = xs[start + n]
        else:
            for k in range(steps):
                start, to = at + offsets[k], k * pitch + first
                for n in range(LANES):
                    tile[to + n] = xs[start + places[first + n]]


@compiled
def spread(tile: Array, pitch: int, rows: int, first: int, width: int, outs: Array, at: int, geometry: Array) -> None:
    """outs += tile, for positions that may belong to several images; outs [B, outputs, image]."""
    image, outputs = geometry[1], geometry[11]
    n = 0
    while n < width:
        batch, place = (first + n) // image, (first + n) % image
        count = min(width - n, image - place)
        for r in range(rows):
            to = at + (batch * outputs + r) * image + place
            for i in range(count):
                outs[to + i] += tile[r * pitch + n + i]
        n += count


@compiled
def tile_product(
    x: int, w: int, out: int, geometry: Array, groups: int, outputs: int, inner: int, positions: int,
    zero: Zero,
) -> None:  # fmt: skip
    """out += x * w modulo the word size by address: padded x, w [outputs, inner]; `geometry` see `conv.product`."""
    image, volume, made = geometry[1], geometry[2], geometry[11]
    xs = flat(x, positions // image * volume, zero)
    ws, outs = flat(w, outputs * inner, zero), flat(out, positions * made, zero)
    each, block = outputs // groups, 4 * cpu_matmul.ROW_STEPS
    panel = cpu_matmul.VECTORS * VECTOR_BITS // (8 * xs.itemsize)
    pitch = max(LANES, panel)
    tile = np.empty(block * pitch, dtype=xs.dtype)
    edge = np.empty(each * pitch, dtype=xs.dtype)
    spots, offsets = np.empty(pitch, dtype=np.int64), np.empty(inner, dtype=np.int64)
    entries(0, inner, geometry, offsets)
    for n in range(0, positions, pitch):
        width = min(pitch, positions - n)
        places(n, width, geometry, spots)
        for o in range(0, outputs, each):
            edge[:] = 0
            for k in range(0, inner, block):
                steps = min(block, inner - k)
                _windows(xs, o // each * geometry[12], spots, width, offsets[k:], steps, tile, pitch)
                for v in range(0, width, panel):
                    cpu_matmul.rows_times_panel(
                        ws, o * inner + k, inner, each, tile, v, pitch, None, 0, steps, edge, v, pitch
                    )  # fmt: skip
            spread(edge, pitch, each, n, width, outs, o * image, geometry)


@compiled
def depthwise(x: int, w: int, out: int, geometry: Array, positions: int, zero: Zero) -> None:
    """The same where each channel is a group, with one or several outputs.

    Sums run over whole padded lines, in steps of 1 whatever the stride, and over all lines at once if they follow each
    other: long loops without gaps. What lies between windows is left out at the end.
    """
    columns, image, volume, line, down, right, plane, height, width, gap_h, gap_w, outputs, _ = geometry
    batches, rows = positions // image, image // columns
    xs, ws = flat(x, batches * volume, zero), flat(w, outputs * height * width, zero)
    outs = flat(out, positions * outputs, zero)
    each = outputs // (volume // plane)
    together = rows if down == 1 else 1
    length = (together - 1) * line + (columns - 1) * right + 1
    sums = np.empty(length, dtype=xs.dtype)
    for part in range(batches * outputs):
        batch, o = part // outputs, part % outputs
        for first in range(0, rows, together):
            sums[:] = 0
            for i in range(height):
                for j in range(width):
                    factor = ws[(o * height + i) * width + j]
                    at = batch * volume + o // each * plane + (first * down + i * gap_h) * line + j * gap_w
                    entry = xs[at : at + length]
                    for n in range(length):
                        sums[n] += factor * entry[n]
            for r in range(together):
                to = part * image + (first + r) * columns
                made, found = outs[to : to + columns], sums[r * line :: right]
                for c in range(columns):
                    made[c] += found[c]


# -- on byte tiles ----------------------------------------------------------------------------------------------------
PANEL = 32  # windows at a time
BLOCK = 6 * STEPS  # entries of windows at a time, in 32 bits: with a panel and 16 rows they fill the first-level cache
_WORD = np.uint32(0)


@compiled
def _byte_windows(
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
def byte_product(
    x: int, w: int, out: int, geometry: Array, groups: int, outputs: int, inner: int, positions: int, desk: int,
    zero: Zero,
) -> None:  # fmt: skip
    """The same as `tile_product`; `desk` as for `cpu_amx.product`."""
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
                    _byte_windows(x + o // each * geometry[12] * size, spots, width, offsets, steps, right, line, zero)
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
    """`byte_product` in 32 bits."""
    image, made = geometry[1], geometry[11]
    outs, each = flat(out, positions * made, _WORD), outputs // groups
    right = desk + 64
    left = right + PANEL * BLOCK * 4
    sums = left + ROWS_IN_CACHE * BLOCK * 4
    spots, offsets = np.empty(PANEL, dtype=np.int64), np.empty(BLOCK + 4, dtype=np.int64)
    line, edge = np.empty(STEPS, dtype=np.uint32), np.empty(ROWS_IN_CACHE * PANEL, dtype=np.uint32)
    begin(16, desk)
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
                        planes_panel(left, right, rows, steps, width, to, image * 4, sums, line)
                    else:
                        edge[:] = 0
                        planes_panel(left, right, rows, steps, width, edge.ctypes.data, PANEL * 4, sums, line)
                        spread(edge, PANEL, rows, n, width, outs, m * image, geometry)
    end()
