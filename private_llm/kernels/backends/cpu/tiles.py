"""Register tiles of ring products on the CPU, written in LLVM's vector types.

Neither torch's integer product nor Numba's loop vectoriser keeps the accumulators in registers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic

WIDE = bool(binding.get_host_cpu_features().get("avx512dq", False))
VECTOR_BITS = 512 if WIDE else 256
"""Width of a vector: wider types than the machine's are legal but spill."""

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


def _emit(
    builder: Any, shape: tuple[int, int, bool], arrays: Sequence[Any], starts: Sequence[Any],  # noqa: ANN401
    pitches: Sequence[Any], line: Callable[[Any], Any], steps: Any,  # noqa: ANN401
) -> None:  # fmt: skip
    """The instructions of a tile. arrays, starts: of x, y, out; pitches: of x, out; line(i): where line i of y begins.

    Lines are the rows of y as it lies in memory: along k there is one for each of the tile's columns, else one a step.
    """
    rows, vectors, along_k = shape
    (xs, ys, outs), (x0, y0, o0), (dx, do) = arrays, starts, pitches
    element = xs.type.pointee
    lanes = VECTOR_BITS // element.width
    vector = ir.VectorType(element, lanes)

    def address(base: Any, start: Any, pitch: Any, row: int, extra: Any) -> Any:  # noqa: ANN401
        offset = builder.add(start, builder.mul(pitch, _I64(row)))
        return builder.gep(base, [builder.add(offset, extra)])

    def load(pointer: Any) -> Any:  # noqa: ANN401
        return builder.load(builder.bitcast(pointer, vector.as_pointer()), align=element.width // 8)

    fixed = [builder.add(y0, line(_I64(v))) for v in range(vectors)] if along_k else []
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
        right = [load(builder.gep(ys, [builder.add(start, k)])) for start in fixed]
    else:
        left = [_broadcast(builder, vector, builder.load(address(xs, x0, dx, m, k))) for m in range(rows)]
        begin = line(k)
        right = [load(address(ys, y0, _I64(lanes), v, begin)) for v in range(vectors)]
    made = {(m, v): builder.add(sums[m, v], builder.mul(left[m], right[v])) for m, v in places}
    for place, phi in sums.items():
        phi.add_incoming(ir.Constant(vector, [0] * lanes), entry)
        phi.add_incoming(made[place], loop)
    k_next = builder.add(k, _I64(lanes if along_k else 1))
    k.add_incoming(k_next, loop)
    builder.cbranch(builder.icmp_signed("<", k_next, steps), loop, done)
    builder.position_at_end(done)
    for m, v in places:
        if along_k:
            at = address(outs, o0, do, m, _I64(v))
            builder.store(builder.add(builder.load(at), _sum_lanes(builder, made[m, v])), at)
        else:
            at = address(outs, o0, do, m, _I64(v * lanes))
            total = builder.add(load(at), made[m, v])
            builder.store(total, builder.bitcast(at, vector.as_pointer()), align=element.width // 8)


def tile(rows: int, vectors: int, along_k: bool) -> Callable[..., None]:
    """out[m, v] += sum_k x[m, k] y[k, v] for a tile held in registers; steps must be positive.

    `along_k`: lanes run over k, `v` counts rows of y, and steps is a multiple of the lanes. Otherwise lanes
    run over the columns of y. Arrays are flat, each with the offset of its first element and a row pitch.
    """

    @intrinsic
    def made(typing_context, x, x_at, x_pitch, y, y_at, y_pitch, steps, out, out_at, out_pitch):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        word = types.intp
        signature = types.void(x, word, word, y, word, word, word, out, word, word)

        def codegen(context: Any, builder: Any, _: Any, args: Any) -> Any:  # noqa: ANN401
            arrays = [
                context.make_array(kind)(context, builder, args[i]).data for kind, i in ((x, 0), (y, 3), (out, 7))
            ]
            _emit(
                builder, (rows, vectors, along_k), arrays, (args[1], args[4], args[8]), (args[2], args[9]),
                lambda number: builder.mul(args[5], number), args[6],
            )  # fmt: skip
            return context.get_dummy_value()

        return signature, codegen

    function: Callable[..., None] = made
    return function


def listed_tile(rows: int, vectors: int, along_k: bool) -> Callable[..., None]:
    """As `tile`, but line i of y is its row number listed[first + i], wherever that lies."""

    @intrinsic
    def made(typing_context, x, x_at, x_pitch, y, y_at, y_pitch, listed, first, steps, out, out_at, out_pitch):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        word = types.intp
        signature = types.void(x, word, word, y, word, word, listed, word, word, out, word, word)

        def codegen(context: Any, builder: Any, _: Any, args: Any) -> Any:  # noqa: ANN401
            arrays = [
                context.make_array(kind)(context, builder, args[i]).data for kind, i in ((x, 0), (y, 3), (out, 9))
            ]
            numbers = context.make_array(listed)(context, builder, args[6]).data

            def line(number: Any) -> Any:  # noqa: ANN401
                return builder.mul(args[5], builder.load(builder.gep(numbers, [builder.add(args[7], number)])))

            _emit(
                builder, (rows, vectors, along_k), arrays, (args[1], args[4], args[10]), (args[2], args[11]), line,
                args[8],
            )  # fmt: skip
            return context.get_dummy_value()

        return signature, codegen

    function: Callable[..., None] = made
    return function
