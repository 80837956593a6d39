"""Ring convolutions on the CPU (Numba, one thread, GIL-free): windows made tile by tile, never as one matrix.

The output [B, O, rows, columns] of a group is the product of its weights [O, K] with windows [K, positions], where K
counts (channel, window row, window column) and positions run through all images of the batch. Both loops over K and
over positions are blocked; a tile of windows is copied from the (zero-padded) images straight into the layout that
the inner product reads, stays in the first-level cache, and meets all rows of the weights:

- `tile_product`, on the register tiles of cpu_matmul.py;
- `depthwise`, where every channel is a group of its own: no sum over channels, so no windows at all.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from private_llm.kernels import cpu_matmul
from private_llm.kernels.address import flat

Array = np.ndarray[Any, Any]

_LANES = 16


@njit(nogil=True, cache=True)
def _places(first: int, width: int, plan: Array, places: Array) -> None:
    """Where the windows of the flat positions first .. first + width - 1 begin in the padded images."""
    columns, image, volume, line, down, right = plan[0], plan[1], plan[2], plan[3], plan[4], plan[5]
    places[:] = 0
    for n in range(width):
        batch, rest = (first + n) // image, (first + n) % image
        places[n] = batch * volume + rest // columns * down * line + rest % columns * right


@njit(nogil=True, cache=True)
def _offsets(first: int, steps: int, plan: Array, offsets: Array) -> None:
    """Where the entries first .. first + steps - 1 of a window lie, counted from its first one."""
    line, plane, height, width, gap_h, gap_w = plan[3], plan[6], plan[7], plan[8], plan[9], plan[10]
    for k in range(steps):
        channel, rest = (first + k) // (height * width), (first + k) % (height * width)
        offsets[k] = channel * plane + rest // width * gap_h * line + rest % width * gap_w


@njit(nogil=True, cache=True)
def _copy(xs: Array, at: int, packed: Array, to: int, high: int) -> None:
    """16 neighbours into a line of 32-bit words, high halves of longer elements `high` words later."""
    if xs.itemsize == packed.itemsize:
        for n in range(_LANES):
            packed[to + n] = xs[at + n]
    else:
        for n in range(_LANES):
            packed[to + n] = np.uint32(xs[at + n])
        for n in range(_LANES):
            packed[to + high + n] = np.uint32(xs[at + n] >> xs.dtype.type(32))


@njit(nogil=True, cache=True)
def _gather(xs: Array, places: Array, first: int, offset: int, packed: Array, to: int, high: int) -> None:
    """The same of 16 scattered entries."""
    if xs.itemsize == packed.itemsize:
        for n in range(_LANES):
            packed[to + n] = xs[places[first + n] + offset]
    else:
        for n in range(_LANES):
            x = xs[places[first + n] + offset]
            packed[to + n] = np.uint32(x)
            packed[to + high + n] = np.uint32(x >> xs.dtype.type(32))


@njit(nogil=True, cache=True)
def _windows(
    xs: Array, at: int, places: Array, width: int, offsets: Array, steps: int, packed: Array, block: int, line: int,
    high: int,
) -> None:  # fmt: skip
    """Entries of `width` windows: 16 windows stand side by side, `line` words before the next entry's, blocks apart."""
    for c in range((width + _LANES - 1) // _LANES):
        first = c * _LANES
        neighbours = True
        for n in range(1, _LANES):
            neighbours = neighbours and places[first + n] == places[first] + n
        if neighbours:
            for k in range(steps):
                _copy(xs, at + places[first] + offsets[k], packed, c * block + k * line, high)
        else:
            for k in range(steps):
                _gather(xs, places, first, at + offsets[k], packed, c * block + k * line, high)


@njit(nogil=True, cache=True)
def _spread(tile: Array, pitch: int, rows: int, first: int, width: int, outs: Array, at: int, plan: Array) -> None:
    """outs += tile, for positions that may belong to several images; outs [B, outputs, image]."""
    image, outputs = plan[1], plan[11]
    n = 0
    while n < width:
        batch, place = (first + n) // image, (first + n) % image
        count = min(width - n, image - place)
        for r in range(rows):
            to = at + (batch * outputs + r) * image + place
            for i in range(count):
                outs[to + i] += tile[r * pitch + n + i]
        n += count


@njit(nogil=True, cache=True)
def tile_product(
    x: int, w: int, out: int, plan: Array, groups: int, inner: int, positions: int, zero: np.unsignedinteger[Any]
) -> None:
    """out += x * w modulo the word size: padded x, w [O, inner], out [B, O, image]; for the plan see `conv.product`."""
    image, volume, outputs = plan[1], plan[2], plan[11]
    xs = flat(x, positions // image * volume, zero)
    ws, outs = flat(w, outputs * inner, zero), flat(out, positions * outputs, zero)
    each, block = outputs // groups, 4 * cpu_matmul.ROW_STEPS
    panel = cpu_matmul.VECTORS * cpu_matmul.VECTOR_BITS // (8 * xs.itemsize)
    pitch = max(_LANES, panel)
    tile = np.empty(block * pitch, dtype=xs.dtype)
    edge = np.empty(each * pitch, dtype=xs.dtype)
    places, offsets = np.empty(pitch, dtype=np.int64), np.empty(inner, dtype=np.int64)
    _offsets(0, inner, plan, offsets)
    for n in range(0, positions, pitch):
        width = min(pitch, positions - n)
        _places(n, width, plan, places)
        for o in range(0, outputs, each):
            edge[:] = 0
            for k in range(0, inner, block):
                steps = min(block, inner - k)
                _windows(xs, o // each * plan[12], places, width, offsets[k:], steps, tile, _LANES, pitch, 0)
                for v in range(0, width, panel):
                    cpu_matmul.rows_times_panel(
                        ws, o * inner + k, inner, each, tile, v, pitch, steps, edge, v, pitch
                    )  # fmt: skip
            _spread(edge, pitch, each, n, width, outs, o * image, plan)


@njit(nogil=True, cache=True)
def depthwise(x: int, w: int, out: int, plan: Array, positions: int, zero: np.unsignedinteger[Any]) -> None:
    """The same where each channel is a group, with one or several outputs."""
    columns, image, volume, line, down, right, plane, height, width, gap_h, gap_w, outputs, _ = plan
    batches = positions // image
    xs, ws = flat(x, batches * volume, zero), flat(w, outputs * height * width, zero)
    outs = flat(out, positions * outputs, zero)
    each = outputs // (volume // plane)
    sums = np.empty(columns, dtype=xs.dtype)
    for batch in range(batches):
        for o in range(outputs):
            for r in range(image // columns):
                to = (batch * outputs + o) * image + r * columns
                sums[:] = 0
                for i in range(height):
                    for j in range(width):
                        factor = ws[(o * height + i) * width + j]
                        at = batch * volume + o // each * plane + (r * down + i * gap_h) * line + j * gap_w
                        if right == 1:
                            for c in range(columns):
                                sums[c] += factor * xs[at + c]
                        else:
                            for c in range(columns):
                                sums[c] += factor * xs[at + c * right]
                for c in range(columns):
                    outs[to + c] += sums[c]
