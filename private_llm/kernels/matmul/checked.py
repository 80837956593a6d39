"""What a client does with rows before and after others multiply them by a public weight (Numba, GIL-free).

Elements travel modulo 2^(8 size), in `size` bytes each, 5 or 4. `private_llm.assisted` states the bound, the scales
and the check.
"""

from __future__ import annotations

import numpy as np

from private_llm.kernels.address import Read, Written, flat
from private_llm.kernels.compiling import compiled
from private_llm.kernels.matmul.narrow import HALF

MOST = 8
"""How many of the largest entries of a row its bound looks at."""
_REAL, _SINGLE, _WHOLE, _BYTE = np.float64(0), np.float32(0), np.int64(0), np.uint8(0)
FILLED, LARGEST = 0.98, 0.5
"""The bound of products, and of inputs, where the weight has only zeros for them; of half the modulus."""


@compiled
def hide_rows(
    x: Read, column_scales: Read, columns: Read, mask: Read, whole: Written, hidden: Written, scales: Written,
    norm: float, size: int, inputs: int, first: int, last: int,
) -> None:  # fmt: skip
    """Rows first to last as whole numbers, times a scale, and these minus a mask, packed; scale 0: it is not finite.

    x: float32 [rows, inputs]; column_scales, columns: float64 [inputs]; mask, whole: int64 [rows, inputs]; hidden:
    uint8 [size rows inputs]; scales: float64 [rows].
    """
    factors, reach = flat(column_scales, inputs, _REAL), flat(columns, inputs, _REAL)
    most = np.float64(1 << (8 * size - 1))
    scaled, top, at = np.empty(inputs, np.float64), np.empty(MOST, np.float64), np.empty(MOST, np.int64)
    for m in range(first, last):
        row, masks = flat(x + 4 * m * inputs, inputs, _SINGLE), flat(mask + 8 * m * inputs, inputs, _WHOLE)
        made = flat(whole + 8 * m * inputs, inputs, _WHOLE)
        packed = flat(hidden + size * m * inputs, size * inputs, _BYTE)
        words = flat(hidden + size * m * inputs, inputs, HALF)
        squares, finite, found = 0.0, True, 0
        for k in range(inputs):
            scaled[k] = np.float64(row[k]) * factors[k]
        for k in range(inputs):
            entry = abs(scaled[k])
            squares += entry * entry
            if found == MOST and entry <= top[MOST - 1]:
                continue
            finite &= entry < np.inf
            place = found if found < MOST else MOST - 1
            found = place + 1
            while place and top[place - 1] < entry:
                top[place], at[place] = top[place - 1], at[place - 1]
                place -= 1
            top[place], at[place] = entry, k
        if not (finite and squares == squares):
            flat(scales, last, _REAL)[m] = 0.0
            continue
        left, before = squares * (1 + (inputs + 16) * 2.0**-52), 0.0  # sums are rounded
        bound = np.sqrt(left) * norm
        for n in range(found):
            left -= top[n] * top[n]
            before += reach[at[n]] * top[n]
            bound = min(bound, before + np.sqrt(max(left, 0.0)) * norm)
        scale = min(FILLED * most / max(bound, 1e-300), LARGEST * most / max(top[0] if found else 0.0, 1e-250))
        flat(scales, last, _REAL)[m] = scale
        for k in range(inputs):
            made[k] = np.int64(np.rint(scaled[k] * scale))
        if size == 4:
            for k in range(inputs):
                words[k] = np.int32(made[k] - masks[k])
            continue
        for k in range(inputs):
            rest = made[k] - masks[k]
            for b in range(5):
                packed[5 * k + b] = np.uint8(rest >> (8 * b))


@compiled
def open_rows(
    one: Read, other: Read, whole: Read, sums: Read, folded: Read, scales: Read, factors: Read, out: Written,
    right: Written, size: int, lines: int, inputs: int, outputs: int, first: int, last: int,
) -> None:  # fmt: skip
    """Rows first to last of the product from both parts, as real numbers, and whether its secret sums are right.

    one, other: uint8 [size rows outputs]; whole: int64 [rows, inputs]; sums, folded: int64 [lines, outputs] and [lines,
    inputs]; scales: float64 [rows]; factors: float64 [outputs]; out: float32 [rows, outputs]; right: uint8 [rows].
    """
    wide = np.empty(outputs, np.int64)
    turned = flat(factors, outputs, _REAL)
    for m in range(first, last):
        place = size * m * outputs
        if size == 4:
            c, d = flat(one + place, outputs, HALF), flat(other + place, outputs, HALF)
            for n in range(outputs):
                wide[n] = np.int32(c[n] + d[n])
        else:
            a, b = flat(one + place, 5 * outputs, _BYTE), flat(other + place, 5 * outputs, _BYTE)
            for n in range(outputs):
                low = np.int64(0)
                high = np.int64(0)
                for k in range(5):
                    low |= np.int64(a[5 * n + k]) << (8 * k)
                    high |= np.int64(b[5 * n + k]) << (8 * k)
                wide[n] = ((low + high) << 24) >> 24
        good, mine = np.uint8(1), flat(whole + 8 * m * inputs, inputs, _WHOLE)
        for line in range(lines):
            total, wanted = np.int64(0), np.int64(0)
            secret = flat(sums + 8 * line * outputs, outputs, _WHOLE)
            shadow = flat(folded + 8 * line * inputs, inputs, _WHOLE)
            for n in range(outputs):
                total += wide[n] * secret[n]
            for k in range(inputs):
                wanted += mine[k] * shadow[k]
            good &= np.uint8(total == wanted)
        flat(right, last, _BYTE)[m] = good
        made, scale = flat(out + 4 * m * outputs, outputs, _SINGLE), flat(scales, last, _REAL)[m]
        for n in range(outputs):
            made[n] = np.float32(np.float64(wide[n]) / scale * turned[n])
