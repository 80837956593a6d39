"""Rows of different public lengths in one flat tensor: what causal masks and padding leave of a score matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from private_llm.errors import DomainError
from private_llm.protocols.share import Share
from private_llm.tensor.fixed import Fixed


@dataclass(frozen=True)
class Rows:
    """Row r holds lengths[r] >= 0 consecutive entries; all lengths are public. Everything here is local.

    batch: how many of the rows each row of a batch has, where that is known. Raises DomainError for a negative length.
    """

    lengths: tuple[int, ...]
    batch: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if any(n < 0 for n in self.lengths):
            raise DomainError("rows: a length is negative")

    @classmethod
    def of(cls, lengths: Tensor | Sequence[int], batch: tuple[int, ...] = ()) -> Rows:
        """From a tensor or sequence of lengths; empty rows are dropped."""
        numbers = lengths.tolist() if isinstance(lengths, Tensor) else lengths
        return cls(tuple(n for n in numbers if n), batch)

    @property
    def count(self) -> int:
        """Number of rows."""
        return len(self.lengths)

    @cached_property
    def total(self) -> int:
        """Number of entries."""
        return sum(self.lengths)

    @cached_property
    def longest(self) -> int:
        """Length of the longest row."""
        return max(self.lengths, default=0)

    def numbers(self, device: torch.device) -> EntryNumbers:
        """Of rows and entries, on a device, where they stay as long as these rows live."""
        found = self._numbers.get(device)
        if found is None:
            found = self._numbers[device] = EntryNumbers(self.lengths, self.total, device)
        return found

    @cached_property
    def _numbers(self) -> dict[torch.device, EntryNumbers]:
        return {}

    @cached_property
    def halved(self) -> Rows:
        """What a level of a tournament leaves of every row."""
        return Rows(tuple((n + 1) // 2 for n in self.lengths))

    @cached_property
    def longer(self) -> Rows:
        """Every row with one entry more."""
        return Rows(tuple(n + 1 for n in self.lengths))

    def check(self, x: Fixed) -> None:
        """Raise DomainError unless x is flat and as long as all rows together."""
        if tuple(x.shape) != (self.total,):
            raise DomainError(f"rows of {self.total} entries in sum: got a tensor of shape {tuple(x.shape)}")

    def sum(self, x: Fixed) -> Fixed:
        """x [total] to row sums [count], same fractional bits."""
        return x.view(
            lambda part: part.new_zeros(self.count).index_add(0, self.numbers(part.device).row_of_entry, part)
        )

    def spread(self, x: Fixed) -> Fixed:
        """x [count] to one copy per entry, [total]."""
        return x.view(lambda part: part.index_select(0, self.numbers(part.device).row_of_entry))

    def append(self, x: Fixed, last: Fixed) -> Fixed:
        """x [total] with one more entry at each row's end, of `last` [count], of equal fractional bits: `longer`."""
        pairs = zip(x.share.parts, last.share.parts, strict=True)
        both = Share(tuple(torch.cat(pair)[self.numbers(pair[0].device).appended] for pair in pairs))
        return x.min_width_with(last).with_share(both)

    def without_last(self, x: Fixed) -> Fixed:
        """Entries of `longer` to those of these rows, [total]."""
        return x.view(lambda part: part.index_select(0, self.numbers(part.device).kept))


@dataclass(frozen=True, eq=False)
class TournamentLevel:
    """A level of a tournament of each row, int64 positions: who meets (left, right), who waits (bye), next order."""

    left: Tensor
    right: Tensor
    bye: Tensor
    order: Tensor


class EntryNumbers:
    """Public numbers of rows and of their entries, int64. As many as entries, so they are made where they are used."""

    def __init__(self, lengths: tuple[int, ...], total: int, device: torch.device) -> None:
        self._lengths, self._total, self._device = lengths, total, device

    @cached_property
    def lengths(self) -> Tensor:
        """Of the rows, [count]."""
        return torch.tensor(self._lengths, dtype=torch.int64).to(self._device)

    @cached_property
    def row_of_entry(self) -> Tensor:
        """The row of each entry, [total]."""
        return torch.repeat_interleave(self.lengths, output_size=self._total)

    @cached_property
    def kept(self) -> Tensor:
        """Where the entries of these rows are in those of `longer`, whose last ones are left out: [total]."""
        return torch.arange(self._total, device=self._device) + self.row_of_entry

    @cached_property
    def appended(self) -> Tensor:
        """Where each entry of `longer` is in all entries followed by one for each row: [total + count]."""
        total, count = self._total, len(self._lengths)
        every, order = torch.arange(total + count, device=self._device), self.lengths.new_empty(total + count)
        order[self.kept] = every[:total]
        order[(self.lengths + 1).cumsum(0) - 1] = every[total:]
        return order

    def square(self, levels: int, longest: int) -> Tensor:
        """Positions of what `levels` levels of the tournament leave, `longest` a row: [count, longest].

        Shorter rows have copies of their last entry.
        """
        found = self._squares.get(levels)
        if found is None:
            lengths = ((self.lengths + (1 << levels) - 1) >> levels).unsqueeze(-1)
            here = torch.arange(longest, device=self._device).minimum(lengths - 1)
            found = self._squares[levels] = lengths.cumsum(0) - lengths + here
        return found

    @cached_property
    def _squares(self) -> dict[int, Tensor]:
        return {}

    @cached_property
    def tournament(self) -> tuple[TournamentLevel, ...]:
        """ceil(log2 of the longest) levels; 32 bytes an entry. Positions are counted on the CPU: nobody waits."""
        made, lengths, known = [], self.lengths, torch.tensor(self._lengths, dtype=torch.int64)
        while known.numel() and int(known.max()) > 1:
            pairs, left_over = int((known // 2).sum()), int((known % 2).sum())
            halves, odd = lengths // 2, lengths % 2
            starts = lengths.cumsum(0) - lengths
            left = torch.repeat_interleave(starts, halves, output_size=pairs) + _counting(halves, pairs)
            right = left + torch.repeat_interleave(halves, halves, output_size=pairs)
            bye = torch.repeat_interleave(starts + lengths - 1, odd, output_size=left_over)
            # Winners come first, then those that sat out: entry k of a row is its k-th winner, or its odd one.
            rest = halves + odd
            winners = halves.cumsum(0) - halves
            byes = pairs + odd.cumsum(0) - odd
            place = _counting(rest, pairs + left_over)
            every = [torch.repeat_interleave(x, rest, output_size=pairs + left_over) for x in (halves, byes, winners)]
            order = torch.where(place == every[0], every[1], every[2] + place)
            made.append(TournamentLevel(left, right, bye, order))
            lengths, known = rest, known // 2 + known % 2
        return tuple(made)


def _counting(lengths: Tensor, total: int) -> Tensor:
    """0 .. n-1 for each n of `lengths`, one after the other; total: their sum."""
    starts = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths, output_size=total)
    return torch.arange(total, device=lengths.device) - starts
