"""Comparison keys: the function "x < alpha gives beta, else 0", split between two holders.

alpha has `levels` bits and beta is a row of 64-bit words; each holder's key gives additive shares (mod 2^64, hence mod
2^32) of the function's value at any public x, without a word between the holders. A key alone is pseudorandom.
Construction: Boyle, Chandran, Gilboa, Gupta, Ishai, Kumar, Rathee, "Function secret sharing for mixed-mode and
fixed-point secure computation" (Eurocrypt 2021), figure 1. A node's seed s makes its children's seeds AES_L(s) ^ s,
AES_R(s) ^ s and the words of its two sides by further keys; the lowest bit of a child, its control bit, is cleared.

The keys of AES are known to both holders and to who makes keys, and to nobody else; they are derived from a seed of the
session, anew every EPOCH comparison keys (`Ciphers`). So work that is done for one of them, or before, is of no use for
others: a holder of n keys of l levels opens one of them with 2^127 / (n l) blocks of AES, where n is EPOCH at most,
however long a session is: 2^102 blocks for 32 levels.

The two keys differ in their roots alone: all other words (`key_words`) are one array that both holders have:
2 words of seed correction and one for each word of beta at each level, 2 bits of control corrections at each level, and
one word for each word of beta at the end.
"""

from functools import cached_property

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes

from private_llm.errors import DomainError
from private_llm.kernels import comparison_keys as kernels
from private_llm.kernels.address import Array
from private_llm.kernels.prg import aes
from private_llm.kernels.trace_hook import as_array
from private_llm.ring.prg import Prg, Seed

MOST_WORDS = 4  # words that a beta may have
EPOCH = 1 << 20  # comparison keys that are made with one set of keys of AES, at most
add_steps = kernels.add_steps


class CipherSet:
    """Keys of AES: of the left and the right child, of two blocks of words of either side, of two at the end."""

    def __init__(self, stream: Prg) -> None:
        """The next 128 bytes of a stream."""
        raw = np.empty(8 * 16, dtype=np.uint8)
        stream.fill(raw)
        keys = [raw[16 * n : 16 * n + 16].tobytes() for n in range(8)]
        self.children, self.values, self.end = keys[:2], (keys[2:4], keys[4:6]), keys[6:]

    @cached_property
    def tables(self) -> Array:
        """Of the left and the right side (child, two blocks of words) and of the end: [3, 11, 4, 2], for kernels."""
        sides = [[child, *words] for child, words in zip(self.children, self.values, strict=True)]
        return aes.tables([[aes.round_keys(key) for key in each] for each in [*sides, self.end]])

    def contexts(self, words: int) -> tuple[list[CipherContext], list[list[CipherContext]], list[CipherContext]]:
        """Encryptors of children, of the words of either side, and of the words at the end."""
        blocks = _blocks(words)
        inner = [[_encryptor(key) for key in side[:blocks]] for side in self.values]
        return [_encryptor(key) for key in self.children], inner, [_encryptor(key) for key in self.end[:blocks]]

    def __repr__(self) -> str:
        return "CipherSet(<secret>)"


class Ciphers:
    """Ciphers of comparison keys, a new set every EPOCH keys, from one seed at makers and holders, in one order."""

    def __init__(self, seed: Seed) -> None:
        self._seed, self._epochs, self._left = seed, 0, 0
        self._set: CipherSet | None = None

    def take(self, count: int) -> CipherSet:
        """The set of the next `count` keys. Raises DomainError for more than EPOCH at a time."""
        if count > EPOCH:
            raise DomainError(f"comparison keys: got {count} at a time; want at most {EPOCH}")
        if self._set is None or count > self._left:
            self._set = CipherSet(self._seed.stream(f"comparison ciphers {self._epochs}"))
            self._epochs, self._left = self._epochs + 1, EPOCH
        self._left -= count
        return self._set

    def apart(self, label: str) -> "Ciphers":
        """Others, for calls that a maker computes at another time than holders do."""
        return Ciphers(self._seed.derive(label))


def _encryptor(key: bytes) -> CipherContext:
    return Cipher(algorithms.AES(key), modes.ECB()).encryptor()


