"""Distributed point functions: a secret index, split between two holders in a few hundred bytes.

Each holder expands its key to additive shares (mod 2^64, hence mod 2^32) of the one-hot row of the index
over the whole domain; a key alone is pseudorandom. Construction: Boyle, Gilboa, Ishai, "Function secret
sharing: improvements and extensions" (CCS 2016), figure 1, output group Z/2^64 with two leaves per block.
The expansion G(s) = (AES_L(s) ^ s, AES_R(s) ^ s), leaves AES_O(s) ^ s, uses three fixed public keys.
The lowest bit of a child block is its control bit and is cleared in the seed.

Key layout (int64 words, n = depth): root 2, then n corrections of 2, control corrections 1 (2 bits a level),
leaf corrections 2: 5 + 2n words, for a vocabulary of 50,257 (n = 15) 280 bytes.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor

from private_llm.errors import DomainError
from private_llm.kernels import comparison_keys as kernels
from private_llm.kernels.address import Array
from private_llm.kernels.parallel import parallel_for
from private_llm.kernels.prg import aes
from private_llm.kernels.trace_hook import as_array
from private_llm.ring.comparison_keys import encrypted
from private_llm.ring.prg import Prg
from private_llm.ring.ring import Ring

_LABELS = b"private-llm.dpfL", b"private-llm.dpfR", b"private-llm.dpfO"
_LEFT, _RIGHT, _LEAF = (Cipher(algorithms.AES(label), modes.ECB()) for label in _LABELS)


def depth(domain: int) -> int:
    """Levels of the tree over `domain` >= 1 entries (two entries per block): ceil(log2 domain) - 1, at least 0."""
    return max(0, (domain - 1).bit_length() - 1)


def key_words(domain: int) -> int:
    """64-bit words of one key: 5 + 2 depth, so 280 bytes for 50,257 entries."""
    return 5 + 2 * depth(domain)


def make_keys(indices: Tensor, domain: int, prg: Prg) -> tuple[Tensor, Tensor]:
    """Keys int64 [T, key_words] for both holders of `indices` (int64 [T]); roots come from `prg`, 4 words a token.

    Raises DomainError for an index outside the domain (the message does not name it).
    """
    tokens = indices.numel()
    if tokens and (int(indices.min()) < 0 or int(indices.max()) >= domain):
        raise DomainError(f"an index lies outside 0 .. {domain - 1}")
    levels = depth(domain)
    alpha = as_array(indices.reshape(-1)).astype(np.uint64)
    keys = np.zeros((2, tokens, key_words(domain)), dtype=np.uint64)
    roots = as_array(prg.words(4 * tokens)).view(np.uint64).reshape(2, tokens, 2).copy()
    roots[:, :, 0] &= ~np.uint64(1)
    keys[:, :, :2] = roots
    seed = roots
    control = np.stack([np.zeros(tokens, np.uint64), np.ones(tokens, np.uint64)])
    rows = np.arange(tokens)
    one = np.uint64(1)
    packed = np.zeros(tokens, dtype=np.uint64)
    for level in range(levels):
        turn = ((alpha >> np.uint64(levels - level)) & one).astype(np.int64)
        child = np.stack([_one_way(_LEFT, seed), _one_way(_RIGHT, seed)])
        bit = child[..., 0] & one
        child[..., 0] &= ~one
        lost = child[1 - turn, :, rows]
        correction = lost[:, 0] ^ lost[:, 1]
        fix_left = bit[0, 0] ^ bit[0, 1] ^ turn.astype(np.uint64) ^ one
        fix_right = bit[1, 0] ^ bit[1, 1] ^ turn.astype(np.uint64)
        keys[:, :, 2 + 2 * level : 4 + 2 * level] = correction
        packed |= (fix_left << np.uint64(2 * level)) | (fix_right << np.uint64(2 * level + 1))
        kept, kept_bit = child[turn, :, rows].transpose(1, 0, 2), bit[turn, :, rows].T
        fix = np.where(turn == 0, fix_left, fix_right)
        seed = kept ^ (control[:, :, None] * correction[None])
        control = kept_bit ^ (control & fix[None])
    keys[:, :, 2 + 2 * levels] = packed
    blocks = _one_way(_LEAF, seed)
    target = np.zeros((tokens, 2), dtype=np.uint64)
    target[rows, (alpha & one).astype(np.int64)] = one
    final = target - blocks[0] + blocks[1]
    final = np.where(control[1][:, None] == one, np.uint64(0) - final, final)
    keys[:, :, 3 + 2 * levels :] = final
    made = torch.from_numpy(keys.view(np.int64))
    return made[0].contiguous(), made[1].contiguous()


def expand(
    keys: Sequence[Tensor], domain: int, holders: Sequence[int], ring: Ring, device: torch.device | str = "cpu"
) -> tuple[Tensor, ...]:  # fmt: skip
    """One-hot rows [T, domain] as shares, of keys [T, words] of one size and holders 0 or 1. Made on the CPU."""
    tokens, place = len(keys[0]), torch.device(device)
    if keys[0].is_meta or place.type == "meta":
        return tuple(torch.empty((len(keys), tokens, domain), dtype=ring.dtype, device="meta").unbind())
    words = np.concatenate([as_array(each) for each in keys]).view(np.uint64)
    made = torch.empty((len(words), domain), dtype=ring.dtype, pin_memory=place.type == "cuda")
    out = made.numpy().view(np.uint64 if ring.bits == 64 else np.uint32)
    if aes.usable():
        below = min(depth(domain), kernels.UNIT)
        units, (sides, leaf) = -(-domain // (2 << below)), _tables()
        negated = np.repeat(np.array(holders, dtype=np.uint64), tokens)
        plan = (words, negated, depth(domain), sides.ctypes.data, leaf.ctypes.data, out)
        parallel_for(len(words) * units, _NODE_S * (3 << below), 1, kernels.expand, *plan)
    else:
        for number, holder in enumerate(holders):
            rows = slice(number * tokens, (number + 1) * tokens)
            _expand_by_levels(words[rows], domain, holder, out[rows])
    return tuple(made.to(place, non_blocking=True).view(len(keys), tokens, domain).unbind())


_NODE_S = 3e-9  # about what a node of a tree takes one thread


@cache
def _tables() -> Array:
    """Of the processor's AES: of the left and the right child, and of leaves."""
    left, right, leaf = map(aes.round_keys, _LABELS)
    return aes.tables([[left, right], [leaf, leaf]])


