"""Quad's arithmetic: Trio's main run between parties 1 and 2, and its mirror between parties 0 and 3 as the check.

Masks a1 (known to parties 0, 1, 3), a2 (0, 2, 3), u (1, 2, 3); a = a1 + a2, X = x + a, V = X + u.
    P0: (a1, a2, x + u)   P1: (x + a2, a1, u)   P2: (x + a1, a2, u)   P3: (a1, a2, u)
Every party lacks one of the three masks, and V is known to parties 0, 1 and 2. The first two parts are Trio's share
with party 0 and party 3 both as helper.

Main run. Trio's code. Helper messages are sent by party 3; party 0 makes the same bytes (records, roles). What
parties 1 and 2 tell each other is checked by the mirror.

Mirror of a product. xy = XY - Xb - Ya + ab, and with p = x + u: Xb + Ya = p_x b + a p_y + 2ab - u_x b - a u_y, so
    m0 = -(p_x b + a p_y) - ab at party 0,   m3 = u_x b + a u_y at party 3,   m0 + m3 = xy - XY.
  without shift: parties 1, 2, 3 draw t and the new u. Party 2 tells party 0 XY + t (party 1 records the same), party
    3 sends m3 - t + u; party 0 holds z + u, and records V = z + u + a with each of parties 1 and 2. 5 elements in all.
  with shift: party 3 sends m3 + q, and w - XY + q is recorded (nothing of XY is sent). Then z = floor of the opened w
    needs beta = 1 - msb(w), known to parties 1 and 2, times msb(R), known to parties 0 and 3: the main run's small
    exchange, mirrored. Party 2 tells party 0 (w >> f) + t1 and beta - t2 (f bits), party 3 sends msb(R) t2 + t3 (f
    bits); party 0 gets z + u, u = t1 + 2^(l-f) t3. V is recorded, which covers the exchange. 5 (l + f) bits in all.
  polynomials, lookups: the main run with (X, a) and (-a, -X) swapped: what is X - a for Trio is (-a) - (-X) here,
    parties 0 and 3 know -a, and -X has the additive shares -(p + a) and u.

Why one liar is always seen. The first lie of a party, whatever the secrets are:
  party 1 to party 2 by d: an opened value at party 2 is off by d, that of party 0 is right, their records differ;
  party 2 to party 1: likewise with party 1; party 2 to party 0: party 1 has recorded the right bytes;
  party 3 to party 2: party 0 has recorded the right bytes; party 3 to party 0: coefficient 1, so party 0's record is
  off by d against both. Party 0 sends nothing in a run. `verify` compares the records before anything is opened.
What each receives is uniform: party 0 (XY + t, w >> f + t1, beta - t2: masked by streams of 1, 2, 3; party 3's: by u,
q, t3), parties 1 and 2 as in Trio, party 3 nothing.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from private_llm.errors import ProtocolAbort
from private_llm.kernels import ops
from private_llm.kernels.forms import BilinearForm
from private_llm.kernels.shapes import broadcast
from private_llm.net.ledger import Cost
from private_llm.net.transport import CLIENT
from private_llm.protocols.quad.client import as_tensor, digest, unmask
from private_llm.protocols.quad.records import QuadParty
from private_llm.protocols.share import BitWidths, Index, Share, taking_part
from private_llm.protocols.trio.arithmetic import TrioArithmetic, powers
from private_llm.protocols.trio.division import TrioDivision, TrioParty
from private_llm.ring.ring import Ring


def main_run(cost: Cost) -> Cost:
    """Trio's price with party 3 as the helper."""
    return Cost({(3 if a == 0 else a, b): count for (a, b), count in cost.sent.items()}, cost.rounds)


def mirrored(cost: Cost) -> Cost:
    """Trio's price and its check: what the helper sends party 2 tells party 0, and what an evaluator opens party 3."""
    return main_run(cost) + Cost({(2, 0): cost.sent.get((0, 2), 0), (3, 0): cost.sent.get((1, 2), 0)})


