"""Products modulo 2^40 with public 16-bit weights on the CPU (Numba, GIL-free).

A weight is read as it lies, two bytes an element, which is what a product with few rows waits for. Elements x of the
left operand come as three balanced digits, x = d0 + 2^13 d1 + 2^26 d2 modulo 2^40: one instruction multiplies pairs of
16-bit numbers and adds them up in 32 bits. Sums of d1 are needed modulo 2^27 and those of d2 modulo 2^14, so they may
leave 32 bits; those of d0 are widened every `_STEPS` vectors, before they do: 7 * 2 * 2^12 * 2^15 < 2^31.
"""

from __future__ import annotations

import numpy as np
from llvmlite import binding, ir

from private_llm.kernels.address import Read, Written, flat
from private_llm.kernels.compiling import compiled
from private_llm.kernels.emitting import ADDRESS, I32, I64, Function, IrValue, emitted, known, loop, pointer, shuffled

_FEATURES = binding.get_host_cpu_features()
LANES = 32 if _FEATURES.get("avx512bw") else 16
"""16-bit numbers in a vector."""
STEP = 32
"""Lines of weights and digits have multiples of so many elements; what is beyond the inputs is zero in the digits."""
LINES = 16
"""Lines of the weight that meet all rows before the next: they stay in the first-level cache."""
_STEPS = 7
DIGITS, BYTES = 3, 5
_LOW, _MIDDLE = 13, 26
_SHORTS, _SUMS = ir.VectorType(ir.IntType(16), LANES), ir.VectorType(I32, LANES // 2)
_WIDE = ir.VectorType(I64, LANES // 4)
NARROW, WHOLE, BYTE = np.int16(0), np.int64(0), np.uint8(0)
"""The `zero` of weights and digits, of ring elements, and of bytes."""


def _pairs(builder: IrValue, a: IrValue, b: IrValue) -> IrValue:
    """a[2i] b[2i] + a[2i+1] b[2i+1] in 32 bits."""
    if LANES == 32 or _FEATURES.get("avx2"):
        name = "llvm.x86.avx512.pmaddw.d.512" if LANES == 32 else "llvm.x86.avx2.pmadd.wd"
        return builder.call(known(builder, name, _SUMS, _SHORTS, _SHORTS), [a, b])
    sides = []
    for first in range(2):
        a_half, b_half = (builder.sext(shuffled(builder, range(first, LANES, 2), each), _SUMS) for each in (a, b))
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
    """out[m, n] of some rows of digits int16 [3, length] and lines of the weight, all of them, `length` a multiple of
    STEP; addresses, and elements from a row of `out` to the next.
    """
    cells = [(m, n) for m in range(rows) for n in range(lines)]

    @emitted(ADDRESS, ADDRESS, ADDRESS, ADDRESS, ADDRESS)
    def run(
        builder: IrValue, digits: IrValue, weight: IrValue, out: IrValue, length: IrValue, columns: IrValue
    ) -> None:
        zero, none = ir.Constant(_SUMS, None), ir.Constant(_WIDE, None)
        with builder.goto_entry_block():  # where LLVM turns them into registers
            held = [builder.alloca(_WIDE) for _ in cells] + [builder.alloca(_SUMS) for _ in 2 * cells]
            lows = [builder.alloca(_SUMS) for _ in cells]
        for place in held:
            builder.store(none if place.type.pointee == _WIDE else zero, place)

        def vector(base: IrValue, line: int, k: IrValue) -> IrValue:
            at = builder.add(builder.mul(length, I64(line)), k)
            return builder.load(pointer(builder, builder.add(base, builder.shl(at, I64(1))), _SHORTS), align=2)

        def chunk(first: IrValue) -> None:
            for place in lows:
                builder.store(zero, place)
            left = builder.sub(length, first)
            most = I64(_STEPS * LANES)
            count = builder.select(builder.icmp_signed("<", left, most), left, most)

            def step(offset: IrValue) -> None:
                k = builder.add(first, offset)
                weights = [vector(weight, n, k) for n in range(lines)]
                for m in range(rows):
                    for digit in range(DIGITS):
                        mine = vector(digits, m * DIGITS + digit, k)
                        for n in range(lines):
                            cell = m * lines + n
                            place = lows[cell] if digit == 0 else held[len(cells) * digit + cell]
                            builder.store(builder.add(builder.load(place), _pairs(builder, mine, weights[n])), place)

            loop(builder, count, LANES, step)
            half = LANES // 4
            for low, place in zip(lows, held, strict=False):
                found = builder.load(low)
                for part in (range(half), range(half, 2 * half)):
                    wide = builder.sext(shuffled(builder, part, found), _WIDE)
                    builder.store(builder.add(builder.load(place), wide), place)

        loop(builder, length, _STEPS * LANES, chunk)
        for cell, (m, n) in enumerate(cells):
            low = _sum(builder, builder.load(held[cell]))
            middle, top = (builder.load(held[len(cells) * digit + cell]) for digit in (1, 2))
            shift = ir.Constant(_SUMS, [_MIDDLE - _LOW] * _SUMS.count)
            rest = builder.sext(_sum(builder, builder.add(middle, builder.shl(top, shift))), I64)
            place = builder.add(builder.mul(columns, I64(m)), I64(n))
            made = builder.add(low, builder.shl(rest, I64(_LOW)))
            builder.store(made, pointer(builder, builder.add(out, builder.shl(place, I64(3))), I64), align=8)

    return run


_two_two, _two_one, _one_two, _one_one = _tile(2, 2), _tile(2, 1), _tile(1, 2), _tile(1, 1)


@compiled
def narrow_digits(x: Read, out: Written, packed: int, inner: int, length: int, first: int, last: int) -> None:
    """Rows first to last of int64 [rows, inner], modulo 2^40, as digits int16 [rows, 3, length], zeros beyond inner.

    packed: whether x is uint8 [5 rows inner].
    """
    low, half = (1 << _LOW) - 1, 1 << (_LOW - 1)
    row, raw = flat(x, 0, WHOLE), flat(x, 0, BYTE)
    for m in range(first, last):
        if packed:
            raw = flat(x + BYTES * m * inner, BYTES * inner, BYTE)
        else:
            row = flat(x + 8 * m * inner, inner, WHOLE)
        made = flat(out + 2 * DIGITS * m * length, DIGITS * length, NARROW)
        d0, d1, d2 = made[:length], made[length : 2 * length], made[2 * length :]
        for k in range(inner):
            rest = np.int64(0)
            if packed:
                for b in range(BYTES):
                    rest |= np.int64(raw[BYTES * k + b]) << (8 * b)
            else:
                rest = row[k]
            a = ((rest + half) & low) - half
            rest = (rest - a) >> _LOW
            c = ((rest + half) & low) - half
            rest = (rest - c) >> _LOW
            d0[k], d1[k] = np.int16(a), np.int16(c)
            d2[k] = np.int16(((rest + 2 * half) & (2 * low + 1)) - 2 * half)
        for k in range(inner, length):
            d0[k] = d1[k] = d2[k] = 0


@compiled
def narrow_product(
    digits: Read, weight: Read, wide: Written, out: Written, rows: int, length: int, columns: int, first: int,
    last: int,
) -> None:  # fmt: skip
    """Columns first to last of x weight^T modulo 2^40, in five bytes an element, uint8 [rows, columns, 5].

    digits: of x, int16 [rows, 3, length]; weight: int16 [columns, length]; wide: int64 [rows, columns], overwritten by
    what equals the product; by address, contiguous.
    """
    pairs = rows - rows % 2
    for begin in range(first, last, LINES):
        end = min(begin + LINES, last)
        lines = end - (end - begin) % 2
        for m in range(0, rows, 2):
            left = digits + 2 * DIGITS * m * length
            for n in range(begin, lines, 2):
                at = wide + 8 * (m * columns + n)
                if m < pairs:
                    _two_two(left, weight + 2 * n * length, at, length, columns)
                else:
                    _one_two(left, weight + 2 * n * length, at, length, columns)
            if lines < end:
                at = wide + 8 * (m * columns + lines)
                if m < pairs:
                    _two_one(left, weight + 2 * lines * length, at, length, columns)
                else:
                    _one_one(left, weight + 2 * lines * length, at, length, columns)
    for m in range(rows):
        row = flat(wide + 8 * (m * columns + first), last - first, WHOLE)
        made = flat(out + BYTES * (m * columns + first), BYTES * (last - first), BYTE)
        for n in range(last - first):
            rest = row[n]
            for b in range(BYTES):
                made[BYTES * n + b] = np.uint8(rest >> (8 * b))
