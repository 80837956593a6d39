"""The parties' local parts of sums of waves and of exponentials: on CPUs by kernels, elsewhere by PyTorch.

Elements are int64 [n]; secrets of waves are packed fields, cosines and sines of one wave after the other
(`Waves.words`). For an exponential a number is cut into a digit (0 or 1) and the upper and lower half of the rest
(`Digits`), whose factors are in tables; flags are packed bits [1, ceil(n / 64)], rows [4, n]: 2 digit + flag.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from private_llm.kernels import ops
from private_llm.kernels.devices import held_on
from private_llm.kernels.fields.cpu import BLOCK
from private_llm.kernels.ops import packed_words
from private_llm.kernels.parallel import addresses, parallel_for
from private_llm.kernels.waves import cpu

_WAVE_S = 4e-9  # about what one thread takes for an element of one wave

Integers = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


class WaveTables(Protocol):
    """What the kernels read of `protocols.one_step.Waves`."""

    @property
    def table(self) -> Integers:
        """By wave, of frequencies 1, 2, ...: factors of cosine and sine, secret bits, width. [waves, 4]"""

    @property
    def sizes(self) -> Integers:
        """Bits of an angle, of a place, of its lower half, of table entries, most of secrets. [5]"""

    @property
    def shift(self) -> int:
        """Bits that are divided off."""

    @property
    def narrow(self) -> int:
        """Bits that are left."""

    @property
    def above(self) -> int:
        """Bits above those that are wanted, too."""

    @property
    def first(self) -> int:
        """What the first evaluator adds."""


def hidden(mask: Tensor, drawn: Tensor, plan: WaveTables, turns: Tensor) -> Tensor:
    """Party 0's message: the secret numbers of masks [n] less the fields of `drawn`, like `drawn`."""
    message = torch.zeros_like(drawn)
    if mask.is_cpu:
        table = turns.view(-1).numpy()
        given = (*addresses(mask, drawn, message), mask.numel(), plan.table, plan.sizes, table, drawn.numel())
        parallel_for(mask.numel(), len(plan.table) * _WAVE_S, BLOCK, cpu.hidden, *given)
    elif not mask.is_meta:
        message = hidden_by_operations(mask, drawn, plan, turns)
    return message


def summed(masked: Tensor, shares: Tensor, plan: WaveTables, turns: Tensor, first: bool) -> Tensor:
    """An evaluator's piece [n] of the sum, right in the bits that are sent."""
    piece, more = torch.empty_like(masked), plan.first if first else 0
    if masked.is_cpu:
        count, table = masked.numel(), turns.view(-1).numpy()
        given = (*addresses(masked, shares, piece), shares.numel(), count, plan.table, plan.sizes, table, more)
        parallel_for(count, len(plan.table) * _WAVE_S, BLOCK, cpu.summed, *given)
    elif not masked.is_meta:
        piece = summed_by_operations(masked, shares, plan, turns, more)
    return piece


def wraps(g1: Tensor, g2: Tensor, drawn: Tensor, plan: WaveTables) -> Tensor:
    """Party 0's message: what masks [n] wrap by, where the upper bit opened is 0 and where it is 1, less `drawn`."""
    message = torch.zeros_like(drawn) if drawn.is_cuda else torch.empty_like(drawn)
    operands, made = (g1, g2, *drawn.view(2, -1)), tuple(message.view(2, -1))
    ops.field_step("wraps", operands, (plan.shift, plan.narrow, (1 << plan.narrow) - 1), plan.above, made)
    return message


def widened(opened: Tensor, g: Tensor, shares: Tensor, plan: WaveTables, first: bool, piece: Tensor) -> None:
    """Subtract from piece [n] an evaluator's share of the value that `opened` [n] is masked."""
    numbers = (plan.shift, plan.narrow, (1 << plan.narrow) - 1, int(first))
    ops.field_step("widened", (opened, g, *shares.view(2, -1)), numbers, plan.above, (piece,))