class QuadArithmetic(TrioArithmetic):
    """A party's arithmetic on shares of three parts; ProtocolAbort where it lacks its piece, which would be a bug."""

    end: QuadParty
    index_keys = 4

    # -- local ---------------------------------------------------------------------------------------------------
    def add_public(self, x: Share, c: int | Tensor) -> Share:
        """Parties 0, 1 and 2 add c to their masked component. Local."""
        x, c = self.end._matched(x, c)
        a, b, third = x.parts
        if self.party == 0:
            return Share((a, b, third + c))
        return x if self.party == 3 else Share((a + c, b, third))

    def public(self, c: Tensor) -> Share:
        """Masks of zero: known to all. Local."""
        c = c.to(self.ring.dtype)
        zero = torch.zeros_like(c)
        return Share({0: (zero, zero, c), 3: (zero, zero, zero)}.get(self.party, (c, zero, zero)))

    # -- finishing a product, checked ------------------------------------------------------------------------------
    def _finish_checked(
        self, tag: str, shape: torch.Size, piece: Tensor | None, mirror: Tensor | None, shift: int, helped: bool,
        known: Tensor | None = None,
    ) -> Share:  # fmt: skip
        """`_finish` of Trio and its check.

        mirror: parties 0 and 3's pieces of the result before the shift, less `known` (if `helped`, at parties 1 and 2).
        """
        if shift:
            return self._finish_checked_shift(tag, shape, piece, mirror, shift, known)
        main = self.end._finish(tag, shape, piece, 0, helped)
        count = shape.numel()
        if self.party == 0:
            part = self.end._piece(tag, (count,), self.ring.dtype) + _flat(mirror)
            if helped:
                part += self.end._told(tag, (count,), self.ring.dtype)
            return self._with_part(main, part)
        drawn = self.end._joint(2 * count if helped else count)
        u, t = drawn[:count], drawn[count:]
        if self.party == 3:
            message = _flat(mirror) + u
            self.end._tell_piece(tag, message - t if helped else message)
            return Share((*main.parts, u.view(shape)))
        if helped:
            self.end._tell(tag, _flat(known) + t)
        return self._with_part(main, u)

    @staticmethod
    def finish_price(ring: Ring, count: int, shift: int, helped: bool) -> Cost:
        """`_finish_checked` of `count` outputs: 5 (e + f bits) each in all; without shift and `helped` 3 e."""
        return mirrored(TrioParty.finish_price(ring, count, shift, helped))

    def _with_part(self, main: Share, part: Tensor) -> Share:
        """The third component of parties 0, 1 and 2, with V recorded."""
        made = Share((*main.parts, part.view(main.shape)))
        self.end._confirm(made.parts[0] + made.parts[1] + made.parts[2])
        return made

    def _finish_checked_shift(
        self, tag: str, shape: torch.Size, piece: Tensor | None, mirror: Tensor | None, shift: int, known: Tensor | None
    ) -> Share:  # fmt: skip
        main, opened = self.end._finish_shifted(tag, shape, piece, shift)
        count = shape.numel()
        if self.party == 0:
            mine = self.end._piece(tag, (count,), self.ring.dtype)
            r, value = ops.field_step("check_opening", (mine, _flat(mirror), *_three(opened)), (), 0)
            self.end._confirm(value)
            return self._check_shift(tag, main, (r,), shift)
        q = self.end._joint(count)
        if self.party == 3:
            q += _flat(mirror)
            self.end._tell_piece(tag, q)
            return self._check_shift(tag, main, opened, shift)
        q += opened[0]
        if known is not None:
            q -= _flat(known)
        self.end._confirm(q)
        return self._check_shift(tag, main, opened, shift)

    def truncate(self, x: Share, shift: int, widths: BitWidths | None = None) -> Share:
        """X plays w and the mask R; 1 round, 2 elements and 5 f bits an element in all."""
        if not shift:
            return x
        main, opened = self.end._truncate(x, shift)
        return self._check_shift("truncate", main, opened if self.party else (opened[1] + opened[2],), shift)

    @staticmethod
    def truncate_price(ring: Ring, count: int, shift: int, widths: BitWidths | None = None) -> Cost:
        """e + f bits to each of parties 2 and 0, f bits each way and from party 3 to 0; 1 round."""
        return mirrored(TrioDivision.truncate_price(ring, count, shift))

    def _check_shift(self, tag: str, main: Share, opened: tuple[Tensor, ...], shift: int) -> Share:
        """The mirror of Trio's small exchange; `opened` is w at parties 1 and 2, R at party 0, its summands at 3.

        With ~w as the helper's R and ~R as the evaluators' w, it is the main run's; see `kernels.fields.STEPS`.
        """
        count = main.numel()
        packed = ops.packed_words(count, shift)
        first, second = (half.view(-1) for half in main.parts)
        if self.party == 0:
            beta, high = self.end._recv_mixed(self.end._told, tag, packed, count)
            theirs = self.end._piece(tag, (packed,), torch.int64)
            third, value = ops.field_step("check_part", (opened[0], beta, theirs, high, first, second), (shift,), shift)
            self.end._confirm(value)
            return Share((*main.parts, third.view(main.shape)))
        (t2, t3), (t1,) = self.end._draw_mixed(packed, count, 2, -1, elements=1)
        if self.party == 3:
            fields, u = ops.field_step("check_piece", (*_three(opened), t1, t2, t3), (shift,), shift)
            self.end._tell_piece(tag, fields)
        else:
            given = opened[0], t1, t2, t3, first, second
            u, high, beta, value = ops.field_step("check_told", given, (shift,), shift)
            for message in self.end._mixed(beta, high):
                self.end._tell(tag, message)
            self.end._confirm(value)
        return Share((*main.parts, u.view(main.shape)))

    # -- products ------------------------------------------------------------------------------------------------
    def mul(self, x: Share, y: Share, shift: int = 0, widths: BitWidths | None = None) -> Share:
        """5 elements an output without shift (1 round), 5 (l + f) bits with a shift by f (2 rounds)."""
        return self._multiply(_Elementwise(), x, y, shift)

    def bilinear(
        self, form: BilinearForm, x: Share, y: Share, shift: int = 0, select: Tensor | None = None,
        widths: BitWidths | None = None,
    ) -> Share:  # fmt: skip
        """As `mul`, of outputs. Local products: three at every party."""
        form, y = taking_part(form, y)  # parts are added up
        self.end.ledger.add_macs(form.macs(x.shape, y.shape) * 3)
        return self._multiply(form, x, y, shift, select)

    _table_product = bilinear

    @staticmethod
    def product_price(ring: Ring, count: int, shift: int, widths: BitWidths | None = None) -> Cost:
        """One finish, whatever the widths."""
        return QuadArithmetic.finish_price(ring, count, shift, helped=True)

    def _multiply(self, form: BilinearForm, x: Share, y: Share, shift: int, select: Tensor | None = None) -> Share:
        (x0, x1, x2), (y0, y1, y2) = x.parts, y.parts
        mirror = known = None
        if self.role == 0:
            a, b = x0 + x1, y0 + y1
            piece = form.product(a, b).neg_()
            mirror = form.pair(x2, b, a, y2)
            if self.party == 0:
                mirror.neg_().add_(piece)
        else:
            big_x, big_y = x0 + x1, y0 + y1
            known = form.product(big_x, big_y)
            piece = form.pair(big_x, y1, x1, big_y)
            piece.neg_()
            if self.party == 2:
                piece += known
        if select is not None:
            piece = _selected(piece, select)
            mirror, known = (None if made is None else _selected(made, select) for made in (mirror, known))
        return self._finish_checked(form.tag, piece.shape, piece, mirror, shift, True, known)

    def poly(self, x: Share, coefficients: Sequence[int], shift: int = 0) -> Share:
        """Trio's Taylor step and its mirror around -a: degree - 1 elements from party 2, then the check."""
        piece = self._poly_piece(x, coefficients)
        mirror = self._poly_mirror(x, coefficients)
        return self._finish_checked("poly", x.shape, piece, mirror, shift, helped=False)

    @staticmethod
    def poly_price(ring: Ring, count: int, degree: int, shift: int) -> Cost:
        """degree - 1 elements to each of parties 2 and 0, then one finish."""
        return mirrored(TrioArithmetic.poly_price(ring, count, degree, shift))

    def _poly_mirror(self, x: Share, coefficients: Sequence[int]) -> Tensor | None:
        extra, count = len(coefficients) - 2, x.numel()
        both, third = (x.parts[0] + x.parts[1]).reshape(-1), x.parts[2].reshape(-1)
        if self.role:
            self.end._tell("poly", powers(-both, extra) - self.end._joint(extra * count))
            return None
        if self.party == 0:
            shares, mine = self.end._told("poly", (extra * count,), self.ring.dtype), -(both + third)
        else:
            shares, mine = self.end._joint(extra * count), third
        return self._poly_terms(-both, mine, shares, coefficients, self.party == 0)

    # -- edges -----------------------------------------------------------------------------------------------------
    def receive_input(self, shape: tuple[int, ...]) -> Share:
        """V from the client to parties 0, 1 and 2, who record it; party 3 receives nothing."""
        count = torch.Size(shape).numel()
        masks = [stream.elements(count, self.ring, self.end.device).view(shape) for stream in self.end._inputs]
        if self.party == 3:
            return Share(tuple(masks))
        value = self.end.transport.recv(CLIENT, "input", shape, self.ring.dtype)
        self.end._confirm(value)
        self.end._received = hashlib.blake2b(self.end._received.encode() + digest(value), digest_size=32).hexdigest()
        return unmask(self.party, value, masks)

    def lookup(self, index: Index, table: Share | Tensor) -> Share:
        """Trio's lookup and its mirror.

        The mirror takes W = V - u - a: point functions for a at parties (3, 0), for u at (3, {1, 2}), for V at (0,
        {1, 2}), where parties 1 and 2 hold the same key. With a public table those for a suffice.
        """
        if index.one_hot:
            return self._lookup_rows(index, table)
        piece = self._in_chunks(index, lambda keys: self._lookup_piece(keys, index.domain, table))
        mirror = self._in_chunks(index, lambda keys: self._lookup_mirror(keys[2:], index.domain, table))
        if isinstance(table, Tensor):
            main, check = (None, mirror) if self.role == 0 else (piece, None)
            return self._finish_checked("lookup", piece.shape, main, check, 0, helped=False)
        return self._finish_checked("lookup", piece.shape, piece, mirror, 0, True, mirror)

    def _lookup_mirror(self, keys: Sequence[Tensor], domain: int, table: Share | Tensor) -> Tensor:
        """Pieces of the rows at parties 0 (keys a, V) and 3 (a, u), and the rest at 1 and 2 (u, V)."""
        if isinstance(table, Tensor):
            if self.role:
                return torch.empty((keys[0].shape[0], table.shape[1]), dtype=self.ring.dtype, device=self.end.device)
            return ops.ring_matmul(self._expanded(keys[:1], domain, 1 if self.party == 0 else 0)[0], table)
        self.end.ledger.add_macs(2 * keys[0].shape[0] * table.numel())
        ends = {0: (1, 0), 3: (0, 0)}.get(self.party, (1, 1))
        first, second = self._expanded(keys, domain, *ends)
        a, b, third = table.parts
        if self.role:
            return ops.ring_matmul_pair(-first, third, second, a + b + third)
        both = a + b
        if self.party == 3:
            return -ops.ring_matmul_pair(first, both, second, third)
        return ops.ring_matmul_pair(second - first, both, second, third)

    def reveal(self, pieces: Sequence[tuple[int, Share]]) -> None:
        """After one `verify`: party 1 sends X and party 2 its digest, party 0 sends a and party 3 its digest.

        Party 3's is of masks alone; when it runs ahead the client gets it before there is data.
        """
        self.end.verify()
        for endpoint, x in pieces:
            value = (x.parts[0] + x.parts[1]).contiguous()
            if self.end.runs_ahead and self.party == 3:
                self.end._digests.append(digest(value).hex())
            elif self.party in (0, 1):
                self.end.transport.send(endpoint, "reveal", value)
            else:
                self.end.transport.send(endpoint, "reveal digest", as_tensor(digest(value)))


@dataclass(frozen=True)
class _Elementwise(BilinearForm):
    tag = "mul"

    def product(self, x: Tensor, y: Tensor) -> Tensor:
        return x * y

    def pair(self, x0: Tensor, y0: Tensor, x1: Tensor, y1: Tensor) -> Tensor:
        return torch.addcmul(x0 * y0, x1, y1)

    def real(self, x: Tensor, y: Tensor) -> Tensor:
        return x * y

    def macs(self, x_shape: Sequence[int], y_shape: Sequence[int]) -> int:
        return math.prod(broadcast(torch.Size(x_shape), torch.Size(y_shape)))


def _selected(piece: Tensor, select: Tensor) -> Tensor:
    return piece.reshape(-1)[select.to(piece.device)]


def _flat(piece: Tensor | None) -> Tensor:
    """A piece that must be there, as one row."""
    if piece is None:
        raise ProtocolAbort("a party finishes a product without its piece of the check")
    return piece.reshape(-1)


def _three(summands: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    e, g1, g2 = summands
    return e.contiguous(), g1, g2
