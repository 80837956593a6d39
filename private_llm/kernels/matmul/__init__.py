"""Ring matrix products of CPU tensors: batches, broadcasting, threads, and the choice of kernel.

Every layout of y has two kernels, in register tiles (`cpu_matmul`, any processor) and in byte tiles (`cpu_amx`). Listed
rows of y are read in place by register tiles; byte tiles, and layouts of y whose rows are not contiguous, get a copy of
these rows. Of a y that is made from key streams nothing of its size is written: a tile lies in scratch
(`cpu_seeded`), or, on processors without AES instructions, OpenSSL makes some lines at a time.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from private_llm.errors import DomainError
from private_llm.kernels import parallel, shapes
from private_llm.kernels.address import ZERO, Zero
from private_llm.kernels.matmul import amx as cpu_amx
from private_llm.kernels.matmul import cpu as cpu_matmul
from private_llm.kernels.matmul import seeded_cpu as cpu_seeded
from private_llm.kernels.matmul.tiles import WIDE
from private_llm.kernels.parallel import addresses, launch
from private_llm.kernels.seeded_tensor import SeededTensor, StreamSlice
from private_llm.kernels.trace_hook import this_thread

_SHORTEST_DOT = 8
"""Below this inner size, lanes along k stay empty: y is copied into rows of columns instead."""
_TILED_SIDE, _TILED_MACS = 16, 1 << 15
"""From 16 rows, 16 columns (32 of a turned y) and 2^15 multiply-adds (32^3) on, byte tiles are faster."""
_LARGE = 1 << 14
"""Elements from which matrices that lie apart are read where they lie; to copy fewer takes less time than calls do."""
_AT_ONCE = 1 << 17
"""Elements that OpenSSL makes at a time: 1 MB of 64 bits."""
_ROWS_CUT, _SEEDED_CUT = 64, 128
"""Threads take multiples of so many columns: whole cache lines and whole panels."""
RATE, BYTES = 2e10, 1e10
"""Multiply-adds and bytes of y in a second, to guess how many threads are worth their start."""


def tiled(rows: int, inner: int, columns: int, turned: bool = False) -> bool:
    """Whether byte tiles multiply these sizes faster than register tiles, where the processor has them.

    Few columns of a turned y suit the lanes along k of a register tile better.
    """
    least = 2 * _TILED_SIDE if turned else _TILED_SIDE
    return rows >= _TILED_SIDE and columns >= least and rows * inner * columns >= _TILED_MACS


def kernel_name() -> str:
    """Which of them products of many rows use here."""
    if cpu_amx.usable():
        return "byte tiles (AMX)"
    return "register tiles (AVX-512)" if WIDE else "register tiles of pairs"


_local = threading.local()


def desk() -> cpu_amx.Desk:
    """This thread's scratch memory for byte tiles, and for lines of masks."""
    held: cpu_amx.Desk | None = getattr(_local, "desk", None)
    if held is None:
        held = _local.desk = cpu_amx.Desk(cpu_seeded.LINES_BYTES + 64 + cpu_amx.PRODUCT_BYTES)
    return held


def product(x: Tensor, y: Tensor, onto: Tensor | None = None) -> Tensor:
    """x y modulo the ring size, added onto `onto` (contiguous, of the result's shape, changed in place) if given."""
    if x.dim() < 2 or y.dim() < 2 or x.shape[-1] != y.shape[-2] or x.dtype != y.dtype or x.dtype not in shapes.RING:
        shapes.check_product(x, y)  # which says what is wrong
    if isinstance(y, SeededTensor):
        if y.dim() == 2:
            return _seeded_product(x, y, onto)
        y = y.made()
    rows, inner, columns = x.shape[-2], x.shape[-1], y.shape[-1]
    batch = x.shape[:-2]
    if y.dim() == 2:  # all rows of x meet the same matrix
        stacks, rows_each = 1, math.prod(batch) * rows
    else:
        if batch != y.shape[:-2]:
            batch = shapes.broadcast(batch, y.shape[:-2])
            x, y = x.expand(*batch, rows, inner), y.expand(*batch, inner, columns)
        stacks, rows_each = math.prod(batch), rows
    out = torch.zeros((*batch, rows, columns), dtype=x.dtype) if onto is None else onto
    if not (inner and out.numel()):
        return out
    turned = y.stride(-2) == 1 and inner >= _SHORTEST_DOT
    y = y.mT if turned else y
    step = inner * columns
    if not y.is_contiguous():
        apart = matrix_step(y) if y.numel() >= _LARGE else None
        if apart is None:
            y = y.contiguous()
        else:
            step = apart
    x = x.contiguous()
    pieces = parallel.threads(max(stacks * rows_each * inner * columns / RATE, y.numel() * y.element_size() / BYTES))
    if stacks == 1 and pieces > 1 and rows_each < _TILED_SIDE * pieces:
        only = y[(0,) * (y.dim() - 2)]
        _spread_matrix(x.view(rows_each, inner), only, out.view(rows_each, columns), turned, pieces)
    else:
        first = y if y.is_contiguous() else y[(0,) * (y.dim() - 2)]  # the others are found from its address
        at, sizes = addresses(x, first, out), (stacks, rows_each, inner, columns)
        if pieces == 1:
            _run(at, sizes, step, turned, ZERO[x.dtype])
        else:
            _spread(at, sizes, step, turned, ZERO[x.dtype], pieces)
    return out


