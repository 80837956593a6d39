"""Register tiles of ring products on the CPU, written in LLVM's vector types.

Neither torch's integer product nor Numba's loop vectoriser keeps the accumulators in registers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import binding, ir

from private_llm.kernels.emitting import (
    ADDRESS,
    ARRAY,
    I32,
    I64,
    Function,
    IrValue,
    emitted,
    loop,
    shuffled,
)

WIDE = bool(binding.get_host_cpu_features().get("avx512dq", False))
VECTOR_BITS = 512 if WIDE else 256
"""Width of a vector: wider types than the machine's are legal but spill."""


def _sum_lanes(builder: IrValue, value: IrValue) -> IrValue:
    """Sum of the lanes, by halves."""
    count = value.type.count
    while count > 1:
        count //= 2
        low, high = (shuffled(builder, range(first, first + count), value) for first in (0, count))
        value = builder.add(low, high)
    return builder.extract_element(value, I32(0))


def _emit(
    builder: IrValue, shape: tuple[int, int, bool], arrays: Sequence[IrValue], starts: Sequence[IrValue],
    pitches: Sequence[IrValue], line: Callable[[IrValue], IrValue], steps: IrValue,
) -> None:  # fmt: skip
    """The instructions of a tile. arrays, starts: of x, y, out; pitches: of x, out; line(i): where line i of y begins.

    Lines are the rows of y as it lies in memory: along k there is one for each of the tile's columns, else one a step.
    """
    rows, vectors, along_k = shape
    (xs, ys, outs), (x0, y0, o0), (dx, do) = arrays, starts, pitches
    element = xs.type.pointee
    lanes = VECTOR_BITS // element.width
    vector = ir.VectorType(element, lanes)

    def address(base: IrValue, start: IrValue, pitch: IrValue, row: int, extra: IrValue) -> IrValue:
        offset = builder.add(start, builder.mul(pitch, I64(row)))
        return builder.gep(base, [builder.add(offset, extra)])

    def load(place: IrValue) -> IrValue:
        return builder.load(builder.bitcast(place, vector.as_pointer()), align=element.width // 8)

    def spread(value: IrValue) -> IrValue:
        first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, I32(0))
        return shuffled(builder, [0] * lanes, first)

    fixed = [builder.add(y0, line(I64(v))) for v in range(vectors)] if along_k else []
    entry, places = builder.block, [(m, v) for m in range(rows) for v in range(vectors)]

    def step(k: IrValue) -> dict[tuple[int, int], IrValue]:
        sums = {place: builder.phi(vector) for place in places}
        if along_k:
            left = [load(address(xs, x0, dx, m, k)) for m in range(rows)]
            right = [load(builder.gep(ys, [builder.add(start, k)])) for start in fixed]
        else:
            left = [spread(builder.load(address(xs, x0, dx, m, k))) for m in range(rows)]
            begin = line(k)
            right = [load(address(ys, y0, I64(lanes), v, begin)) for v in range(vectors)]
        made = {(m, v): builder.add(sums[m, v], builder.mul(left[m], right[v])) for m, v in places}
        for place, phi in sums.items():
            phi.add_incoming(ir.Constant(vector, [0] * lanes), entry)
            phi.add_incoming(made[place], builder.block)
        return made

    made = loop(builder, steps, lanes if along_k else 1, step)
    for m, v in places:
        at = address(outs, o0, do, m, I64(v if along_k else v * lanes))
        if along_k:
            builder.store(builder.add(builder.load(at), _sum_lanes(builder, made[m, v])), at)
        else:
            total = builder.add(load(at), made[m, v])
            builder.store(total, builder.bitcast(at, vector.as_pointer()), align=element.width // 8)


def tile(rows: int, vectors: int, along_k: bool) -> Function:
    """out[m, v] += sum_k x[m, k] y[k, v] for a tile held in registers; steps must be positive.

    `along_k`: lanes run over k, `v` counts rows of y, and steps is a multiple of the lanes. Otherwise lanes
    run over the columns of y. Arguments: x, y, a list, a place in it, steps and out; arrays are flat, each with the
    offset of its first element and a row pitch. Line i of y is its row number list[place + i], wherever that lies, or
    row number place + i where the list is None.
    """

    place = (ARRAY, ADDRESS, ADDRESS)

    @emitted(*place, *place, ARRAY, ADDRESS, ADDRESS, *place)
    def made(
        builder: IrValue, xs: IrValue, x0: IrValue, dx: IrValue, ys: IrValue, y0: IrValue, dy: IrValue,
        numbers: IrValue, first: IrValue, steps: IrValue, outs: IrValue, o0: IrValue, do: IrValue,
    ) -> None:  # fmt: skip
        if numbers is None:
            y0 = builder.add(y0, builder.mul(dy, first))

        def line(number: IrValue) -> IrValue:
            if numbers is not None:
                number = builder.load(builder.gep(numbers, [builder.add(first, number)]))
            return builder.mul(dy, number)

        _emit(builder, (rows, vectors, along_k), (xs, ys, outs), (x0, y0, o0), (dx, do), line, steps)

    return made
