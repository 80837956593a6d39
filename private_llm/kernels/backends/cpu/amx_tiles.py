"""Instructions of CPUs with AMX as Numba functions on addresses: tiles of 16 x 16 groups of four bytes.

What they are for, and the order of the shifted copies, is said in `amx`. Everything here is one instruction, or one
line or tile of vector instructions, in LLVM's types: Numba's array indexing would keep it from the vector units.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from private_llm.kernels.compiling import compiled

TILE = 16
"""Rows and columns of a tile, in groups of four bytes."""
TILE_WORDS = TILE * TILE
TILE_BYTES = 4 * TILE_WORDS

_I8 = ir.IntType(8)
_I64 = ir.IntType(64)
_POINTER = _I8.as_pointer()


def instruction(builder: Any, name: str, *arguments: Any) -> None:  # noqa: ANN401
    """An AMX instruction by LLVM's name; tile numbers are constants."""
    full = f"llvm.x86.{name}"
    known = builder.module.globals.get(full)
    kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
    builder.call(known or ir.Function(builder.module, kind, full), arguments)


@intrinsic
def configure(typing_context, address):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Set the tiles' shapes from 64 bytes at `address`; clears them."""

    def codegen(context: Any, builder: Any, _: Any, args: Any) -> Any:  # noqa: ANN401
        instruction(builder, "ldtilecfg", builder.inttoptr(args[0], _POINTER))
        return context.get_dummy_value()

    return types.void(types.intp), codegen


