"""Trio's products, one-step polynomials, lookups, and the edges of the sharing (division.py has the sharing).

Products. With E = a1 (b1 - b2) - a2 b1, v1 = -((x + a2) b1 + a1 (y + b2)) and v2 = (x + a1)(y + b1):
v1 + v2 = xy + E, and E is what party 0 can compute. (PIGEON, Trio.)
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from private_llm.errors import DomainError
from private_llm.kernels import ops
from private_llm.kernels.forms import MATMUL, BilinearForm
from private_llm.net.ledger import Cost
from private_llm.net.transport import CLIENT
from private_llm.protocols.share import BitWidths, Index, Share
from private_llm.protocols.trio.division import Family, TrioParty
from private_llm.ring.dpf import expand, key_words
from private_llm.ring.ring import Ring


class TrioArithmetic(Family):
    """One party's products, one-step polynomials, lookups and edges."""

    index_keys = 2  # keys of point functions that this party receives for an index

    def add_public(self, x: Share, c: int | Tensor) -> Share:
        """The evaluators add c to their masked component. Local."""
        x, c = self.end._matched(x, c)
        return x if self.role == 0 else Share((x.parts[0] + c, x.parts[1]))

    def public(self, c: Tensor) -> Share:
        """Masks of zero: known to all. Local."""
        c = c.to(self.ring.dtype)
        zero = torch.zeros_like(c)
        return Share((zero, zero)) if self.role == 0 else Share((c, zero))

    def mul(self, x: Share, y: Share, shift: int = 0, widths: BitWidths | None = None) -> Share:
        """One finish: 1 element before and each way, f bits more with a shift."""
        (x0, x1), (y0, y1) = x.parts, y.parts
        if self.role == 0:
            piece = x0 * (y0 - y1) - x1 * y0
        elif self.role == 1:
            piece = -(x0 * y1 + x1 * y0)
        else:
            piece = x0 * y0
        return self.end._finish("mul", piece.shape, piece, shift, True, widths)

    def bilinear(
        self, form: BilinearForm, x: Share, y: Share, shift: int = 0, select: Tensor | None = None,
        widths: BitWidths | None = None,
    ) -> Share:  # fmt: skip
        """As `mul`, of outputs. Local products: two at parties 0 and 1, one at party 2."""
        (x0, x1), (y0, y1) = x.parts, y.parts
        if self.role == 0:
            piece = form.pair(x0 - x1, y0, -x0, y1)
        elif self.role == 1:
            piece = form.pair(-x0, y1, -x1, y0)
        else:
            piece = form.product(x0, y0)
        self.end.transport.ledger.add_macs(form.macs(x0.shape, y0.shape) * (1 if self.role == 2 else 2))
        if select is not None:
            piece = piece.reshape(-1)[select.to(piece.device)]
        return self.end._finish(form.tag, piece.shape, piece, shift, True, widths)

    _table_product = bilinear  # of a shared table, which dealer masks once, whatever it does to operands

    @staticmethod
    def product_price(ring: Ring, count: int, shift: int, widths: BitWidths | None = None) -> Cost:
        """`mul` and `bilinear` with `count` outputs, whatever the sums are over, divided by 2^shift."""
        if widths is not None and shift and ring.bits == 64:
            return TrioParty.narrow_finish_price(count, shift, widths)
        return TrioParty.finish_price(ring, count, shift, helped=True)

    def poly(self, x: Share, coefficients: Sequence[int], shift: int = 0) -> Share:
        """c(M - a) by Taylor's formula around the public M: party 0 shares a^2 (and a^3), and there is no E."""
        return self.end._finish("poly", x.shape, self._poly_piece(x, coefficients), shift, helped=False)

    @staticmethod
    def poly_price(ring: Ring, count: int, degree: int, shift: int) -> Cost:
        """`poly` of `degree` 2 or 3: degree - 1 elements pre, then one finish; 1 round, 2 with a shift."""
        pre = Cost({(0, 2): (degree - 1) * count * ring.bytes})
        return pre + TrioParty.finish_price(ring, count, shift, helped=False)

    def _poly_piece(self, x: Share, coefficients: Sequence[int]) -> Tensor | None:
        """An evaluator's piece of the value; the helper shares the powers of a and has none."""
        extra = len(coefficients) - 2
        if extra not in (1, 2):
            raise DomainError(f"poly: got degree {extra + 1}; want 2 or 3")
        count = x.numel()
        both = (x.parts[0] + x.parts[1]).reshape(-1)
        if self.role == 0:
            self.end.transport.send(2, "poly", powers(both, extra) - self.end._draw(extra * count))
            return None
        if self.role == 1:
            shares = self.end._draw(extra * count)
        else:
            shares = self.end.transport.recv(0, "poly", (extra * count,), self.ring.dtype)
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
        """1 element from the client to each evaluator; party 0 receives nothing."""
        count = torch.Size(shape).numel()
        masks = [stream.elements(count, self.ring, self.end.device).view(shape) for stream in self.end._inputs]
        if self.role == 0:
            return Share((masks[0], masks[1]))
        masked = self.end.transport.recv(CLIENT, "input", shape, self.ring.dtype)
        return Share((masked, masks[0]))

    def receive_index(self, count: int, domain: int) -> Index:
        """`index_keys` for each index; with `one_hot` rows of `domain` shared elements."""
        if self.end.one_hot:
            return Index(self.receive_input((count, domain)).parts, count, domain, one_hot=True)
        links = self.end.transport.where_it_comes()  # `expand` reads keys in main memory, on any device
        keys = links.recv(CLIENT, "index", (self.index_keys, count, key_words(domain)), torch.int64)
        return Index(tuple(keys), count, domain)

    def lookup(self, index: Index, table: Share | Tensor) -> Share:
        """Every component of W = M - a1 - a2 is known to two parties, who hold the keys of one point function for it.

        (0, 1) for a1, (0, 2) for a2, (1, 2) for M. Each sums its expanded shares times the component: three
        additive pieces, which `_finish` turns into a share (party 0's as E). One-hot rows times a shared table cost
        the same; with a public table they are local.
        """
        if index.one_hot:
            return self._lookup_rows(index, table)
        piece = self._in_chunks(index, lambda keys: self._lookup_piece(keys, index.domain, table))
        if isinstance(table, Tensor):
            return self.end._finish("lookup", piece.shape, piece if self.role else None, 0, helped=False)
        return self.end._finish("lookup", piece.shape, piece, 0, helped=True)

    def _in_chunks(self, index: Index, piece: Callable[[Sequence[Tensor]], Tensor]) -> Tensor:
        """What `piece` makes of the keys, a limited number of expanded entries at a time."""
        chunk = max(1, _LOOKUP_CELLS // index.domain)
        if index.count <= chunk:
            return piece(index.keys)
        starts = range(0, index.count, chunk)
        return torch.cat([piece([key[at : at + chunk] for key in index.keys]) for at in starts])

    def _expanded(self, keys: Sequence[Tensor], domain: int, *holders: int) -> tuple[Tensor, ...]:
        return expand(keys, domain, holders, self.ring, self.end.device)

    def _lookup_rows(self, index: Index, table: Share | Tensor) -> Share:
        rows = Share(index.to(self.end.device).keys)
        if isinstance(table, Tensor):
            return rows.map(lambda part: ops.ring_matmul(part, table))
        with self.end.ledger.op("lookup"):
            return self._table_product(MATMUL, rows, table)

    def _lookup_piece(self, keys: Sequence[Tensor], domain: int, table: Share | Tensor) -> Tensor:
        # Party 0 has key 0 of (0, 1) and (0, 2), party 1 key 1 of (0, 1) and key 0 of (1, 2), party 2 the rest.
        if isinstance(table, Tensor):
            if self.role == 0:
                return torch.empty((keys[0].shape[0], table.shape[1]), dtype=self.ring.dtype, device=self.end.device)
            return ops.ring_matmul(self._expanded(keys[1:2], domain, self.role - 1)[0], table)
        self.end.ledger.add_macs(2 * keys[0].shape[0] * table.numel())
        first, second = self._expanded(keys[:2], domain, min(self.role, 1), max(self.role - 1, 0))
        if self.role == 0:
            return ops.ring_matmul_pair(first, table.parts[0], second, table.parts[1])
        return ops.ring_matmul_pair(second, table.parts[0], second - first, table.parts[1])

    def reveal(self, pieces: Sequence[tuple[int, Share]]) -> None:
        """Party 1 sends x + a2, party 2 sends a2: 1 element each to the endpoint of each piece."""
        if self.role:
            for endpoint, x in pieces:
                part = x.parts[0] if self.role == 1 else x.parts[1]
                self.end.transport.send(endpoint, "reveal", part.contiguous())


def powers(a: Tensor, extra: int) -> Tensor:
    """a*a, or with extra=2 a*a and then a*a*a, one after the other: [n] to [extra n]. Local."""
    square = a * a
    return torch.cat([square, square * a]) if extra == 2 else square


_LOOKUP_CELLS = 1 << 22  # expanded entries held at once (32 MiB in a 64-bit ring)
