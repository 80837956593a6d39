"""Trio's functions in one step: piecewise polynomials, sums of waves, exponentials.

Piecewise polynomials in one round, by comparison keys that party 0 makes for its masks. The evaluators know M = x + a,
party 0 knows a. With s = -a and w = `bits`, [x + c < 0] is bit w-1 of M + c + s:

    [x + c < 0] = top(M + c) ^ u,   u = top(s) ^ carry,   carry = [lower(M + c) + lower(s) >= 2^(w-1)]

and the carry is [~lower(M + c) < lower(s)]: a comparison of what the evaluators know with what party 0 knows. Its key
has alpha = lower(s) and beta = +-(1, a, a^2), minus where top(s) is set; party 0 shares top(s) (1, a, a^2) besides. So
the evaluators have additive shares of u a^j for every threshold, from one key, and without a message between them:

    [x + c < 0] a^j = u a^j,  or where top(M + c) is set  a^j - u a^j
    x^i [x + c < 0] = sum_j binomial(i, j) M^(i-j) (-1)^j a^j [x + c < 0]

One finish turns the sum of all pieces into a share: 1 round, 2 with a shift, in whose first round what is not divided
goes along. Party 0 sends each evaluator the key (`ring.comparison_keys`), whose roots come from their common streams,
and party 2 the shared powers. Source: Boyle et al. 2021, section 3 (DReLU by a comparison key), with Trio's masks in
place of a dealer's. Leakage: none to a single party, as long as AES is a good cipher; the receivers' views are
pseudorandom keys. Party 0 tells the evaluators a fresh seed of the cipher's keys when the session begins
(`_common_seed`); what that leaves of the cipher's security is in the header of `ring.comparison_keys`.

Sums of waves: the mask's side of cos(k (M - a)) comes from party 0, in shares, and no bit above a turn. With the
numbers of `protocols.one_step`, for an angle M - a of which the evaluators know M and party 0 knows a:
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

Exponentials: the mask's side of e^(M - a) = e^M e^(-a) comes from party 0, in shares. With the digits of
`protocols.one_step`, bit b = B ^ l of what is kept, j the digit and r the rest of the mask a:
1. Party 0 shares four numbers: e^(-r) in the place 2 j + l, zero in the others. One share is drawn from its stream with
   party 1, the other one goes to party 2.
2. The evaluators know M and B. b = 1 means l = 1 - B, so the places 1 - B and 3 - B count; each is multiplied by the
   public factor of its digit. The sum is an additive share of b e^x, which one finish turns into a share.

Pre: 4 fields of GIVEN_BITS, and a division of as many bits (division.py); online as that: 2 rounds. Without a shift 4
elements and a finish. Leakage: none to a single party. Party 2 receives four numbers masked by a stream that it lacks,
all else is a finish or such a division.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from private_llm.errors import DomainError
from private_llm.kernels import ops, waves
from private_llm.kernels.address import Array
from private_llm.kernels.trace_hook import as_array
from private_llm.net.ledger import Cost
from private_llm.protocols.ends import PartySetup
from private_llm.protocols.one_step import GIVEN_BITS, Exponential, Pieces, PiecesShape, Waves, turns
from private_llm.protocols.prices import Adder, Prices
from private_llm.protocols.share import BitShare, BitWidths, Share
from private_llm.protocols.trio.bits import TrioBits
from private_llm.protocols.trio.division import Family, TrioParty
from private_llm.ring import comparison_keys
from private_llm.ring.prg import Seed
from private_llm.ring.ring import Ring


class ComparisonKeys(Family):
    """One party's piecewise polynomials, where the settings may take comparison keys."""

    def __init__(self, end: TrioParty, setup: PartySetup) -> None:
        super().__init__(end, setup)
        end._ciphers.append(comparison_keys.Ciphers(_common_seed(setup)))

    def takes_keys(self, count: int, shape: PiecesShape, other: Callable[..., Cost], *facts: Hashable) -> bool:
        """As the interface says, by bytes, rounds and the cipher's work of whoever has most of it."""
        return _takes_keys(self.end.adder, self.end.prices, self.ring, count, shape, other, facts)

    def key_seconds(self, count: int, shape: PiecesShape) -> float | None:
        """As the interface says."""
        return _key_seconds(self.end.adder, self.end.prices, self.ring, count, shape)

    def piecewise(self, x: Share, pieces: Pieces) -> list[Share]:
        """As the interface says: see the module header."""
        shape = pieces.shape
        if not 2 <= shape.bits <= self.ring.bits or not 0 <= shape.low <= shape.bits - 2:
            raise DomainError(
                f"piecewise: got bits={shape.bits}, low={shape.low}; want 2 to {self.ring.bits}, and 0 to bits - 2"
            )
        flat, found = x.map(lambda part: part.reshape(-1)), []
        for at in range(0, max(1, x.numel()), _KEYS):  # party 0 makes keys while the others use those before
            part = Share(tuple(each[at : at + _KEYS] for each in flat.parts))
            if self.role == 0:
                self._send_keys(part, shape)
            else:
                found.append(self._pieces(part, pieces))
        piece = torch.cat(found, 1) if found else None
        made: dict[int, Share] = {}
        for shift, outputs, along in shape.finishes:
            size = torch.Size((len(outputs), *x.shape))
            some = None if piece is None else piece[list(outputs)]
            if along:
                beside = None if piece is None else piece[list(along)]
                share, other = self._finish_along(size, some, shift, beside, torch.Size((len(along), *x.shape)))
                made |= _rows(along, other)
            else:
                share = self.end._finish("piecewise", size, some, shift, helped=False)
            made |= _rows(outputs, share)
        return [made[output] for output in range(shape.outputs)]

    @staticmethod
    def piecewise_price(ring: Ring, count: int, shape: PiecesShape) -> Cost:
        """`piecewise`: keys to both evaluators (856 bytes for 26 levels and degree 1), powers to one, finishes."""
        keys = 8 * count * comparison_keys.key_words(shape.levels, shape.words)
        powers = 8 * count * (shape.words + (shape.words > 2))
        total = Cost({(0, 1): keys, (0, 2): keys + powers})
        for shift, outputs, along in shape.finishes:
            more = count * len(along) * ring.bytes
            finish = TrioParty.finish_price(ring, count * len(outputs), shift, helped=False)
            total += finish + Cost({(1, 2): more, (2, 1): more})
        return total

    def _finish_along(
        self, size: torch.Size, piece: Tensor | None, shift: int, along: Tensor | None, shape: torch.Size
    ) -> tuple[Share, Share]:
        """Shares of the outputs that are divided by 2^shift, and of those of `shape` that are not, in 2 rounds."""
        mask = self.end._draw(shape.numel())
        if along is None:
            other = Share((mask.view(shape), self.end._draw(shape.numel(), 1).view(shape)))
            return self.end._finish_shifted("piecewise", size, piece, shift)[0], other
        masked = along.reshape(-1) + mask
        share, opened = self.end._finish_shifted("piecewise", size, piece, shift, masked)
        return share, Share(((masked + opened[-1] - mask).view(shape), mask.view(shape)))

    def _send_keys(self, x: Share, shape: PiecesShape) -> None:
        count, words = x.numel(), shape.words
        key_words = comparison_keys.key_words(shape.levels, words)
        more = words + (words > 2)
        if x.parts[0].is_meta:
            message = torch.empty((count, key_words), dtype=torch.int64, device="meta")
            self.end.transport.send(1, "piecewise", message)
            self.end.transport.send(2, "piecewise", message)
            self.end.transport.send(2, "piecewise", torch.empty((more, count), dtype=torch.int64, device="meta"))
            return
        mask = _unsigned(x.parts[0] + x.parts[1]).reshape(-1)
        lower, top = _split(np.uint64(0) - mask, shape)
        powers = np.stack([mask**j for j in range(words)])
        beta = np.where(top == 1, np.uint64(0) - powers, powers)
        first, second = self.end._streams
        keys = comparison_keys.make_keys(
            lower, np.ascontiguousarray(beta.T), shape.levels, first, second, self.end._ciphers[0].take(count)
        )
        shared = np.concatenate([top * powers, powers[2:]]) - self._shared(more, count)
        message = _signed(keys)
        self.end.transport.send(1, "piecewise", message)
        self.end.transport.send(2, "piecewise", message)
        self.end.transport.send(2, "piecewise", _signed(shared))

    def _shared(self, rows: int, count: int) -> Array:
        """What parties 0 and 1 draw as the first share of rows of words."""
        return _unsigned(self.end._streams[0].words(rows * count)).reshape(rows, count)

    def _pieces(self, x: Share, pieces: Pieces) -> Tensor:
        """An evaluator's additive pieces of all outputs: [outputs, count]."""
        shape, count, words = pieces.shape, x.numel(), pieces.shape.words
        key_words = comparison_keys.key_words(shape.levels, words)
        more, device = words + (words > 2), x.parts[0].device
        meta, first = x.parts[0].is_meta, self.role == 1
        root = ciphers = None
        if not meta:
            ciphers, root = self.end._ciphers[0].take(count), comparison_keys.roots(self.end._streams[0], count)
        key = self.end.transport.recv(0, "piecewise", (count, key_words), torch.int64)
        if not first:
            received = self.end.transport.recv(0, "piecewise", (more, count), torch.int64)
        if root is None or ciphers is None:
            return torch.empty((shape.outputs, count), dtype=self.ring.dtype, device="meta")
        shared = self._shared(more, count) if first else _unsigned(received)
        powers = np.stack(
            [np.full(count, int(first), dtype=np.uint64), _unsigned(x.parts[1]).reshape(-1), *shared[words:]]
        )
        masked, key_of = _unsigned(x.parts[0] + x.parts[1]).reshape(-1), _unsigned(key)
        offsets, steps, rest = pieces.arrays
        sums = np.einsum("ow,jn->owjn", rest, powers)
        step = max(1, _POINTS // max(1, len(offsets)))
        for at in range(0, count, step):
            some = slice(at, at + step)
            lower, top = _split(masked[some] + offsets[:, None], shape)
            values = comparison_keys.evaluate(
                self.role - 1, root[some], key_of[some], ~lower, shape.levels, words, ciphers, pieces.ways
            )
            comparison_keys.add_steps(
                values, top, np.ascontiguousarray(shared[:words, some]), np.ascontiguousarray(powers[:, some]), steps,
                sums, at,
            )  # fmt: skip
        return _signed(_polynomial(sums, masked)).to(self.ring.dtype).to(device)


class OneStep(Family):
    """One party's exponentials and sums of waves."""

    def __init__(self, end: TrioParty, setup: PartySetup) -> None:
        super().__init__(end, setup)
        self._bits = TrioBits(end, setup)

    def exponential(self, x: Share, keep: BitShare, plan: Exponential) -> Share:
        """As the interface says: see the module header."""
        if self.ring.bits != 64 or keep.rows != 1 or keep.count != x.numel():
            raise DomainError(
                f"exponential: got a {self.ring.bits}-bit ring and {keep.rows} rows of {keep.count} bits for "
                f"{x.numel()} elements; want 64 bits, and one row of as many"
            )
        count, piece, low = x.numel(), None, GIVEN_BITS if plan.shift and self.end._narrows else None
        both = (x.parts[0] + x.parts[1]).reshape(-1)
        if self.role == 0:
            self.end._send_low("exponential", self._places(both, keep, plan, low), low)
        else:
            if self.role == 1:
                shares = self.end._draw_low(_PLACES * count, low).view(_PLACES, count)
            else:
                shares = self.end._recv_low("exponential", (_PLACES, count), low)
            masked = both + plan.offset
            piece = waves.weighed(masked, keep.parts[0].contiguous(), shares, plan.digits, plan.factors)
        return self.end._finish("exponential", x.shape, piece, plan.shift, False, BitWidths(GIVEN_BITS, self.ring.bits))

    @staticmethod
    def exponential_price(ring: Ring, count: int, shift: int) -> Cost:
        """`count` exponentials: 4 fields pre, a narrow division (elements without a shift); 2 rounds."""
        if shift and ring.bits == 64:
            fields = Cost({(0, 2): 8 * ops.packed_words(_PLACES * count, GIVEN_BITS)})
            return fields + TrioParty.narrow_finish_price(count, shift, BitWidths(GIVEN_BITS, ring.bits))
        return Cost({(0, 2): _PLACES * count * ring.bytes}) + TrioParty.finish_price(ring, count, shift, helped=False)

    def _places(self, mask: Tensor, keep: BitShare, plan: Exponential, low: int | None) -> Tensor:
        """Party 0: e^(-r) in one of four places, less party 1's shares: [4, n]."""
        message = -self.end._draw_low(_PLACES * mask.numel(), low).view(_PLACES, mask.numel())
        flags = keep.parts[0] ^ keep.parts[1]
        waves.placed(mask, flags, message, plan.digits, plan.secrets)
        return message

    def relu_minus_waves(self, x: Share, negative: BitShare, angle: Share, plan: Waves) -> Share:
        """As the interface says: an injection whose finish takes the sum's pieces, too."""
        if negative.rows != 1 or not negative.count == x.numel() == angle.numel():
            raise DomainError(
                f"waves: got {negative.rows} rows of {negative.count} bits and {angle.numel()} angles for {x.numel()} "
                "elements; want one row, and as many of each"
            )
        low = None if plan.bits >= self.ring.bits else plan.bits
        size = torch.Size((negative.count,))
        piece = self._bits._inject_piece(negative, x, [-1], [0], low)
        self._less_waves(angle, plan, piece)
        rest = self.end._finish("waves", size, piece, 0, helped=False, low=low)
        return self.end.add(x, rest.map(lambda part: part.view(x.shape)))

    @staticmethod
    def relu_minus_waves_price(ring: Ring, count: int, plan: Waves) -> Cost:
        """The waves' shares, one injection's products and fields of wraps pre; what is opened, one finish: 2 rounds."""
        pre = plan.words(count) + 2 * ops.packed_words(count, plan.above)
        opened = 8 * ops.packed_words(count, plan.wide)
        summed = Cost({(0, 2): 8 * pre, (1, 2): opened, (2, 1): opened}, 1)
        return summed + TrioBits.inject_price(ring, count, 1, 1, 0, None if plan.bits >= ring.bits else plan.bits)

    def _less_waves(self, angle: Share, plan: Waves, piece: Tensor | None) -> None:
        """Subtract from an evaluator's additive piece of a result [n] its piece of the sum; 1 round."""
        if self.ring.bits != 64:
            raise DomainError(f"waves: got a {self.ring.bits}-bit ring; want 64 bits")
        count, table = angle.numel(), turns()
        both = (angle.parts[0] + angle.parts[1]).reshape(-1)
        hidden, wraps = plan.words(count), 2 * ops.packed_words(count, plan.above)
        if self.role == 0:
            drawn = self.end._draw_words(hidden + wraps)
            g1, g2 = self.end._draw(count), self.end._draw(count, 1)
            fields, rest = drawn.split_with_sizes((hidden, wraps))
            self.end.transport.send(2, "waves", waves.hidden(both, fields, plan, table))
            self.end.transport.send(2, "waves", waves.wraps(g1, g2, rest, plan))
            return
        if piece is None:
            raise self.end._lacking("waves")
        if self.role == 1:
            fields, rest = self.end._draw_words(hidden + wraps).split_with_sizes((hidden, wraps))
        else:
            fields = self.end.transport.recv(0, "waves", (hidden,), torch.int64)
            rest = self.end.transport.recv(0, "waves", (wraps,), torch.int64)
        g = self.end._draw(count)
        mine = waves.summed(both, fields, plan, table, self.role == 1) + g
        theirs = self.end.transport.exchange(3 - self.role, "waves", ops.pack_fields(mine, plan.wide))
        opened = mine + ops.unpack_fields(theirs, count, plan.wide)
        waves.widened(opened, g, rest, plan, self.role == 1, piece)


def _common_seed(setup: PartySetup) -> Seed:
    """A fresh seed for the ciphers of comparison keys, at the start of a session: 32 bytes from party 0 to 1 and 2."""
    if setup.counting:
        return Seed(bytes(32))
    if setup.party:
        return Seed(setup.transport.recv(0, "cipher key", (32,), torch.uint8).cpu().numpy().tobytes())
    seed = Seed.fresh()
    for evaluator in (1, 2):
        setup.transport.send(evaluator, "cipher key", torch.frombuffer(bytearray(seed.raw()), dtype=torch.uint8))
    return seed


@lru_cache(maxsize=4096)
def _takes_keys(
    adder: Adder, prices: Prices, ring: Ring, count: int, shape: PiecesShape, other: Callable[..., Cost],
    facts: tuple[Hashable, ...],
) -> bool:  # fmt: skip
    blocks = shape.cipher_blocks(count)
    return adder.takes_keys(lambda: prices.piecewise(ring, count, shape), lambda: other(prices, *facts), blocks)


@lru_cache(maxsize=4096)
def _key_seconds(adder: Adder, prices: Prices, ring: Ring, count: int, shape: PiecesShape) -> float | None:
    return adder.key_seconds(prices.piecewise(ring, count, shape), shape.cipher_blocks(count))


def _rows(outputs: Sequence[int], share: Share) -> dict[int, Share]:
    return dict(zip(outputs, (Share(parts) for parts in zip(*share.parts, strict=True)), strict=True))


def _polynomial(total: Array, masked: Array) -> Array:
    """Shares of sum_i c_i (M - a)^i from those of c_i a^j, total [outputs, i, j, n]: [outputs, n]."""
    value = total[:, 0, 0] + masked * total[:, 1, 0] - total[:, 1, 1]
    if total.shape[1] > 2:
        value += masked * masked * total[:, 2, 0] - np.uint64(2) * masked * total[:, 2, 1] + total[:, 2, 2]
    made: Array = value
    return made


def _split(values: Array, shape: PiecesShape) -> tuple[Array, Array]:
    """The compared lower bits, and the top one."""
    lower = (values >> np.uint64(shape.low)) & np.uint64((1 << shape.levels) - 1)
    return lower, (values >> np.uint64(shape.bits - 1)) & np.uint64(1)


def _unsigned(values: Tensor) -> Array:
    """Ring elements or words as uint64; those of a smaller ring are widened."""
    array: Array = as_array(values)
    return array.view(np.uint64) if array.dtype == np.int64 else array.view(np.uint32).astype(np.uint64)


def _signed(values: Array) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values).view(np.int64))


_KEYS = 1 << 15  # elements whose keys are held, and sent, at once: 28 to 90 MB
_POINTS = 1 << 16  # elements times thresholds that are evaluated at once
_PLACES = 4  # two digits times two values of the mask of the bit, of an exponential
