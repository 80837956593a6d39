"""Instructions of CPUs with AMX as Numba functions on addresses: tiles of 16 x 16 groups of four bytes.

What they are for, and the order of the shifted copies, is said in `amx`. Everything here is one instruction, or one
line or tile of vector instructions, in LLVM's types: Numba's array indexing would keep it from the vector units.

32-bit products of convolutions take planes instead of shifted copies. An element has bytes x_0 .. x_3, and x y = sum
over i + j < 4 of 2^(8 (i + j)) x_i y_j mod 2^32: ten products of bytes. Plane i of the left operand holds the bytes x_i
of 64 steps of 16 rows, plane j of the right one the bytes y_j of 64 steps of 16 columns, four steps to a group. Ten
instructions on eight tiles make 16 x 64 x 16 multiply-adds, where shifted copies take sixteen on sixteen; and a block
of the left operand is a quarter as large, so that it stays in the first-level cache.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir

from private_llm.kernels.address import Array, flat
from private_llm.kernels.compiling import compiled
from private_llm.kernels.emitting import (
    ADDRESS,
    I8,
    I32,
    I64,
    ZERO,
    Function,
    IrValue,
    emitted,
    known,
    loop,
    pointer,
    shuffled,
)

TILE = 16
"""Rows and columns of a tile, in groups of four bytes."""
TILE_WORDS = TILE * TILE
TILE_BYTES = 4 * TILE_WORDS
_PITCH = I64(4 * TILE)
_HALF = ir.VectorType(I32, TILE)


def _instruction(builder: IrValue, name: str, *arguments: IrValue) -> None:
    """An AMX instruction by LLVM's name; tile numbers are constants."""
    function = known(builder, f"llvm.x86.{name}", ir.VoidType(), *(argument.type for argument in arguments))
    builder.call(function, arguments)


def _load_tile(builder: IrValue, tile: int, base: IrValue, offset: IrValue) -> None:
    _instruction(builder, "tileloadd64", I8(tile), builder.gep(base, [offset]), _PITCH)


def _store_tile(builder: IrValue, tile: int, base: IrValue, number: int) -> None:
    _instruction(builder, "tilestored64", I8(tile), builder.gep(base, [I64(TILE_BYTES * number)]), _PITCH)


@emitted(ADDRESS)
def configure(builder: IrValue, address: IrValue) -> None:
    """Set the tiles' shapes from 64 bytes at `address`; clears them."""
    _instruction(builder, "ldtilecfg", pointer(builder, address, I8))


@emitted()
def release(builder: IrValue) -> None:
    """Give the tiles back, so that task switches need not save them."""
    _instruction(builder, "tilerelease")


def _multiply(columns: int) -> Function:
    """sums[i, j] = left_i right_j over `steps` tiles each, two left tiles by `columns` right ones; all addresses."""

    @emitted(*[ADDRESS] * 6)
    def run(builder: IrValue, *given: IrValue) -> None:
        left = [pointer(builder, each, I8) for each in given[:2]]
        right = [pointer(builder, each, I8) for each in given[2 : 2 + columns]]
        for t in range(2 * columns):
            _instruction(builder, "tilezero", I8(t))

        def step(k: IrValue) -> None:
            at = builder.mul(k, I64(TILE_BYTES))
            for i in range(2):
                _load_tile(builder, 4 + i, left[i], at)
            for j in range(columns):
                _load_tile(builder, 6 + j, right[j], at)
                for i in range(2):
                    _instruction(builder, "tdpbuud", I8(i * columns + j), I8(4 + i), I8(6 + j))

        loop(builder, given[4], 1, step)
        out = pointer(builder, given[5], I8)
        for i in range(2):
            for j in range(columns):
                _store_tile(builder, i * columns + j, out, 2 * i + j)

    return run


two_columns, one_column = _multiply(2), _multiply(1)
"""(left 0, left 1, right 0, right 1, steps, sums)."""


@compiled
def place(shift: int, size: int) -> int:
    """Where f_shift stands among the shifted copies: 3 2 1 0, and 7 3 6 2 5 1 4 0, so f_{s-4} follows f_s."""
    if size == 4:
        return 3 - shift
    return 2 * (7 - shift) if shift > 3 else 2 * (3 - shift) + 1


