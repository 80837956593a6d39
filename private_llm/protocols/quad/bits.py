"""Quad's bits: Trio's main run between parties 1 and 2, and its mirror between parties 0 and 3 as the check.

A secret bit b has masks l1 (parties 0, 1, 3), l2 (0, 2, 3) and u (1, 2, 3); l = l1 ^ l2, B = b ^ l, V = B ^ u.
    P0: (l1, l2, b ^ u)   P1: (B, l1, u)   P2: (B, l2, u)   P3: (l1, l2, u)

Main run: Trio's code, with party 0 and party 3 both as helper (party 3 sends, party 0 records the same bytes).
What can go wrong in it unseen is only what parties 1 and 2 tell each other.

Check run. Every value that parties 1 and 2 open is  w = sum_k c_k h_k ^ l_w,  c_k polynomials in what parties 1
and 2 know (bits of M, earlier w), h_k polynomials in what parties 0 and 3 know (bits of s, masks). Trio computes
it with the h_k shared and the c_k known; the mirror with the c_k shared and the h_k known, by the same kernels:
  1. parties 1, 2, 3 draw t; party 2 sends party 0 the rows c_k ^ t_k, and party 1 records the same bytes;
  2. party 3, holding t and u, sends party 0 its piece of the sum ^ u_w (u_w fresh): uniform for party 0;
  3. party 0 adds its own piece and l_w, and holds V_w = w ^ u_w: its third component, and the value that parties
     1 and 2 compute from what they opened. V_w is recorded between parties 0 and 1, and between 0 and 2.
One liar is always seen, whatever the secrets are (no selective failure): party 1's lie shifts w at party 2, hence
the record of parties 0 and 2; party 2's shifts that of 0 and 1, as does a wrong row (party 1 computes it too);
party 3's piece enters V_w with coefficient 1, its message to party 2 is known to party 0; party 0 sends nothing.
Records are compared before anything is opened (`records`). The check adds no round: nobody waits for party 0.
Bytes a 64-bit sign bit: main 326 bits, mirror 206 + 60.

The mirror of an inject takes x = X - a as -(a - X): weights with the other sign, masks where values were.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from private_llm.kernels import ops
from private_llm.net.ledger import Cost
from private_llm.protocols.carry import CarryPlan, carry_plan
from private_llm.protocols.ends import PartySetup
from private_llm.protocols.quad.arithmetic import QuadArithmetic, main_run, mirrored
from private_llm.protocols.quad.records import QuadParty
from private_llm.protocols.share import BitShare, BitWeights, Share, check_low, words_for
from private_llm.protocols.trio.bits import TrioBits, plan_sizes
from private_llm.ring.ring import Ring


class QuadBits(TrioBits):
    """One party's bits, checked."""

    end: QuadParty

    def __init__(self, end: QuadParty, setup: PartySetup) -> None:
        super().__init__(end, setup)
        self._arithmetic = QuadArithmetic(end, setup)

    # -- sign bits ------------------------------------------------------------------------------------------
    def _msb_prefix(self, x: Share, offsets: Sequence[int], width: int, low: int, plan: CarryPlan) -> BitShare:
        thresholds = len(offsets)
        if self.role == 0:
            out, s, lam = self._msb_helper(x, thresholds, width, low, plan)
            u = self._msb_check_masks(s.repeat(1, thresholds) if thresholds > 1 else s, lam, low, plan)
        else:
            out, planes, opened = self._msb_evaluate(x, offsets, width, low, plan)
            u = self._msb_check_values(planes, opened, low, plan)
        u = u.view(thresholds, -1)
        return BitShare((*out.parts, u ^ out.parts[0] ^ out.parts[1] if self.party == 0 else u), out.count)

    @staticmethod
    def msb_price(count: int, bits: int, thresholds: int = 1, low: int = 0) -> Cost:
        """The mirror shares the monomials for every threshold, not once."""
        plan = carry_plan(bits - 1 - low)
        lanes = 8 * words_for(count) * thresholds
        told = (plan.monomial_rows + plan.products + 1) * lanes
        checked = Cost({(2, 0): told, (3, 0): plan.online_rows * lanes})
        return main_run(TrioBits.msb_price(count, bits, thresholds, low)) + checked

    def _check_rows(self, plan: CarryPlan, lanes: int) -> tuple[int, int, int]:
        """Words of monomials and of all rows that party 2 tells, and of those that party 3 tells."""
        monomials = plan.monomial_rows * lanes
        return monomials, monomials + plan.products * lanes + lanes, plan.online_rows * lanes

    def _msb_check_values(self, planes: Tensor, opened: Sequence[Tensor], low: int, plan: CarryPlan) -> Tensor:
        """Parties 1 and 2: monomials of the bits of M, products of the opened bits, the top bit; returns u."""
        lanes = planes.shape[1]
        monomials, told, confirmed = self._check_rows(plan, lanes)
        rows, u = self.end._joint_words(told + confirmed).split([told, confirmed])
        top: Tensor = rows[told - lanes :] ^ u[confirmed - lanes :]
        ops.block_monomials(planes, low, plan_sizes(plan.blocks), rows[:monomials].view(-1, lanes))
        at, blocks = monomials, len(plan.blocks)
        for level, groups in enumerate(plan.levels):
            end = at + plan.product_rows[level] * lanes
            ops.join_products(opened[level], plan_sizes(groups), blocks, rows[at:end].view(-1, lanes))
            at, blocks = end, len(groups)
        rows[at:].bitwise_xor_(planes[-1])
        self.end._tell("msb", rows)
        self.end._confirm(torch.cat([w.view(-1) for w in opened]) ^ u)
        return top

    def _msb_check_masks(self, s: Tensor, lam: Tensor, low: int, plan: CarryPlan) -> Tensor:
        """Parties 0 and 3: the same carries with s and the masks known; returns V at party 0, u at party 3."""
        lanes, first = s.shape[1], self.party == 0
        monomials, told, confirmed = self._check_rows(plan, lanes)
        if first:
            rows = self.end._told("msb", (told,), torch.int64)
            held = made = self.end._piece("msb", (confirmed,), torch.int64) ^ lam
        else:
            rows, held = self.end._joint_words(told + confirmed).split([told, confirmed])
            made = held.clone()
        count = plan.block_rows
        out = made[: count * lanes].view(-1, lanes)
        ops.block_carries(s, low, plan_sizes(plan.blocks), rows[:monomials].view(-1, lanes), first, out)
        at, used, blocks = 0, monomials, len(plan.blocks)
        for level, groups in enumerate(plan.levels):
            known, mine = (t[at : at + count * lanes].view(-1, lanes) for t in (lam, held))
            products = rows[used : used + plan.product_rows[level] * lanes].view(-1, lanes)
            at, used, count = at + count * lanes, used + products.numel(), plan.joined_rows[level]
            out = made[at : at + count * lanes].view(-1, lanes)
            ops.join_carries(known, mine, products, plan_sizes(groups), blocks, first, out)
            blocks = len(groups)
        if first:
            self.end._confirm(made)
        else:
            self.end._tell_piece("msb", made)
        return held[at:] ^ rows[told - lanes :]

    # -- bits known to two parties -----------------------------------------------------------------------------
    def _share_known_bits(self, planes: Tensor | None, rows: int, count: int) -> BitShare:
        """Bits that parties 1 and 2 know: party 2 tells party 0 B ^ u."""
        main = super()._share_known_bits(planes, rows, count)
        shape = tuple(main.parts[0].shape)
        if self.party == 0:
            return BitShare((*main.parts, self.end._told("a2b", shape, torch.int64)), count)
        u = self.end._joint_words(rows * shape[1]).view(shape)
        if planes is not None:
            self.end._tell("a2b", main.parts[0] ^ u)
        return BitShare((*main.parts, u), count)

    def _share_mask_bits(self, x: Share, width: int) -> BitShare:
        """Bits of s with B = 0 and u = 0: parties 0 and 3 know them."""
        main = super()._share_mask_bits(x, width)
        zero = torch.zeros_like(main.parts[0])
        return BitShare((*main.parts, main.parts[0] ^ main.parts[1] if self.party == 0 else zero), main.count)

    @classmethod
    def msb_ripple_price(cls, count: int, bits: int, thresholds: int = 1, low: int = 0) -> Cost:
        """`bits` mask bits to party 2, as many bits of M per threshold to party 0, then the gates."""
        row = 8 * words_for(count)
        shared = Cost({(3, 2): row * bits, (2, 0): row * bits * thresholds})
        return shared + cls.gate_price(count, thresholds).times(bits - 1 - low)

    # -- gates ----------------------------------------------------------------------------------------------
    def invert(self, x: BitShare) -> BitShare:
        """Local: parties 1 and 2 invert B, party 0 b ^ u."""
        return BitShare((*x.parts[:2], ~x.parts[2]), x.count) if self.party == 0 else super().invert(x)

    def and_(self, x: BitShare, y: BitShare) -> BitShare:
        """Main 3 bits a gate, mirror 2: party 2 tells the masked product of what is known, party 3 its piece."""
        main = super().and_(x, y)
        shape = tuple(main.parts[0].shape)
        if self.role:
            t, u = self.end._joint_words(2 * main.parts[0].numel()).view(2, *shape)
            self.end._tell("and", (x.parts[0] & y.parts[0]) ^ t)
            self.end._confirm(main.parts[0] ^ u)
            return BitShare((*main.parts, u), main.count)
        lx, ly = (bits.parts[0] ^ bits.parts[1] for bits in (x, y))
        if self.party == 3:
            t, u = self.end._joint_words(2 * main.parts[0].numel()).view(2, *shape)
            self.end._tell_piece("and", (lx & y.parts[2]) ^ (ly & x.parts[2]) ^ t ^ u)
            return BitShare((*main.parts, u), main.count)
        # With V = part ^ l, lx Vy ^ ly Vx ^ lx ly is lx part_y ^ ly part_x ^ lx ly.
        opened = self.end._told("and", shape, torch.int64) ^ self.end._piece("and", shape, torch.int64)
        part = (lx & y.parts[2]) ^ (ly & x.parts[2]) ^ (lx & ly) ^ opened
        self.end._confirm(part ^ main.parts[0] ^ main.parts[1])
        return BitShare((*main.parts, part), main.count)

    @staticmethod
    def gate_price(count: int, rows: int = 1) -> Cost:
        """1 bit pre, 1 each way, and 2 to party 0; 1 round."""
        return mirrored(TrioBits.gate_price(count, rows))

    # -- bits to numbers --------------------------------------------------------------------------------------
    def inject(
        self, bits: BitShare, x: Share | None, weights: BitWeights, constants: BitWeights, shift: int = 0,
        low: int | None = None,
    ) -> Share:  # fmt: skip
        """As Trio's, and its mirror: as many elements from party 2; one check."""
        check_low(low, shift)
        piece = self._inject_piece(bits, x, weights, constants)
        mirror = self._inject_mirror(bits, x, weights, constants)
        return self._arithmetic._finish_checked("inject", torch.Size((bits.count,)), piece, mirror, shift, helped=False)

    @staticmethod
    def inject_price(ring: Ring, count: int, rows: int, weighted: int, shift: int, low: int | None = None) -> Cost:
        """1 element per row and per weighted row to parties 2 and 0, then one finish; the same with `low`."""
        return mirrored(TrioBits.inject_price(ring, count, rows, weighted, shift))

    def _inject_mirror(
        self, bits: BitShare, x: Share | None, weights: BitWeights, constants: BitWeights
    ) -> Tensor | None:
        """Additive pieces of the sum at parties 0 and 3."""
        count, rows = bits.count, bits.rows
        weighted, products = self._weighted(x, weights)
        extra = rows + products
        value = torch.zeros(count, dtype=self.ring.dtype, device=self.end.device)
        known = value[:1] if x is None else (x.parts[0] + x.parts[1]).reshape(-1)
        if self.role:
            told = self.end._joint(extra * count).view(extra, count)
            ops.inject_products(bits.parts[0].contiguous(), known, weighted, told)
            self.end._tell("inject", told)
            return None
        first = self.party == 0
        told = self.end._told("inject", (extra, count), self.ring.dtype) if first else self.end._joint(extra * count)
        m = held = value
        if x is not None:
            third = x.parts[2].reshape(-1)
            m, held = known, known + third if first else -third
        w, c = -self._rows(weights), self._rows(constants)
        known_bits = bits.parts[0] ^ bits.parts[1]
        ops.inject_terms(known_bits, m, held, told.view(extra, count), weighted, w, c, first, value)
        return value