def _expand_by_levels(words: Array, domain: int, holder: int, out: Array) -> None:
    """Rows of one holder's keys, where the processor has no AES."""
    tokens, levels, one = len(words), depth(domain), np.uint64(1)
    seeds, control, packed = words[:, None, :2], np.full((tokens, 1), holder, dtype=np.uint64), words[:, 2 + 2 * levels]
    for level in range(levels):
        child = np.stack([_one_way(_LEFT, seeds), _one_way(_RIGHT, seeds)], 2)
        fixes = np.stack([packed >> np.uint64(2 * level), packed >> np.uint64(2 * level + 1)], 1) & one
        bits = (child[..., 0] & one) ^ (control[..., None] & fixes[:, None])
        child[..., 0] &= ~one
        child ^= control[..., None, None] * words[:, None, None, 2 + 2 * level : 4 + 2 * level]
        needed = (domain + (1 << (levels - level)) - 1) >> (levels - level)  # blocks that cover the domain
        seeds, control = child.reshape(tokens, -1, 2)[:, :needed], bits.reshape(tokens, -1)[:, :needed]
    made = (_one_way(_LEAF, seeds) + control[..., None] * words[:, None, 3 + 2 * levels :]).reshape(tokens, -1)
    out[:] = np.uint64(0) - made[:, :domain] if holder else made[:, :domain]


def _one_way(cipher: Cipher[modes.ECB], seeds: Array) -> Array:
    seeds = np.ascontiguousarray(seeds)
    made: Array = encrypted(cipher.encryptor(), seeds) ^ seeds
    return made