# -- on any device ----------------------------------------------------------------------------------------------------
def hidden_by_operations(mask: Tensor, drawn: Tensor, plan: WaveTables, turns: Tensor) -> Tensor:
    """`hidden` on any device."""
    made, bits = [], int(plan.sizes[3])
    rows = _rows(drawn, mask.numel(), plan)
    for numbers, wave, fields in zip(_turned(mask, plan, turns), plan.table.tolist(), rows, strict=False):
        _, _, own, width = wave
        for number, packed in zip(numbers, fields, strict=True):
            value = (number + (1 << (bits - own - 1))) >> (bits - own)
            made.append(ops.pack_fields(value - ops.unpack_fields(packed, mask.numel(), width), width))
    return torch.cat(made)


def summed_by_operations(masked: Tensor, shares: Tensor, plan: WaveTables, turns: Tensor, more: int) -> Tensor:
    """`summed` on any device; more: what is added."""
    piece, count, bits = torch.full_like(masked, more), masked.numel(), int(plan.sizes[3])
    rounding, rows = 1 << (bits - 1), _rows(shares, count, plan)
    for (c, s), wave, (first, second) in zip(_turned(masked, plan, turns), plan.table.tolist(), rows, strict=False):
        even, odd, own, width = wave
        left, right = (even * c + odd * s + rounding) >> bits, (even * s - odd * c + rounding) >> bits
        cosines, sines = (ops.unpack_fields(packed, count, width) for packed in (first, second))
        piece += (left * cosines + right * sines) << (int(plan.sizes[4]) - own)
    return piece


def _rows(words: Tensor, count: int, plan: WaveTables) -> list[tuple[Tensor, Tensor]]:
    """The packed fields of each wave's cosines and sines."""
    sizes = [packed_words(count, int(width)) for width in plan.table[:, 3] for _ in range(2)]
    pieces = words.split_with_sizes(sizes)
    return list(zip(pieces[::2], pieces[1::2], strict=True))


def _turned(values: Tensor, plan: WaveTables, turns: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Cosines and sines of the angles, of twice the angles, and so on."""
    angle, phase, half, bits = plan.sizes[:4].tolist()
    place = values << (phase - angle)
    if angle > phase:
        place = (values + (1 << (angle - phase - 1))) >> (angle - phase)
    upper, lower = (place >> half) & ((1 << half) - 1), place & ((1 << half) - 1)
    c, s, d, t = (row[at] for row, at in zip(held_on(turns, place.device), (upper, upper, lower, lower), strict=True))
    rounding = 1 << (bits - 1)
    first = (c * d - s * t + rounding) >> bits
    newest, before = (first, (s * d + c * t + rounding) >> bits), (1 << bits, 0)
    while True:
        yield newest
        following = [((first * x + rounding // 2) >> (bits - 1)) - y for x, y in zip(newest, before, strict=True)]
        newest, before = (following[0], following[1]), newest


# -- exponentials -----------------------------------------------------------------------------------------------------
_ELEMENT_S = 4e-9  # about what an element takes on one thread
_STEP = 64  # threads take multiples of so many elements: whole words of flags
_ENTRIES = 1 << 16  # elements that PyTorch looks up at once, so that what lies between stays in the cache


@dataclass(frozen=True)
class Digits:
    """How a number is cut: bits that are dropped, of the rest, and of its lower half."""

    dropped: int
    rest: int
    fine: int

    @cached_property
    def words(self) -> Integers:
        """As the kernels take it."""
        return np.array([self.dropped, self.rest, self.fine], np.int64)

    def of(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Which sixteen, and the upper and lower half of the rest."""
        low = values >> self.dropped
        rest = low & ((1 << self.rest) - 1)
        return (low >> self.rest) & 1, rest >> self.fine, rest & ((1 << self.fine) - 1)


@dataclass(frozen=True)
class Factors:
    """The public side: entries where the mask has the same digit, the other one, the lower half; bits rounded off."""

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
        plans = (digits.words, *tables, factors.near_bits, factors.far_bits)
        given = (*addresses(masked, keep, shares, piece), piece.numel(), *plans)
        parallel_for(piece.numel(), _ELEMENT_S, _STEP, cpu.weighed, *given)
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
        plans = (digits.words, secrets.coarse.numpy(), secrets.fine.numpy(), secrets.shift)
        given = (*addresses(mask, kept, message), mask.numel(), *plans)
        parallel_for(mask.numel(), _ELEMENT_S, _STEP, cpu.placed, *given)
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
