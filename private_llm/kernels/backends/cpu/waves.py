"""The parties' local parts of a sum of waves (`protocols/trio/waves.py`), each in one pass (Numba, GIL-free).

Operands are addresses of n 64-bit elements and of packed fields (`trunc`): those of a sum's secrets lie one row after
the other, cosine and sine of each wave. `plan` is `Waves.table`, `sizes` is `Waves.sizes`, `turns` the four rows of
`protocols.waves.turns`, one after the other.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from private_llm.kernels.address import WORD, flat
from private_llm.kernels.backends.cpu.trunc import BLOCK, pack, unpack
from private_llm.kernels.compiling import compiled

Array = np.ndarray[Any, Any]

_SIGNED = np.int64(0)


@compiled
def _place(value: int, frequency: int, sizes: Array) -> int:
    """The angle of `frequency` times the value, in turns / 2^(bits of a phase), rounded; modulo a turn later on."""
    angle, phase = sizes[0], sizes[1]
    turned = frequency * value
    if angle <= phase:
        return int(turned << (phase - angle))
    return int((turned + (np.int64(1) << (angle - phase - 1))) >> (angle - phase))


@compiled
def _turned(place: int, turns: Array, sizes: Array) -> tuple[int, int]:
    """Cosine and sine of a place, with as many fractional bits as the table."""
    half, bits = sizes[2], sizes[3]
    size = np.int64(1) << half
    upper, lower = (place >> half) & (size - 1), place & (size - 1)
    c, s, d, t = turns[upper], turns[size + upper], turns[2 * size + lower], turns[3 * size + lower]
    rounding = np.int64(1) << (bits - 1)
    return (c * d - s * t + rounding) >> bits, (s * d + c * t + rounding) >> bits


@compiled
def hidden(mask: int, n: int, plan: Array, sizes: Array, turns: Array, drawn: int, words: int, message: int) -> None:
    """message = the secret numbers of masks [n] less the fields of `drawn`, both of so many words."""
    masks = flat(mask, n, _SIGNED)
    source, made = flat(drawn, words, WORD), flat(message, words, WORD)
    made[:] = WORD
    cosines, sines = np.empty(BLOCK, np.uint64), np.empty(BLOCK, np.uint64)
    fields = np.empty(BLOCK, np.uint64)
    for start in range(0, n, BLOCK):
        count, at = min(BLOCK, n - start), 0
        for row in range(len(plan)):
            frequency, drop, width = plan[row, 0], sizes[3] - plan[row, 3], plan[row, 4]
            rounding = np.int64(1) << (drop - 1)
            for j in range(count):
                c, s = _turned(_place(masks[start + j], frequency, sizes), turns, sizes)
                cosines[j], sines[j] = (c + rounding) >> drop, (s + rounding) >> drop
            each, cut = (n * width + 63) // 64, (np.uint64(1) << np.uint64(width)) - np.uint64(1)
            for values in (cosines, sines):
                unpack(source[at : at + each], start, count, width, fields)
                for j in range(count):
                    fields[j] = (values[j] - fields[j]) & cut
                pack(fields, start, count, width, made[at : at + each])
                at += each


@compiled
def summed(
    masked: int, shares: int, words: int, n: int, plan: Array, sizes: Array, turns: Array, first: int, piece: int
) -> None:  # fmt: skip
    """piece [n] = `first` and an evaluator's share of the sum: its secret numbers times their public factors."""
    values, source, out = flat(masked, n, _SIGNED), flat(shares, words, WORD), flat(piece, n, _SIGNED)
    cosines, sines = np.empty(BLOCK, np.int64), np.empty(BLOCK, np.int64)
    for start in range(0, n, BLOCK):
        count, at = min(BLOCK, n - start), 0
        out[start : start + count] = first
        for row in range(len(plan)):
            frequency, amplitude, phase = plan[row, 0], plan[row, 1], plan[row, 2]
            up, width = sizes[5] - plan[row, 3], plan[row, 4]
            each = (n * width + 63) // 64
            unpack(source[at : at + each], start, count, width, cosines)
            unpack(source[at + each : at + 2 * each], start, count, width, sines)
            at += 2 * each
            rounding = np.int64(1) << (sizes[3] - 1)
            for j in range(count):
                place = _place(values[start + j], frequency, sizes) - phase
                c, s = _turned(place, turns, sizes)
                c, s = (amplitude * c + rounding) >> sizes[3], (amplitude * s + rounding) >> sizes[3]
                out[start + j] += (c * cosines[j] + s * sines[j]) << up


@compiled
def wraps(g1: int, g2: int, n: int, shift: int, narrow: int, drawn: int, words: int, message: int) -> None:
    """message = shares of what the masks wrap by, [2 n] fields of 64 - narrow bits, less the fields of `drawn`.

    g1 and g2 are masks modulo 2^(shift + narrow); h = (g1 >> shift) + (g2 >> shift) of which the upper bit counts, and
    the one before it where what is opened has none. First the fields for an upper bit of 0, then those for 1.
    """
    one, other = flat(g1, n, WORD), flat(g2, n, WORD)
    source, made = flat(drawn, 2 * words, WORD), flat(message, 2 * words, WORD)
    made[:] = WORD
    fields, width = np.empty(BLOCK, np.uint64), 64 - narrow
    down, cut = np.uint64(shift), (np.uint64(1) << np.uint64(narrow)) - np.uint64(1)
    kept = (np.uint64(1) << np.uint64(width)) - np.uint64(1)
    for start in range(0, n, BLOCK):
        count = min(BLOCK, n - start)
        for top in range(2):
            unpack(source[top * words : (top + 1) * words], start, count, width, fields)
            for j in range(count):
                h = ((one[start + j] >> down) & cut) + ((other[start + j] >> down) & cut)
                value = h >> np.uint64(narrow)
                if not top:
                    value += (h >> np.uint64(narrow - 1)) & np.uint64(1)
                fields[j] = (value - fields[j]) & kept
            pack(fields, start, count, width, made[top * words : (top + 1) * words])


@compiled
def widened(
    opened: int, g: int, shares: int, words: int, n: int, shift: int, narrow: int, first: bool, piece: int
) -> None:  # fmt: skip
    """piece [n] -= an evaluator's share, in the whole ring, of the narrow value that `opened` [n] is masked.

    shares are those that `wraps` made, [2 n] fields of 64 - narrow bits in two rows of so many words.
    """
    w, mine, out = flat(opened, n, WORD), flat(g, n, WORD), flat(piece, n, WORD)
    source = flat(shares, 2 * words, WORD)
    zeros, ones = np.empty(BLOCK, np.uint64), np.empty(BLOCK, np.uint64)
    width, down, up = 64 - narrow, np.uint64(shift), np.uint64(narrow)
    cut, top = (np.uint64(1) << up) - np.uint64(1), np.uint64(narrow - 1)
    half = np.uint64(1) << np.uint64(narrow - 2)
    for start in range(0, n, BLOCK):
        count = min(BLOCK, n - start)
        unpack(source[:words], start, count, width, zeros)
        unpack(source[words:], start, count, width, ones)
        for j in range(count):
            m = (w[start + j] >> down) & cut
            wrap = ones[j] if m >> top else zeros[j]
            value = (wrap << up) - ((mine[start + j] >> down) & cut)
            if first:
                value += m - half
            out[start + j] -= value
