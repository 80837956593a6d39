"""Rows of different public lengths in one flat tensor: what causal masks and padding leave of a score matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from private_llm.errors import DomainError
from private_llm.tensor.fixed import Fixed


@dataclass(frozen=True)
class Rows:
    """Row r holds lengths[r] >= 0 consecutive entries; all lengths are public. Everything here is local.

    Raises DomainError for a negative length.
    """

    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        if any(n < 0 for n in self.lengths):
            raise DomainError("rows: a length is negative")

    @classmethod
    def of(cls, lengths: Tensor | Sequence[int]) -> Rows:
        """From a tensor or sequence of lengths; empty rows are dropped."""
        numbers = lengths.tolist() if isinstance(lengths, Tensor) else lengths
        return cls(tuple(n for n in numbers if n))

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

    def check(self, x: Fixed) -> None:
        """Raise DomainError unless x is flat and as long as all rows together."""
        if tuple(x.shape) != (self.total,):
            raise DomainError(f"rows of {self.total} entries in sum: got a tensor of shape {tuple(x.shape)}")

    def sum(self, x: Fixed) -> Fixed:
        """x [total] to row sums [count], same fractional bits."""

        def add_up(part: Tensor) -> Tensor:
            zero = torch.zeros(self.count, dtype=part.dtype, device=part.device)
            return zero.index_add(0, self.row_of_entry.to(part.device), part)

        return x.view(add_up)

    def spread(self, x: Fixed) -> Fixed:
        """x [count] to one copy per entry, [total]."""
        return x.view(lambda part: part.index_select(0, self.row_of_entry.to(part.device)))
