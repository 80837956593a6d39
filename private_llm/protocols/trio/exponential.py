"""Trio's exponentials in one step: the mask's side of e^(M - a) = e^M e^(-a) comes from party 0, in shares.

With the digits of `protocols.exponential`, bit b = B ^ l of what is kept, j the digit and r the rest of the mask a:

1. Party 0 shares four numbers: e^(-r) in the place 2 j + l, zero in the others. One share is drawn from its stream with
   party 1, the other one goes to party 2.
2. The evaluators know M and B. b = 1 means l = 1 - B, so the places 1 - B and 3 - B count; each is multiplied by the
   public factor of its digit. The sum is an additive share of b e^x, which one finish turns into a share.

Pre: 4 fields of GIVEN_BITS, and a division of as many bits (narrow.py); online as that: 2 rounds. Without a shift 4
elements and a finish. Leakage: none to a single party. Party 2 receives four numbers masked by a stream that it lacks,
all else is a finish or such a division.
"""

from __future__ import annotations

from torch import Tensor

from private_llm.errors import DomainError
from private_llm.kernels import exponential
from private_llm.protocols.exponential import GIVEN_BITS, Exponential
from private_llm.protocols.narrow import BitWidths
from private_llm.protocols.share import BitShare, Share
from private_llm.protocols.trio.piecewise import TrioPiecewise


class TrioExponentials(TrioPiecewise):
    """Trio's arithmetic, shuffles and piecewise polynomials, and exponentials."""

    has_exponentials = True

    def exponential(self, x: Share, keep: BitShare, plan: Exponential) -> Share:
        """As the interface says: see the module header. Bytes: `trio/cost.py`."""
        if self.ring.bits != 64 or keep.rows != 1 or keep.count != x.numel():
            raise DomainError(
                f"exponential: got a {self.ring.bits}-bit ring and {keep.rows} rows of {keep.count} bits for "
                f"{x.numel()} elements; want 64 bits, and one row of as many"
            )
        count, piece, low = x.numel(), None, GIVEN_BITS if plan.shift and self._narrows else None
        both = (x.parts[0] + x.parts[1]).reshape(-1)
        if self.role == 0:
            self._send_low(2, "exponential", self._places(both, keep, plan, low), low)
        else:
            if self.role == 1:
                shares = self._draw_low(_PLACES * count, low).view(_PLACES, count)
            else:
                shares = self._recv_low(0, "exponential", (_PLACES, count), low)
            masked = both + plan.offset
            piece = exponential.weighed(masked, keep.parts[0].contiguous(), shares, plan.digits, plan.factors)
        if low is None:
            return self._finish("exponential", x.shape, piece, plan.shift, helped=False)
        return self._divided("exponential", piece, x.shape, plan.shift, BitWidths(low, self.ring.bits))

    def _places(self, mask: Tensor, keep: BitShare, plan: Exponential, low: int | None) -> Tensor:
        """Party 0: e^(-r) in one of four places, less party 1's shares: [4, n]."""
        message = -self._draw_low(_PLACES * mask.numel(), low).view(_PLACES, mask.numel())
        flags = keep.parts[0] ^ keep.parts[1]
        exponential.placed(mask, flags, message, plan.digits, plan.secrets)
        return message


_PLACES = 4
"""Two digits times two values of the mask of the bit."""
