"""Register tiles of ring products on the CPU, written in LLVM's vector types.

Neither torch's integer product nor Numba's loop vectoriser keeps the accumulators in registers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

from llvmlite import binding, ir

from private_llm.kernels.emitting import ADDRESS, ARRAY, I32, I64, Function, IrValue, emitted, loop, shuffled

WIDE = bool(binding.get_host_cpu_features().get("avx512dq", False))
VECTOR_BITS = 512 if WIDE else 256
"""Width of a vector: wider types than the machine's are legal but spill."""
_CELLS = 4
"""Sums of 64 bits that 16 registers hold in two parts each, beside their operands."""


def _is_split(element: ir.Type) -> bool:
    """Whether a sum of products has two parts, since no instruction multiplies these elements: that of products of low
    halves (VPMULUDQ), and that of a low and a high half, both ways, modulo 2^32 (one VPMULLD).
    """
    return bool(element.width == 64 and not WIDE)


def lanes_of(array: IrValue) -> int:
    """Elements of an array in a vector."""
    return int(VECTOR_BITS // array.type.pointee.width)


def load(builder: IrValue, array: IrValue, at: IrValue) -> IrValue:
    """A vector from an element of an array on."""
    kind = ir.VectorType(array.type.pointee, lanes_of(array))
    place = builder.bitcast(builder.gep(array, [at]), kind.as_pointer())
    return builder.load(place, align=kind.element.width // 8)


def store(builder: IrValue, vector: IrValue, array: IrValue, at: IrValue) -> None:
    """The same, written."""
    place = builder.bitcast(builder.gep(array, [at]), vector.type.as_pointer())
    builder.store(vector, place, align=vector.type.element.width // 8)


def spread(builder: IrValue, array: IrValue, at: IrValue) -> IrValue:
    """A vector of one element of an array."""
    value, lanes = builder.load(builder.gep(array, [at])), lanes_of(array)
    first = builder.insert_element(ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined), value, I32(0))
    return shuffled(builder, [0] * lanes, first)


Product = tuple[int, IrValue, IrValue, IrValue]
"""Which sum gets a product of vectors, both of them, and the second one `swapped`."""


def swapped(builder: IrValue, vector: IrValue) -> IrValue:
    """A vector whose 32-bit halves change places, if elements have 64 bits and their sums two parts."""
    if not _is_split(vector.type.element):
        return vector
    halves = ir.VectorType(I32, 2 * vector.type.count)
    return shuffled(builder, [lane ^ 1 for lane in range(halves.count)], builder.bitcast(vector, halves))


def sum_products(
    builder: IrValue, element: ir.Type, count: int, steps: IrValue, by: int,
    products: Callable[[IrValue], Iterable[Product]],
) -> list[IrValue]:  # fmt: skip
    """So many sums over k = 0, by, .. below steps, as vectors; products(k): what to add to them."""
    lanes = VECTOR_BITS // element.width
    kinds = [ir.VectorType(element, lanes)] + [ir.VectorType(I32, 2 * lanes)] * _is_split(element)
    low, half = (ir.Constant(kinds[0], [value] * lanes) for value in ((1 << 32) - 1, 32))
    entry = builder.block

    def step(k: IrValue) -> list[list[IrValue]]:
        sums = [[builder.phi(kind) for kind in kinds] for _ in range(count)]
        made = [list(each) for each in sums]
        for number, a, b, turned in products(k):
            parts = made[number]
            if len(parts) == 1:
                parts[0] = builder.add(parts[0], builder.mul(a, b))
            else:
                parts[0] = builder.add(parts[0], builder.mul(builder.and_(a, low), builder.and_(b, low)))
                parts[1] = builder.add(parts[1], builder.mul(builder.bitcast(a, kinds[1]), turned))
        for phi, part in zip(chain(*sums), chain(*made), strict=True):
            phi.add_incoming(ir.Constant(phi.type, None), entry)
            phi.add_incoming(part, builder.block)
        return made

    found = []
    for whole, *cross in loop(builder, steps, by, step):
        for part in cross:
            both = builder.bitcast(part, kinds[0])
            whole = builder.add(whole, builder.shl(builder.add(both, builder.lshr(both, half)), half))
        found.append(whole)
    return found


def _sum_lanes(builder: IrValue, value: IrValue) -> IrValue:
    """Sum of the lanes, by halves."""
    count = value.type.count
    while count > 1:
        count //= 2
        low, high = (shuffled(builder, range(first, first + count), value) for first in (0, count))
        value = builder.add(low, high)
    return builder.extract_element(value, I32(0))


def _emit(
    builder: IrValue, shape: tuple[range, range, bool], arrays: Sequence[IrValue], starts: Sequence[IrValue],
    pitches: Sequence[IrValue], line: Callable[[IrValue], IrValue], steps: IrValue,
) -> None:  # fmt: skip
    """The instructions of some rows and vectors of a tile. arrays, starts: of x, y, out; pitches: of x, out; line(i):
    where line i of y begins.

    Lines are the rows of y as it lies in memory: along k there is one for each of the tile's columns, else one a step.
    """
    rows, vectors, along_k = shape
    (xs, ys, outs), (x0, y0, o0), (dx, do) = arrays, starts, pitches
    lanes = lanes_of(xs)
    fixed = [builder.add(y0, line(I64(v))) for v in vectors] if along_k else []
    lefts = [builder.add(x0, builder.mul(dx, I64(m))) for m in rows]
    places = [(i, j) for i in range(len(rows)) for j in range(len(vectors))]

    def products(k: IrValue) -> Iterator[Product]:
        left = [(load if along_k else spread)(builder, xs, builder.add(start, k)) for start in lefts]
        if along_k:
            begins = [builder.add(start, k) for start in fixed]
        else:
            begin = builder.add(y0, line(k))
            begins = [builder.add(begin, I64(v * lanes)) for v in vectors]
        right = [load(builder, ys, at) for at in begins]
        fewer = left if len(rows) < len(vectors) else right
        turned = [swapped(builder, each) for each in fewer]
        for number, (i, j) in enumerate(places):
            if fewer is left:
                yield number, right[j], left[i], turned[i]
            else:
                yield number, left[i], right[j], turned[j]

    made = sum_products(builder, xs.type.pointee, len(places), steps, lanes if along_k else 1, products)
    for total, (i, j) in zip(made, places, strict=True):
        row = builder.add(o0, builder.mul(do, I64(rows[i])))
        at = builder.add(row, I64(vectors[j] if along_k else vectors[j] * lanes))
        if along_k:
            place = builder.gep(outs, [at])
            builder.store(builder.add(builder.load(place), _sum_lanes(builder, total)), place)
        else:
            store(builder, builder.add(load(builder, outs, at), total), outs, at)


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

        high, wide = (max(1, _CELLS // vectors), _CELLS) if _is_split(xs.type.pointee) else (rows, vectors)
        for m in range(0, rows, high):
            for v in range(0, vectors, wide):
                shape = range(m, min(m + high, rows)), range(v, min(v + wide, vectors)), along_k
                _emit(builder, shape, (xs, ys, outs), (x0, y0, o0), (dx, do), line, steps)

    return made
