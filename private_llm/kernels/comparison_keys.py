"""Local steps of comparison keys and of distributed point functions on the CPU (Numba); blocks are pairs of uint64.

`make`, `follow` and `expand` take whole keys, with the processor's AES; all others are the same level by level, for
processors without, where the caller runs the cipher.
"""

from __future__ import annotations

import numpy as np

from private_llm.kernels.address import Array, Read, Words1, Words2, flat
from private_llm.kernels.compiling import compiled
from private_llm.kernels.prg.aes import LINE, descend_three, descend_two, encrypt_three, encrypt_two


@compiled
def correct(
    seeds: Array, control: Array, left: Array, right: Array, left_words: Array, right_words: Array, turn: Array,
    beta: Array, total: Array, side: Array, values: Array, bits: Array, at: int,
) -> None:  # fmt: skip
    """One level of making keys: seeds [2, n, 2], control [2, n] and total [n, words] become those of the next level.

    left, right [2, n, 2], left_words, right_words [blocks, 2, n, 2] are the ciphers' outputs of the seeds (adding the
    seed makes them one-way), turn [n] the bits of alpha. Writes side [n, 2], values [n, words], two bits of bits [n].
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
    """Add the last words to total [m, words], negated if so asked; end [blocks, m, 2]: ciphers' outputs of seeds."""
    count, (entries, words) = len(last), total.shape
    for m in range(entries):
        for word in range(words):
            value = total[m, word] + (end[word >> 1, m, word & 1] ^ seeds[m, word & 1])
            if control[m] == np.uint64(1):
                value += last[m % count, word]
            total[m, word] = np.uint64(0) - value if negate else value


@compiled
def add_steps(values: Array, top: Array, offset: Array, powers: Array, steps: Array, total: Array, at: int) -> None:
    """Add shares of coefficients times powers of the mask, where a threshold's bit is set.

    total [outputs, i, j, at + n] += sum over points of steps[output, point, i] bit[point, n] mask[n]^j, where the bit
    times mask^j is u or, where top [points, n] is set, powers[j, n] - u, with u = values[point, n, j] + offset[j, n].
    """
    points, count, words = values.shape
    bits = np.empty((words, count), dtype=np.uint64)
    for point in range(points):
        for n in range(count):
            flip = np.uint64(0) - top[point, n]  # all bits of it are the top bit
            for j in range(words):
                bit = values[point, n, j] + offset[j, n]
                bits[j, n] = (powers[j, n] & flip) + ((bit ^ flip) - flip)
        for output in range(len(steps)):
            for i in range(words):
                factor = steps[output, point, i]
                if factor != np.uint64(0):  # public
                    for j in range(words):
                        for n in range(count):
                            total[output, i, j, at + n] += factor * bits[j, n]


_WORDS = LINE // 8
GROUP = 8  # keys that are followed side by side: the cipher works on others while one waits for its step


