"""Trio's arithmetic: products, fused matrix products, one-step polynomials, wrap-free truncation.

Sharing of x with masks a = a1 + a2: party 0 holds (a1, a2), party 1 (x + a2, a1), party 2 (x + a1, a2); both
evaluators know M = x + a. Party 0 sends to party 2 only (comparison keys to both: trio/piecewise.py), and its streams
with party 1 and party 2 replace all its other messages. But for lookups by keys it works with masks alone, so it may
be ahead of the data.

Products. With E = a1 (b1 - b2) - a2 b1, v1 = -((x + a2) b1 + a1 (y + b2)) and v2 = (x + a1)(y + b1):
v1 + v2 = xy + E, and E is what party 0 can compute. (PIGEON, Trio.)

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
Leakage: none to a single party (each message is masked by a stream its receiver lacks). The rounding
bit depends on R: the functionality is truncation with an error of one unit (see threat).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

import torch
from torch import Tensor

from private_llm.errors import DomainError, ProtocolAbort
from private_llm.kernels import ops
from private_llm.kernels.forms import Form, Matmul
from private_llm.kernels.shapes import broadcast
from private_llm.net.transport import CLIENT, Transport
from private_llm.protocols.arithmetic import BitWidths
from private_llm.protocols.party_end import Links
from private_llm.protocols.protocol import Protocol
from private_llm.protocols.share import Index, Share
from private_llm.ring.dpf import expand, key_words
from private_llm.ring.prg import Prg, Seed
from private_llm.ring.ring import Ring

Receive = Callable[[str, tuple[int, ...], torch.dtype], Tensor]
"""Receives the next message of one party: tag, shape, dtype."""


class TrioArithmetic(Protocol):
    """One party's arithmetic; shares have two parts. Bytes over all links: `trio/cost.py`."""

    name = "trio"
    can_repeat = True
    one_hot = False
    """Whether the client shares indices as one-hot rows, which need nothing of party 0 but masks."""

    def __init__(
        self, party: int, transport: Transport, ring: Ring, pair_seeds: dict[int, Seed], input_keys: Sequence[Seed],
        device: str = "cpu",
    ) -> None:  # fmt: skip
        super().__init__(party, transport, ring)
        self.device = device
        # The helper shares one stream with each evaluator; an evaluator has only its own.
        helpers = (1, 2) if self.role == 0 else (0,)
        self._seeds = [pair_seeds[other] for other in helpers]
        self._keys = list(input_keys)
        self._sections: set[str] = set()
        self._apart = False  # inside a section: the helping party may be ahead
        self._streams: list[Prg] = [seed.stream("trio masks") for seed in self._seeds]
        self._inputs: list[Prg] = self.input_masks(self._keys)

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

    @property
    def runs_ahead(self) -> bool:
        """Whether this is inside a `section`."""
        return self._apart

    @contextmanager
    def section(self, label: str, links: Links = lambda transport: transport) -> Iterator[None]:
        """Inside, masks come from streams of their own and indices are one-hot, so that party 0 may run ahead.

        Sends nothing. Raises ProtocolAbort for a label that this session has used: masks must never repeat.
        """
        if label in self._sections:
            raise ProtocolAbort(f"the masks of '{label}' were used before; masks must never repeat")
        self._sections.add(label)
        kept = self._streams, self._inputs, self.one_hot, self.transport, self._apart
        self._streams = [seed.stream(f"trio masks/{label}") for seed in self._seeds]
        self._inputs = self.input_masks(self._keys, label)
        self.one_hot, self.transport, self._apart = True, links(self.transport), True
        try:
            yield
        finally:
            self._streams, self._inputs, self.one_hot, self.transport, self._apart = kept

    @cached_property
    def role(self) -> int:
        """What this party does: 0 helps, 1 and 2 evaluate."""
        return self.party

    @property
    def mask_streams(self) -> Sequence[Prg]:
        """Those with the helper, or with each evaluator; none in a `section`, whose messages may be stored ones."""
        return () if self._apart else self._streams

    def _draw(self, count: int, which: int = 0) -> Tensor:
        return self._streams[which].draw(count, self.ring.dtype, self.device)

    def _draw_words(self, count: int, which: int = 0) -> Tensor:
        return self._streams[which].draw(count, torch.int64, self.device)

    # -- local ---------------------------------------------------------------------------------------------
    def add_public(self, x: Share, c: int | Tensor) -> Share:
        """The evaluators add c to their masked component. Local."""
        if isinstance(c, Tensor):
            x, c = self._matched(x, c)
        else:
            c = self.ring.constant(c)
        return x if self.role == 0 else Share((x.parts[0] + c, x.parts[1]))

    def _matched(self, x: Share, c: Tensor) -> tuple[Share, Tensor]:
        """x expanded to the shape of its sum with public constants, and these as ring elements."""
        shape = broadcast(x.shape, c.shape)
        if shape != x.shape:
            x = x.map(lambda part: part.expand(shape))
        return x, c.to(self.ring.dtype)

    def public(self, c: Tensor) -> Share:
        """Masks of zero: known to all. Local."""
        c = c.to(self.ring.dtype)
        zero = torch.zeros_like(c)
        return Share((zero, zero)) if self.role == 0 else Share((c, zero))

    # -- finishing a product -------------------------------------------------------------------------------
    def _finish(self, tag: str, shape: torch.Size, piece: Tensor | None, shift: int, helped: bool) -> Share:
        """From additive pieces to a share. Evaluators pass v_i as `piece`, party 0 E if it helps (else None)."""
        if shift:
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
        theirs = self.transport.exchange(3 - self.role, tag, masked)
        return Share(((masked + theirs - z).view(shape), z.view(shape)))

    def _finish_narrow(self, tag: str, shape: torch.Size, piece: Tensor | None, low: int) -> Share:
        """A share of what is right in its lowest `low` bits, without E: they alone are sent, each way, in 1 round."""
        count = shape.numel()
        z = self._draw(count)
        if self.role == 0:
            return Share((z.view(shape), self._draw(count, 1).view(shape)))
        if piece is None:
            raise self._lacking(tag)
        masked = piece.reshape(-1) + z
        theirs = self.transport.exchange(3 - self.role, tag, ops.pack_fields(masked, low))
        return Share(((masked + ops.unpack_fields(theirs, count, low) - z).view(shape), z.view(shape)))

    # -- elements of which only the lowest bits count, packed ------------------------------------------------
    def _draw_low(self, count: int, low: int | None) -> Tensor:
        """Uniform elements [count] below 2^low (None: of the whole ring) from the first stream."""
        if low is None:
            return self._draw(count)
        return ops.unpack_fields(self._draw_words(ops.packed_words(count, low)), count, low)

    def _send_low(self, to: int, tag: str, elements: Tensor, low: int | None) -> None:
        self.transport.send(to, tag, elements if low is None else ops.pack_fields(elements.view(-1), low))

    def _recv_low(self, sender: int, tag: str, shape: tuple[int, ...], low: int | None) -> Tensor:
        if low is None:
            return self.transport.recv(sender, tag, shape, self.ring.dtype)
        count = torch.Size(shape).numel()
        words = self.transport.recv(sender, tag, (ops.packed_words(count, low),), torch.int64)
        return ops.unpack_fields(words, count, low).view(shape)

    def _beyond(self, shift: int) -> DomainError:
        return DomainError(f"shift: got {shift}; want 0 to {self.ring.bits - 3} in a {self.ring.bits}-bit ring")

    def _lacking(self, tag: str) -> DomainError:
        return DomainError(f"{tag}: party {self.party} finishes a product without its piece")

    def _finish_shifted(
        self, tag: str, shape: torch.Size, piece: Tensor | None, shift: int, along: Tensor | None = None
    ) -> tuple[Share, tuple[Tensor, ...]]:
        """The share, and what was opened: w at an evaluator, the summands of R at the helper.

        along: masked elements [n] that the evaluators exchange in the same message; the other's are what is opened
        last.
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
        return self._close(tag, shape, w, fields, z, zeta, shift), (w, theirs[count:])

    def _close(
        self, tag: str, shape: torch.Size, w: Tensor, fields: Tensor, z: Tensor, zeta: Tensor, shift: int
    ) -> Share:
        their_fields = self.transport.exchange(3 - self.role, tag, fields)
        half, own = ops.trunc_close(w, fields, their_fields, z, zeta, shift, shift)
        return Share((half.view(shape), own.view(shape)))

    def truncate(self, x: Share, shift: int, widths: BitWidths | None = None) -> Share:
        """Division of a held value: M plays w and the known mask plays R.

        1 round, f bits each way; pre 1 element + f bits. Raises DomainError for a shift above ring bits - 3.
        """
        return self._truncate(x, shift)[0] if shift else x

    def _truncate(self, x: Share, shift: int) -> tuple[Share, tuple[Tensor, ...]]:
        if not 0 < shift <= self.ring.bits - 3:
            raise self._beyond(shift)
        count = x.numel()
        packed = ops.packed_words(count, shift)
        first, second = x.parts[0].reshape(-1).contiguous(), x.parts[1].reshape(-1).contiguous()
        if self.role == 0:
            (rho1, zeta1), (z1,) = self._draw_mixed(packed, count, 2, 0, elements=1)
            zeta2 = self._draw_words(packed, 1)
            zero = torch.zeros_like(z1)
            a1, a2, z2, rho2 = ops.trunc_helper(zero, first, second, z1, rho1, zeta1, zeta2, shift, shift)
            for message in self._mixed(rho2, z2):
                self.transport.send(2, "truncate", message)
            return Share((a1.view(x.shape), a2.view(x.shape))), (zero, first, second)
        if self.role == 1:
            (rho, zeta), (z,) = self._draw_mixed(packed, count, 2, elements=1)
        else:
            zeta = self._draw_words(packed)
            rho, z = self._recv_mixed(self._from_helper, "truncate", packed, count)
        w, fields = ops.trunc_open(first, second, rho, zeta, shift, shift)
        return self._close("truncate", x.shape, w, fields, z, zeta, shift), (w,)

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

    def _recv_mixed(self, recv: Receive, tag: str, packed: int, count: int) -> tuple[Tensor, Tensor]:
        if count > _JOINED:
            return recv(tag, (packed,), torch.int64), recv(tag, (count,), self.ring.dtype)
        step = packed * 8 // self.ring.bytes
        fields, elements = recv(tag, (step + count,), self.ring.dtype).split_with_sizes((step, count))
        return fields.view(torch.int64), elements

    def _from_helper(self, tag: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self.transport.recv(0, tag, shape, dtype)

    # -- products ------------------------------------------------------------------------------------------
    def mul(self, x: Share, y: Share, shift: int = 0, widths: BitWidths | None = None) -> Share:
        """Elementwise product; bytes and rounds of one finish: 1 element before and each way, f bits more with a shift.

        1 round, 2 with a shift. Raises DomainError for a shift above ring bits - 3.
        """
        piece = self._mul_piece(x, y)
        return self._finish("mul", piece.shape, piece, shift, helped=True)

    def _mul_piece(self, x: Share, y: Share) -> Tensor:
        """v_i at an evaluator, E at the helper."""
        (x0, x1), (y0, y1) = x.parts, y.parts
        if self.role == 0:
            return x0 * (y0 - y1) - x1 * y0
        return -(x0 * y1 + x1 * y0) if self.role == 1 else x0 * y0

    def bilinear(
        self, form: Form, x: Share, y: Share, shift: int = 0, select: Tensor | None = None,
        widths: BitWidths | None = None,
    ) -> Share:  # fmt: skip
        """Output-sized traffic, rounds and errors as `mul`. Local products: two at parties 0 and 1, one at party 2."""
        piece = self._bilinear_piece(form, x, y, select)
        return self._finish(form.tag, piece.shape, piece, shift, helped=True)

    def _bilinear_piece(self, form: Form, x: Share, y: Share, select: Tensor | None) -> Tensor:
        """v_i at an evaluator, E at the helper, of all or of the selected outputs."""
        (x0, x1), (y0, y1) = x.parts, y.parts
        if self.role == 0:
            piece = form.pair(x0 - x1, y0, -x0, y1)
        elif self.role == 1:
            piece = form.pair(-x0, y1, -x1, y0)
        else:
            piece = form.product(x0, y0)
        self.ledger.add_macs(form.macs(x.shape, y.shape) * (1 if self.role == 2 else 2))
        if select is not None:
            piece = piece.reshape(-1)[select.to(piece.device)]
        return piece

    def poly(self, x: Share, coefficients: Sequence[int], shift: int = 0) -> Share:
        """c(M - a) by Taylor's formula around the public M; party 0 shares a^2 (and a^3).

        Pre: 1 (degree 2) or 2 (degree 3) elements more than a product without E; online as a product. Raises
        DomainError for another degree, or a shift above ring bits - 3.
        """
        return self._finish("poly", x.shape, self._poly_piece(x, coefficients), shift, helped=False)

    def _poly_piece(self, x: Share, coefficients: Sequence[int]) -> Tensor | None:
        """An evaluator's piece of the value; the helper shares the powers of a and has none."""
        extra = len(coefficients) - 2
        if extra not in (1, 2):
            raise DomainError(f"poly: got degree {extra + 1}; want 2 or 3")
        count = x.numel()
        both = (x.parts[0] + x.parts[1]).reshape(-1)
        if self.role == 0:
            self.transport.send(2, "poly", powers(both, extra) - self._draw(extra * count))
            return None
        if self.role == 1:
            shares = self._draw(extra * count)
        else:
            shares = self.transport.recv(0, "poly", (extra * count,), self.ring.dtype)
        return self._poly_terms(both, x.parts[1].reshape(-1), shares, coefficients, self.role == 1)

    def _poly_terms(
        self, m: Tensor, mine: Tensor, shares: Tensor, coefficients: Sequence[int], first: bool
    ) -> Tensor:  # fmt: skip
        """A piece of c(m - a), from m and additive shares of a and of its powers; `first` adds c(m)."""
        count = m.numel()
        c = [self.ring.constant(v) for v in coefficients]
        c3 = c[3] if len(c) == 4 else 0
        value = shares[:count] * (m * (3 * c3) + c[2]) - mine * ((m * (3 * c3) + 2 * c[2]) * m + c[1])
        if c3:
            value = value - shares[count:] * c3
        if first:
            value = value + (((m * c3 + c[2]) * m + c[1]) * m + c[0])
        return value

    # -- edges ----------------------------------------------------------------------------------------------
    def receive_input(self, shape: tuple[int, ...]) -> Share:
        """1 element from the client to each evaluator; party 0 receives nothing. No round is booked."""
        count = torch.Size(shape).numel()
        masks = [stream.elements(count, self.ring, self.device).view(shape) for stream in self._inputs]
        if self.role == 0:
            return Share((masks[0], masks[1]))
        masked = self.transport.recv(CLIENT, "input", shape, self.ring.dtype)
        return Share((masked, masks[0]))

    def receive_index(self, count: int, domain: int) -> Index:
        """Two keys of a distributed point function from the client for each index.

        16 ceil(log2 domain) + 24 bytes a key (at least 40). With `one_hot` instead rows of `domain` shared elements, as
        `receive_input`.
        """
        if self.one_hot:
            return Index(self.receive_input((count, domain)).parts, count, domain, one_hot=True)
        shape = (2, count, key_words(domain))
        keys = self.transport.recv(CLIENT, "index", shape, torch.int64)
        return Index((keys[0], keys[1]), count, domain)

    def lookup(self, index: Index, table: Share | Tensor) -> Share:
        """Rows of a table at secret indices: 24 bytes an output (64 bits; 16 if public), 1 round, whatever the domain.

        Every component of W = M - a1 - a2 is known to two parties, who hold the two keys of one point function for it:
        (0, 1) for a1, (0, 2) for a2, (1, 2) for M. Each sums its expanded shares times the component: three additive
        pieces, which `_finish` turns into a share (party 0's as E). One-hot rows times a shared table cost the same;
        with a public table they are local. Raises DomainError unless the table has `domain` rows.
        """
        if index.one_hot:
            return self._lookup_rows(Share(index.keys), table)
        piece = self._in_chunks(index, lambda keys: self._lookup_piece(keys, index.domain, table))
        if isinstance(table, Tensor):
            return self._finish("lookup", piece.shape, piece if self.role else None, 0, helped=False)
        return self._finish("lookup", piece.shape, piece, 0, helped=True)

    def _in_chunks(self, index: Index, piece: Callable[[list[Tensor]], Tensor]) -> Tensor:
        """What `piece` makes of the keys, a limited number of expanded entries at a time."""
        chunk = max(1, _LOOKUP_CELLS // index.domain)
        pieces = [piece([key[at : at + chunk] for key in index.keys]) for at in range(0, index.count, chunk)]
        return torch.cat(pieces) if len(pieces) > 1 else pieces[0]

    def _lookup_rows(self, rows: Share, table: Share | Tensor) -> Share:
        if isinstance(table, Tensor):
            return rows.map(lambda part: ops.ring_matmul(part, table))
        with self.ledger.op("lookup"):
            # The table is masked once, whatever a subclass does.
            return TrioArithmetic.bilinear(self, Matmul(), rows, table)

    def _lookup_piece(self, keys: Sequence[Tensor], domain: int, table: Share | Tensor) -> Tensor:
        # Party 0 has key 0 of (0, 1) and (0, 2), party 1 key 1 of (0, 1) and key 0 of (1, 2), party 2 the rest.
        if isinstance(table, Tensor):
            if self.role == 0:
                return torch.empty((keys[0].shape[0], table.shape[1]), dtype=self.ring.dtype, device=self.device)
            return ops.ring_matmul(expand(keys[1], domain, self.role - 1, self.ring), table)
        self.ledger.add_macs(2 * keys[0].shape[0] * table.numel())
        first = expand(keys[0], domain, 0 if self.role == 0 else 1, self.ring)
        if self.role == 0:
            second = expand(keys[1], domain, 0, self.ring)
            return ops.ring_matmul_pair(first, table.parts[0], second, table.parts[1])
        second = expand(keys[1], domain, self.role - 1, self.ring)
        return ops.ring_matmul_pair(second, table.parts[0], second - first, table.parts[1])

    def reveal(self, pieces: Sequence[tuple[int, Share]]) -> None:
        """Party 1 sends x + a2, party 2 sends a2: 1 element each to the endpoint of each piece."""
        if self.role:
            for endpoint, x in pieces:
                part = x.parts[0] if self.role == 1 else x.parts[1]
                self.transport.send(endpoint, "reveal", part.contiguous())


def powers(a: Tensor, extra: int) -> Tensor:
    """a*a, or with extra=2 a*a and then a*a*a, one after the other: [n] to [extra n]. Local."""
    square = a * a
    return torch.cat([square, square * a]) if extra == 2 else square


_LOOKUP_CELLS = 1 << 22
"""Expanded entries held at once (32 MiB in a 64-bit ring)."""

_JOINED = 1 << 14
"""Elements up to which two arrays are copied into one message: a message costs more than the copy."""
