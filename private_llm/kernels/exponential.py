"""The parties' local parts of an exponential: on CPUs by a kernel, elsewhere by PyTorch.

A number is cut into a digit (0 or 1) and the upper and lower half of the rest (`Digits`), whose factors are in tables.
Elements are int64 [n], flags packed bits [1, ceil(n / 64)], rows [4, n]: 2 digit + flag.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from private_llm.kernels.address import addresses
from private_llm.kernels.backends.cpu import exponential as cpu
from private_llm.kernels.devices import held_on
from private_llm.kernels.parallel import parallel_for

_ELEMENT_S = 4e-9
"""About what an element takes on one thread."""
_STEP = 64
"""Threads take multiples of so many elements: whole words of flags."""
_ENTRIES = 1 << 16
"""Elements that PyTorch looks up at once, so that what lies between stays in the cache."""


@dataclass(frozen=True)
class Digits:
    """How a number is cut: bits that are dropped, of the rest, and of its lower half."""

    dropped: int
    rest: int
    fine: int

    @cached_property
    def words(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """As the kernels take it."""
        return np.array([self.dropped, self.rest, self.fine], np.int64)

    def of(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Which sixteen, and the upper and lower half of the rest."""
        low = values >> self.dropped
        rest = low & ((1 << self.rest) - 1)
        return (low >> self.rest) & 1, rest >> self.fine, rest & ((1 << self.fine) - 1)


@dataclass(frozen=True)
class Factors:
    """The public side: entries where the mask has the same digit, where it has the other one, and of the lower half;
    bits that a product with either loses, rounded.
    """

    near: Tensor
    far: Tensor
    fine: Tensor
    near_bits: int
    far_bits: int


@dataclass(frozen=True)
class Secrets:
    """The secret side: entries of the upper and of the lower half; bits that their product loses, rounded."""

    coarse: Tensor
    fine: Tensor
    shift: int


def weighed(masked: Tensor, keep: Tensor, shares: Tensor, digits: Digits, factors: Factors) -> Tensor:
    """An evaluator's piece [n]: of the shares [4, n] that `keep` points at, each times its digit's factor."""
    piece = torch.empty_like(masked)
    if piece.is_cpu:
        tables = [table.numpy() for table in (factors.near, factors.far, factors.fine)]
        parallel_for(
            piece.numel(), _ELEMENT_S, _STEP, cpu.weighed, *addresses(masked, keep, shares), piece.numel(),
            digits.words, *tables, factors.near_bits, factors.far_bits, *addresses(piece)
        )  # fmt: skip
    elif not piece.is_meta:
        weighed_by_operations(masked, keep, shares, digits, factors, piece)
    return piece


def weighed_by_operations(
    masked: Tensor, keep: Tensor, shares: Tensor, digits: Digits, factors: Factors, piece: Tensor
) -> None:  # fmt: skip
    """`weighed` on any device."""
    flags = _flags(keep, piece.numel()).bool()
    for at in range(0, piece.numel(), _ENTRIES):
        some = slice(at, at + _ENTRIES)
        zero, one = public_factors(masked[some], digits, factors)
        first, second = (torch.where(flags[some], shares[row, some], shares[row + 1, some]) for row in (0, 2))
        piece[some] = zero * first + one * second


def placed(mask: Tensor, kept: Tensor, message: Tensor, digits: Digits, secrets: Secrets) -> None:
    """Add the secret number of each mask [n] to its row of the message [4, n]."""
    if mask.is_cpu:
        tables = [secrets.coarse.numpy(), secrets.fine.numpy()]
        operands = addresses(mask, kept)
        parallel_for(
            mask.numel(), _ELEMENT_S, _STEP, cpu.placed, *operands, mask.numel(), digits.words, *tables, secrets.shift,
            *addresses(message)
        )  # fmt: skip
    elif not mask.is_meta:
        placed_by_operations(mask, kept, message, digits, secrets)


def placed_by_operations(mask: Tensor, kept: Tensor, message: Tensor, digits: Digits, secrets: Secrets) -> None:
    """`placed` on any device."""
    flags = _flags(kept, mask.numel())
    for at in range(0, mask.numel(), _ENTRIES):
        some = slice(at, at + _ENTRIES)
        digit, value = secret_numbers(mask[some], digits, secrets)
        message[:, some].scatter_add_(0, (2 * digit + flags[some])[None], value[None])


def public_factors(masked: Tensor, digits: Digits, factors: Factors) -> tuple[Tensor, Tensor]:
    """(for a mask whose digit is 0, for one whose digit is 1): int64 [n]."""
    digit, upper, lower = digits.of(masked)
    near, far, fine = (held_on(table, masked.device) for table in (factors.near, factors.far, factors.fine))
    scale, zero = fine[lower], digit == 0
    same, other = (
        (coarse[upper] * scale + (1 << (bits - 1))) >> bits
        for coarse, bits in ((near, factors.near_bits), (far, factors.far_bits))
    )
    return torch.where(zero, same, other), torch.where(zero, other, same)


def secret_numbers(mask: Tensor, digits: Digits, secrets: Secrets) -> tuple[Tensor, Tensor]:
    """(digit, number): int64 [n]."""
    digit, upper, lower = digits.of(mask)
    coarse, fine = held_on(secrets.coarse, mask.device), held_on(secrets.fine, mask.device)
    return digit, (coarse[upper] * fine[lower] + (1 << (secrets.shift - 1))) >> secrets.shift


def _flags(words: Tensor, count: int) -> Tensor:
    """Bits [1, W] as numbers 0 and 1: [count]."""
    places = torch.arange(64, device=words.device)
    return ((words.reshape(-1, 1) >> places) & 1).view(-1)[:count]