@compiled
def follow(
    root: Array, holder: int, key: Array, x: Array, levels: int, nodes: Array, ciphers: Array, total: Array
) -> None:
    """Evaluate keys: total [points, n, words] is set to this holder's shares at x [points, n].

    root [n, 2], key [n, words of a key]; ciphers [3, 11, 4, 2]: tables (`aes`) of the left and the right side, each
    of a child and two blocks of words, and of two blocks at the end. nodes int64 [levels]: at most so many different
    ways do the points of a key go that far, those of one way neighbours. Steps do not depend on x: time tells nothing.
    """
    points, count, words = total.shape
    at_tables, table_bytes = ciphers.ctypes.data, ciphers.itemsize * ciphers.size // 3
    controls, first, last = (2 + words) * levels, 2 * levels, key.shape[1] - words
    one, mask = np.uint64(1), ~np.uint64(0) >> np.uint64(64 - levels)
    turns, parents = np.empty((2, points), dtype=np.int64)
    node_of = np.empty((GROUP, points), dtype=np.int64)
    fix, out = 2 * GROUP * points, 2 * GROUP * (points + levels)  # lines of corrections, and of the end's words
    room = np.zeros((out + 2) * _WORDS, dtype=np.uint64)
    at_room = (room.ctypes.data + LINE - 1) // LINE * LINE
    lines = flat(at_room, (out + 1) * _WORDS, room[0]).reshape(-1, _WORDS)
    for begin in range(0, count, GROUP):
        group = min(GROUP, count - begin)
        for e in range(group):
            root_line = lines[e * points]
            root_line[0], root_line[1] = root[begin + e, 0], root[begin + e, 1]
            root_line[2:6] = np.uint64(0)
            root_line[6] = np.uint64(0) - np.uint64(holder)
            node_of[e] = 0
            for level in range(levels):  # well before they are read: a line is not read fast just after its words
                bits = key[begin + e, controls + (level >> 5)] >> np.uint64(2 * (level & 31))
                for side in range(2):
                    line = lines[fix + 2 * (e * levels + level) + side]
                    line[0] = key[begin + e, 2 * level] | ((bits >> np.uint64(side)) & one)
                    line[1] = key[begin + e, 2 * level + 1]
                    for word in range(words):
                        line[2 + word] = key[begin + e, first + words * level + word]
        for level in range(levels):
            width, old, new = nodes[level], (level & 1) * GROUP, (1 - (level & 1)) * GROUP
            shift = np.uint64(levels - 1 - level)
            for e in range(group):
                n = begin + e
                for spare in range(width):
                    turns[spare], parents[spare] = 0, 0
                node, before = np.int64(-1), ~((x[0, n] & mask) >> shift)
                for point in range(points):
                    way = (x[point, n] & mask) >> shift
                    node += np.int64(way != before)
                    before = way
                    turns[node], parents[node] = np.int64(way & one), node_of[e, point]
                    node_of[e, point] = node
                above, below = at_room + LINE * (old + e) * points, at_room + LINE * (new + e) * points
                fixes = at_room + LINE * (fix + 2 * (e * levels + level))
                for child in range(width):
                    side = turns[child]
                    place, table = above + LINE * parents[child], at_tables + table_bytes * side
                    if words > 2:
                        descend_three(place, fixes + LINE * side, table, below + LINE * child)
                    else:
                        descend_two(place, fixes + LINE * side, table, below + LINE * child)
        end = (levels & 1) * GROUP
        for e in range(group):
            n, leaves = begin + e, lines[(end + e) * points : (end + e + 1) * points]
            for leaf in leaves[: nodes[levels - 1]]:
                encrypt_two(leaf[0], leaf[1], at_tables + 2 * table_bytes, at_room + LINE * out)
                for word in range(words):
                    value = leaf[2 + word] + lines[out, word] + (key[n, last + word] & leaf[6])
                    leaf[2 + word] = np.uint64(0) - value if holder == 1 else value
            for point in range(points):
                for word in range(words):
                    total[point, n, word] = leaves[node_of[e, point], 2 + word]
    room[:] = np.uint64(0)  # `lines` does not own its memory: without a use after the loops Numba frees it before them


UNIT = 9  # levels of a subtree that `expand` takes at a time: its 512 blocks stay in the fastest memory


