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
class Narrow:
    """How many of the lowest bits are right of x, which they hold: |x| < 2^(given-2), and are wanted of x / 2^shift.

    Where no more than given - shift bits are wanted, x may be any number modulo 2^given.
    """

    given: int
    wanted: int

    def fields(self, shift: int) -> int:
        """Bits above those that a division leaves right by itself: with none, its second exchange goes."""
        return max(0, self.wanted - self.given + shift)

    def check(self, ring: Ring, shift: int) -> None:
        """Raise DomainError for bits that the ring does not have, and for a shift that leaves none."""
        if not (0 <= shift <= self.given - 3 and 3 <= self.given <= ring.bits and 1 <= self.wanted <= ring.bits):
            raise DomainError(
                f"narrow: got a division by 2^{shift} of {self.given} bits that leaves {self.wanted}; want a shift "
                f"from 0 to the bits given less 3, and bits of the ring ({ring.bits})"
            )
