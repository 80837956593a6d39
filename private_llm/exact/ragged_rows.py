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

    @cached_property
    def row_of_entry(self) -> Tensor:
        """int64 [total]: the row of each entry."""
        return torch.repeat_interleave(torch.arange(self.count), torch.tensor(self.lengths, dtype=torch.int64))

    @cached_property
    def halved(self) -> Rows:
        """What a level of a tournament leaves of every row."""
        return Rows(tuple((n + 1) // 2 for n in self.lengths))

    @cached_property
    def longer(self) -> Rows:
        """Every row with one entry more."""
        return Rows(tuple(n + 1 for n in self.lengths))

    @cached_property
    def kept(self) -> Tensor:
        """int64 [total]: where the entries of these rows are in those of `longer`, whose last ones are left out."""
        return torch.arange(self.total) + self.row_of_entry

    @cached_property
    def appended(self) -> Tensor:
        """int64 [total + count]: where each entry of `longer` is in all entries followed by one for each row."""
        order = torch.empty(self.total + self.count, dtype=torch.int64)
        order[self.kept] = torch.arange(self.total)
        order[torch.tensor(self.longer.lengths, dtype=torch.int64).cumsum(0) - 1] = self.total + torch.arange(
            self.count
        )
        return order

    def check(self, x: Fixed) -> None:
        """Raise DomainError unless x is flat and as long as all rows together."""
        if tuple(x.shape) != (self.total,):
            raise DomainError(f"rows of {self.total} entries in sum: got a tensor of shape {tuple(x.shape)}")

    def sum(self, x: Fixed) -> Fixed:
        """x [total] to row sums [count], same fractional bits."""

        def add_up(part: Tensor) -> Tensor:
            if part.is_meta:
                return part.new_empty(self.count)
            zero = torch.zeros(self.count, dtype=part.dtype, device=part.device)
            return zero.index_add(0, self.row_of_entry.to(part.device), part)

        return x.view(add_up)

    def spread(self, x: Fixed) -> Fixed:
        """x [count] to one copy per entry, [total]."""

        def copied(part: Tensor) -> Tensor:
            return (
                part.new_empty(self.total) if part.is_meta else part.index_select(0, self.row_of_entry.to(part.device))
            )

        return x.view(copied)

    def append(self, x: Fixed, last: Fixed) -> Fixed:
        """x [total] with one more entry at the end of each row, of `last` [count], as entries of `longer`.

        Both have the same fractional bits.
        """
        pairs = zip(x.share.parts, last.share.parts, strict=True)
        both = Share(tuple(torch.cat(pair)[self.appended.to(pair[0].device)] for pair in pairs))
        return x.min_width_with(last).with_share(both)

    def without_last(self, x: Fixed) -> Fixed:
        """Entries of `longer` to those of these rows, [total]."""
        return x.view(lambda part: part.index_select(0, self.kept.to(part.device)))
