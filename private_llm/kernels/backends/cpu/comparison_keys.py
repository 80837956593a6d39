"""Local steps of comparison keys on the CPU (Numba, GIL-free); blocks are pairs of uint64.

`make` and `follow` take whole keys, with the processor's AES; `correct`, `descend` and `finish` are the same level by
level, for processors without, where the caller runs the cipher.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from private_llm.kernels.backends.cpu.aes import KEYS_BYTES, encrypt
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


_LANES = 8
"""Ways that are followed side by side: a step of one waits for the cipher, which can work on the others' meanwhile."""


@compiled
def follow(root: Array, holder: int, key: Array, x: Array, levels: int, ciphers: Array, total: Array) -> None:
    """Evaluate keys: total [m, words] is set to this holder's shares at x [m]; entry m belongs to key m modulo n.

    root [n, 2], key [n, words of a key]; ciphers [8, 11, 2]: round keys of the left and right child, of two blocks of
    words of the left and of the right side, and of two at the end.
    """
    count, (entries, words) = len(root), total.shape
    at_keys = np.uintp(ciphers.ctypes.data)
    blocks = (words + 1) >> 1
    controls, first, last = (2 + words) * levels, 2 * levels, key.shape[1] - words
    one = np.uint64(1)
    low, high, mask = np.empty((3, _LANES), dtype=np.uint64)
    which, place = np.empty((2, _LANES), dtype=np.int64)
    points = entries // count
    total[:] = np.uint64(0)
    for begin in range(0, entries, _LANES):
        lanes = min(_LANES, entries - begin)
        for lane in range(lanes):  # the points of one key are neighbours, so that it stays in the cache
            n = (begin + lane) // points
            which[lane], place[lane] = n, (begin + lane) % points * count + n
            low[lane], high[lane], mask[lane] = root[n, 0], root[n, 1], np.uint64(0) - np.uint64(holder)
        for level in range(levels):
            for lane in range(lanes):
                n, m = which[lane], place[lane]
                old_low, old_high, was = low[lane], high[lane], mask[lane]  # all bits of `was` are the control bit
                side = np.int64((x[m] >> np.uint64(levels - 1 - level)) & one)
                child = encrypt(old_low, old_high, at_keys + np.uintp(KEYS_BYTES * side))
                for block in range(blocks):
                    values = encrypt(old_low, old_high, at_keys + np.uintp(KEYS_BYTES * (2 + 2 * side + block)))
                    word = 2 * block
                    total[m, word] += (values[0] ^ old_low) + (key[n, first + words * level + word] & was)
                    if word + 1 < words:
                        total[m, word + 1] += (values[1] ^ old_high) + (key[n, first + words * level + word + 1] & was)
                new_low = child[0] ^ old_low
                fix = (key[n, controls + (level >> 5)] >> np.uint64(2 * (level & 31) + side)) & was
                mask[lane] = np.uint64(0) - ((new_low ^ fix) & one)
                low[lane] = (new_low & ~one) ^ (key[n, 2 * level] & was)
                high[lane] = child[1] ^ old_high ^ (key[n, 2 * level + 1] & was)
        for lane in range(lanes):
            n, m = which[lane], place[lane]
            for block in range(blocks):
                values = encrypt(low[lane], high[lane], at_keys + np.uintp(KEYS_BYTES * (6 + block)))
                for half in range(min(2, words - 2 * block)):
                    word = 2 * block + half
                    value = total[m, word] + (values[half] ^ (high[lane] if half else low[lane]))
                    value += key[n, last + word] & mask[lane]
                    total[m, word] = np.uint64(0) - value if holder == 1 else value