def macs(x_shape: shapes.Size, y_shape: shapes.Size) -> int:
    """Multiply-adds of a product [..., M, K] x [..., K, N]: outputs times K."""
    batch = shapes.broadcast(torch.Size(x_shape[:-2]), torch.Size(y_shape[:-2]))
    return int(math.prod(batch) * x_shape[-2] * x_shape[-1] * y_shape[-1])


def matrix_step(y: Tensor) -> int | None:
    """Elements from one contiguous matrix of y [.., a, b] to the next, if all are equally far apart; else None."""
    a, b = y.shape[-2:]
    if y.stride(-1) != 1 or y.stride(-2) != b:
        return None
    step = wanted = None
    for size, stride in zip(reversed(y.shape[:-2]), reversed(y.stride()[:-2]), strict=True):
        if size == 1:
            continue
        if wanted is None:
            step = wanted = stride
        if stride != wanted:
            return None
        wanted *= size
    return a * b if step is None else step


def _run(at: Sequence[int], sizes: tuple[int, int, int, int], step: int, turned: bool, zero: Zero) -> None:
    """out += x y in one thread, by address: x [B, M, K], out [B, M, N], y [B, K, N] or, if turned, [B, N, K].

    sizes: B, M, K, N. All are contiguous, but matrices of y may lie apart (entries of a cache in their larger buffers):
    step is the number of elements from one to the next.
    """
    stacks, rows, inner, columns = sizes
    if rows < _TILED_SIDE or not (cpu_amx.usable() and tiled(rows, inner, columns, turned)):
        launch(cpu_matmul.dot_product if turned else cpu_matmul.row_product, *at, *sizes, step, zero)
    elif stacks > 1 and step != inner * columns:
        for stack in range(stacks):
            _run(_from(at, sizes, step, zero, stack), (1, rows, inner, columns), step, turned, zero)
    else:
        launch(cpu_amx.product, *at, *sizes, turned, desk().address, zero)


def _from(
    at: Sequence[int], sizes: tuple[int, int, int, int], step: int, zero: Zero, stack: int, row: int = 0
) -> tuple[int, int, int]:  # fmt: skip
    """Where product number `stack` begins, from a row on."""
    (x, y, out), (_, rows, inner, columns), size = at, sizes, zero.itemsize
    return (
        x + (stack * rows + row) * inner * size, y + stack * step * size, out + (stack * rows + row) * columns * size
    )  # fmt: skip


def _spread(
    at: Sequence[int], sizes: tuple[int, int, int, int], step: int, turned: bool, zero: Zero, pieces: int
) -> None:  # fmt: skip
    """`_run` on several threads: each takes some products, or some rows."""
    stacks, rows, inner, columns = sizes

    def part(first: int, last: int, row: int = 0, end: int = rows) -> None:
        _run(_from(at, sizes, step, zero, first, row), (last - first, end - row, inner, columns), step, turned, zero)

    if stacks >= pieces or rows < _TILED_SIDE * pieces:
        parallel.run_parallel(part, parallel.split_range(stacks, pieces))
    else:
        for stack in range(stacks):
            parallel.run_parallel(partial(part, stack, stack + 1), parallel.split_range(rows, pieces, _TILED_SIDE))


def _spread_matrix(x: Tensor, y: Tensor, out: Tensor, turned: bool, pieces: int) -> None:
    """Few rows of x: each thread reads its own lines of y, so makes some columns (turned), or a part of all sums."""
    ranges = parallel.split_range(len(y), pieces, _TILED_SIDE)
    places = out.split([last - first for first, last in ranges], dim=1) if turned else [out] * len(ranges)
    made = [torch.zeros_like(place, memory_format=torch.contiguous_format) for place in places]
    numbers = {first: number for number, (first, _) in enumerate(ranges)}

    def part(first: int, last: int) -> None:
        lines = x if turned else x[:, first:last].contiguous()
        some, sums = y[first:last], made[numbers[first]]
        _run(addresses(lines, some, sums), (1, len(x), lines.shape[1], sums.shape[1]), 0, turned, ZERO[x.dtype])

    parallel.run_parallel(part, ranges)
    for place, sums in zip(places, made, strict=True):
        place += sums


