"""The parties' local parts of sums of waves and of exponentials (protocols/trio/one_step.py), each in one pass (Numba).

Of sums of waves, operands are addresses of n 64-bit elements and of packed fields (`trunc`): those of a sum's secrets
lie one row after the other, cosine and sine of each wave. `plan` is `Waves.table`, `sizes` is `Waves.sizes`, `turns`
the four rows of `protocols.one_step.turns`, one after the other. Calls work on whole blocks, or up to the end.
"""

from __future__ import annotations

import numpy as np

from private_llm.kernels.address import SIGNED, WORD, Array, IndexTable, Plan, Read, Written, flat
from private_llm.kernels.compiling import compiled
from private_llm.kernels.fields.cpu import BLOCK, clear, pack, unpack


@compiled
def _first_turned(values: Array, start: int, sizes: Array, turns: Array, waves: Array) -> None:
    """Cosines and sines of a block of angles into waves[0] and waves[1], those of 0 into waves[2] and waves[3]."""
    angle, phase, half, bits = sizes[0], sizes[1], sizes[2], sizes[3]
    size, down, up = np.int64(1) << half, max(angle - phase, 0), max(phase - angle, 0)
    rounding, least = np.int64(1) << (bits - 1), (np.int64(1) << down) >> 1
    for j in range(min(BLOCK, len(values) - start)):
        place = ((values[start + j] + least) >> down) << up
        upper, lower = (place >> half) & (size - 1), place & (size - 1)
        c, s, d, t = turns[upper], turns[size + upper], turns[2 * size + lower], turns[3 * size + lower]
        waves[0, j] = (c * d - s * t + rounding) >> bits
        waves[1, j] = (s * d + c * t + rounding) >> bits
        waves[2, j], waves[3, j] = np.int64(1) << bits, 0


@compiled
def _turn_on(first: Array, sizes: Array, waves: Array) -> None:
    """From frequencies k and k - 1 in waves to k + 1 and k: cos (k+1) a = 2 cos a cos k a - cos (k-1) a, and sines."""
    bits = sizes[3]
    rounding = np.int64(1) << (bits - 2)
    for row in range(2):
        newest, before = waves[row], waves[2 + row]
        for j in range(BLOCK):
            following = ((first[j] * newest[j] + rounding) >> (bits - 1)) - before[j]
            before[j], newest[j] = newest[j], following


@compiled
def hidden(
    mask: Read, drawn: Read, message: Written, n: int, plan: IndexTable, sizes: Plan, turns: Plan, words: int,
    begin: int, end: int,
) -> None:  # fmt: skip
    """message = the secret numbers of masks [n] less the fields of `drawn`, both of so many words."""
    masks = flat(mask, n, SIGNED)
    source, made = flat(drawn, words, WORD), flat(message, words, WORD)
    row_at = 0
    for row in range(len(plan)):
        each = (n * plan[row, 3] + 63) // 64
        for _ in range(2):
            clear(made[row_at : row_at + each], n, plan[row, 3], begin, end)
            row_at += each
    waves, fields = np.zeros((4, BLOCK), np.int64), np.empty(BLOCK, np.int64)
    first = np.empty(BLOCK, np.int64)
    for start in range(begin, end, BLOCK):
        count, at = min(BLOCK, n - start), 0
        _first_turned(masks, start, sizes, turns, waves)
        first[:] = waves[0]
        for row in range(len(plan)):
            if row:
                _turn_on(first, sizes, waves)
            drop, width = sizes[3] - plan[row, 2], plan[row, 3]
            rounding = np.int64(1) << (drop - 1)
            each, cut = (n * width + 63) // 64, (np.int64(1) << width) - 1
            for kind in range(2):
                unpack(source[at : at + each], start, count, width, fields)
                numbers = waves[kind]
                for j in range(BLOCK):
                    fields[j] = (((numbers[j] + rounding) >> drop) - fields[j]) & cut
                pack(fields, start, count, width, made[at : at + each])
                at += each


