"""Local steps of comparison keys on the CPU (Numba, GIL-free); blocks are pairs of uint64."""

from __future__ import annotations

from typing import Any

import numpy as np

from private_llm.kernels.compiling import compiled

Array = np.ndarray[Any, Any]


@compiled
def correct(
    seeds: Array, control: Array, left: Array, right: Array, left_words: Array, right_words: Array, turn: Array,
    beta: Array, total: Array, side: Array, values: Array, bits: Array, at: int,
) -> None:  # fmt: skip
    """One level of making keys: seeds [2, n, 2], control [2, n] and total [n, words] become those of the next level.

    left, right [2, n, 2], left_words, right_words [blocks, 2, n, 2] are the ciphers' outputs of the seeds (adding the
    seed makes them one-way), turn [n] the bits of alpha. Writes corrections: side [n, 2], values [n, words], and two
    bits of bits [n].
    """
    count, words = total.shape
    one = np.uint64(1)
    for n in range(count):
        right_turn = turn[n] == one
        low0, high0, low1, high1 = seeds[0, n, 0], seeds[0, n, 1], seeds[1, n, 0], seeds[1, n, 1]
        seeds_apart = low0 ^ low1
        fix_left = (left[0, n, 0] ^ left[1, n, 0] ^ seeds_apart ^ turn[n] ^ one) & one
        fix_right = (right[0, n, 0] ^ right[1, n, 0] ^ seeds_apart ^ turn[n]) & one
        bits[n] |= (fix_left << np.uint64(2 * at)) | (fix_right << np.uint64(2 * at + 1))
        lost = left if right_turn else right
        kept = right if right_turn else left
        fix_low = (lost[0, n, 0] ^ lost[1, n, 0] ^ seeds_apart) & ~one
        fix_high = lost[0, n, 1] ^ lost[1, n, 1] ^ high0 ^ high1
        side[n, 0], side[n, 1] = fix_low, fix_high
        lost_words = left_words if right_turn else right_words
        kept_words = right_words if right_turn else left_words
        negate = control[1, n] == one
        for word in range(words):
            block, half = word >> 1, word & 1
            value = (lost_words[block, 1, n, half] ^ seeds[1, n, half]) - (
                lost_words[block, 0, n, half] ^ seeds[0, n, half]
            )
            value -= total[n, word]
            if right_turn:
                value += beta[n, word]
            if negate:
                value = np.uint64(0) - value
            values[n, word] = value
            total[n, word] += kept_words[block, 0, n, half] ^ seeds[0, n, half]
            total[n, word] -= kept_words[block, 1, n, half] ^ seeds[1, n, half]
            total[n, word] += np.uint64(0) - value if negate else value
        fix = fix_right if right_turn else fix_left
        for holder in range(2):
            low = kept[holder, n, 0] ^ seeds[holder, n, 0]
            high = kept[holder, n, 1] ^ seeds[holder, n, 1]
            bit = low & one
            low &= ~one
            if control[holder, n] == one:
                low ^= fix_low
                high ^= fix_high
                bit ^= fix
            seeds[holder, n, 0], seeds[holder, n, 1], control[holder, n] = low, high, bit


@compiled
def descend(
    seeds: Array, control: Array, left: Array, right: Array, left_words: Array, right_words: Array, turn: Array,
    side: Array, values: Array, bits: Array, at: int, total: Array,
) -> None:  # fmt: skip
    """One level of evaluation: seeds [m, 2] and control [m] become those of the child at turn [m].

    left, right [m, 2], left_words, right_words [blocks, m, 2] are the ciphers' outputs of the seeds (adding the seed
    makes them one-way). side [n, 2], values [n, words] and bits [n] are corrections; entry m belongs to key m modulo n.
    Adds the words of the side taken to total [m, words].
    """
    count, (entries, words) = len(side), total.shape
    one = np.uint64(1)
    for m in range(entries):
        n = m % count
        right_turn = turn[m] == one
        child = right if right_turn else left
        made = right_words if right_turn else left_words
        corrected = control[m] == one
        for word in range(words):
            value = made[word >> 1, m, word & 1] ^ seeds[m, word & 1]
            if corrected:
                value += values[n, word]
            total[m, word] += value
        low = child[m, 0] ^ seeds[m, 0]
        high = child[m, 1] ^ seeds[m, 1]
        bit = low & one
        low &= ~one
        if corrected:
            low ^= side[n, 0]
            high ^= side[n, 1]
            bit ^= (bits[n] >> np.uint64(2 * at + (1 if right_turn else 0))) & one
        seeds[m, 0], seeds[m, 1], control[m] = low, high, bit


@compiled
def finish(seeds: Array, control: Array, end: Array, last: Array, negate: bool, total: Array) -> None:
    """Add the words at the end of the way to total [m, words], and negate it for the second holder.

    end [blocks, m, 2] are the ciphers' outputs of the seeds, last [n, words] the corrections.
    """
    count, (entries, words) = len(last), total.shape
    for m in range(entries):
        for word in range(words):
            value = total[m, word] + (end[word >> 1, m, word & 1] ^ seeds[m, word & 1])
            if control[m] == np.uint64(1):
                value += last[m % count, word]
            total[m, word] = np.uint64(0) - value if negate else value


@compiled
def add_steps(values: Array, top: Array, offset: Array, powers: Array, steps: Array, total: Array) -> None:
    """Add shares of coefficients times powers of the mask, where a threshold's bit is set.

    total [outputs, i, j, n] += sum over points of steps[output, point, i] bit[point, n] mask[n]^j, where the bit times
    mask^j is u or, where top [points, n] is set, powers[j, n] - u, with u = values[point, n, j] + offset[j, n].
    """
    points, count, words = values.shape
    for point in range(points):
        for n in range(count):
            for j in range(words):
                bit = values[point, n, j] + offset[j, n]
                if top[point, n] == np.uint64(1):
                    bit = powers[j, n] - bit
                for output in range(len(steps)):
                    for i in range(words):
                        total[output, i, j, n] += steps[output, point, i] * bit
