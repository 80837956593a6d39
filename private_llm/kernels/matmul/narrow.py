"""Products with public weights on the CPU (Numba, GIL-free): modulo 2^40 for 16-bit weights, 2^32 for 8-bit ones.

A weight is read as it lies, two bytes an element or one, which is what a product with few rows waits for. For 16 bits
elements x of the left operand come as three balanced digits, x = d0 + 2^8 d1 + 2^24 d2 modulo 2^40: one instruction
multiplies pairs of 16-bit numbers and adds them up in 32 bits. Sums of d1 are needed modulo 2^32 and those of d2 modulo
2^16, so they may leave 32 bits; those of d0 are widened every `_STEPS` vectors, before they do: 255 * 2 * 2^7 * 2^15 <
2^31. For 8 bits x = d0 + 2^16 d1 modulo 2^32, and all sums may leave 32 bits.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from llvmlite import binding, ir

from private_llm.kernels.address import Read, Written, flat
from private_llm.kernels.compiling import compiled
from private_llm.kernels.emitting import (
    ADDRESS,
    I8,
    I32,
    I64,
    Function,
    IrValue,
    emitted,
    known,
    loop,
    pointer,
    shuffled,
)

_FEATURES = binding.get_host_cpu_features()
LANES = 32 if _FEATURES.get("avx512bw") else 16
"""16-bit numbers in a vector."""
STEP = 32
"""Lines of weights and digits have multiples of so many elements; what is beyond the inputs is zero in the digits."""
LINES = 16
"""Lines of the weight that meet all rows before the next: they stay in the first-level cache."""
_STEPS = 255
BYTES = {16: 5, 8: 4}
"""Of an element of inputs and products, by the bits of a weight: the modulus is 2^40, or 2^32."""
DIGITS = {5: 3, 4: 2}
"""Of an element, by its bytes."""
_LOW, _MIDDLE = 8, 24
_SHORTS, _SUMS = ir.VectorType(ir.IntType(16), LANES), ir.VectorType(I32, LANES // 2)
_OCTETS = ir.VectorType(I8, LANES)
_WIDE = ir.VectorType(I64, LANES // 4)
NARROW, WHOLE, BYTE, HALF = np.int16(0), np.int64(0), np.uint8(0), np.int32(0)
"""The `zero` of digits, of ring elements, of bytes, and of elements modulo 2^32."""


def _pairs(builder: IrValue, a: IrValue, b: IrValue) -> IrValue:
    """Sums of two products a[i] b[i] each in 32 bits, all of them in some sum."""
    if LANES == 32 or _FEATURES.get("avx2"):
        name = "llvm.x86.avx512.pmaddw.d.512" if LANES == 32 else "llvm.x86.avx2.pmadd.wd"
        return builder.call(known(builder, name, _SUMS, _SHORTS, _SHORTS), [a, b])
    sides, half = [], LANES // 2
    for first in (0, half):
        a_half, b_half = (builder.sext(shuffled(builder, range(first, first + half), each), _SUMS) for each in (a, b))
        sides.append(builder.mul(a_half, b_half))
    return builder.add(*sides)


def _sum(builder: IrValue, lanes: IrValue) -> IrValue:
    """All elements of a vector, modulo their size."""
    count = lanes.type.count
    while count > 1:
        count //= 2
        other = shuffled(builder, range(count, 2 * count), lanes)
        lanes = builder.add(shuffled(builder, range(count), lanes), other)
    return builder.extract_element(lanes, I32(0))


def _tile(rows: int, lines: int) -> Function:
    """out[m, n] of some rows of digits int16 [3 or 2, length] and lines of the weight, all of them, `length` a multiple
    of STEP; addresses, elements from a row of `out` to the next, and bytes of an element: `out` is int64 for 5, else
    int32.
    """

    @emitted(ADDRESS, ADDRESS, ADDRESS, ADDRESS, ADDRESS, ADDRESS)
    def run(
        builder: IrValue, digits: IrValue, weight: IrValue, out: IrValue, length: IrValue, columns: IrValue,
        size: IrValue,
    ) -> None:  # fmt: skip
        given = builder, (rows, lines), digits, weight, out, length, columns
        with builder.if_else(builder.icmp_signed("==", size, I64(BYTES[8]))) as (eight, sixteen):
            with eight:
                _eight(*given)
            with sixteen:
                _sixteen(*given)

    return run


def _vector(builder: IrValue, kind: ir.VectorType, base: IrValue, length: IrValue, line: int, k: IrValue) -> IrValue:
    """Elements from k on of a line, as 16-bit numbers."""
    width = kind.element.width // 8
    at = builder.mul(builder.add(builder.mul(length, I64(line)), k), I64(width))
    made = builder.load(pointer(builder, builder.add(base, at), kind), align=width)
    return made if kind == _SHORTS else builder.sext(made, _SHORTS)


def _zeros(builder: IrValue, kind: ir.VectorType, count: int) -> list[IrValue]:
    """Variables, where LLVM turns them into registers."""
    with builder.goto_entry_block():
        made = [builder.alloca(kind) for _ in range(count)]
    for place in made:
        builder.store(ir.Constant(kind, None), place)
    return made


def _add_pairs(
    builder: IrValue, sizes: tuple[int, int], held: list[IrValue], left: Callable[[int], IrValue],
    weights: list[IrValue],
) -> None:  # fmt: skip
    """To the sums of each digit of each cell, digit by digit. left: a line of digits."""
    (rows, lines), digits = sizes, len(held) // (sizes[0] * sizes[1])
    for m in range(rows):
        for digit in range(digits):
            mine = left(m * digits + digit)
            for n in range(lines):
                place = held[(digit * rows + m) * lines + n]
                builder.store(builder.add(builder.load(place), _pairs(builder, mine, weights[n])), place)


def _store(builder: IrValue, made: IrValue, out: IrValue, columns: IrValue, m: int, n: int) -> None:
    """In row m and column n."""
    width = made.type.width // 8
    at = builder.mul(builder.add(builder.mul(columns, I64(m)), I64(n)), I64(width))
    builder.store(made, pointer(builder, builder.add(out, at), made.type), align=1)


def _eight(
    builder: IrValue, sizes: tuple[int, int], digits: IrValue, weight: IrValue, out: IrValue, length: IrValue,
    columns: IrValue,
) -> None:  # fmt: skip
    """With 8-bit weights: everything is modulo 2^32."""
    rows, lines = sizes
    cells = rows * lines
    held = _zeros(builder, _SUMS, DIGITS[4] * cells)

    def step(k: IrValue) -> None:
        weights = [_vector(builder, _OCTETS, weight, length, n, k) for n in range(lines)]
        _add_pairs(builder, sizes, held, lambda line: _vector(builder, _SHORTS, digits, length, line, k), weights)

    loop(builder, length, LANES, step)
    for cell in range(cells):
        low, high = (builder.load(held[digit * cells + cell]) for digit in range(2))
        made = _sum(builder, builder.add(low, builder.shl(high, ir.Constant(_SUMS, [16] * _SUMS.count))))
        _store(builder, made, out, columns, *divmod(cell, lines))


def _sixteen(
    builder: IrValue, sizes: tuple[int, int], digits: IrValue, weight: IrValue, out: IrValue, length: IrValue,
    columns: IrValue,
) -> None:  # fmt: skip
    """With 16-bit weights: sums of the lowest digits are widened."""
    rows, lines = sizes
    cells = rows * lines
    wholes, sums = _zeros(builder, _WIDE, cells), _zeros(builder, _SUMS, DIGITS[5] * cells)
    lows = sums[:cells]

    def chunk(first: IrValue) -> None:
        for place in lows:
            builder.store(ir.Constant(_SUMS, None), place)
        left = builder.sub(length, first)
        most = I64(_STEPS * LANES)
        count = builder.select(builder.icmp_signed("<", left, most), left, most)

        def step(offset: IrValue) -> None:
            k = builder.add(first, offset)
            weights = [_vector(builder, _SHORTS, weight, length, n, k) for n in range(lines)]
            _add_pairs(builder, sizes, sums, lambda line: _vector(builder, _SHORTS, digits, length, line, k), weights)

        loop(builder, count, LANES, step)
        half = LANES // 4
        for low, place in zip(lows, wholes, strict=True):
            found = builder.load(low)
            for part in (range(half), range(half, 2 * half)):
                wide = builder.sext(shuffled(builder, part, found), _WIDE)
                builder.store(builder.add(builder.load(place), wide), place)

    loop(builder, length, _STEPS * LANES, chunk)
    for cell in range(cells):
        middle, top = (builder.load(sums[digit * cells + cell]) for digit in (1, 2))
        shift = ir.Constant(_SUMS, [_MIDDLE - _LOW] * _SUMS.count)
        rest = builder.sext(_sum(builder, builder.add(middle, builder.shl(top, shift))), I64)
        made = builder.add(_sum(builder, builder.load(wholes[cell])), builder.shl(rest, I64(_LOW)))
        _store(builder, made, out, columns, *divmod(cell, lines))


_two_two, _two_one, _one_two, _one_one = _tile(2, 2), _tile(2, 1), _tile(1, 2), _tile(1, 1)


@compiled
def narrow_digits(
    x: Read, out: Written, size: int, packed: int, inner: int, length: int, first: int, last: int
) -> None:  # fmt: skip
    """Rows first to last of int64 [rows, inner], modulo 2^(8 size), as digits int16 [rows, 3 or 2, length], zeros
    beyond inner.

    packed: whether x is uint8 [size rows inner].
    """
    row, raw, words = flat(x, 0, WHOLE), flat(x, 0, BYTE), flat(x, 0, HALF)
    for m in range(first, last):
        if packed:
            raw, words = flat(x + size * m * inner, size * inner, BYTE), flat(x + size * m * inner, inner, HALF)
        else:
            row = flat(x + 8 * m * inner, inner, WHOLE)
        if size == 4:
            made = flat(out + 4 * m * length, 2 * length, NARROW)
            for k in range(inner):
                rest = np.int64(words[k]) if packed else row[k]
                made[k] = np.int16(rest)
                made[length + k] = np.int16((rest + (1 << 15)) >> 16)
            for k in range(inner, length):
                made[k] = made[length + k] = 0
            continue
        made = flat(out + 6 * m * length, 3 * length, NARROW)
        d0, d1, d2 = made[:length], made[length : 2 * length], made[2 * length :]
        for k in range(inner):
            rest = np.int64(0)
            if packed:
                for b in range(5):
                    rest |= np.int64(raw[5 * k + b]) << (8 * b)
            else:
                rest = row[k]
            d0[k] = np.int8(rest)
            rest = (rest - d0[k]) >> _LOW
            d1[k] = np.int16(rest)
            d2[k] = np.int16((rest - d1[k]) >> (_MIDDLE - _LOW))
        for k in range(inner, length):
            d0[k] = d1[k] = d2[k] = 0


@compiled
def narrow_product(
    digits: Read, weight: Read, wide: Written, out: Written, size: int, rows: int, length: int, columns: int,
    first: int, last: int,
) -> None:  # fmt: skip
    """Columns first to last of x weight^T modulo 2^(8 size), uint8 [rows, columns, size].

    digits: of x, int16 [rows, 3 or 2, length]; weight: int16 or int8 [columns, length]; wide: int64 [rows, columns],
    overwritten for 5 bytes by what equals the product; by address, contiguous.
    """
    pairs, line = rows - rows % 2, (2 if size == 5 else 1) * length
    to, unit, digit_lines = (wide, 8, 3) if size == 5 else (out, 4, 2)
    for begin in range(first, last, LINES):
        end = min(begin + LINES, last)
        lines = end - (end - begin) % 2
        for m in range(0, rows, 2):
            left = digits + 2 * digit_lines * m * length
            for n in range(begin, lines, 2):
                at = to + unit * (m * columns + n)
                if m < pairs:
                    _two_two(left, weight + n * line, at, length, columns, size)
                else:
                    _one_two(left, weight + n * line, at, length, columns, size)
            if lines < end:
                at = to + unit * (m * columns + lines)
                if m < pairs:
                    _two_one(left, weight + lines * line, at, length, columns, size)
                else:
                    _one_one(left, weight + lines * line, at, length, columns, size)
    if size != 5:
        return
    for m in range(rows):
        row = flat(wide + 8 * (m * columns + first), last - first, WHOLE)
        made = flat(out + 5 * (m * columns + first), 5 * (last - first), BYTE)
        for n in range(last - first):
            rest = row[n]
            for b in range(5):
                made[5 * n + b] = np.uint8(rest >> (8 * b))
