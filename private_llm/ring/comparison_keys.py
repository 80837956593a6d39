"""Comparison keys: the function "x < alpha gives beta, else 0", split between two holders.

alpha has `levels` bits and beta is a row of 64-bit words; each holder's key gives additive shares (mod 2^64, hence mod
2^32) of the function's value at any public x, without a word between the holders. A key alone is pseudorandom.
Construction: Boyle, Chandran, Gilboa, Gupta, Ishai, Kumar, Rathee, "Function secret sharing for mixed-mode and
fixed-point secure computation" (Eurocrypt 2021), figure 1. A node's seed s makes its children's seeds AES_L(s) ^ s,
AES_R(s) ^ s and the words of its two sides by further fixed public keys; the lowest bit of a child is its control bit,
and is cleared.

The two keys differ in their roots alone: all other words (`key_words`) are one array that both holders have:
2 words of seed correction and one for each word of beta at each level, 2 bits of control corrections at each level, and
one word for each word of beta at the end.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes

from private_llm.errors import DomainError
from private_llm.kernels.backends.cpu import aes, aes_fan
from private_llm.kernels.backends.cpu import comparison_keys as kernels
from private_llm.kernels.watching import as_array
from private_llm.ring.prg import Prg

Array = np.ndarray[Any, Any]

MOST_WORDS = 4
"""Words that a beta may have."""


def _cipher(label: bytes) -> Cipher[modes.ECB]:
    return Cipher(algorithms.AES(label), modes.ECB())


_CHILDREN = (b"private-llm.dcL0", b"private-llm.dcR0")
_VALUES = ((b"private-llm.dcV0", b"private-llm.dcV1"), (b"private-llm.dcW0", b"private-llm.dcW1"))
_END = (b"private-llm.dcE0", b"private-llm.dcE1")
"""Public keys of AES: of the left and right child, of two blocks of words of either side, of two at the end."""


def key_words(levels: int, words: int) -> int:
    """64-bit words of a key without its root, for alphas of `levels` >= 1 bits and betas of `words` words.

    levels (2 + words) + ceil(levels / 32) + words: 107 for 26 levels and 2 words.
    """
    return levels * (2 + words) + _control_words(levels) + words


def cipher_blocks(levels: int, words: int) -> int:
    """Blocks of AES that the value at one x takes a holder; making a key takes four times as many."""
    return (1 + _blocks(words)) * levels + _blocks(words)


def make_keys(alpha: Array, beta: Array, levels: int, first: Prg, second: Prg) -> Array:
    """What both holders have of the keys of alpha uint64 [n] and beta uint64 [n, words]: uint64 [n, key_words].

    The roots, 2 words each, are drawn from the streams of the two holders, who draw the same (`roots`). Only the lowest
    `levels` bits of alpha count. Raises DomainError for levels outside 1 to 64, and for no words or too many.
    """
    count, words = beta.shape
    _check(levels, words)
    seeds = np.stack([roots(first, count), roots(second, count)])
    if aes.usable():
        made = np.zeros((count, key_words(levels, words)), dtype=np.uint64)
        kernels.make(seeds, alpha, beta, levels, _tables(), made)
        return made
    return _make_by_levels(seeds, alpha, beta, levels)


def _make_by_levels(seeds: Array, alpha: Array, beta: Array, levels: int) -> Array:
    """`make_keys` with OpenSSL's cipher, a level of all keys at a time."""
    count, words = beta.shape
    control = np.zeros((2, count), dtype=np.uint64)
    control[1] = 1
    total = np.zeros((count, words), dtype=np.uint64)
    made = np.zeros((count, key_words(levels, words)), dtype=np.uint64)
    sides, values, bits = _parts(made, levels, words)
    children, inner, end = _contexts(words)
    for level in range(levels):
        left, right = (_encrypt(each, seeds) for each in children)
        kernels.correct(
            seeds, control, left, right, *(_joined(each, seeds) for each in inner),
            (alpha >> np.uint64(levels - 1 - level)) & np.uint64(1), beta, total, sides[:, level], values[:, level],
            bits[:, level // 32], level % 32,
        )  # fmt: skip
    last = np.concatenate([_encrypt(each, seeds) ^ seeds for each in end], axis=-1)[..., :words]
    difference = last[1] - last[0] - total
    made[:, -words:] = np.where(control[1][:, None] == 1, np.uint64(0) - difference, difference)
    return made


def evaluate(
    holder: int, root: Array, key: Array, x: Array, levels: int, words: int, nodes: Array | None = None
) -> Array:
    """This holder's shares of beta where x < alpha, else of 0: uint64 [points, n, words] at x uint64 [points, n].

    holder: 0 or 1, the first or second of `make_keys`, with its root [n, 2]. Only the lowest `levels` bits of x count.
    nodes: as `shared_ways` has it of points at public distances, for which so many steps of
    a level are taken; default: one for each point. Raises DomainError as `make_keys`.
    """
    _check(levels, words)
    points, count = x.shape
    if not x.size:
        return np.zeros((points, count, words), dtype=np.uint64)
    if aes.usable():
        total = np.empty((points, count, words), dtype=np.uint64)
        most = np.full(levels, points, dtype=np.int64) if nodes is None else nodes
        kernels.follow(root, holder, key, np.ascontiguousarray(x), levels, most, _tables(), total)
        return total
    return _evaluate_by_levels(holder, root, key, x, levels, words)


def _evaluate_by_levels(holder: int, root: Array, key: Array, x: Array, levels: int, words: int) -> Array:
    """`evaluate` with OpenSSL's cipher, a level of all points at a time."""
    points, count = x.shape
    seeds = np.tile(root, (points, 1))
    control = np.full(points * count, holder, dtype=np.uint64)
    total = np.zeros((points * count, words), dtype=np.uint64)
    flat = x.reshape(-1)
    sides, values, bits = _parts(key, levels, words)
    children, inner, end = _contexts(words)
    for level in range(levels):
        left, right = (_encrypt(each, seeds) for each in children)
        kernels.descend(
            seeds, control, left, right, *(_joined(each, seeds) for each in inner),
            (flat >> np.uint64(levels - 1 - level)) & np.uint64(1),
            np.ascontiguousarray(sides[:, level]), np.ascontiguousarray(values[:, level]),
            np.ascontiguousarray(bits[:, level // 32]), level % 32, total,
        )  # fmt: skip
    kernels.finish(seeds, control, _joined(end, seeds), np.ascontiguousarray(key[:, -words:]), holder == 1, total)
    return total.reshape(points, count, words)


def shared_ways(offsets: Array, levels: int, low: int) -> Array:
    """How many different ways points m + offsets can go at most, level by level, whatever m is: int64 [levels].

    offsets: uint64 [points], modulo 2^64; `low` bits of a sum are dropped, the next `levels` compared. Points that go
    one way are counted once where they are neighbours, so offsets should rise or fall. Public and local.
    """
    apart = (offsets - offsets[0]).view(np.int64)
    if np.any(np.abs(apart) >> 62) or not (np.all(np.diff(apart) >= 0) or np.all(np.diff(apart) <= 0)):
        return np.full(levels, len(offsets), dtype=np.int64)
    apart = np.sort(apart - apart.min())
    found = np.empty(levels, dtype=np.int64)
    for level in range(levels):
        bits = low + levels - 1 - level
        phases = -apart & ((1 << bits) - 1)  # with the most ways one may begin at a point
        cells = (apart + phases[:, None]) >> bits
        found[level] = 1 + int((np.diff(cells, axis=1) != 0).sum(1).max())
    return found


def roots(stream: Prg, count: int) -> Array:
    """The next `count` roots of a holder's stream: uint64 [count, 2]."""
    drawn: Array = as_array(stream.words(2 * count)).view(np.uint64).reshape(count, 2).copy()
    drawn[:, 0] &= ~np.uint64(1)
    return drawn


def _parts(key: Array, levels: int, words: int) -> tuple[Array, Array, Array]:
    """Views of a key: seed corrections [n, levels, 2], those of words [n, levels, words], control bits [n, words]."""
    count, values, bits = len(key), 2 * levels, (2 + words) * levels
    return (
        key[:, :values].reshape(count, levels, 2),
        key[:, values:bits].reshape(count, levels, words),
        key[:, bits : bits + _control_words(levels)],
    )


def _check(levels: int, words: int) -> None:
    if not 1 <= levels <= 64 or not 1 <= words <= MOST_WORDS:
        raise DomainError(f"comparison keys: got {levels} levels and {words} words; want 1 to 64 and 1 to {MOST_WORDS}")


@cache
def _tables() -> Array:
    """Of the left and the right side (child, two blocks of words) and of the end: [3, 11, 4, 2], for kernels."""
    labels = [[child, *words] for child, words in zip(_CHILDREN, _VALUES, strict=True)]
    return aes_fan.tables([[aes.round_keys(label) for label in each] for each in [*labels, list(_END)]])


def _control_words(levels: int) -> int:
    return (levels + 31) // 32


def _blocks(words: int) -> int:
    return (words + 1) // 2


def _contexts(words: int) -> tuple[list[CipherContext], list[list[CipherContext]], list[CipherContext]]:
    """Encryptors of children, of the words of either side, and of the words at the end."""
    blocks = _blocks(words)
    return (
        [_cipher(label).encryptor() for label in _CHILDREN],
        [[_cipher(label).encryptor() for label in side[:blocks]] for side in _VALUES],
        [_cipher(label).encryptor() for label in _END[:blocks]],
    )


def _encrypt(encryptor: CipherContext, blocks: Array) -> Array:
    out = np.empty(blocks.size + 2, dtype=np.uint64)  # the cipher wants one spare block
    if blocks.size:
        encryptor.update_into(blocks.data.cast("B"), out.data.cast("B"))
    return out[: blocks.size].reshape(blocks.shape)


def _joined(encryptors: list[CipherContext], seeds: Array) -> Array:
    """The ciphers' outputs [blocks, .., 2]."""
    if len(encryptors) == 1:
        return _encrypt(encryptors[0], seeds)[None]
    return np.stack([_encrypt(each, seeds) for each in encryptors])
