"""Trio's narrow divisions, right in their lowest bits, and values cut to such bits.

Of x, |x| < 2^(k-2), the lowest k bits are right, and r bits of the quotient by 2^f are wanted. Everything is that of a
division in the ring (trio/arithmetic.py), but modulo 2^k:

  1. The evaluators exchange k bits of v1 + g1 and v2 + g2 and hold w = x + 2^(k-2) + R mod 2^k.
  2. (w >> f) - (R >> f), plus 2^(k-f) where w wrapped, is the quotient or one unit more. Modulo 2^(k-f) the wrap does
     not count: what is left of it counts modulo 2^n, n = r - (k - f) bits. Party 0 shares msb(R) modulo 2^n, and the
     evaluators exchange n bits. With n = 0 both go, and x may be any number modulo 2^k: w is not read as a number then.
  3. The mask of the result is (R >> f) + 2^(k-f) (zeta1 + zeta2), of which party 2 gets r bits of its part.

Pre: r + n bits; online: k + n each way; 2 rounds, 1 with n = 0. A held value is divided without opening anything: its M
plays w. Numbers of k bits are moved up by 64 - k, so the kernels are those of the whole ring.

Cutting needs no message where two units of the quotient do not matter. With M = x + a1 + a2 modulo 2^b, the s bits cut
from each of the three amount to so little that (M >> s) - (a1 >> s) - (a2 >> s) lies between x / 2^s - 1 and
x / 2^s + 2, modulo 2^(b-s).

Leakage: none to a single party. w is uniform modulo 2^k for each evaluator, which lacks the other's g; what party 2
gets is masked by streams that it lacks. Above the right bits a share depends on masks. The rounding bit depends on R
(see threat).
"""

from __future__ import annotations

import torch
from torch import Tensor

from private_llm.kernels import ops
from private_llm.kernels.forms import Form
from private_llm.protocols.arithmetic import BitWidths
from private_llm.protocols.share import Share
from private_llm.protocols.trio.arithmetic import TrioArithmetic


class TrioNarrow(TrioArithmetic):
    """Trio's arithmetic, and divisions of which the lowest bits are right."""

    has_narrow = True

    @property
    def _narrows(self) -> bool:
        return self.has_narrow and self.ring.bits == 64

    def mul(self, x: Share, y: Share, shift: int = 0, widths: BitWidths | None = None) -> Share:
        """As the interface says: see the module header."""
        if widths is None or not shift or not self._narrows:
            return super().mul(x, y, shift)
        piece = self._mul_piece(x, y)
        return self._divided("mul", piece, piece.shape, shift, widths)

    def bilinear(
        self, form: Form, x: Share, y: Share, shift: int = 0, select: Tensor | None = None,
        widths: BitWidths | None = None,
    ) -> Share:  # fmt: skip
        """As `mul`. Local products: two at parties 0 and 1, one at party 2."""
        if widths is None or not shift or not self._narrows:
            return super().bilinear(form, x, y, shift, select)
        piece = self._bilinear_piece(form, x, y, select)
        return self._divided(form.tag, piece, piece.shape, shift, widths)

    def truncate(self, x: Share, shift: int, widths: BitWidths | None = None) -> Share:
        """As the interface says: M plays w. Pre r + n bits, online n each way, 1 round, none with n = 0."""
        if widths is None or not self._narrows:
            return super().truncate(x, shift)
        widths.check(self.ring, shift)
        up = 1 << (self.ring.bits - widths.valid_in)
        first, second = (part.reshape(-1) * up for part in x.parts)
        return self._closed("truncate", x.shape, first, second, shift, widths)

    def local_truncate(self, x: Share, shift: int) -> Share:
        """As the interface says: each party cuts the numbers that it knows."""
        if not self.has_narrow:
            return super().local_truncate(x, shift)
        first, second = x.parts[0], x.parts[1] >> shift
        if self.role == 0:
            return Share((first >> shift, second))
        return Share((((first + x.parts[1]) >> shift) - second, second))

    def _divided(self, tag: str, piece: Tensor | None, shape: torch.Size, shift: int, widths: BitWidths) -> Share:
        """From additive pieces of x modulo 2^given (party 0's is E, or none) to a share of x / 2^shift of `shape`."""
        widths.check(self.ring, shift)
        count, up = shape.numel(), 1 << (self.ring.bits - widths.valid_in)
        mine = self._draw(count)
        if piece is not None:
            mine = piece.reshape(-1) + mine
        elif self.role:
            raise self._lacking(tag)
        if self.role == 0:
            return self._closed(tag, shape, mine * up, self._draw(count, 1) * up, shift, widths)
        if widths.valid_in == self.ring.bits:
            theirs = self.transport.exchange(3 - self.role, tag, mine)
        else:
            fields = self.transport.exchange(3 - self.role, tag, ops.pack_fields(mine, widths.valid_in))
            theirs, mine = ops.unpack_fields(fields, count, widths.valid_in) * up, mine * up
        return self._closed(tag, shape, mine, theirs, shift, widths)

    def _closed(
        self, tag: str, shape: torch.Size, first: Tensor, second: Tensor, shift: int, widths: BitWidths
    ) -> Share:  # fmt: skip
        """The quotient from what adds up to w at an evaluator, and to R at party 0, both moved up: [n] each."""
        count, n = shape.numel(), widths.fields(shift)
        f = shift + self.ring.bits - widths.valid_in
        low = None if widths.needed_out == self.ring.bits else widths.needed_out
        if n == 0:
            own = self._recv_low(0, tag, (count,), low) if self.role == 2 else self._draw(count)
            other = ((first + second) >> f) - own
            if self.role == 0:
                self._send_low(2, tag, other, low)
                return Share((own.view(shape), other.view(shape)))
            return Share((other.view(shape), own.view(shape)))
        packed = ops.packed_words(count, n)
        if self.role == 0:
            (rho1, zeta1), (z1,) = self._draw_mixed(packed, count, 2, elements=1)
            zeta2, zero = self._draw_words(packed, 1), torch.zeros_like(z1)
            a1, a2, z2, rho2 = ops.trunc_helper(zero, first, second, z1, rho1, zeta1, zeta2, f, n)
            for message in self._mixed(rho2, z2 if low is None else ops.pack_fields(z2, low)):
                self.transport.send(2, tag, message)
            return Share((a1.view(shape), a2.view(shape)))
        if self.role == 1:
            (rho, zeta), (z,) = self._draw_mixed(packed, count, 2, elements=1)
        else:
            zeta = self._draw_words(packed)
            size = count if low is None else ops.packed_words(count, low)
            rho, z = self._recv_mixed(self._from_helper, tag, packed, size)
            z = z if low is None else ops.unpack_fields(z, count, low)
        w, fields = ops.trunc_open(first, second, rho, zeta, f, n)
        their_fields = self.transport.exchange(3 - self.role, tag, fields)
        half, own = ops.trunc_close(w, fields, their_fields, z, zeta, f, n)
        return Share((half.view(shape), own.view(shape)))