@compiled
def expand(
    keys: Words2, holders: Words1, levels: int, sides: Read, leaf: Read, out: Words2, first: int, last: int
) -> None:  # fmt: skip
    """Additive shares of one-hot rows, out [T, domain] (32 or 64 bits), of keys [T, 5 + 2 levels]: units first .. last.

    sides, leaf: addresses of tables (`aes`) of the left and the right child, and of leaves. A unit is a subtree of
    `UNIT` levels, or of all; a row has as many as cover it. A node's control bit is the lowest bit of its seed.
    """
    domain, kind, one = out.shape[1], out.dtype.type, np.uint64(1)
    below = min(levels, UNIT)
    above, each = levels - below, (domain + (2 << below) - 1) // (2 << below)
    nodes = np.empty((1 << below, 2), dtype=np.uint64)
    room = np.zeros(2 * _WORDS, dtype=np.uint64)
    at_line = (room.ctypes.data + LINE - 1) // LINE * LINE
    line = flat(at_line, _WORDS, room[0])
    for unit in range(first, last):
        key, holder, place = keys[unit // each], holders[unit // each], unit % each
        packed, final = key[2 + 2 * levels], key[3 + 2 * levels :]
        nodes[0, 0], nodes[0, 1] = key[0] | holder, key[1]
        for level in range(levels):
            fix_left = key[2 + 2 * level] | ((packed >> np.uint64(2 * level)) & one)
            fix_right = key[2 + 2 * level] | ((packed >> np.uint64(2 * level + 1)) & one)
            fix_high = key[3 + 2 * level]
            for i in range((1 << max(0, level - above)) - 1, -1, -1):  # children lie where later nodes lay
                mask = np.uint64(0) - (nodes[i, 0] & one)
                encrypt_two(nodes[i, 0] & ~one, nodes[i, 1], sides, at_line)
                if level >= above:
                    nodes[2 * i, 0], nodes[2 * i, 1] = line[0] ^ (mask & fix_left), line[1] ^ (mask & fix_high)
                    nodes[2 * i + 1, 0], nodes[2 * i + 1, 1] = line[2] ^ (mask & fix_right), line[3] ^ (mask & fix_high)
                elif (place >> (above - 1 - level)) & 1:
                    nodes[0, 0], nodes[0, 1] = line[2] ^ (mask & fix_right), line[3] ^ (mask & fix_high)
                else:
                    nodes[0, 0], nodes[0, 1] = line[0] ^ (mask & fix_left), line[1] ^ (mask & fix_high)
        start = place * (2 << below)
        for i in range(min(1 << below, (domain - start + 1) // 2)):
            mask = np.uint64(0) - (nodes[i, 0] & one)
            encrypt_two(nodes[i, 0] & ~one, nodes[i, 1], leaf, at_line)
            for side in range(min(2, domain - start - 2 * i)):
                value = line[side] + (final[side] & mask)
                out[unit // each, start + 2 * i + side] = kind(np.uint64(0) - value if holder else value)
    room[:] = np.uint64(0)  # as in `follow`


@compiled
def make(roots: Array, alpha: Array, beta: Array, levels: int, ciphers: Array, key: Array) -> None:
    """Keys [n, words of a key], zero so far, of alpha [n] and beta [n, words] from roots [2, n, 2]; as `follow`."""
    count, words = beta.shape
    at_tables, table_bytes = ciphers.ctypes.data, ciphers.itemsize * ciphers.size // 3
    controls, first = (2 + words) * levels, 2 * levels
    one = np.uint64(1)
    seeds = np.empty((2, 2), dtype=np.uint64)
    control = np.empty(2, dtype=np.uint64)
    out = np.empty((2, 2, 8), dtype=np.uint64)  # [holder, side]: the child, then words
    at_out, step = out.ctypes.data, 8 * out.itemsize
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
                for side in range(2):
                    place, table = at_out + (2 * holder + side) * step, at_tables + table_bytes * side
                    if words > 2:
                        encrypt_three(seeds[holder, 0], seeds[holder, 1], table, place)
                    else:
                        encrypt_two(seeds[holder, 0], seeds[holder, 1], table, place)
            for word in range(words):
                value = out[1, lost, 2 + word] - out[0, lost, 2 + word] - total[word]
                if kept == 1:
                    value += beta[n, word]
                if negate:
                    value = np.uint64(0) - value
                key[n, first + words * level + word] = value
                total[word] += out[0, kept, 2 + word] - out[1, kept, 2 + word]
                total[word] += np.uint64(0) - value if negate else value
            fix_low = (out[0, lost, 0] ^ out[1, lost, 0]) & ~one
            fix_high = out[0, lost, 1] ^ out[1, lost, 1]
            key[n, 2 * level], key[n, 2 * level + 1] = fix_low, fix_high
            turn = np.uint64(kept)
            fix_left = (out[0, 0, 0] ^ out[1, 0, 0] ^ turn ^ one) & one
            fix_right = (out[0, 1, 0] ^ out[1, 1, 0] ^ turn) & one
            at = 2 * (level & 31)
            key[n, controls + (level >> 5)] |= (fix_left << np.uint64(at)) | (fix_right << np.uint64(at + 1))
            fix = fix_right if kept == 1 else fix_left
            for holder in range(2):
                low, high = out[holder, kept, 0], out[holder, kept, 1]
                bit = low & one
                low &= ~one
                if control[holder] == one:
                    low ^= fix_low
                    high ^= fix_high
                    bit ^= fix
                seeds[holder, 0], seeds[holder, 1], control[holder] = low, high, bit
        for holder in range(2):
            encrypt_two(
                seeds[holder, 0], seeds[holder, 1], at_tables + 2 * table_bytes, at_out + 2 * holder * step
            )  # fmt: skip
        for word in range(words):
            value = out[1, 0, word] - out[0, 0, word] - total[word]
            key[n, key.shape[1] - words + word] = np.uint64(0) - value if control[1] == one else value
