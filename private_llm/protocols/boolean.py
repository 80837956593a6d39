"""The interface of comparisons and bits: sign bits of ring elements, gates, and the way between bits and numbers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from torch import Tensor

from private_llm.protocols.party_end import PartyEnd
from private_llm.protocols.share import BitShare, Share

Weights = Sequence[int | Tensor]
"""Public ring constants: one per bit row, an int or a tensor broadcastable to the shape."""


class Boolean(PartyEnd):
    """Bits are shared bitwise, 64 elements a word (`BitShare`)."""

    @abstractmethod
    def msb(self, x: Share, offsets: Sequence[int] = (0,), bits: int | None = None, low: int = 0) -> BitShare:
        """Rows of sign bits: row k is [x + offsets[k] < 0], for x flattened.

        `bits=b` promises -2^(b-1) <= x + offset < 2^(b-1) and uses a shorter adder; default: full ring.
        `low=d` leaves the d lowest positions out of the adder: where 0 <= x + offset < 2^d the bit may be 1
        (and the range starts at -2^(b-1) + 2^d).
        """

    @abstractmethod
    def inject(self, bits: BitShare, x: Share | None, weights: Weights, constants: Weights, shift: int = 0) -> Share:
        """sum over rows k of bit_k * (weights[k] * x + constants[k]), divided by 2^shift.

        `x` is flattened to [count]; with `x=None` the weights are ignored (bit to arithmetic). Result is 1-D [count].
        """

    @abstractmethod
    def xor(self, x: BitShare, y: BitShare) -> BitShare:
        """Bitwise exclusive or. Local."""

    @abstractmethod
    def invert(self, x: BitShare) -> BitShare:
        """Bitwise not. Local."""

    @abstractmethod
    def and_(self, x: BitShare, y: BitShare) -> BitShare:
        """Bitwise and, rows by rows."""

    @abstractmethod
    def a2b(self, x: Share) -> BitShare:
        """All bits of x (flattened): row i holds bit i, least significant first."""
