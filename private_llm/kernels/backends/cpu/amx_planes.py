"""32-bit ring products on byte tiles, by planes: the same instruction as in `amx`, fed with fewer bytes.

A 32-bit element has bytes x_0 .. x_3, and x y = sum over i + j < 4 of 2^(8 (i + j)) x_i y_j mod 2^32: ten products of
bytes. Plane i of the left operand holds the bytes x_i of 64 steps of 16 rows, plane j of the right one the bytes
y_j of 64 steps of 16 columns, four steps to a group. Ten instructions on eight tiles make 16 x 64 x 16 multiply-adds,
where the shifted copies of `amx` take sixteen on sixteen; and a block of the left operand is a quarter as large,
so that it stays in the first-level cache. Both operands are packed byte by byte, which the copies of `amx` save.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from private_llm.kernels.address import Array, flat
from private_llm.kernels.backends.cpu.amx_tiles import TILE_BYTES, add_line, configure, instruction
from private_llm.kernels.compiling import compiled

STEPS = 64
"""Steps in a group of planes."""
PLANES_BYTES = 4 * TILE_BYTES
"""Four planes of 16 rows or columns and 64 steps."""
SUMS_BYTES = 8 * TILE_BYTES

_I8 = ir.IntType(8)
_I64 = ir.IntType(64)
_LINE = ir.VectorType(_I8, 64)
_BYTE, _WORD = np.uint8(0), np.uint32(0)


def _shuffled(builder: Any, a: Any, b: Any, mask: list[int]) -> Any:  # noqa: ANN401
    """Bytes of a (0 .. 63) and b (64 .. 127)."""
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(ir.IntType(32), 64), mask))


def _store_planes(builder: Any, planes: list[Any], to: Any) -> None:  # noqa: ANN401
    for i, plane in enumerate(planes):
        place = builder.add(to, _I64(TILE_BYTES * i))
        builder.store(plane, builder.inttoptr(place, _LINE.as_pointer()), align=64)


def _load(builder: Any, address: Any) -> Any:  # noqa: ANN401
    return builder.load(builder.inttoptr(address, _LINE.as_pointer()), align=4)


@intrinsic
def split_row(typing_context, x, to):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """64 elements at x as a row of 64 bytes in each of the four planes at `to`."""

    def codegen(context: Any, builder: Any, _: Any, args: Any) -> Any:  # noqa: ANN401
        lines = [_load(builder, builder.add(args[0], _I64(64 * n))) for n in range(4)]
        halves = []
        for first in (0, 2):  # bytes 0, then 1 of 32 elements; bytes 2, then 3
            a, b = lines[first], lines[first + 1]
            for byte in (0, 2):
                mask = [64 * (n // 16) + 4 * (n % 16) + byte + extra for extra in (0, 1) for n in range(32)]
                halves.append(_shuffled(builder, a, b, mask))
        planes = []
        for pair in (0, 1):
            for start in (0, 32):
                mask = [*range(start, start + 32), *range(64 + start, 96 + start)]
                planes.append(_shuffled(builder, halves[pair], halves[2 + pair], mask))
        _store_planes(builder, planes, args[1])
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), codegen


@intrinsic
def split_steps(typing_context, y0, y1, y2, y3, to):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """16 elements of each of four steps as 16 groups of four bytes in each of the four planes at `to`."""

    def codegen(context: Any, builder: Any, _: Any, args: Any) -> Any:  # noqa: ANN401
        lines = [_load(builder, arg) for arg in args[:4]]
        pairs = []  # of steps (0, 1), then (2, 3): bytes 0 0 1 1, then bytes 2 2 3 3
        for first in (0, 2):
            for byte in (0, 2):
                mask = [64 * (m % 2) + 4 * n + byte + m // 2 for n in range(16) for m in range(4)]
                pairs.append(_shuffled(builder, lines[first], lines[first + 1], mask))
        planes = []
        for pair in (0, 1):
            for start in (0, 2):
                mask = [64 * (m // 2) + 4 * n + start + m % 2 for n in range(16) for m in range(4)]
                planes.append(_shuffled(builder, pairs[pair], pairs[2 + pair], mask))
        _store_planes(builder, planes, args[4])
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, types.intp, types.intp), codegen


@intrinsic
def multiply(typing_context, left, right, groups, sums):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Sums of left_i right_j over i + j = 3, 2, 1, 0, two tiles apart at `sums`; over `groups` groups of 64 steps.

    Tiles 0 to 3 add up, tile 7 holds a right plane, 4 to 6 left planes 0 to 2 (plane 3 is used once, before plane 0).
    """

    def codegen(context: Any, builder: Any, _: Any, args: Any) -> Any:  # noqa: ANN401
        pointer, pitch = _I8.as_pointer(), _I64(64)
        left_at, right_at, sums_at = (builder.inttoptr(args[i], pointer) for i in (0, 1, 3))
        for tile in range(4):
            instruction(builder, "tilezero", _I8(tile))
        entry = builder.block
        loop, done = builder.append_basic_block("group"), builder.append_basic_block("done")
        builder.branch(loop)
        builder.position_at_end(loop)
        k = builder.phi(_I64)
        k.add_incoming(_I64(0), entry)
        start = builder.mul(k, _I64(PLANES_BYTES))

        def load(tile: int, base: Any, plane: int) -> None:  # noqa: ANN401
            place = builder.gep(base, [builder.add(start, _I64(plane * TILE_BYTES))])
            instruction(builder, "tileloadd64", _I8(tile), place, pitch)

        for j in range(4):
            load(7, right_at, j)
            if j == 0:
                load(4, left_at, 3)
                instruction(builder, "tdpbuud", _I8(3), _I8(4), _I8(7))
            for i in range(3 if j == 0 else 4 - j):
                if j == 0:
                    load(4 + i, left_at, i)
                instruction(builder, "tdpbuud", _I8(i + j), _I8(4 + i), _I8(7))
        following = builder.add(k, _I64(1))
        k.add_incoming(following, loop)
        builder.cbranch(builder.icmp_signed("<", following, args[2]), loop, done)
        builder.position_at_end(done)
        for tile in range(4):
            place = builder.gep(sums_at, [_I64(2 * TILE_BYTES * (3 - tile))])
            instruction(builder, "tilestored64", _I8(tile), place, pitch)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, types.intp), codegen