def key_words(levels: int, words: int) -> int:
    """Words of a key without its root: levels (2 + words) + ceil(levels / 32) + words, 107 for 26 levels, 2 words."""
    return levels * (2 + words) + _control_words(levels) + words


def cipher_blocks(levels: int, words: int) -> int:
    """Blocks of AES that the value at one x takes a holder; making a key takes four times as many."""
    return (1 + _blocks(words)) * levels + _blocks(words)


def make_keys(alpha: Array, beta: Array, levels: int, first: Prg, second: Prg, ciphers: CipherSet) -> Array:
    """What both holders have of the keys of alpha uint64 [n] and beta uint64 [n, words]: uint64 [n, key_words].

    The roots, 2 words each, are drawn from the streams of the two holders, who draw the same (`roots`) and have the
    same ciphers. Only the lowest `levels` bits of alpha count. Raises DomainError for other levels (1 to 64) or words.
    """
    count, words = beta.shape
    _check(levels, words)
    seeds = np.stack([roots(first, count), roots(second, count)])
    if aes.usable():
        made = np.zeros((count, key_words(levels, words)), dtype=np.uint64)
        kernels.make(seeds, alpha, beta, levels, ciphers.tables, made)
        return made
    return _make_by_levels(seeds, alpha, beta, levels, ciphers)


def _make_by_levels(seeds: Array, alpha: Array, beta: Array, levels: int, ciphers: CipherSet) -> Array:
    """`make_keys` with OpenSSL's cipher, a level of all keys at a time."""
    count, words = beta.shape
    control = np.zeros((2, count), dtype=np.uint64)
    control[1] = 1
    total = np.zeros((count, words), dtype=np.uint64)
    made = np.zeros((count, key_words(levels, words)), dtype=np.uint64)
    sides, values, bits = _parts(made, levels, words)
    children, inner, end = ciphers.contexts(words)
    for level in range(levels):
        left, right = (encrypted(each, seeds) for each in children)
        kernels.correct(
            seeds, control, left, right, *(_joined(each, seeds) for each in inner),
            (alpha >> np.uint64(levels - 1 - level)) & np.uint64(1), beta, total, sides[:, level], values[:, level],
            bits[:, level // 32], level % 32,
        )  # fmt: skip
    last = np.concatenate([encrypted(each, seeds) ^ seeds for each in end], axis=-1)[..., :words]
    difference = last[1] - last[0] - total
    made[:, -words:] = np.where(control[1][:, None] == 1, np.uint64(0) - difference, difference)
    return made


def evaluate(
    holder: int, root: Array, key: Array, x: Array, levels: int, words: int, ciphers: CipherSet,
    nodes: Array | None = None,
) -> Array:  # fmt: skip
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
        kernels.follow(root, holder, key, np.ascontiguousarray(x), levels, most, ciphers.tables, total)
        return total
    return _evaluate_by_levels(holder, root, key, x, levels, words, ciphers)


def _evaluate_by_levels(
    holder: int, root: Array, key: Array, x: Array, levels: int, words: int, ciphers: CipherSet
) -> Array:
    """`evaluate` with OpenSSL's cipher, a level of all points at a time."""
    points, count = x.shape
    seeds = np.tile(root, (points, 1))
    control = np.full(points * count, holder, dtype=np.uint64)
    total = np.zeros((points * count, words), dtype=np.uint64)
    flat = x.reshape(-1)
    sides, values, bits = _parts(key, levels, words)
    children, inner, end = ciphers.contexts(words)
    for level in range(levels):
        left, right = (encrypted(each, seeds) for each in children)
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


def _control_words(levels: int) -> int:
    return (levels + 31) // 32


def _blocks(words: int) -> int:
    return (words + 1) // 2


def encrypted(encryptor: CipherContext, blocks: Array) -> Array:
    """Blocks uint64 [.., 2] under a cipher."""
    out = np.empty(blocks.size + 2, dtype=np.uint64)  # the cipher wants one spare block
    if blocks.size:
        encryptor.update_into(blocks.data.cast("B"), out.data.cast("B"))
    return out[: blocks.size].reshape(blocks.shape)


def _joined(encryptors: list[CipherContext], seeds: Array) -> Array:
    if len(encryptors) == 1:
        return encrypted(encryptors[0], seeds)[None]
    return np.stack([encrypted(each, seeds) for each in encryptors])
