"""`plain`: one party, no secrecy, the same interface and fixed-point arithmetic as the real protocols.

It exists as the reference the suite compares every protocol with, and to tell an approximation's error
from a protocol's (`checked.py` is the same with every range checked). A session refuses to start it without
`insecure=True`.

The edges of `plain`: values enter and leave in the clear.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from private_llm.errors import DomainError
from private_llm.kernels.forms import Form
from private_llm.net.transport import CLIENT, Transport
from private_llm.protocols.arithmetic import BitWidths
from private_llm.protocols.ends import ClientEnd
from private_llm.protocols.permutation import (
    Permutation,
    ShuffledBits,
    check_size,
    drawn,
    inverse,
    known,
    moved_bits,
    moved_rows,
    packed,
    unpacked,
)
from private_llm.protocols.protocol import Protocol, Weights, check_injected, check_low
from private_llm.protocols.share import BitShare, Index, Share, words_for
from private_llm.ring.prg import Seed
from private_llm.ring.ring import Ring


class Plain(Protocol):
    """The cleartext reference: nothing is sent between parties, and every division is the floor.

    A share has one part.
    """

    name = "plain"
    divides_exactly = True

    def add_public(self, x: Share, c: int | Tensor) -> Share:
        """x + c, broadcasting; wraps."""
        return x.map(lambda part: part + c)

    def public(self, c: Tensor) -> Share:
        """c itself."""
        return Share((c.to(self.ring.dtype),))

    def truncate(self, x: Share, shift: int, widths: BitWidths | None = None) -> Share:
        """floor(x / 2^shift), exactly, for every ring element. Raises DomainError for a shift below 0."""
        if shift < 0:
            raise DomainError(f"shift: got {shift}; want at least 0")
        return x.map(lambda part: part >> shift) if shift else x

    def mul(self, x: Share, y: Share, shift: int = 0, widths: BitWidths | None = None) -> Share:
        """floor(x*y / 2^shift), where x*y wraps modulo 2^(ring bits) unnoticed."""
        return self.truncate(Share((x.parts[0] * y.parts[0],)), shift)

    def bilinear(
        self, form: Form, x: Share, y: Share, shift: int = 0, select: Tensor | None = None,
        widths: BitWidths | None = None,
    ) -> Share:  # fmt: skip
        """floor(B(x, y) / 2^shift), optionally at selected outputs only, 1-D; B(x, y) wraps unnoticed."""
        out = form.product(x.parts[0], y.parts[0])
        if select is not None:
            out = out.reshape(-1)[select]
        return self.truncate(Share((out,)), shift)

    def poly(self, x: Share, coefficients: Sequence[int], shift: int = 0) -> Share:
        """Horner's rule in the ring, then the division; any degree."""
        value = x.parts[0]
        out = torch.full_like(value, self.ring.constant(coefficients[-1]))
        for c in reversed(coefficients[:-1]):
            out = out * value + self.ring.constant(c)
        return self.truncate(Share((out,)), shift)

    def msb(self, x: Share, offsets: Sequence[int] = (0,), bits: int | None = None, low: int = 0) -> BitShare:
        """Sign bits by comparison, exact for every `low`."""
        flat = x.parts[0].reshape(-1)
        width = bits or self.ring.bits
        rows = torch.stack([((flat + c) >> (width - 1)) & 1 for c in offsets])
        return BitShare((packed(rows),), flat.numel())

    def inject(
        self, bits: BitShare, x: Share | None, weights: Weights, constants: Weights, shift: int = 0,
        low: int | None = None,
    ) -> Share:  # fmt: skip
        """floor(sum of bit_k * (w_k x + c_k) / 2^shift), 1-D [count]; all bits of it, whatever `low` says."""
        check_low(low, shift)
        return self.truncate(Share((self._injected(bits, x, weights, constants, self.ring.dtype),)), shift)

    @staticmethod
    def _injected(bits: BitShare, x: Share | None, weights: Weights, constants: Weights, dtype: torch.dtype) -> Tensor:
        check_injected(bits, x, weights, constants)
        out = torch.zeros(bits.count, dtype=dtype, device=bits.parts[0].device)
        for bit, weight, constant in zip(unpacked(bits.parts[0], bits.count), weights, constants, strict=True):
            term = _flat(constant) if x is None else x.parts[0].reshape(-1) * _flat(weight) + _flat(constant)
            out = out + bit.to(dtype) * term
        return out

    def xor(self, x: BitShare, y: BitShare) -> BitShare:
        """x ^ y."""
        return BitShare((x.parts[0] ^ y.parts[0],), x.count)

    def invert(self, x: BitShare) -> BitShare:
        """~x."""
        return BitShare((~x.parts[0],), x.count)

    def and_(self, x: BitShare, y: BitShare) -> BitShare:
        """x & y."""
        return BitShare((x.parts[0] & y.parts[0],), x.count)

    def a2b(self, x: Share, bits: int | None = None) -> BitShare:
        """Bits of two's complement: [bits rows, count], least significant first."""
        flat = x.parts[0].reshape(-1)
        rows = torch.stack([(flat >> i) & 1 for i in range(bits or self.ring.bits)])
        return BitShare((packed(rows),), flat.numel())

    def receive_input(self, shape: tuple[int, ...]) -> Share:
        """The client's values in the clear, `shape`; 1 element each."""
        return Share((self.transport.recv(CLIENT, "input", shape, self.ring.dtype),))

    def receive_index(self, count: int, domain: int) -> Index:
        """The indices in the clear, int64 [count]; 8 bytes each."""
        return Index((self.transport.recv(CLIENT, "index", (count,), torch.int64),), count, domain)

    def lookup(self, index: Index, table: Share | Tensor) -> Share:
        """Rows [count, D] of a table [domain, D]."""
        rows = table if isinstance(table, Tensor) else table.parts[0]
        if rows.is_meta:
            return Share((torch.empty((index.count, rows.shape[1]), dtype=self.ring.dtype, device="meta"),))
        return Share((rows[index.keys[0]],))

    def permutation(self, size: int, *, hidden: bool = True, reuse: bool = False, blocks: int = 1) -> Permutation:
        """A permutation in the clear, from the operating system's entropy."""
        check_size(size, blocks)
        words = Seed.fresh().stream("plain permutations").words(size, self.device)
        return Permutation(size, (drawn(words, blocks),), frozenset(), reuse)

    def random_bits(self, rows: int, count: int) -> BitShare:
        """Bits in the clear, from the operating system's entropy."""
        words = Seed.fresh().stream("plain bits").words(rows * words_for(count), self.device)
        return BitShare((words.view(rows, words_for(count)),), count)

    def shuffle(self, x: Share, order: Permutation, undo: bool = False, places: Tensor | None = None) -> Share:
        """x[p], or back."""
        kind, p = moved_rows(x, order, undo, places), known(order.parts[0])
        return x.map(lambda part: kind.move(part, inverse(p) if undo else kind.end(p)))

    def _moved_bits(self, x: BitShare, order: Permutation, undo: bool) -> BitShare:
        p = known(order.parts[0])
        return BitShare((moved_bits(x, order).move(x.parts[0], inverse(p) if undo else p),), x.count)

    def open_shuffled(self, x: ShuffledBits) -> Tensor:
        """The bits."""
        x.order.spend(x.bits.rows)
        return unpacked(x.bits.parts[0], x.bits.count).bool()

    def reveal(self, pieces: Sequence[tuple[int, Share]]) -> None:
        """The values themselves, 1 element each."""
        for endpoint, x in pieces:
            self.transport.send(endpoint, "reveal", x.parts[0].contiguous())


def _flat(c: int | Tensor) -> int | Tensor:
    return c.reshape(-1) if isinstance(c, Tensor) else c


class PlainClient(ClientEnd):
    """Client end of `plain`."""

    def share(self, elements: Tensor) -> None:
        """To the one party."""
        self.transport.send(0, "input", elements.contiguous())

    def share_index(self, indices: Tensor, domain: int) -> None:
        """8 bytes each."""
        if indices.numel() and (int(indices.min()) < 0 or int(indices.max()) >= domain):
            raise DomainError(f"an index lies outside 0 .. {domain - 1}")
        self.transport.send(0, "index", indices.reshape(-1).contiguous())

    def open(self, shape: tuple[int, ...]) -> Tensor:
        """From the one party."""
        return open_plain(self.transport, self.ring, shape)


def open_plain(transport: Transport, ring: Ring, shape: tuple[int, ...]) -> Tensor:
    """Ring elements of `shape` that the party reveals to this endpoint right now."""
    return transport.recv(0, "reveal", shape, ring.dtype)
