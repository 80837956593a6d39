"""Products and quotients of which only the lowest bits are right, because nobody reads the others.

A quotient by 2^f that is read modulo 2^r need not be right above, and a product below 2^(k-2) in absolute value is the
same number modulo 2^k: under trio k bits are then opened instead of the ring's, and r bits are shared. Which r is
enough is told by who reads the result: a product below 2^(k-2) again wants k bits of its factors.
"""

from __future__ import annotations

from dataclasses import dataclass

from private_llm.errors import DomainError
from private_llm.ring.ring import Ring


@dataclass(frozen=True, slots=True)
class BitWidths:
    """How many of the lowest bits are right of x, which they hold: |x| < 2^(given-2), and are wanted of x / 2^shift.

    Where no more than given - shift bits are wanted, x may be any number modulo 2^given.
    """

    valid_in: int
    needed_out: int

    def fields(self, shift: int) -> int:
        """Bits above those that a division leaves right by itself: with none, its second exchange goes."""
        return max(0, self.needed_out - self.valid_in + shift)

    def check(self, ring: Ring, shift: int) -> None:
        """Raise DomainError for bits that the ring does not have, and for a shift that leaves none."""
        valid, needed, bits = self.valid_in, self.needed_out, ring.bits
        if not (0 <= shift <= valid - 3 and 3 <= valid <= bits and 1 <= needed <= bits):
            raise DomainError(
                f"bit widths: got a division by 2^{shift} of {valid} bits of which {needed} are needed; want a shift "
                f"from 0 to the valid bits less 3, and at most the {bits} bits of the ring"
            )
