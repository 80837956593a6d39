"""The parties' local parts of an exponential (`protocols/trio/party.py`), each in one pass (Numba, GIL-free).

Operands are addresses of n 64-bit elements, of words of bits, and of four rows [4, n]. `digits` is what decides how a
number is cut, `Digits`; tables have an entry for each upper or lower half. A call works on elements begin .. end - 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from private_llm.kernels.address import flat
from private_llm.kernels.compiling import compiled

Array = np.ndarray[Any, Any]

_SIGNED = np.int64(0)


@compiled
def _flag(words: Array, place: int) -> int:
    """One bit."""
    return int((words[place >> 6] >> (place & 63)) & 1)


@compiled
def _cut(value: int, digits: Array) -> tuple[int, int, int]:
    """Which sixteen (0 or 1), the upper and the lower half of the rest; digits: bits dropped, of the rest, of the lower
    half.
    """
    low = value >> digits[0]
    rest = low & ((1 << digits[1]) - 1)
    return (low >> digits[1]) & 1, rest >> digits[2], rest & ((1 << digits[2]) - 1)


@compiled
def weighed(
    masked: int, keep: int, shares: int, n: int, digits: Array, near: Array, far: Array, fine: Array, near_bits: int,
    far_bits: int, piece: int, begin: int, end: int,
) -> None:  # fmt: skip
    """piece [n] = an evaluator's additive share: one of its shares [4, n] of each digit, times that digit's factor.

    The first of a digit's two rows counts where the bit of `keep` is set. A factor is an entry of `near` (where the
    mask's digit is the same) or `far`, times one of `fine`, without so many bits, rounded.
    """
    x, bits, rows = flat(masked, n, _SIGNED), flat(keep, (n + 63) // 64, _SIGNED), flat(shares, 4 * n, _SIGNED)
    out = flat(piece, n, _SIGNED)
    for m in range(begin, end):
        digit, upper, lower = _cut(x[m], digits)
        same = (near[upper] * fine[lower] + (1 << (near_bits - 1))) >> near_bits
        other = (far[upper] * fine[lower] + (1 << (far_bits - 1))) >> far_bits
        row = 1 - _flag(bits, m)
        first, second = rows[row * n + m], rows[(2 + row) * n + m]
        out[m] = other * first + same * second if digit else same * first + other * second


@compiled
def placed(
    mask: int, kept: int, n: int, digits: Array, coarse: Array, fine: Array, shift: int, message: int,
    begin: int, end: int,
) -> None:  # fmt: skip
    """Add party 0's number of each mask [n] to its place of `message` [4, n]: row 2 digit + bit of `kept`."""
    x, bits = flat(mask, n, _SIGNED), flat(kept, (n + 63) // 64, _SIGNED)
    rows = flat(message, 4 * n, _SIGNED)
    for m in range(begin, end):
        digit, upper, lower = _cut(x[m], digits)
        row = 2 * digit + _flag(bits, m)
        rows[row * n + m] += (coarse[upper] * fine[lower] + (1 << (shift - 1))) >> shift
