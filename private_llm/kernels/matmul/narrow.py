"""Products of 64-bit ring elements with public 16-bit weights on the CPU (Numba, GIL-free).

A weight is read as it lies, two bytes an element, which is what a product with few rows waits for. The left operand
comes as its low 32 bits (signed) and what is above them, modulo 2^32: a signed 32-bit product of 64 bits is one
instruction, and the part above needs products of 32 bits only.
"""

from __future__ import annotations

import numpy as np

from private_llm.kernels.address import Read, Written, flat
from private_llm.kernels.compiling import compiled

NARROW, HALF, WHOLE = np.int16(0), np.int32(0), np.int64(0)
"""The `zero` of weights, of halves of the left operand and of results."""
LINES = 16
"""Lines of the weight that meet all rows before the next: they stay in the first-level cache."""


@compiled
def narrow_product(
    low: Read, high: Read, weight: Read, out: Written, rows: int, inner: int, columns: int, first: int, last: int,
) -> None:  # fmt: skip
    """out[:, first:last] = (low + 2^32 high) weight[first:last]^T modulo 2^64.

    low, high: int32 [rows, inner]; weight: int16 [columns, inner]; out: int64 [rows, columns]; by address, contiguous.
    """
    lows, highs = flat(low, rows * inner, HALF), flat(high, rows * inner, HALF)
    weights, outs = flat(weight, columns * inner, NARROW), flat(out, rows * columns, WHOLE)
    fours = rows - rows % 4
    for begin in range(first, last, LINES):
        end = min(begin + LINES, last)
        for m in range(0, fours, 4):
            at = m * inner
            l0, l1 = lows[at : at + inner], lows[at + inner : at + 2 * inner]
            l2, l3 = lows[at + 2 * inner : at + 3 * inner], lows[at + 3 * inner : at + 4 * inner]
            h0, h1 = highs[at : at + inner], highs[at + inner : at + 2 * inner]
            h2, h3 = highs[at + 2 * inner : at + 3 * inner], highs[at + 3 * inner : at + 4 * inner]
            for n in range(begin, end):
                line = weights[n * inner : (n + 1) * inner]
                a0, a1, a2, a3 = np.int64(0), np.int64(0), np.int64(0), np.int64(0)
                for k in range(inner):
                    w = np.int64(line[k])
                    a0 += w * np.int64(l0[k])
                    a1 += w * np.int64(l1[k])
                    a2 += w * np.int64(l2[k])
                    a3 += w * np.int64(l3[k])
                b0, b1, b2, b3 = np.int32(0), np.int32(0), np.int32(0), np.int32(0)
                for k in range(inner):
                    v = np.int32(line[k])
                    b0 = np.int32(b0 + v * h0[k])
                    b1 = np.int32(b1 + v * h1[k])
                    b2 = np.int32(b2 + v * h2[k])
                    b3 = np.int32(b3 + v * h3[k])
                place = m * columns + n
                outs[place] = a0 + (np.int64(b0) << 32)
                outs[place + columns] = a1 + (np.int64(b1) << 32)
                outs[place + 2 * columns] = a2 + (np.int64(b2) << 32)
                outs[place + 3 * columns] = a3 + (np.int64(b3) << 32)
        for m in range(fours, rows):
            l0, h0 = lows[m * inner : (m + 1) * inner], highs[m * inner : (m + 1) * inner]
            for n in range(begin, end):
                line = weights[n * inner : (n + 1) * inner]
                a0, b0 = np.int64(0), np.int32(0)
                for k in range(inner):
                    a0 += np.int64(line[k]) * np.int64(l0[k])
                    b0 = np.int32(b0 + np.int32(line[k]) * h0[k])
                outs[m * columns + n] = a0 + (np.int64(b0) << 32)
