"""The parties' local parts of a sum of waves: on CPUs by a kernel, elsewhere by PyTorch.

Elements are int64 [n]; secrets are packed fields, cosines and sines of one wave after the other (`Waves.words`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from private_llm.kernels import ops
from private_llm.kernels.address import addresses
from private_llm.kernels.backends.cpu import waves as cpu
from private_llm.kernels.backends.cpu.trunc import BLOCK
from private_llm.kernels.devices import held_on
from private_llm.kernels.parallel import parallel_for
from private_llm.kernels.shapes import packed_words

_WAVE_S, _WRAP_S = 4e-9, 3e-9
"""About what one thread takes for an element: of one wave, of what is wrapped by."""

Integers = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


class Plan(Protocol):
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


def hidden(mask: Tensor, drawn: Tensor, plan: Plan, turns: Tensor) -> Tensor:
    """Party 0's message: the secret numbers of masks [n] less the fields of `drawn`, like `drawn`."""
    message = torch.zeros_like(drawn)
    if mask.is_cpu:
        (masks,), (fields, made) = addresses(mask), addresses(drawn, message)
        table = turns.view(-1).numpy()
        parallel_for(
            mask.numel(), len(plan.table) * _WAVE_S, BLOCK, cpu.hidden, masks, mask.numel(), plan.table, plan.sizes,
            table, fields, drawn.numel(), made
        )  # fmt: skip
    elif not mask.is_meta:
        message = hidden_by_operations(mask, drawn, plan, turns)
    return message


def summed(masked: Tensor, shares: Tensor, plan: Plan, turns: Tensor, first: bool) -> Tensor:
    """An evaluator's piece [n] of the sum, right in the bits that are sent."""
    piece, more = torch.empty_like(masked), plan.first if first else 0
    if masked.is_cpu:
        operands, made = addresses(masked, shares), addresses(piece)
        table = turns.view(-1).numpy()
        parallel_for(
            masked.numel(), len(plan.table) * _WAVE_S, BLOCK, cpu.summed, *operands, shares.numel(), masked.numel(),
            plan.table, plan.sizes, table, more, *made,
        )  # fmt: skip
    elif not masked.is_meta:
        piece = summed_by_operations(masked, shares, plan, turns, more)
    return piece


def wraps(g1: Tensor, g2: Tensor, drawn: Tensor, plan: Plan) -> Tensor:
    """Party 0's message: what masks [n] wrap by, where the upper bit opened is 0 and where it is 1, less `drawn`."""
    message = torch.zeros_like(drawn)
    if g1.is_cpu:
        masks, (fields, made) = addresses(g1, g2), addresses(drawn, message)
        parallel_for(
            g1.numel(), _WRAP_S, BLOCK, cpu.wraps, *masks, g1.numel(), plan.shift, plan.narrow, plan.above, fields,
            drawn.numel() // 2, made
        )  # fmt: skip
    elif not g1.is_meta:
        message = wraps_by_operations(g1, g2, drawn, plan)
    return message


def widened(opened: Tensor, g: Tensor, shares: Tensor, plan: Plan, first: bool, piece: Tensor) -> None:
    """Subtract from piece [n] an evaluator's share of the value that `opened` [n] is masked."""
    if piece.is_cpu:
        operands, made = addresses(opened, g, shares), addresses(piece)
        words = shares.numel() // 2
        parallel_for(
            piece.numel(), _WRAP_S, BLOCK, cpu.widened, *operands, words, piece.numel(), plan.shift, plan.narrow,
            plan.above, first, *made
        )  # fmt: skip
    elif not piece.is_meta:
        piece -= widened_by_operations(opened, g, shares, plan, first)


# -- on any device ----------------------------------------------------------------------------------------------------
def hidden_by_operations(mask: Tensor, drawn: Tensor, plan: Plan, turns: Tensor) -> Tensor:
    """`hidden` on any device."""
    made, bits = [], int(plan.sizes[3])
    rows = _rows(drawn, mask.numel(), plan)
    for numbers, wave, fields in zip(_turned(mask, plan, turns), plan.table.tolist(), rows, strict=False):
        _, _, own, width = wave
        for number, packed in zip(numbers, fields, strict=True):
            value = (number + (1 << (bits - own - 1))) >> (bits - own)
            made.append(ops.pack_fields(value - ops.unpack_fields(packed, mask.numel(), width), width))
    return torch.cat(made)


def summed_by_operations(masked: Tensor, shares: Tensor, plan: Plan, turns: Tensor, more: int) -> Tensor:
    """`summed` on any device; more: what is added."""
    piece, count, bits = torch.full_like(masked, more), masked.numel(), int(plan.sizes[3])
    rounding, rows = 1 << (bits - 1), _rows(shares, count, plan)
    for (c, s), wave, (first, second) in zip(_turned(masked, plan, turns), plan.table.tolist(), rows, strict=False):
        even, odd, own, width = wave
        left, right = (even * c + odd * s + rounding) >> bits, (even * s - odd * c + rounding) >> bits
        cosines, sines = (ops.unpack_fields(packed, count, width) for packed in (first, second))
        piece += (left * cosines + right * sines) << (int(plan.sizes[4]) - own)
    return piece


def wraps_by_operations(g1: Tensor, g2: Tensor, drawn: Tensor, plan: Plan) -> Tensor:
    """`wraps` on any device."""
    h = _kept(g1, plan) + _kept(g2, plan)
    over, top = h >> plan.narrow, (h >> (plan.narrow - 1)) & 1
    width, made = plan.above, []
    for value, fields in zip((over + top, over), drawn.view(2, -1), strict=True):
        made.append(ops.pack_fields(value - ops.unpack_fields(fields.contiguous(), len(h), width), width))
    return torch.cat(made)


def widened_by_operations(opened: Tensor, g: Tensor, shares: Tensor, plan: Plan, first: bool) -> Tensor:
    """What `widened` subtracts, on any device."""
    m, width = _kept(opened, plan), plan.above
    zeros, ones = (ops.unpack_fields(row.contiguous(), len(m), width) for row in shares.view(2, -1))
    wrap = torch.where((m >> (plan.narrow - 1)) == 1, ones, zeros)
    value = (wrap << plan.narrow) - _kept(g, plan)
    return value + m - (1 << (plan.narrow - 2)) if first else value


def _kept(values: Tensor, plan: Plan) -> Tensor:
    """The bits that a division leaves."""
    return (values >> plan.shift) & ((1 << plan.narrow) - 1)


def _rows(words: Tensor, count: int, plan: Plan) -> list[tuple[Tensor, Tensor]]:
    """The packed fields of each wave's cosines and sines."""
    sizes = [packed_words(count, int(width)) for width in plan.table[:, 3] for _ in range(2)]
    pieces = words.split_with_sizes(sizes)
    return list(zip(pieces[::2], pieces[1::2], strict=True))


def _turned(values: Tensor, plan: Plan, turns: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
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