# -- a matrix that is made from key streams ---------------------------------------------------------------------------
def _seeded_product(x: Tensor, y: SeededTensor, onto: Tensor | None) -> Tensor:
    """`product` with a matrix y that is not in memory."""
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
            _spread_seeded(*mine, piece, piece.key.rounds, y.turned)
        at = ends[1]
    return out


def _spread_seeded(x: Tensor, out: Tensor, piece: StreamSlice, keys: int, turned: bool) -> None:
    """out += x y for the lines of one piece, on as many threads as are worth it; each makes some columns."""
    (rows, inner), columns, zero = x.shape, out.shape[1], ZERO[x.dtype]
    in_bytes = cpu_amx.usable() and tiled(rows, inner, columns, turned)
    kernel = cpu_seeded.in_byte_tiles if in_bytes else cpu_seeded.in_register_tiles
    left, made = addresses(x[0], out[0])
    given = (left, x.stride(0), keys, piece.start, turned, rows, inner, columns)

    def part(first: int, last: int) -> None:
        scratch = desk().address
        if this_thread.hook is not None and not in_bytes:  # a step that is repeated has scratch of its own
            room = torch.empty(cpu_seeded.REGISTER_BYTES // 8, dtype=torch.int64)
            scratch = room.data_ptr()
        launch(kernel, *given, first, last, made, out.stride(0), scratch, zero)

    pieces = parallel.threads(inner * columns * max(rows / RATE, x.element_size() / BYTES))
    parallel.run_parallel(part, parallel.split_range(columns, pieces, _SEEDED_CUT))


def _some_at_a_time(x: Tensor, out: Tensor, y: SeededTensor) -> None:
    """out += x y, some lines of y after the others."""
    number = max(1, _AT_ONCE // max(1, y.line.numel()))
    count = y.shape[1] if y.turned else y.shape[0]
    for first in range(0, count, number):
        last = min(count, first + number)
        lines = y.lines(first, last).made()
        if y.turned:
            out[:, first:last] += product(x, lines)
        else:
            out += product(x[:, first:last], lines)


# -- listed rows ------------------------------------------------------------------------------------------------------
def check_inside(name: str, listed: Tensor, limit: int) -> None:
    """Raise DomainError unless all numbers lie in 0 .. limit - 1; looks at them where they are."""
    if not listed.numel():
        return
    if listed.is_cpu:
        listed = listed.contiguous()
        fits = cpu_matmul.inside(*addresses(listed), listed.numel(), limit)
    else:
        fits = int(listed.min()) >= 0 and int(listed.max()) < limit
    if not fits:
        raise DomainError(f"{name}: a number of the list lies outside 0 .. {limit - 1}; want rows of y")


def listed_product(name: str, x: Tensor, y: Tensor, listed: Tensor, onto: Tensor | None = None) -> Tensor:
    """`ops.ring_matmul_rows` or `ops.ring_matmul_lines`, as `name` says, of CPU tensors."""
    turned = name == "ring_matmul_rows"
    size = shapes.listed_size(name, x, y, listed)
    out = torch.zeros(size, dtype=x.dtype) if onto is None else onto
    check_inside(name, listed, len(y))
    (rows, inner), columns = x.shape, out.shape[1]
    copied = isinstance(y, SeededTensor) or y.stride(1) != 1
    if copied or (cpu_amx.usable() and tiled(rows, inner, columns, turned)):
        found = y.index_select(0, listed.cpu())
        return product(x, found.mT if turned else found, onto)
    if not (out.numel() and inner):
        return out
    x, listed = x.contiguous(), listed.cpu().contiguous()
    kernel = cpu_matmul.dot_rows if turned else cpu_matmul.add_lines
    given = (*addresses(x, y[0], listed, out), rows, inner, columns, y.stride(0))

    def part(first: int, last: int) -> None:
        kernel(*given, first, last, ZERO[x.dtype])

    pieces = parallel.threads(inner * max(out.numel() / RATE, columns * y.element_size() / BYTES))
    parallel.run_parallel(part, parallel.split_range(columns, pieces, _ROWS_CUT))
    return out