@compiled
def make(roots: Array, alpha: Array, beta: Array, levels: int, ciphers: Array, key: Array) -> None:
    """Make keys of alpha [n] and beta [n, words] from roots [2, n, 2]: key [n, words of a key], which must be zero.

    ciphers: as in `follow`.
    """
    count, words = beta.shape
    at_keys = np.uintp(ciphers.ctypes.data)
    blocks = (words + 1) >> 1
    controls, first = (2 + words) * levels, 2 * levels
    one = np.uint64(1)
    seeds = np.empty((2, 2), dtype=np.uint64)
    control = np.empty(2, dtype=np.uint64)
    child = np.empty((2, 2, 2), dtype=np.uint64)  # [holder, side, half]
    total = np.empty(words, dtype=np.uint64)
    for n in range(count):
        for holder in range(2):
            seeds[holder, 0], seeds[holder, 1] = roots[holder, n, 0], roots[holder, n, 1]
            control[holder] = np.uint64(holder)
        total[:] = np.uint64(0)
        for level in range(levels):
            kept = np.int64((alpha[n] >> np.uint64(levels - 1 - level)) & one)
            lost = 1 - kept
            negate = control[1] == one
            for holder in range(2):
                low, high = seeds[holder, 0], seeds[holder, 1]
                for side in range(2):
                    made = encrypt(low, high, at_keys + np.uintp(KEYS_BYTES * side))
                    child[holder, side, 0], child[holder, side, 1] = made[0] ^ low, made[1] ^ high
            for block in range(blocks):
                lost0 = encrypt(seeds[0, 0], seeds[0, 1], at_keys + np.uintp(KEYS_BYTES * (2 + 2 * lost + block)))
                lost1 = encrypt(seeds[1, 0], seeds[1, 1], at_keys + np.uintp(KEYS_BYTES * (2 + 2 * lost + block)))
                kept0 = encrypt(seeds[0, 0], seeds[0, 1], at_keys + np.uintp(KEYS_BYTES * (2 + 2 * kept + block)))
                kept1 = encrypt(seeds[1, 0], seeds[1, 1], at_keys + np.uintp(KEYS_BYTES * (2 + 2 * kept + block)))
                for half in range(min(2, words - 2 * block)):
                    word = 2 * block + half
                    value = (lost1[half] ^ seeds[1, half]) - (lost0[half] ^ seeds[0, half]) - total[word]
                    if kept == 1:
                        value += beta[n, word]
                    if negate:
                        value = np.uint64(0) - value
                    key[n, first + words * level + word] = value
                    total[word] += (kept0[half] ^ seeds[0, half]) - (kept1[half] ^ seeds[1, half])
                    total[word] += np.uint64(0) - value if negate else value
            fix_low = (child[0, lost, 0] ^ child[1, lost, 0]) & ~one
            fix_high = child[0, lost, 1] ^ child[1, lost, 1]
            key[n, 2 * level], key[n, 2 * level + 1] = fix_low, fix_high
            turn = np.uint64(kept)
            fix_left = (child[0, 0, 0] ^ child[1, 0, 0] ^ turn ^ one) & one
            fix_right = (child[0, 1, 0] ^ child[1, 1, 0] ^ turn) & one
            at = 2 * (level & 31)
            key[n, controls + (level >> 5)] |= (fix_left << np.uint64(at)) | (fix_right << np.uint64(at + 1))
            fix = fix_right if kept == 1 else fix_left
            for holder in range(2):
                low, high = child[holder, kept, 0], child[holder, kept, 1]
                bit = low & one
                low &= ~one
                if control[holder] == one:
                    low ^= fix_low
                    high ^= fix_high
                    bit ^= fix
                seeds[holder, 0], seeds[holder, 1], control[holder] = low, high, bit
        for block in range(blocks):
            end0 = encrypt(seeds[0, 0], seeds[0, 1], at_keys + np.uintp(KEYS_BYTES * (6 + block)))
            end1 = encrypt(seeds[1, 0], seeds[1, 1], at_keys + np.uintp(KEYS_BYTES * (6 + block)))
            for half in range(min(2, words - 2 * block)):
                word = 2 * block + half
                value = (end1[half] ^ seeds[1, half]) - (end0[half] ^ seeds[0, half]) - total[word]
                key[n, key.shape[1] - words + word] = np.uint64(0) - value if control[1] == one else value