@intrinsic
def release(typing_context):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Give the tiles back, so that task switches need not save them."""

    def codegen(context: Any, builder: Any, _: Any, __: Any) -> Any:  # noqa: ANN401
        instruction(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), codegen


def _multiply(columns: int) -> Callable[..., None]:
    """sums[i, j] = left_i right_j over `steps` tiles each, two left tiles by `columns` right ones; all addresses."""

    @intrinsic
    def run(typing_context, left0, left1, right0, right1, steps, sums):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        word = types.intp

        def codegen(context: Any, builder: Any, _: Any, args: Any) -> Any:  # noqa: ANN401
            left = [builder.inttoptr(arg, _POINTER) for arg in args[:2]]
            right = [builder.inttoptr(arg, _POINTER) for arg in args[2 : 2 + columns]]
            pitch = _I64(4 * TILE)
            for t in range(2 * columns):
                instruction(builder, "tilezero", _I8(t))
            entry = builder.block
            loop, done = builder.append_basic_block("step"), builder.append_basic_block("done")
            builder.branch(loop)
            builder.position_at_end(loop)
            k = builder.phi(_I64)
            k.add_incoming(_I64(0), entry)
            at = [builder.mul(k, _I64(TILE_BYTES))]
            for i in range(2):
                instruction(builder, "tileloadd64", _I8(4 + i), builder.gep(left[i], at), pitch)
            for j in range(columns):
                instruction(builder, "tileloadd64", _I8(6 + j), builder.gep(right[j], at), pitch)
                for i in range(2):
                    instruction(builder, "tdpbuud", _I8(i * columns + j), _I8(4 + i), _I8(6 + j))
            following = builder.add(k, _I64(1))
            k.add_incoming(following, loop)
            builder.cbranch(builder.icmp_signed("<", following, args[4]), loop, done)
            builder.position_at_end(done)
            out = builder.inttoptr(args[5], _POINTER)
            for i in range(2):
                for j in range(columns):
                    place = builder.gep(out, [_I64(TILE_BYTES * (2 * i + j))])
                    instruction(builder, "tilestored64", _I8(i * columns + j), place, pitch)
            return context.get_dummy_value()

        return types.void(word, word, word, word, word, word), codegen

    made: Callable[..., None] = run
    return made


two_columns = _multiply(2)
one_column = _multiply(1)


@compiled
def place(shift: int, size: int) -> int:
    """Where f_shift stands among the shifted copies: 3 2 1 0, and 7 3 6 2 5 1 4 0, so f_{s-4} follows f_s."""
    if size == 4:
        return 3 - shift
    return 2 * (7 - shift) if shift > 3 else 2 * (3 - shift) + 1


def _lines(builder: Any, bits: int, address: Any) -> tuple[Any, Any]:  # noqa: ANN401
    """Low halves (or all) and high halves (or None) of 16 elements at `address`."""
    line, half = ir.VectorType(ir.IntType(bits), TILE), ir.VectorType(ir.IntType(32), TILE)
    loaded = builder.load(builder.inttoptr(address, line.as_pointer()), align=bits // 8)
    if bits == 32:
        return loaded, None
    high = builder.lshr(loaded, ir.Constant(line, [32] * TILE))
    return builder.trunc(loaded, half), builder.trunc(high, half)


def _store(builder: Any, line: Any, address: Any) -> None:  # noqa: ANN401
    builder.store(line, builder.inttoptr(address, line.type.as_pointer()), align=4)


@intrinsic
def shift_line(typing_context, x, packed, run, zero):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """All f_shift of 16 elements at x, each at its place, `run` bytes apart, from packed on."""

    def codegen(context: Any, builder: Any, _: Any, args: Any) -> Any:  # noqa: ANN401
        bits = zero.bitwidth
        low, high = _lines(builder, bits, args[0])

        def moved(line: Any, by: int) -> Any:  # noqa: ANN401
            return builder.shl(line, ir.Constant(line.type, [by] * TILE)) if by else line

        for shift in range(bits // 8):
            if shift < 4:
                word = moved(low, 8 * (3 - shift))
            else:
                down = ir.Constant(low.type, [8 * (shift - 3)] * TILE)
                word = high if shift == 7 else builder.or_(builder.lshr(low, down), moved(high, 8 * (7 - shift)))
            name = "llvm.bswap.v16i32"
            known = builder.module.globals.get(name)
            swap = known or ir.Function(builder.module, ir.FunctionType(word.type, [word.type]), name)
            start = builder.mul(args[2], _I64(place.py_func(shift, bits // 8)))
            _store(builder, builder.call(swap, [word]), builder.add(args[1], start))
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, zero), codegen


@intrinsic
def copy_line(typing_context, y, packed, run, zero):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """16 elements at y to packed, their high halves `run` bytes later."""

    def codegen(context: Any, builder: Any, _: Any, args: Any) -> Any:  # noqa: ANN401
        low, high = _lines(builder, zero.bitwidth, args[0])
        _store(builder, low, args[1])
        if high is not None:
            _store(builder, high, builder.add(args[1], args[2]))
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, zero), codegen


@intrinsic
def turn(typing_context, y, pitch, packed, run, zero):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """16 lines of 16 elements, `pitch` bytes apart, to a tile with lines as columns; high halves `run` bytes later."""

    def codegen(context: Any, builder: Any, _: Any, args: Any) -> Any:  # noqa: ANN401
        starts = [builder.add(args[0], builder.mul(args[1], _I64(n))) for n in range(TILE)]
        lines = [_lines(builder, zero.bitwidth, start) for start in starts]
        for half in range(zero.bitwidth // 32):
            start = builder.add(args[2], args[3]) if half else args[2]
            for k, row in enumerate(_transposed(builder, [line[half] for line in lines])):
                _store(builder, row, builder.add(start, _I64(4 * TILE * k)))
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, types.intp, zero), codegen


@intrinsic
def add_line(typing_context, sums, out, zero):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """16 elements at out += sum of 2^(8 shift) sums, highest shift first, each two tiles after the one before."""

    def codegen(context: Any, builder: Any, _: Any, args: Any) -> Any:  # noqa: ANN401
        bits = zero.bitwidth
        line, half = ir.VectorType(ir.IntType(bits), TILE), ir.VectorType(ir.IntType(32), TILE)
        byte = ir.Constant(line, [8] * TILE)
        total = None
        for step in range(bits // 8):
            address = builder.add(args[0], _I64(2 * TILE_BYTES * step))
            part = builder.load(builder.inttoptr(address, half.as_pointer()), align=4)
            part = part if bits == 32 else builder.zext(part, line)
            total = part if total is None else builder.add(builder.shl(total, byte), part)
        target = builder.inttoptr(args[1], line.as_pointer())
        builder.store(builder.add(builder.load(target, align=bits // 8), total), target, align=bits // 8)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, zero), codegen


def _transposed(builder: Any, rows: list[Any]) -> list[Any]:  # noqa: ANN401
    """Rows of a square matrix as its columns: swap halves, quarters, ... of pairs of rows."""
    lanes = range(TILE)
    distance = 1
    while distance < TILE:
        low = [TILE + i - distance if i & distance else i for i in lanes]
        high = [TILE + i if i & distance else i + distance for i in lanes]
        masks = [ir.Constant(ir.VectorType(ir.IntType(32), TILE), mask) for mask in (low, high)]
        made = list(rows)
        for i in lanes:
            if not i & distance:
                pair = rows[i], rows[i + distance]
                made[i], made[i + distance] = (builder.shuffle_vector(*pair, mask) for mask in masks)
        rows, distance = made, 2 * distance
    return rows
