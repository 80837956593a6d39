"""Ring convolutions on the CPU (Numba, one thread, GIL-free): windows made tile by tile, never as one matrix.

The output [B, O, rows, columns] of a group is the product of its weights [O, K] with windows [K, positions], where K
counts (channel, window row, window column) and positions run through all images of the batch. Both loops over K and
over positions are blocked; a tile of windows is copied from the (zero-padded) images straight into the layout that
the inner product reads, stays in the first-level cache, and meets all rows of the weights. Rows of few columns would
break such tiles into scattered pieces; there the images of a batch are laid side by side, entry by entry:
a convolution of B images with rows of n windows is one of a single image with rows of B n windows (`pad_turned`).

- `tile_product`, on the register tiles of matmul.py; on byte tiles see conv_amx.py;
- `depthwise`, where every channel is a group of its own: no sum over channels, so no windows at all.
"""

from __future__ import annotations

import numpy as np

from private_llm.kernels.address import Array, Zero, flat
from private_llm.kernels.backends.cpu import matmul as cpu_matmul
from private_llm.kernels.backends.cpu.tiles import VECTOR_BITS
from private_llm.kernels.compiling import compiled

LANES = 16
"""Windows side by side."""


@compiled
def pad(x: int, wide: int, planes: int, sizes: Array, zero: Zero) -> None:
    """Planes [height, width] with zeros around; sizes are (height, width, above and below, left and right)."""
    height, width, above, beside = sizes
    line = width + 2 * beside
    xs, out = flat(x, planes * height * width, zero), flat(wide, planes * (height + 2 * above) * line, zero)
    at = 0
    for plane in range(planes):
        out[at : at + above * line] = 0
        at += above * line
        for r in range(height):
            out[at : at + beside] = 0
            start = (plane * height + r) * width
            for c in range(width):
                out[at + beside + c] = xs[start + c]
            out[at + line - beside : at + line] = 0
            at += line
        out[at : at + above * line] = 0
        at += above * line


@compiled
def pad_turned(x: int, wide: int, images: int, planes: int, sizes: Array, zero: Zero) -> None:
    """The same of several images, whose entries at one place come side by side: [plane, row, column, image]."""
    height, width, above, beside = sizes
    line, volume = (width + 2 * beside) * images, planes * height * width
    area = (height + 2 * above) * line
    xs, out = flat(x, images * volume, zero), flat(wide, planes * area, zero)
    out[:] = 0
    for plane in range(planes):
        for r in range(height):
            to = plane * area + (r + above) * line + beside * images
            start = (plane * height + r) * width
            for c in range(width):
                for b in range(images):
                    out[to + c * images + b] = xs[b * volume + start + c]


@compiled
def add_turned(made: int, out: int, images: int, volume: int, zero: Zero) -> None:
    """out [image, volume] += made [volume, image]."""
    sums, outs = flat(made, images * volume, zero), flat(out, images * volume, zero)
    for b in range(images):
        for i in range(volume):
            outs[b * volume + i] += sums[i * images + b]


@compiled
def places(first: int, width: int, geometry: Array, found: Array) -> None:
    """Where the windows of the flat positions first .. first + width - 1 begin in the padded images."""
    columns, image, volume, line, down, right = (
        geometry[0],
        geometry[1],
        geometry[2],
        geometry[3],
        geometry[4],
        geometry[5],
    )
    found[:] = 0
    for n in range(width):
        batch, rest = (first + n) // image, (first + n) % image
        found[n] = batch * volume + rest // columns * down * line + rest % columns * right


@compiled
def entries(first: int, steps: int, geometry: Array, found: Array) -> None:
    """Where the entries first .. first + steps - 1 of a window lie, counted from its first one."""
    line, plane, height, width, gap_h, gap_w = (
        geometry[3],
        geometry[6],
        geometry[7],
        geometry[8],
        geometry[9],
        geometry[10],
    )
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
                        ws, o * inner + k, inner, each, tile, v, pitch, steps, edge, v, pitch
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