@compiled
def summed(
    masked: Read, shares: Read, piece: Written, words: int, n: int, plan: IndexTable, sizes: Plan, turns: Plan,
    more: int, begin: int, end: int,
) -> None:  # fmt: skip
    """piece [n] = `more` and an evaluator's share of the sum: its secret numbers times their public factors."""
    values, source, out = flat(masked, n, SIGNED), flat(shares, words, WORD), flat(piece, n, SIGNED)
    waves, total = np.zeros((4, BLOCK), np.int64), np.empty(BLOCK, np.int64)
    cosines, sines, first = np.empty(BLOCK, np.int64), np.empty(BLOCK, np.int64), np.empty(BLOCK, np.int64)
    bits = sizes[3]
    rounding = np.int64(1) << (bits - 1)
    for start in range(begin, end, BLOCK):
        count, at = min(BLOCK, n - start), 0
        _first_turned(values, start, sizes, turns, waves)
        first[:] = waves[0]
        total[:] = more
        for row in range(len(plan)):
            if row:
                _turn_on(first, sizes, waves)
            even, odd, up, width = plan[row, 0], plan[row, 1], sizes[4] - plan[row, 2], plan[row, 3]
            each = (n * width + 63) // 64
            unpack(source[at : at + each], start, count, width, cosines)
            unpack(source[at + each : at + 2 * each], start, count, width, sines)
            at += 2 * each
            c, s = waves[0], waves[1]
            for j in range(BLOCK):
                left = (even * c[j] + odd * s[j] + rounding) >> bits
                right = (even * s[j] - odd * c[j] + rounding) >> bits
                total[j] += (left * cosines[j] + right * sines[j]) << up
        out[start : start + count] = total[:count]


# -- exponentials: words of bits, four rows [4, n]; `digits` is `Digits`, tables have an entry for each half -----------
@compiled
def _flag(words: Array, place: int) -> int:
    return int((words[place >> 6] >> (place & 63)) & 1)


@compiled
def _cut(value: int, digits: Array) -> tuple[int, int, int]:
    """Which sixteen (0 or 1), upper and lower half of the rest; digits: bits dropped, of the rest, of the half."""
    low = value >> digits[0]
    rest = low & ((1 << digits[1]) - 1)
    return (low >> digits[1]) & 1, rest >> digits[2], rest & ((1 << digits[2]) - 1)


@compiled
def weighed(
    masked: Read, keep: Read, shares: Read, piece: Written, n: int, digits: Plan, near: Plan, far: Plan, fine: Plan,
    near_bits: int, far_bits: int, begin: int, end: int,
) -> None:  # fmt: skip
    """piece [n] = an evaluator's additive share: one of its shares [4, n] of each digit, times that digit's factor.

    The first of a digit's two rows counts where the bit of `keep` is set. A factor is an entry of `near` (where the
    mask's digit is the same) or `far`, times one of `fine`, without so many bits, rounded.
    """
    x, bits, rows = flat(masked, n, SIGNED), flat(keep, (n + 63) // 64, SIGNED), flat(shares, 4 * n, SIGNED)
    out = flat(piece, n, SIGNED)
    for m in range(begin, end):
        digit, upper, lower = _cut(x[m], digits)
        same = (near[upper] * fine[lower] + (1 << (near_bits - 1))) >> near_bits
        other = (far[upper] * fine[lower] + (1 << (far_bits - 1))) >> far_bits
        row = 1 - _flag(bits, m)
        first, second = rows[row * n + m], rows[(2 + row) * n + m]
        out[m] = other * first + same * second if digit else same * first + other * second


@compiled
def placed(
    mask: Read, kept: Read, message: Written, n: int, digits: Plan, coarse: Plan, fine: Plan, shift: int, begin: int,
    end: int,
) -> None:  # fmt: skip
    """Add party 0's number of each mask [n] to its place of `message` [4, n]: row 2 digit + bit of `kept`."""
    x, bits = flat(mask, n, SIGNED), flat(kept, (n + 63) // 64, SIGNED)
    rows = flat(message, 4 * n, SIGNED)
    for m in range(begin, end):
        digit, upper, lower = _cut(x[m], digits)
        row = 2 * digit + _flag(bits, m)
        rows[row * n + m] += (coarse[upper] * fine[lower] + (1 << (shift - 1))) >> shift
