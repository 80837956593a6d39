"""What one party holds of secret values: ring components (`Share`) and bitsliced words (`BitShare`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Share:
    """This party's components of a ring tensor; all parts have the logical shape. `repr` shows no values.

    One part under plain (two in debug sessions), two under trio and dealer, three under quad; int64 or int32.
    """

    parts: tuple[Tensor, ...]

    @property
    def shape(self) -> torch.Size:
        """The logical shape (public)."""
        return self.parts[0].shape

    def numel(self) -> int:
        """Number of elements (public)."""
        return self.parts[0].numel()

    def map(self, linear: Callable[[Tensor], Tensor]) -> Share:
        """Apply a linear or reordering function to every part, which may change the shape: a local operation."""
        return Share(tuple(map(linear, self.parts)))

    def __repr__(self) -> str:
        return f"Share(shape={tuple(self.shape)}, parts={len(self.parts)})"


@dataclass(frozen=True, slots=True)
class BitShare:
    """This party's components of secret bits: int64 words [rows, words]; lane j of word i is element 64*i+j.

    `rows` counts bit vectors (for instance thresholds); `count` is the number of elements of each;
    lanes beyond `count` in the last word are unspecified.
    """

    parts: tuple[Tensor, ...]
    count: int

    @property
    def rows(self) -> int:
        """Number of bit vectors."""
        return int(self.parts[0].shape[0])

    def row(self, index: int) -> BitShare:
        """One bit vector, as a share of one row. Local."""
        return self.some(index, 1)

    def some(self, start: int, rows: int) -> BitShare:
        """Bit vectors start .. start + rows - 1, as views. Local."""
        return BitShare(tuple(part[start : start + rows] for part in self.parts), self.count)

    def __repr__(self) -> str:
        return f"BitShare(rows={self.rows}, count={self.count})"


@dataclass(frozen=True, slots=True)
class Index:
    """This party's hold on `count` secret indices below the public `domain`.

    `keys`: of point functions (int64 [count, words] each: two in trio, four in quad), or with `one_hot` the parts of
    shared one-hot rows [count, domain], or the indices [count] under `plain`.
    """

    keys: tuple[Tensor, ...]
    count: int
    domain: int
    one_hot: bool = False

    def to(self, device: torch.device) -> Index:
        """The same with its keys on another device. Local."""
        return replace(self, keys=tuple(key.to(device) for key in self.keys))

    def __repr__(self) -> str:
        return f"Index(count={self.count}, domain={self.domain})"


def cleartext(elements: Tensor, watched: bool = False) -> Share:
    """The share of `plain`: the elements themselves; if `watched` (debug_ranges), and real numbers that never wrap.

    Every local step does the same to both, so they differ by a multiple of the ring's size as soon as one wraps.
    Single precision is enough to tell that.
    """
    return Share((elements, elements.to(torch.float32))) if watched else Share((elements,))


def words_for(count: int) -> int:
    """64-bit words that hold one bit per element: ceil(count / 64)."""
    return (count + 63) // 64