def _lines(builder: IrValue, bits: int, address: IrValue) -> tuple[IrValue, IrValue]:
    """Low halves (or all) and high halves (or None) of 16 elements at `address`."""
    line = ir.VectorType(ir.IntType(bits), TILE)
    loaded = builder.load(pointer(builder, address, line), align=bits // 8)
    if bits == 32:
        return loaded, None
    high = builder.lshr(loaded, ir.Constant(line, [32] * TILE))
    return builder.trunc(loaded, _HALF), builder.trunc(high, _HALF)


def _store(builder: IrValue, line: IrValue, address: IrValue) -> None:
    builder.store(line, pointer(builder, address, line.type), align=4)


@emitted(ADDRESS, ADDRESS, ADDRESS, ZERO)
def shift_line(builder: IrValue, x: IrValue, packed: IrValue, run: IrValue, bits: int) -> None:
    """All f_shift of 16 elements at x, each at its place, `run` bytes apart, from packed on."""
    low, high = _lines(builder, bits, x)

    def moved(line: IrValue, by: int) -> IrValue:
        return builder.shl(line, ir.Constant(line.type, [by] * TILE)) if by else line

    for shift in range(bits // 8):
        if shift < 4:
            word = moved(low, 8 * (3 - shift))
        else:
            down = ir.Constant(low.type, [8 * (shift - 3)] * TILE)
            word = high if shift == 7 else builder.or_(builder.lshr(low, down), moved(high, 8 * (7 - shift)))
        swap = known(builder, "llvm.bswap.v16i32", _HALF, _HALF)
        start = builder.mul(run, I64(place.py_func(shift, bits // 8)))
        _store(builder, builder.call(swap, [word]), builder.add(packed, start))


@emitted(ADDRESS, ADDRESS, ADDRESS, ZERO)
def copy_line(builder: IrValue, y: IrValue, packed: IrValue, run: IrValue, bits: int) -> None:
    """16 elements at y to packed, their high halves `run` bytes later."""
    low, high = _lines(builder, bits, y)
    _store(builder, low, packed)
    if high is not None:
        _store(builder, high, builder.add(packed, run))


@emitted(ADDRESS, ADDRESS, ADDRESS, ADDRESS, ZERO)
def turn(builder: IrValue, y: IrValue, pitch: IrValue, packed: IrValue, run: IrValue, bits: int) -> None:
    """16 lines of 16 elements, `pitch` bytes apart, to a tile with lines as columns; high halves `run` bytes later."""
    starts = [builder.add(y, builder.mul(pitch, I64(n))) for n in range(TILE)]
    lines = [_lines(builder, bits, start) for start in starts]
    for half in range(bits // 32):
        start = builder.add(packed, run) if half else packed
        for k, row in enumerate(_transposed(builder, [line[half] for line in lines])):
            _store(builder, row, builder.add(start, I64(4 * TILE * k)))


@emitted(ADDRESS, ADDRESS, ZERO)
def add_line(builder: IrValue, sums: IrValue, out: IrValue, bits: int) -> None:
    """16 elements at out += sum of 2^(8 shift) sums, highest shift first, each two tiles after the one before."""
    line, total = ir.VectorType(ir.IntType(bits), TILE), None
    for step in range(bits // 8):
        address = builder.add(sums, I64(2 * TILE_BYTES * step))
        part = builder.load(pointer(builder, address, _HALF), align=4)
        part = part if bits == 32 else builder.zext(part, line)
        byte = ir.Constant(line, [8] * TILE)
        total = part if total is None else builder.add(builder.shl(total, byte), part)
    target = pointer(builder, out, line)
    builder.store(builder.add(builder.load(target, align=bits // 8), total), target, align=bits // 8)


def _transposed(builder: IrValue, rows: list[IrValue]) -> list[IrValue]:
    """Rows of a square matrix as its columns: swap halves, quarters, ... of pairs of rows."""
    lanes = range(TILE)
    distance = 1
    while distance < TILE:
        low = [TILE + i - distance if i & distance else i for i in lanes]
        high = [TILE + i if i & distance else i + distance for i in lanes]
        made = list(rows)
        for i in lanes:
            if not i & distance:
                pair = rows[i], rows[i + distance]
                made[i], made[i + distance] = (shuffled(builder, places, *pair) for places in (low, high))
        rows, distance = made, 2 * distance
    return rows


# -- planes of bytes of 32-bit elements -------------------------------------------------------------------------------
STEPS = 64
"""Steps in a group of planes."""
PLANES_BYTES = 4 * TILE_BYTES
"""Four planes of 16 rows or columns and 64 steps."""
SUMS_BYTES = 8 * TILE_BYTES

_LINE = ir.VectorType(I8, 64)
_WORD = np.uint32(0)


def _load_line(builder: IrValue, address: IrValue) -> IrValue:
    return builder.load(pointer(builder, address, _LINE), align=4)


def _store_planes(builder: IrValue, pairs: list[IrValue], places: list[list[int]], to: IrValue) -> None:
    """Four planes of bytes, two of each of the first pairs with the one two after it."""
    planes = [shuffled(builder, chosen, pairs[n], pairs[2 + n]) for n in (0, 1) for chosen in places]
    for i, plane in enumerate(planes):
        builder.store(plane, pointer(builder, builder.add(to, I64(TILE_BYTES * i)), _LINE), align=64)


@emitted(ADDRESS, ADDRESS)
def split_row(builder: IrValue, x: IrValue, to: IrValue) -> None:
    """64 elements at x as a row of 64 bytes in each of the four planes at `to`."""
    lines = [_load_line(builder, builder.add(x, I64(64 * n))) for n in range(4)]
    halves = []
    for first in (0, 2):  # bytes 0, then 1 of 32 elements; bytes 2, then 3
        for byte in (0, 2):
            places = [64 * (n // 16) + 4 * (n % 16) + byte + extra for extra in (0, 1) for n in range(32)]
            halves.append(shuffled(builder, places, lines[first], lines[first + 1]))
    _store_planes(builder, halves, [[*range(n, n + 32), *range(64 + n, 96 + n)] for n in (0, 32)], to)


@emitted(*[ADDRESS] * 5)
def split_steps(builder: IrValue, *given: IrValue) -> None:
    """16 elements of each of four steps as 16 groups of four bytes in each of the four planes at the last address."""
    lines = [_load_line(builder, each) for each in given[:4]]
    pairs = []  # of steps (0, 1), then (2, 3): bytes 0 0 1 1, then bytes 2 2 3 3
    for first in (0, 2):
        for byte in (0, 2):
            places = [64 * (m % 2) + 4 * n + byte + m // 2 for n in range(16) for m in range(4)]
            pairs.append(shuffled(builder, places, lines[first], lines[first + 1]))
    whole = [[64 * (m // 2) + 4 * n + start + m % 2 for n in range(16) for m in range(4)] for start in (0, 2)]
    _store_planes(builder, pairs, whole, given[4])


@emitted(*[ADDRESS] * 4)
def multiply(builder: IrValue, left: IrValue, right: IrValue, groups: IrValue, sums: IrValue) -> None:
    """Sums of left_i right_j over i + j = 3, 2, 1, 0, two tiles apart at `sums`; over `groups` groups of 64 steps.

    Tiles 0 to 3 add up, tile 7 holds a right plane, 4 to 6 left planes 0 to 2 (plane 3 is used once, before plane 0).
    """
    left_at, right_at, sums_at = (pointer(builder, each, I8) for each in (left, right, sums))
    for tile in range(4):
        _instruction(builder, "tilezero", I8(tile))

    def step(k: IrValue) -> None:
        start = builder.mul(k, I64(PLANES_BYTES))

        def load(tile: int, base: IrValue, plane: int) -> None:
            _load_tile(builder, tile, base, builder.add(start, I64(plane * TILE_BYTES)))

        for j in range(4):
            load(7, right_at, j)
            if j == 0:
                load(4, left_at, 3)
                _instruction(builder, "tdpbuud", I8(3), I8(4), I8(7))
            for i in range(3 if j == 0 else 4 - j):
                if j == 0:
                    load(4 + i, left_at, i)
                _instruction(builder, "tdpbuud", I8(i + j), I8(4 + i), I8(7))

    loop(builder, groups, 1, step)
    for tile in range(4):
        _store_tile(builder, tile, sums_at, 2 * (3 - tile))


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
def planes_panel(
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
