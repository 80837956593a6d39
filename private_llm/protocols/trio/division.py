"""Trio's sharing, and the way from additive pieces of a value to a share of its quotient by 2^f.

Sharing of x with masks a = a1 + a2: party 0 holds (a1, a2), party 1 (x + a2, a1), party 2 (x + a1, a2); both
evaluators know M = x + a. Party 0 sends to party 2 only (comparison keys to both: trio/one_step.py), and its streams
with party 1 and party 2 replace all its other messages. But for lookups by keys it needs no data: it may be ahead.

Finishing without shift: party 0 sends g - E to party 2 (g known to party 1, who subtracts it); the
evaluators add fresh masks z1, z2 and exchange. Pre: 1 element; online: 1 each way; 1 round.

Finishing with a shift by f bits, free of wrap errors:
  1. Let u = z + 2^(l-2), 0 <= u < 2^(l-1), and R = E + g1 + g2, uniform for each evaluator and known to
     party 0. The evaluators exchange v1 + g1 and v2 + g2 and hold w = u + R mod 2^l.
  2. w wrapped iff msb(R) = 1 and msb(w) = 0, so
     (w >> f) - (R >> f) + 2^(l-f) msb(R) (1 - msb(w)) - 2^(l-2-f) is floor(z / 2^f) or one unit more.
  3. Party 0 shares msb(R) modulo 2^f (f bits to party 2). The evaluators exchange
     (1 - msb(w)) rho_i + zeta_i mod 2^f with fresh zeta (known to party 0), f bits each way.
     The result's mask is (R >> f) + 2^(l-f)(zeta1 + zeta2), which is uniform; party 0 knows it.
The second, small exchange is the price of a result mask that does not depend on w: without it the
evaluators could not both hold M. Pre: l + f bits; online: l + f bits each way; 2 rounds.

Narrow divisions are right in their lowest bits. Of x, |x| < 2^(k-2), the lowest k bits are right, and r bits of the
quotient by 2^f are wanted. Everything is as above, but modulo 2^k:
  1. The evaluators exchange k bits of v1 + g1 and v2 + g2 and hold w = x + 2^(k-2) + R mod 2^k.
  2. (w >> f) - (R >> f), plus 2^(k-f) where w wrapped, is the quotient or one unit more. Modulo 2^(k-f) the wrap does
     not count: what is left of it counts modulo 2^n, n = r - (k - f) bits. Party 0 shares msb(R) modulo 2^n, and the
     evaluators exchange n bits. With n = 0 both go, and x may be any number modulo 2^k: w is not read as a number then.
  3. The mask of the result is (R >> f) + 2^(k-f) (zeta1 + zeta2), of which party 2 gets r bits of its part.
Pre: r + n bits; online: k + n each way; 2 rounds, 1 with n = 0. Numbers of k bits are moved up by 64 - k, so the
kernels are those of the whole ring. A held value is divided without opening anything: its M plays w.

Cutting needs no message where two units of the quotient do not matter. With M = x + a1 + a2 modulo 2^b, the s bits cut
from each of the three amount to so little that (M >> s) - (a1 >> s) - (a2 >> s) lies between x / 2^s - 1 and
x / 2^s + 2, modulo 2^(b-s).

Leakage: none to a single party (each message is masked by a stream its receiver lacks; w is uniform modulo 2^k for each
evaluator, which lacks the other's g). Above the right bits a share depends on masks. The rounding bit depends on R: the
functionality is truncation with an error of one unit (see threat).
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch import Tensor

from private_llm.errors import DomainError, ProtocolAbort
from private_llm.kernels import ops
from private_llm.kernels.shapes import broadcast
from private_llm.net.ledger import Cost
from private_llm.protocols.ends import PartySetup, WrapLinks
from private_llm.protocols.prices import Adder, Prices
from private_llm.protocols.protocol import Protocol
from private_llm.protocols.share import BitWidths, Share
from private_llm.ring.comparison_keys import Ciphers
from private_llm.ring.prg import Prg, Seed
from private_llm.ring.ring import RING64, Ring

ReceiveFrom = Callable[[str, tuple[int, ...], torch.dtype], Tensor]
"""Receives the next message of one party: tag, shape, dtype."""


class TrioParty(Protocol):
    """One party's streams, and how it divides and finishes; shares have two parts. Its primitives: registry.py."""

    name = "trio"
    can_repeat = True
    one_hot = False  # whether the client shares indices as one-hot rows, which need nothing of party 0 but masks
    prices: Prices

    def __init__(self, setup: PartySetup) -> None:
        super().__init__(setup.party, setup.transport, setup.ring)
        self.adder = Adder(setup.config.adder, setup.config.bandwidth_mbit, setup.config.latency_ms)
        self.role = setup.party % 3  # 0 helps, 1 and 2 evaluate; both parties 0 and 3 of quad help
        # The helper shares one stream with each evaluator; an evaluator has only its own.
        helpers = (1, 2) if self.role == 0 else (0,)
        self._seeds = [setup.pair_seeds[other] for other in helpers]
        self._keys = list(setup.input_keys)
        self._sections: set[str] = set()
        self._ciphers: list[Ciphers] = []  # of comparison keys: one, where the parties take such keys
        self._streams: list[Prg] = [seed.stream("trio masks") for seed in self._seeds]
        self._inputs: list[Prg] = self.input_masks(self._keys)
        mutual = setup.pair_seeds.get(3 - self.role) if self.role else None
        self._mutual: Prg | None = None if mutual is None else mutual.stream("trio permutations")

    def input_masks(self, keys: Sequence[Seed], label: str = "") -> list[Prg]:
        """One stream for each key."""
        return [key.stream(f"client input/{label}" if label else "client input") for key in keys]

    @contextmanager
    def inputs_of(self, masks: list[Prg]) -> Iterator[None]:
        """As the interface says."""
        kept, self._inputs = self._inputs, masks
        try:
            yield
        finally:
            self._inputs = kept

    @contextmanager
    def section(self, label: str, links: WrapLinks = lambda transport: transport) -> Iterator[None]:
        """Inside, masks come from streams of their own and indices are one-hot, so that party 0 may run ahead."""
        if label in self._sections:
            raise ProtocolAbort(f"the masks of '{label}' were used before; masks must never repeat")
        self._sections.add(label)
        kept = self._streams, self._inputs, self.one_hot, self.transport, self.runs_ahead, self._ciphers
        self._streams = [seed.stream(f"trio masks/{label}") for seed in self._seeds]
        self._inputs = self.input_masks(self._keys, label)
        self.one_hot, self.transport, self.runs_ahead = True, links(self.transport), True
        self._ciphers = [each.apart(label) for each in self._ciphers]
        try:
            yield
        finally:
            self._streams, self._inputs, self.one_hot, self.transport, self.runs_ahead, self._ciphers = kept

    @property
    def mask_streams(self) -> Sequence[Prg]:
        """With the helper, or with each evaluator; none where messages are stored (`section`) or recorded (quad)."""
        return () if self.runs_ahead or self.compares else self._streams

    def _draw(self, count: int, which: int = 0) -> Tensor:
        return self._streams[which].draw(count, self.ring.dtype, self.device)

    def _draw_words(self, count: int, which: int = 0) -> Tensor:
        return self._streams[which].draw(count, torch.int64, self.device)

    def _matched(self, x: Share, c: int | Tensor) -> tuple[Share, int | Tensor]:
        """x expanded to the shape of its sum with public constants, and these as ring elements."""
        if not isinstance(c, Tensor):
            return x, self.ring.constant(c)
        shape = broadcast(x.shape, c.shape)
        if shape != x.shape:
            x = x.map(lambda part: part.expand(shape))
        return x, c.to(self.ring.dtype)

    # -- finishing a product -------------------------------------------------------------------------------
    def _finish(
        self, tag: str, shape: torch.Size, piece: Tensor | None, shift: int, helped: bool,
        widths: BitWidths | None = None, low: int | None = None,
    ) -> Share:  # fmt: skip
        """From additive pieces to a share. Evaluators pass v_i as `piece`, party 0 E if it helps (else None).

        widths: of a division. low: of a share that is right in its lowest bits alone, without E: only these are sent.
        """
        if shift:
            if widths is not None and self._narrows:
                return self._divided(tag, piece, shape, shift, widths)
            return self._finish_shifted(tag, shape, piece, shift)[0]
        if piece is None and (helped or self.role):
            raise self._lacking(tag)
        count = shape.numel()
        # Party 0 and party 1 share a second mask where E needs one.
        blind = self._draw(2 * count if helped and self.role < 2 else count)
        z, cover = blind[:count], blind[count:]
        if self.role == 0:
            z2 = self._draw(count, 1)
            if piece is not None:
                self.transport.send(2, tag, cover - piece.reshape(-1))
            return Share((z.view(shape), z2.view(shape)))
        masked = piece.reshape(-1) + z if piece is not None else z
        if helped and self.role == 1:
            masked = masked - cover
        elif helped:
            masked = masked + self.transport.recv(0, tag, (count,), self.ring.dtype)
        if low is None:
            theirs = self.transport.exchange(3 - self.role, tag, masked)
        else:
            fields = self.transport.exchange(3 - self.role, tag, ops.pack_fields(masked, low))
            theirs = ops.unpack_fields(fields, count, low)
        return Share(((masked + theirs - z).view(shape), z.view(shape)))

    @staticmethod
    def finish_price(ring: Ring, count: int, shift: int, helped: bool) -> Cost:
        """`_finish` of `count` outputs. Without shift and E (not `helped`) party 0 sends nothing."""
        plain, packed = count * ring.bytes, 8 * ops.packed_words(count, shift)
        if shift:
            return Cost({(0, 2): plain + packed, (1, 2): plain + packed, (2, 1): plain + packed}, 2)
        return Cost({(0, 2): plain if helped else 0, (1, 2): plain, (2, 1): plain}, 1)

    # -- elements of which only the lowest bits count, packed ------------------------------------------------
    def _draw_low(self, count: int, low: int | None) -> Tensor:
        """Uniform elements [count] below 2^low (None: of the whole ring) from the first stream."""
        if low is None:
            return self._draw(count)
        return ops.unpack_fields(self._draw_words(ops.packed_words(count, low)), count, low)

    def _send_low(self, tag: str, elements: Tensor, low: int | None) -> None:
        self.transport.send(2, tag, elements if low is None else ops.pack_fields(elements.view(-1), low))

    def _recv_low(self, tag: str, shape: tuple[int, ...], low: int | None) -> Tensor:
        if low is None:
            return self.transport.recv(0, tag, shape, self.ring.dtype)
        count = torch.Size(shape).numel()
        words = self.transport.recv(0, tag, (ops.packed_words(count, low),), torch.int64)
        return ops.unpack_fields(words, count, low).view(shape)

    def _beyond(self, shift: int) -> DomainError:
        return DomainError(f"shift: got {shift}; want 0 to {self.ring.bits - 3} in a {self.ring.bits}-bit ring")

    def _lacking(self, tag: str) -> DomainError:
        return DomainError(f"{tag}: party {self.party} finishes a product without its piece")

    def _finish_shifted(
        self, tag: str, shape: torch.Size, piece: Tensor | None, shift: int, along: Tensor | None = None
    ) -> tuple[Share, tuple[Tensor, ...]]:
        """The share, and what was opened: w at an evaluator, the summands of R at the helper.

        along: masked elements [n] that the evaluators exchange in the same message; the other's are opened last.
        """
        if not 0 < shift <= self.ring.bits - 3:
            raise self._beyond(shift)
        if piece is None and self.role:
            raise self._lacking(tag)
        count = shape.numel()
        packed = ops.packed_words(count, shift)
        if self.role == 0:
            (rho1, zeta1), (g1, z1) = self._draw_mixed(packed, count, 2, 0)
            (zeta2,), (g2,) = self._draw_mixed(packed, count, 1, 1)
            e = torch.zeros_like(g2) if piece is None else piece.reshape(-1)
            a1, a2, z2, rho2 = ops.trunc_helper(e, g1, g2, z1, rho1, zeta1, zeta2, shift, shift)
            for message in self._mixed(rho2, z2):
                self.transport.send(2, tag, message)
            return Share((a1.view(shape), a2.view(shape))), (e, g1, g2)
        if self.role == 1:
            (rho, zeta), (g, z) = self._draw_mixed(packed, count, 2)
        else:
            (zeta,), (g,) = self._draw_mixed(packed, count, 1)
            rho, z = self._recv_mixed(self._from_helper, tag, packed, count)
        mine = g if piece is None else piece.reshape(-1) + g
        theirs = self.transport.exchange(3 - self.role, tag, mine if along is None else torch.cat([mine, along]))
        w, fields = ops.trunc_open(mine, theirs[:count], rho, zeta, shift, shift)
        their_fields = self.transport.exchange(3 - self.role, tag, fields)
        half, own = ops.trunc_close(w, fields, their_fields, z, zeta, shift, shift)
        return Share((half.view(shape), own.view(shape))), (w, theirs[count:])

    def _truncate(self, x: Share, shift: int) -> tuple[Share, tuple[Tensor, ...]]:
        """The share, and what plays w or the summands of R."""
        if not 0 < shift <= self.ring.bits - 3:
            raise self._beyond(shift)
        first, second = (part.reshape(-1).contiguous() for part in x.parts[:2])
        return self._wrapped("truncate", x.shape, first, second, shift, shift, None)

    @property
    def _narrows(self) -> bool:
        return self.ring.bits == 64 and "local_truncate" in self.primitives

    def _divided(self, tag: str, piece: Tensor | None, shape: torch.Size, shift: int, widths: BitWidths) -> Share:
        """From additive pieces of x modulo 2^given (party 0's is E, or none) to a share of x / 2^shift of `shape`."""
        _fields(widths.valid_in, widths.needed_out, shift)  # before anything is drawn
        count, up = shape.numel(), 1 << (self.ring.bits - widths.valid_in)
        mine = self._draw(count)
        if piece is not None:
            mine = piece.reshape(-1) + mine
        elif self.role:
            raise self._lacking(tag)
        if self.role == 0:
            return self._narrowed(tag, shape, mine * up, self._draw(count, 1) * up, shift, widths)
        if widths.valid_in == self.ring.bits:
            theirs = self.transport.exchange(3 - self.role, tag, mine)
        else:
            fields = self.transport.exchange(3 - self.role, tag, ops.pack_fields(mine, widths.valid_in))
            theirs, mine = ops.unpack_fields(fields, count, widths.valid_in) * up, mine * up
        return self._narrowed(tag, shape, mine, theirs, shift, widths)

    @staticmethod
    def narrow_finish_price(count: int, shift: int, widths: BitWidths, held: bool = False) -> Cost:
        """`_divided`, in a 64-bit ring. held: nothing is opened (`truncate`)."""
        wanted, fields = (8 * ops.packed_words(count, bits) for bits in (widths.needed_out, widths.fields(shift)))
        opened = 0 if held else 8 * ops.packed_words(count, widths.valid_in)
        each, rounds = opened + fields, (not held) + (widths.fields(shift) > 0)
        return Cost({(0, 2): wanted + fields, (1, 2): each, (2, 1): each}, rounds)

    def _narrowed(
        self, tag: str, shape: torch.Size, first: Tensor, second: Tensor, shift: int, widths: BitWidths
    ) -> Share:  # fmt: skip
        """The quotient from what adds up to w at an evaluator, and to R at party 0, both moved up: [n] each."""
        count, n = shape.numel(), _fields(widths.valid_in, widths.needed_out, shift)
        f = shift + self.ring.bits - widths.valid_in
        low = None if widths.needed_out == self.ring.bits else widths.needed_out
        if n:
            return self._wrapped(tag, shape, first, second, f, n, low)[0]
        own = self._recv_low(tag, (count,), low) if self.role == 2 else self._draw(count)
        other = ((first + second) >> f) - own
        if self.role == 0:
            self._send_low(tag, other, low)
            return Share((own.view(shape), other.view(shape)))
        return Share((other.view(shape), own.view(shape)))

    def _wrapped(
        self, tag: str, shape: torch.Size, first: Tensor, second: Tensor, f: int, n: int, low: int | None
    ) -> tuple[Share, tuple[Tensor, ...]]:
        """The quotient by 2^f of what adds up to w at an evaluator, and to R at party 0: [count] each.

        n: bits of the result above those that a wrap of w leaves right. low: bits that are wanted of it (None: all).
        Also gives what plays w at an evaluator, or the summands of R at the helper.
        """
        count = shape.numel()
        packed = ops.packed_words(count, n)
        if self.role == 0:
            (rho1, zeta1), (z1,) = self._draw_mixed(packed, count, 2, elements=1)
            zeta2, zero = self._draw_words(packed, 1), torch.zeros_like(z1)
            a1, a2, z2, rho2 = ops.trunc_helper(zero, first, second, z1, rho1, zeta1, zeta2, f, n)
            for message in self._mixed(rho2, z2 if low is None else ops.pack_fields(z2, low)):
                self.transport.send(2, tag, message)
            return Share((a1.view(shape), a2.view(shape))), (zero, first, second)
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
        return Share((half.view(shape), own.view(shape))), (w,)

    # -- words and ring elements in one draw, one message ---------------------------------------------------
    def _draw_mixed(
        self, packed: int, count: int, words: int, which: int = 0, elements: int | None = None
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """`words` packed arrays and as many (or `elements`) arrays of `count` ring elements from one draw."""
        elements = words if elements is None else elements
        step = packed * 8 // self.ring.bytes
        drawn = self._draw(words * step + elements * count, which)
        pieces = drawn.split_with_sizes([step] * words + [count] * elements)
        return [piece.view(torch.int64) for piece in pieces[:words]], pieces[words:]

    def _mixed(self, packed: Tensor, elements: Tensor) -> tuple[Tensor, ...]:
        """The messages that carry words and ring elements; small arrays travel as one message."""
        if elements.numel() > _JOINED:
            return packed, elements
        return (torch.cat([packed.view(self.ring.dtype), elements]),)

    def _recv_mixed(self, recv: ReceiveFrom, tag: str, packed: int, count: int) -> tuple[Tensor, Tensor]:
        if count > _JOINED:
            return recv(tag, (packed,), torch.int64), recv(tag, (count,), self.ring.dtype)
        step = packed * 8 // self.ring.bytes
        fields, elements = recv(tag, (step + count,), self.ring.dtype).split_with_sizes((step, count))
        return fields.view(torch.int64), elements

    def _from_helper(self, tag: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self.transport.recv(0, tag, shape, dtype)


@lru_cache(maxsize=1024)
def _fields(valid_in: int, needed_out: int, shift: int) -> int:
    """`BitWidths.fields` in the 64-bit ring, after its check: a model asks for the same few."""
    widths = BitWidths(valid_in, needed_out)
    widths.check(RING64, shift)
    return widths.fields(shift)


class Family:
    """Primitives of one party with their prices: methods that `Protocol` has, and static methods `..._price`.

    An end holds its families, they hold it weakly: its keys and links go with its session.
    """

    def __init__(self, end: TrioParty, setup: PartySetup) -> None:
        self.end: TrioParty = weakref.proxy(end)
        self.party, self.role, self.ring = end.party, end.role, end.ring


class TrioDivision(Family):
    """Divisions of shares."""

    def truncate(self, x: Share, shift: int, widths: BitWidths | None = None) -> Share:
        """M plays w and the known mask plays R: 1 round, f bits each way; pre 1 element + f bits."""
        if widths is None or not self.end._narrows:
            return self.end._truncate(x, shift)[0] if shift else x
        widths.check(self.ring, shift)
        up = 1 << (self.ring.bits - widths.valid_in)
        first, second = (part.reshape(-1) * up for part in x.parts)
        return self.end._narrowed("truncate", x.shape, first, second, shift, widths)

    @staticmethod
    def truncate_price(ring: Ring, count: int, shift: int, widths: BitWidths | None = None) -> Cost:
        """`truncate` of `count` elements by `shift` bits: e + f bits pre, f bits each way, 1 round."""
        if widths is not None and ring.bits == 64:
            return TrioParty.narrow_finish_price(count, shift, widths, held=True)
        if shift == 0:
            return Cost()
        packed = 8 * ops.packed_words(count, shift)
        return Cost({(0, 2): count * ring.bytes + packed, (1, 2): packed, (2, 1): packed}, 1)

    def local_truncate(self, x: Share, shift: int) -> Share:
        """As the interface says: each party cuts the numbers that it knows."""
        first, second = x.parts[0], x.parts[1] >> shift
        if self.role == 0:
            return Share((first >> shift, second))
        return Share((((first + x.parts[1]) >> shift) - second, second))


_JOINED = 1 << 14  # elements up to which two arrays are copied into one message: a message costs more than the copy
