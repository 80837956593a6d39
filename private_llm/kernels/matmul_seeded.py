"""Ring products with a matrix that is made from key streams: threads, the choice of kernel, and the way without one.

Nothing of y's size is written: a tile lives in scratch (`backends/cpu/seeded_matmul.py`), or, on processors without AES
instructions, some lines at a time are made by OpenSSL and multiplied.
"""

from __future__ import annotations

import threading

import numpy as np
import torch
from torch import Tensor

from private_llm.kernels import matmul, parallel, shapes
from private_llm.kernels.address import addresses
from private_llm.kernels.backends.cpu import amx as cpu_amx
from private_llm.kernels.backends.cpu import seeded_matmul as cpu_seeded
from private_llm.kernels.seeded_tensor import SeededTensor, StreamSlice
from private_llm.kernels.trace_hook import launch, this_thread

_ZERO = {torch.int64: np.uint64(0), torch.int32: np.uint32(0)}
_AT_ONCE = 1 << 17
"""Elements made at a time without instructions: 1 MB of 64 bits."""
_CUT = 128
"""Threads take multiples of this many columns."""
_local = threading.local()


def product(x: Tensor, y: Tensor, onto: Tensor | None = None) -> Tensor:
    """`matmul.product` of x [.., M, K], also where y [K, N] is a `SeededTensor`; of more dimensions, y is made
    whole.
    """
    if not isinstance(y, SeededTensor) or y.dim() != 2:
        return matmul.product(x, y, onto)
    shapes.check_product(x, y)
    rows, inner, columns = x.shape[:-1].numel(), x.shape[-1], y.shape[1]
    out = torch.zeros((*x.shape[:-1], columns), dtype=x.dtype) if onto is None else onto
    if not (inner and out.numel()):
        return out
    left, made, at = x.contiguous().view(rows, inner), out.view(rows, columns), 0
    for piece in y.slices:
        ends = at, at + piece.lines
        mine = (left, made[:, slice(*ends)]) if y.turned else (left[:, slice(*ends)], made)
        if piece.key.rounds is None:
            _some_at_a_time(*mine, y.lines(*ends))
        elif piece.lines:
            _spread(*mine, piece, piece.key.rounds, y.turned)
        at = ends[1]
    return out


def _spread(x: Tensor, out: Tensor, piece: StreamSlice, keys: int, turned: bool) -> None:
    """out += x y for the lines of one piece, on as many threads as are worth it; each makes some columns."""
    (rows, inner), columns, zero = x.shape, out.shape[1], _ZERO[x.dtype]
    tiled = cpu_amx.usable() and matmul.tiled(rows, inner, columns, turned)
    kernel = cpu_seeded.in_byte_tiles if tiled else cpu_seeded.in_register_tiles
    left, made = addresses(x[0], out[0])
    shape, pitches = (rows, inner, columns), (x.stride(0), out.stride(0))

    def part(first: int, last: int) -> None:
        desk = _desk().address
        if this_thread.hook is not None and not tiled:  # a step that is repeated has scratch of its own
            room = torch.empty(cpu_seeded.REGISTER_BYTES // 8, dtype=torch.int64)
            desk = room.data_ptr()
        launch(
            kernel, left, pitches[0], keys, piece.start, turned, *shape, first, last, made, pitches[1], desk, zero
        )  # fmt: skip

    bytes_made = inner * columns * x.element_size()
    seconds = max(rows * inner * columns / matmul.RATE, bytes_made / matmul.BYTES)
    parallel.run_parallel(part, parallel.split_range(columns, parallel.threads(seconds), _CUT))


def _desk() -> cpu_amx.Desk:
    """This thread's scratch memory."""
    held: cpu_amx.Desk | None = getattr(_local, "desk", None)
    if held is None:
        held = _local.desk = cpu_amx.Desk(cpu_seeded.LINES_BYTES + 64 + cpu_amx.PRODUCT_BYTES)
    return held


def _some_at_a_time(x: Tensor, out: Tensor, y: SeededTensor) -> None:
    """out += x y, some lines of y after the others."""
    number = max(1, _AT_ONCE // max(1, y.line.numel()))
    count = y.shape[1] if y.turned else y.shape[0]
    for first in range(0, count, number):
        last = min(count, first + number)
        lines = y.lines(first, last).made()
        if y.turned:
            out[:, first:last] += matmul.product(x, lines)
        else:
            out += matmul.product(x[:, first:last], lines)