@compiled
def begin(desk: int) -> None:
    """Take the tiles, 16 rows of 64 bytes each; 64 bytes of scratch at `desk`."""
    config = flat(desk, 64, _BYTE)
    config[:] = 0
    config[0] = 1
    for t in range(8):
        config[16 + 2 * t] = 64
        config[48 + t] = 16
    configure(desk)


@compiled
def pack_rows(x: int, pitch: int, rows: int, steps: int, packed: int, edge: Array) -> None:
    """Rows x + r pitch as planes [rows / 16][steps / 64][4][16, 64]; steps beyond the last are zeros. edge [64]."""
    groups = (steps + STEPS - 1) // STEPS
    for r in range(rows):
        to = packed + (r >> 4) * groups * PLANES_BYTES + (r & 15) * 64
        for g in range(steps // STEPS):
            split_row(x + r * pitch + g * STEPS * 4, to + g * PLANES_BYTES)
        rest = steps % STEPS
        if rest:
            last = flat(x + r * pitch + (steps - rest) * 4, rest, _WORD)
            edge[:] = 0
            for k in range(rest):
                edge[k] = last[k]
            split_row(edge.ctypes.data, to + (groups - 1) * PLANES_BYTES)


@compiled
def panel(
    left: int, right: int, rows: int, steps: int, columns: int, out: int, pitch: int, sums: int, edge: Array
) -> None:  # fmt: skip
    """Row r of out at out + r pitch += (left right)[r]; right as planes [columns / 16][steps / 64][4][16, 64].

    Scratch: `SUMS_BYTES` at `sums`, on a cache line, and edge [16] or more.
    """
    groups = (steps + STEPS - 1) // STEPS
    for m in range((rows + 15) // 16):
        for c in range((columns + 15) // 16):
            multiply(left + m * groups * PLANES_BYTES, right + c * groups * PLANES_BYTES, groups, sums)
            width = min(16, columns - 16 * c)
            for r in range(min(16, rows - 16 * m)):
                to = out + (16 * m + r) * pitch + 64 * c
                if width == 16:
                    add_line(sums + 64 * r, to, _WORD)
                else:
                    edge[:] = 0
                    add_line(sums + 64 * r, edge.ctypes.data, _WORD)
                    last = flat(to, width, _WORD)
                    for n in range(width):
                        last[n] += edge[n]
