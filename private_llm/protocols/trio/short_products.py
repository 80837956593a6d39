"""Trio's short products, divided in one round and right in their lowest bits alone, and values cut to such bits.

A quotient by 2^f whose lowest l - f bits are all that anybody reads (scores: they are compared, exponentiated and
watched) needs nothing of what a whole one costs beside the opening (trio/arithmetic.py):

  1. R = E + g1 + g2 is uniform for each evaluator and known to party 0. The evaluators exchange v1 + g1 and v2 + g2 and
     hold w = xy + R mod 2^l.
  2. (w >> f) - (R >> f) is floor(xy / 2^f) or one unit more, modulo 2^(l-f), whether w wrapped or not: a wrap changes
     w by 2^l, hence w >> f by 2^(l-f). So party 0 shares nothing of msb(R), and the second exchange goes.
  3. The mask of the result is R >> f, which both evaluators' w goes with: party 0 draws z1 with party 1 and sends
     z2 = (R >> f) - z1 to party 2, of which l - f bits count.

Pre: l - f bits; online: l each way; 1 round. Every xy modulo 2^l is divided as the signed number it stands for: no bit
of slack is needed. Above its lowest l - f bits the shared number is not the quotient: it depends on masks.

Cutting needs no message where two units of the quotient do not matter. With M = x + a1 + a2 modulo 2^b, the s bits cut
from each of the three amount to so little that (M >> s) - (a1 >> s) - (a2 >> s) lies between x / 2^s - 1 and
x / 2^s + 2, modulo 2^(b-s).

Leakage: none to a single party. w is uniform for each evaluator, which lacks the other's g; z2 is masked by a stream
that party 2 lacks. The rounding bit depends on R (see threat).
"""

from __future__ import annotations

import torch
from torch import Tensor

from private_llm.kernels import ops
from private_llm.kernels.forms import Form
from private_llm.protocols.share import Share
from private_llm.protocols.trio.arithmetic import TrioArithmetic


class TrioShortProducts(TrioArithmetic):
    """Trio's arithmetic, and quotients that are right in their lowest bits."""

    has_short_products = True

    def bilinear(
        self, form: Form, x: Share, y: Share, shift: int = 0, select: Tensor | None = None, short: bool = False
    ) -> Share:  # fmt: skip
        """As `mul`, or short: see the module header. Local products: two at parties 0 and 1, one at party 2."""
        if not (short and shift and self.has_short_products):
            return super().bilinear(form, x, y, shift, select)
        if not 0 < shift <= self.ring.bits - 3:
            raise self._beyond(shift)
        piece = self._bilinear_piece(form, x, y, select)
        return self._finish_short(form.tag, piece.shape, piece.reshape(-1), shift)

    def cut(self, x: Share, shift: int) -> Share:
        """As the interface says: each party cuts the numbers that it knows."""
        if not self.has_short_products:
            return super().cut(x, shift)
        first, second = x.parts[0], x.parts[1] >> shift
        if self.role == 0:
            return Share((first >> shift, second))
        return Share((((first + x.parts[1]) >> shift) - second, second))

    def _finish_short(self, tag: str, shape: torch.Size, piece: Tensor, shift: int) -> Share:
        """From additive pieces [n] (party 0's is E) to a share of what is right modulo 2^(l - shift)."""
        count, width = shape.numel(), self.ring.bits - shift
        if self.role == 0:
            g1, z1 = self._draw(2 * count).split(count)
            quotient = (piece + g1 + self._draw(count, 1)) >> shift
            z2 = quotient - z1
            self.transport.send(2, tag, ops.pack_fields(z2.long(), width))
            return Share((z1.view(shape), z2.view(shape)))
        if self.role == 1:
            mask, own = self._draw(2 * count).split(count)
        else:
            mask = self._draw(count)
            fields = self.transport.recv(0, tag, (ops.packed_words(count, width),), torch.int64)
            own = ops.unpack_fields(fields, count, width).to(self.ring.dtype)
        mine = piece + mask
        w = mine + self.transport.exchange(3 - self.role, tag, mine)
        return Share((((w >> shift) - own).view(shape), own.view(shape)))
