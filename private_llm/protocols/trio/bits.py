"""Trio's bits: sign bits of many thresholds at once, bit injection, gates, bit decomposition.

A secret bit b is masked by l1 ^ l2: party 0 holds (l1, l2), party 1 (B, l1), party 2 (B, l2), B = b ^ l1 ^ l2.

msb. x + c_k = (M + c_k) + s with s = -(a1 + a2): party 0 knows the bits of s, the evaluators those of
M + c_k, so the first level needs no AND: party 0 shares all monomials of each three-bit block of s
(once for all thresholds) and generate and propagate are linear in them (protocols/carry.py). Each
further level is one multi-input AND: party 0 shares products of masks, the evaluators exchange masked
outputs. 64 bits: pre 206 bits, online 60 bits each way, 4 rounds (326 bits; parallel prefix: 421, 6 rounds).

The ripple adder shares the bits of s (64) and does one AND per position: 253 bits, 63 rounds.
"""

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import TypeGuard

import numpy as np
import torch
from torch import Tensor

from private_llm.errors import DomainError
from private_llm.kernels import ops
from private_llm.net.ledger import Cost
from private_llm.protocols.carry import CarryPlan, carry_plan
from private_llm.protocols.share import BitShare, BitWeights, Share, check_injected, check_low, words_for
from private_llm.protocols.trio.division import Family, TrioParty
from private_llm.ring.ring import Ring

BitFlags = np.ndarray[tuple[int], np.dtype[np.bool_]]


