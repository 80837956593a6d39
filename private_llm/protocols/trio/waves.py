"""Trio's sums of waves: the mask's side of cos(k (M - a)) comes from party 0, in shares, and no bit above a turn.

With the numbers of `protocols.waves`, for an angle M - a of which the evaluators know M and party 0 knows a:

1. Party 0 shares cos(k a) and sin(k a), packed fields of a few more bits than they have. One share is drawn from its
   stream with party 1, the other one goes to party 2. The evaluators multiply them by factors that depend on M: v1 + v2
   is the sum v modulo 2^wide. No round.
2. They add 2^(wide - 2), and masks g1, g2 of streams with party 0, and exchange v_i + g_i: w = v + g1 + g2 modulo
   2^wide. With h_i = g_i >> shift, w >> shift is (v >> shift) + h1 + h2 and up to two units more modulo 2^narrow: the
   carry of the lower parts, half a unit too much on average, which is taken off before.
3. What is left, m, lies between 0 and 2^(narrow - 1), so (m + h1 + h2) modulo 2^narrow wrapped once where h1 + h2
   did, and once more where the upper bit of h1 + h2 modulo 2^narrow is 1 and that of w >> shift is 0. Party 0 knows
   both bits, and shares the number of wraps for either value of the public one, as fields of bits - narrow bits. So
   the evaluators have additive shares of m modulo 2^bits (the ring, or what is read), and one finish of these, and of
   what else is to be added up, makes a share.

Pre: the fields of 1 and 2 x (bits - narrow) bits; online: wide bits each way, 1 round, before the finish. Leakage: none
to a single party. Party 2 receives fields masked by a stream that it lacks; what the evaluators exchange is masked by
g1 and g2, of which each lacks one, and masks serve once: the h_i are parts of what a finish masks anew.

Trio's exponentials in one step: the mask's side of e^(M - a) = e^M e^(-a) comes from party 0, in shares.

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

import torch
from torch import Tensor

from private_llm.errors import DomainError
from private_llm.kernels import exponential, ops, waves
from private_llm.protocols.arithmetic import BitWidths
from private_llm.protocols.exponential import GIVEN_BITS, Exponential
from private_llm.protocols.share import BitShare, Share
from private_llm.protocols.trio.piecewise import TrioPiecewise
from private_llm.protocols.waves import Waves, turns


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


class TrioWaves(TrioExponentials):
    """Trio's exponentials, and sums of waves."""

    has_waves = True

    def _less_waves(self, angle: Share, plan: Waves, piece: Tensor | None) -> None:
        """Subtract from an evaluator's additive piece of a result [n] its piece of the sum; 1 round."""
        if self.ring.bits != 64:
            raise DomainError(f"waves: got a {self.ring.bits}-bit ring; want 64 bits")
        count, table = angle.numel(), turns()
        both = (angle.parts[0] + angle.parts[1]).reshape(-1)
        hidden, wraps = plan.words(count), 2 * ops.packed_words(count, plan.above)
        if self.role == 0:
            drawn = self._draw_words(hidden + wraps)
            g1, g2 = self._draw(count), self._draw(count, 1)
            fields, rest = drawn.split_with_sizes((hidden, wraps))
            self.transport.send(2, "waves", waves.hidden(both, fields, plan, table))
            self.transport.send(2, "waves", waves.wraps(g1, g2, rest, plan))
            return
        if piece is None:
            raise self._lacking("waves")
        if self.role == 1:
            fields, rest = self._draw_words(hidden + wraps).split_with_sizes((hidden, wraps))
        else:
            fields = self.transport.recv(0, "waves", (hidden,), torch.int64)
            rest = self.transport.recv(0, "waves", (wraps,), torch.int64)
        g = self._draw(count)
        mine = waves.summed(both, fields, plan, table, self.role == 1) + g
        theirs = self.transport.exchange(3 - self.role, "waves", ops.pack_fields(mine, plan.wide))
        opened = mine + ops.unpack_fields(theirs, count, plan.wide)
        waves.widened(opened, g, rest, plan, self.role == 1, piece)
