"""Ring matrix products on the CPU: register tiles of vector multiply-adds (Numba, one thread, GIL-free).

The tile is written in LLVM's vector types, because neither torch's integer product nor Numba's loop
vectoriser keeps the accumulators in registers. Two layouts, chosen by how y lies in memory:

- `dot_product`, y given as [N, K] rows (a linear layer's weight, the key cache): lanes run along k.
- `row_product`, y given as [K, N] rows: lanes run along n.

Both read y once, almost in order, and never copy it. Measured on one AVX-512 core (768 x 3072, 64 bits):
3.6 GMAC/s for one row of x (29 GB/s of weights), 9 to 11 from four rows on, in both layouts. `torch.matmul`
on integers makes 0.1 to 0.5 for one row, 0.8 to 3.7 for eight, 5.5 to 8.7 for 128.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic

from private_llm.kernels.address import flat
from private_llm.kernels.compiling import compiled

Array = np.ndarray[Any, Any]

_WIDE = bool(binding.get_host_cpu_features().get("avx512dq", False))
VECTOR_BITS = 512 if _WIDE else 256
"""Width of a vector: wider types than the machine's are legal but spill."""
VECTORS = 4 if _WIDE else 2
"""Vectors of y per tile: four rows of x times four vectors fill half of 32 registers (two, of 16)."""
ROW_STEPS = 24
"""k steps per block of a row product: few enough that the strided lines of y share a first-level cache."""
DOT_STEPS = 512
"""k steps per block of a dot product with many rows of x: four rows of y then fit the first-level cache."""
ROWS_IN_CACHE = 64
"""Rows of x, and of the result, per block: they stay in the second-level cache."""
FEW_ROWS = 12
"""Up to this many rows of x stay in cache whole, so a dot product needs no blocks."""

_I64 = ir.IntType(64)
_I32 = ir.IntType(32)


def _mask(start: int, count: int) -> ir.Constant:
    return ir.Constant(ir.VectorType(_I32, count), list(range(start, start + count)))


def _broadcast(builder: Any, vector: ir.VectorType, value: Any) -> Any:  # noqa: ANN401
    """`value` in every lane."""
    blank = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(blank, value, _I32(0))
    return builder.shuffle_vector(first, blank, ir.Constant(ir.VectorType(_I32, vector.count), [0] * vector.count))


def _sum_lanes(builder: Any, value: Any) -> Any:  # noqa: ANN401
    """Sum of the lanes, by halves."""
    count = value.type.count
    while count > 1:
        count //= 2
        blank = ir.Constant(value.type, ir.Undefined)
        low = builder.shuffle_vector(value, blank, _mask(0, count))
        value = builder.add(low, builder.shuffle_vector(value, blank, _mask(count, count)))
    return builder.extract_element(value, _I32(0))