class TrioBits(Family):
    """One party's bits."""

    # -- sign bits ------------------------------------------------------------------------------------------
    def msb(self, x: Share, offsets: Sequence[int] = (0,), bits: int | None = None, low: int = 0) -> BitShare:
        """[x + c_k < 0] for all k; see the module header for the cost.

        With `low`, the carry into position `low` is taken as 0: the adder sees floor((M + c) / 2^low) and floor(s /
        2^low), whose sum is floor((x + c) / 2^low) or one less: with x + c >= 2^low - 2^(bits-1) it keeps its sign,
        unless 0 <= x + c < 2^low.
        """
        width = self.ring.bits if bits is None else bits
        if not 2 <= width <= self.ring.bits:
            raise DomainError(f"msb: got bits={width}; want 2 to {self.ring.bits}")
        if not 0 <= low <= width - 2:
            raise DomainError(f"msb: got low={low}; want 0 to {width - 2} for bits={width}")
        if not x.numel():
            none = torch.zeros((len(offsets), 0), dtype=torch.int64, device=self.end.device)
            return BitShare((none,) * len(x.parts), 0)
        prices, given = self.end.prices, (x.numel(), width, len(offsets), low)
        if self.end.adder.ripples(lambda: prices.msb(*given), lambda: prices.msb_ripple(*given)):
            return self._msb_ripple(x, offsets, width, low)
        return self._msb_prefix(x, offsets, width, low, carry_plan(width - 1 - low))

    @staticmethod
    def msb_price(count: int, bits: int, thresholds: int = 1, low: int = 0) -> Cost:
        """`msb` with the prefix adder: values of `bits` bits without the `low` lowest, against `thresholds` offsets."""
        plan = carry_plan(bits - 1 - low)
        word = 8 * words_for(count)
        pre, online = plan.helped_rows(thresholds) * word, plan.online_rows * thresholds * word
        return Cost({(0, 2): pre, (1, 2): online, (2, 1): online}, plan.rounds)

    def _msb_prefix(self, x: Share, offsets: Sequence[int], width: int, low: int, plan: CarryPlan) -> BitShare:
        if self.role == 0:
            return self._msb_helper(x, len(offsets), width, low, plan)[0]
        return self._msb_evaluate(x, offsets, width, low, plan)[0]

    @staticmethod
    def _helped_rows(
        message: Tensor, plan: CarryPlan, words: int, lanes: int
    ) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
        """Parts of party 0's message: monomials [rows, words], the top bit [words], products [rows, lanes] by level."""
        sizes = (plan.monomial_rows * words, words, plan.products * lanes)
        monomials, top, products = message.split_with_sizes(sizes)
        by_level = products.view(-1, lanes).split_with_sizes(plan.product_rows) if plan.levels else ()
        return monomials.view(-1, words), top, by_level

    def _msb_helper(
        self, x: Share, thresholds: int, width: int, low: int, plan: CarryPlan
    ) -> tuple[BitShare, Tensor, Tensor]:
        """The sign bits, the bits of s, and the masks of all rows that the evaluators open."""
        count = x.numel()
        words = words_for(count)
        lanes = thresholds * words
        pre, online = plan.helped_rows(thresholds) * words, plan.online_rows * lanes
        drawn = self.end._draw_words(pre + online, 0)
        message, lam1 = drawn[:pre], drawn[pre:]
        lam2 = self.end._draw_words(online, 1)
        s = ops.transpose_bits(-(x.parts[0] + x.parts[1]).reshape(-1), width)
        monomials, masked_top, products = self._helped_rows(message, plan, words, lanes)
        share_top = masked_top.clone()
        ops.block_monomials(s, low, plan_sizes(plan.blocks), monomials)
        masked_top.bitwise_xor_(s[width - 1])
        lam = lam1 ^ lam2
        masks = lam.view(-1, lanes).split_with_sizes(plan.opened_rows)
        blocks = len(plan.blocks)
        for level, groups in enumerate(plan.levels):
            ops.join_products(masks[level], plan_sizes(groups), blocks, products[level])
            blocks = len(groups)
        self.end.transport.send(2, "msb", message)
        out1 = lam1[online - lanes :].view(thresholds, words) ^ share_top
        out2 = lam2[online - lanes :].view(thresholds, words) ^ masked_top
        return BitShare((out1, out2), count), s, lam

    def _msb_evaluate(
        self, x: Share, offsets: Sequence[int], width: int, low: int, plan: CarryPlan
    ) -> tuple[BitShare, Tensor, list[Tensor]]:
        """The sign bits, the bits of M + c_k, and the rows opened, level by level."""
        count = x.numel()
        words, thresholds = words_for(count), len(offsets)
        lanes = thresholds * words
        pre, online = plan.helped_rows(thresholds) * words, plan.online_rows * lanes
        first = self.role == 1
        planes = self._threshold_planes(x, offsets, width)
        if first:
            drawn = self.end._draw_words(pre + online)
            helped, lam = drawn[:pre], drawn[pre:]
        else:
            lam = self.end._draw_words(online)
            helped = self.end.transport.recv(0, "msb", (pre,), torch.int64)
        mono, top, products = self._helped_rows(helped, plan, words, lanes)
        masks = lam.view(-1, lanes).split_with_sizes(plan.opened_rows)
        mine = masks[0].clone()
        repeated = mono if thresholds == 1 else mono.repeat(1, thresholds)
        ops.block_carries(planes, low, plan_sizes(plan.blocks), repeated, first, mine)
        blocks, opened = len(plan.blocks), []
        for level, groups in enumerate(plan.levels):
            b = mine ^ self.end.transport.exchange(3 - self.role, "msb", mine)
            opened.append(b)
            mine = masks[level + 1].clone()
            ops.join_carries(b, masks[level], products[level], plan_sizes(groups), blocks, first, mine)
            blocks = len(groups)
        b = (mine ^ self.end.transport.exchange(3 - self.role, "msb", mine)).view(thresholds, words)
        opened.append(b)
        parts = (b ^ planes[width - 1].view(thresholds, words), masks[-1].view(thresholds, words) ^ top)
        return BitShare(parts, count), planes, opened

    def _threshold_planes(self, x: Share, offsets: Sequence[int], width: int) -> Tensor:
        """Bits of M + c_k, [width, thresholds * words]: the lanes of one threshold after those of the other."""
        count, words = x.numel(), words_for(x.numel())
        m = (x.parts[0] + x.parts[1]).reshape(-1)
        if len(offsets) == 1:
            c = self.ring.constant(offsets[0])
            return ops.transpose_bits(m + c if c else m, width)
        padded = torch.zeros((len(offsets), words * 64), dtype=m.dtype, device=self.end.device)
        torch.add(m, _column(tuple(offsets), self.ring, self.end.device), out=padded[:, :count])
        return ops.transpose_bits(padded.view(-1), width)

    def _msb_ripple(self, x: Share, offsets: Sequence[int], width: int, low: int) -> BitShare:
        words, thresholds = words_for(x.numel()), len(offsets)
        s = self._share_mask_bits(x, width)
        planes = None if self.role == 0 else self._threshold_planes(x, offsets, width)
        known = self._share_known_bits(planes, width * thresholds, x.numel())
        m = [known.some(i * thresholds, thresholds) for i in range(width)]
        s_rows = [BitShare(tuple(p.expand(thresholds, words) for p in s.row(i).parts), x.numel()) for i in range(width)]
        return self._added(m[low:], s_rows[low:])[-1]

    @classmethod
    def msb_ripple_price(cls, count: int, bits: int, thresholds: int = 1, low: int = 0) -> Cost:
        """The same with the ripple adder: `bits` mask bits pre, then bits - 1 - low gates one after the other."""
        return Cost({(0, 2): 8 * words_for(count) * bits}) + cls.gate_price(count, thresholds).times(bits - 1 - low)

    def _added(self, m: Sequence[BitShare], s: Sequence[BitShare]) -> list[BitShare]:
        """Sum bits but for the lowest, which is m ^ s: carry' = carry ^ (carry ^ m)(carry ^ s), the first one m s."""
        carry, sums = self.and_(m[0], s[0]), []
        for i in range(1, len(m)):
            sums.append(self.end.xor(carry, self.end.xor(m[i], s[i])))
            if i < len(m) - 1:
                carry = self.end.xor(carry, self.and_(self.end.xor(carry, m[i]), self.end.xor(carry, s[i])))
        return sums

    def _share_mask_bits(self, x: Share, width: int) -> BitShare:
        """Bits of s = -(a1 + a2) as shares with B = 0; `width` rows from party 0 to party 2."""
        words = words_for(x.numel())
        if self.role == 0:
            bits = ops.transpose_bits(-(x.parts[0] + x.parts[1]).reshape(-1), width)
            r = self.end._draw_words(width * words, 0).view(width, words)
            rest = r ^ bits
            self.end.transport.send(2, "a2b", rest)
            return BitShare((r, rest), x.numel())
        if self.role == 1:
            own = self.end._draw_words(width * words).view(width, words)
        else:
            own = self.end.transport.recv(0, "a2b", (width, words), torch.int64)
        return BitShare((torch.zeros_like(own), own), x.numel())

    def _share_known_bits(self, planes: Tensor | None, rows: int, count: int) -> BitShare:
        """`rows` bit vectors that both evaluators know, with masks of zero; the helper passes None. Local."""
        zero = torch.zeros((rows, words_for(count)), dtype=torch.int64, device=self.end.device)
        return BitShare((zero if planes is None else planes.view(zero.shape), zero), count)

    def a2b(self, x: Share, bits: int | None = None) -> BitShare:
        """Bits of M + s: the bits of s from party 0, then a ripple adder that keeps every sum bit."""
        width = self.ring.bits if bits is None else bits
        if not 2 <= width <= self.ring.bits:
            raise DomainError(f"a2b: got bits={width}; want 2 to {self.ring.bits}")
        s = self._share_mask_bits(x, width)
        planes = None if self.role == 0 else ops.transpose_bits((x.parts[0] + x.parts[1]).reshape(-1), width)
        m = self._share_known_bits(planes, width, x.numel())
        rows = [[bits.row(i) for i in range(width)] for bits in (m, s)]
        sums = [self.end.xor(rows[0][0], rows[1][0]), *self._added(*rows)]
        return BitShare(tuple(torch.cat(parts) for parts in zip(*(row.parts for row in sums), strict=True)), x.numel())

    def _as_elements(self, parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Evaluators of bits hold the value under both masks; of elements their own mask is not in the first part."""
        return (parts[0] ^ parts[1], *parts[1:]) if self.role else parts

    # -- gates ----------------------------------------------------------------------------------------------
    def invert(self, x: BitShare) -> BitShare:
        """Local: the evaluators invert B."""
        return x if self.role == 0 else BitShare((~x.parts[0], *x.parts[1:]), x.count)

    def and_(self, x: BitShare, y: BitShare) -> BitShare:
        """Pre 1 bit, online 1 bit each way, 1 round."""
        (x0, x1), (y0, y1) = x.parts[:2], y.parts[:2]
        shape = x0.shape
        count = x0.numel()
        if self.role == 0:
            drawn = self.end._draw_words(2 * count, 0)
            l2 = self.end._draw_words(count, 1)
            product = (x0 ^ x1) & (y0 ^ y1)
            self.end.transport.send(2, "and", product ^ drawn[count:].view(shape))
            return BitShare((drawn[:count].view(shape), l2.view(shape)), x.count)
        piece = (x0 & y1) ^ (y0 & x1)
        if self.role == 1:
            drawn = self.end._draw_words(2 * count)
            fresh = drawn[:count].view(shape)
            piece = piece ^ (x0 & y0) ^ drawn[count:].view(shape)
        else:
            fresh = self.end._draw_words(count).view(shape)
            piece = piece ^ self.end.transport.recv(0, "and", tuple(shape), torch.int64)
        mine = piece ^ fresh
        b = mine ^ self.end.transport.exchange(3 - self.role, "and", mine)
        return BitShare((b, fresh), x.count)

    @staticmethod
    def gate_price(count: int, rows: int = 1) -> Cost:
        """`and_` of `rows` bit vectors of `count` elements: 1 bit pre, 1 bit each way, 1 round."""
        word = 8 * words_for(count) * rows
        return Cost({(0, 2): word, (1, 2): word, (2, 1): word}, 1)

    # -- bits to numbers --------------------------------------------------------------------------------------
    def inject(
        self, bits: BitShare, x: Share | None, weights: BitWeights, constants: BitWeights, shift: int = 0,
        low: int | None = None,
    ) -> Share:  # fmt: skip
        """Pre: 1 element per row, 1 more per row with a weight; online: one finish without E."""
        check_low(low, shift)
        low = low if self.ring.bits == 64 else None
        piece = self._inject_piece(bits, x, weights, constants, low)
        return self.end._finish("inject", torch.Size((bits.count,)), piece, shift, helped=False, low=low)

    @staticmethod
    def inject_price(ring: Ring, count: int, rows: int, weighted: int, shift: int, low: int | None = None) -> Cost:
        """`inject` of `rows` bits for `count` elements, `weighted` of them times x."""
        if low is not None and ring.bits == 64:
            each = 8 * ops.packed_words(count, low)
            return Cost({(0, 2): 8 * ops.packed_words((rows + weighted) * count, low), (1, 2): each, (2, 1): each}, 1)
        pre = Cost({(0, 2): (rows + weighted) * count * ring.bytes})
        return pre + TrioParty.finish_price(ring, count, shift, helped=False)

    def _weighted(self, x: Share | None, weights: BitWeights) -> tuple[BitFlags, int]:
        """Which bit rows multiply x, and how many."""
        if x is None:
            return _flags((False,) * len(weights))
        if _whole(weights):
            return _flags(tuple(map(bool, weights)))
        return _flags(tuple([isinstance(w, Tensor) or w != 0 for w in weights]))

    def _inject_piece(
        self, bits: BitShare, x: Share | None, weights: BitWeights, constants: BitWeights, low: int | None = None
    ) -> Tensor | None:
        """This evaluator's additive piece of the sum (None at the helper, who sends its products)."""
        count, rows = bits.count, bits.rows
        numbers = len(weights) == len(constants) == rows and {*map(type, (*weights, *constants))} <= _NUMBERS
        if not numbers or (x is not None and x.parts[0].numel() != count):
            check_injected(bits, x, weights, constants)  # not always: a call of Python costs a good part of a gate
        weighted, products = self._weighted(x, weights)
        extra = rows + products
        if self.role == 0:
            lam = torch.zeros(1, dtype=self.ring.dtype, device=self.end.device)
            if x is not None:
                lam = (x.parts[0] + x.parts[1]).reshape(-1)
            message = self.end._draw_low(extra * count, low).view(extra, count)
            ops.inject_products(bits.parts[0] ^ bits.parts[1], lam, weighted, message)
            self.end._send_low("inject", message, low)
            return None
        if self.role == 1:
            shares = self.end._draw_low(extra * count, low).view(extra, count)
        else:
            shares = self.end._recv_low("inject", (extra, count), low)
        value = torch.zeros(count, dtype=self.ring.dtype, device=self.end.device)
        m = mine = value
        if x is not None:
            m = (x.parts[0] + x.parts[1]).reshape(-1)
            mine = x.parts[1].reshape(-1).contiguous()
        w, c = self._rows(weights), self._rows(constants)
        ops.inject_terms(bits.parts[0].contiguous(), m, mine, shares, weighted, w, c, self.role == 1, value)
        return value

    def _rows(self, values: BitWeights) -> Tensor:
        """Public constants as [rows, 1], or [rows, count] when one of them is a tensor."""
        if _whole(values):
            return _column(tuple(values), self.ring, self.end.device)
        width = max(v.numel() for v in values if isinstance(v, Tensor))
        made = [
            v.reshape(-1).to(self.ring.dtype).expand(width)
            if isinstance(v, Tensor)
            else torch.full((width,), self.ring.constant(v), dtype=self.ring.dtype, device=self.end.device)
            for v in values
        ]
        return torch.stack(made)


_NUMBERS = {int, bool}  # types of public constants that are no tensors


def _whole(values: BitWeights) -> TypeGuard[Sequence[int]]:
    """Whether all constants are numbers, none a tensor. They are many: types are compared in one step."""
    return {*map(type, values)} <= _NUMBERS


@lru_cache(maxsize=1024)
def _flags(rows: tuple[bool, ...]) -> tuple[BitFlags, int]:
    """Flags as the kernels take them, and how many are set; never written to."""
    return np.array(rows, dtype=np.bool_), sum(rows)


@cache
def plan_sizes(sizes: tuple[int, ...]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Sizes of blocks or groups as the kernels take them."""
    return np.array(sizes, dtype=np.int64)


@lru_cache(maxsize=1024)
def _column(values: tuple[int, ...], ring: Ring, device: str) -> Tensor:
    """Public integers as ring elements [n, 1]; never written to."""
    return torch.tensor([[ring.constant(v)] for v in values], dtype=ring.dtype, device=device)