def _tile(rows: int, vectors: int, along_k: bool) -> Callable[..., None]:
    """out[m, v] += sum_k x[m, k] y[k, v] for a tile held in registers; steps must be positive.

    `along_k`: lanes run over k, `v` counts rows of y, and steps is a multiple of the lanes. Otherwise lanes
    run over the columns of y. Arrays are flat, each with the offset of its first element and a row pitch.
    """

    @intrinsic
    def tile(typing_context, x, x_at, x_pitch, y, y_at, y_pitch, steps, out, out_at, out_pitch):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        word = types.intp
        signature = types.void(x, word, word, y, word, word, word, out, word, word)

        def codegen(context: Any, builder: Any, _: Any, args: Any) -> Any:  # noqa: ANN401
            bits = x.dtype.bitwidth
            lanes = VECTOR_BITS // bits
            vector = ir.VectorType(ir.IntType(bits), lanes)
            xs, ys, outs = (
                context.make_array(kind)(context, builder, args[i]).data for kind, i in ((x, 0), (y, 3), (out, 7))
            )
            (x0, dx), (y0, dy), (o0, do) = ((args[i], args[i + 1]) for i in (1, 4, 8))

            def address(base: Any, start: Any, pitch: Any, row: int, extra: Any) -> Any:  # noqa: ANN401
                offset = builder.add(start, builder.mul(pitch, _I64(row)))
                return builder.gep(base, [builder.add(offset, extra)])

            def load(pointer: Any) -> Any:  # noqa: ANN401
                return builder.load(builder.bitcast(pointer, vector.as_pointer()), align=bits // 8)

            entry = builder.block
            loop, done = builder.append_basic_block("step"), builder.append_basic_block("done")
            builder.branch(loop)
            builder.position_at_end(loop)
            k = builder.phi(_I64)
            k.add_incoming(_I64(0), entry)
            places = [(m, v) for m in range(rows) for v in range(vectors)]
            sums = {place: builder.phi(vector) for place in places}
            if along_k:
                left = [load(address(xs, x0, dx, m, k)) for m in range(rows)]
                right = [load(address(ys, y0, dy, v, k)) for v in range(vectors)]
            else:
                left = [_broadcast(builder, vector, builder.load(address(xs, x0, dx, m, k))) for m in range(rows)]
                line = builder.mul(dy, k)
                right = [load(address(ys, y0, _I64(lanes), v, line)) for v in range(vectors)]
            made = {(m, v): builder.add(sums[m, v], builder.mul(left[m], right[v])) for m, v in places}
            for place, phi in sums.items():
                phi.add_incoming(ir.Constant(vector, [0] * lanes), entry)
                phi.add_incoming(made[place], loop)
            k_next = builder.add(k, _I64(lanes if along_k else 1))
            k.add_incoming(k_next, loop)
            builder.cbranch(builder.icmp_signed("<", k_next, args[6]), loop, done)
            builder.position_at_end(done)
            for m, v in places:
                if along_k:
                    at = address(outs, o0, do, m, _I64(v))
                    builder.store(builder.add(builder.load(at), _sum_lanes(builder, made[m, v])), at)
                else:
                    at = address(outs, o0, do, m, _I64(v * lanes))
                    total = builder.add(load(at), made[m, v])
                    builder.store(total, builder.bitcast(at, vector.as_pointer()), align=bits // 8)
            return context.get_dummy_value()

        return signature, codegen

    made: Callable[..., None] = tile
    return made


_dot_block = _tile(4, VECTORS, along_k=True)
_dot_line = _tile(1, 2 * VECTORS, along_k=True)
_dot_one = _tile(1, 1, along_k=True)
_row_block = _tile(4, VECTORS, along_k=False)
_row_line = _tile(1, VECTORS, along_k=False)
_row_wide = _tile(1, 4 * VECTORS, along_k=False)


@compiled
def dot_product(
    x: int, y: int, out: int, batches: int, rows: int, inner: int, columns: int, zero: np.unsignedinteger[Any]
) -> None:
    """out += x y^T modulo the word size; x [B, M, K], y [B, N, K], out [B, M, N] by address, contiguous."""
    xs, ys = flat(x, batches * rows * inner, zero), flat(y, batches * columns * inner, zero)
    outs = flat(out, batches * rows * columns, zero)
    lanes = VECTOR_BITS // (8 * xs.itemsize)
    whole = inner - inner % lanes
    block = max(whole, 1) if rows <= FEW_ROWS else DOT_STEPS
    for batch in range(batches):
        for m_first in range(0, rows, ROWS_IN_CACHE):
            m_last = min(rows, m_first + ROWS_IN_CACHE)
            m_blocks = m_last - (m_last - m_first) % 4
            for k in range(0, whole, block):
                steps = min(block, whole - k)
                n = 0
                while n < columns:
                    y_at = (batch * columns + n) * inner + k
                    wide = columns - n >= 2 * VECTORS
                    for m in range(m_first, m_blocks, 4):
                        x_at = (batch * rows + m) * inner + k
                        out_at = (batch * rows + m) * columns + n
                        if wide:
                            for half in range(0, 2 * VECTORS, VECTORS):
                                y_half = y_at + half * inner
                                _dot_block(xs, x_at, inner, ys, y_half, inner, steps, outs, out_at + half, columns)
                        else:
                            for i in range(4):
                                _dot_one(xs, x_at + i * inner, 0, ys, y_at, 0, steps, outs, out_at + i * columns, 0)
                    for m in range(m_blocks, m_last):
                        x_at = (batch * rows + m) * inner + k
                        out_at = (batch * rows + m) * columns + n
                        if wide:
                            _dot_line(xs, x_at, 0, ys, y_at, inner, steps, outs, out_at, 0)
                        else:
                            _dot_one(xs, x_at, 0, ys, y_at, 0, steps, outs, out_at, 0)
                    n += 2 * VECTORS if wide else 1
        if whole < inner:
            for m in range(batch * rows, (batch + 1) * rows):
                for n in range(columns):
                    y_at = (batch * columns + n) * inner
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
def row_product(
    x: int, y: int, out: int, batches: int, rows: int, inner: int, columns: int, zero: np.unsignedinteger[Any]
) -> None:
    """out += x y modulo the word size; x [B, M, K], y [B, K, N], out [B, M, N] by address, contiguous."""
    xs, ys = flat(x, batches * rows * inner, zero), flat(y, batches * inner * columns, zero)
    outs = flat(out, batches * rows * columns, zero)
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
                    y_at = (batch * inner + k) * columns + n
                    out_at = (batch * rows + m) * columns + n
                    if rows == 1 and columns - n >= 4 * width:
                        _row_wide(xs, x_at, 0, ys, y_at, columns, steps, outs, out_at, 0)
                        n += 4 * width
                    else:
                        rows_times_panel(xs, x_at, inner, count, ys, y_at, columns, steps, outs, out_at, columns)
                        n += width
                left = columns - n
                if left:
                    out_edge[:] = 0
                    for i in range(steps):
                        for j in range(left):
                            y_edge[i * width + j] = ys[(batch * inner + k + i) * columns + n + j]
                    rows_times_panel(xs, x_at, inner, count, y_edge, 0, width, steps, out_edge, 0, width)
                    for i in range(count):
                        for j in range(left):
                            outs[(batch * rows + m + i) * columns + n + j] += out_edge[i * width + j]
