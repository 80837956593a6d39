"""Exact truncation around any protocol: floor(z / 2^f) for every z, instead of at most one unit more.

With y = truncate(z), which is the floor or one unit more, d = z - y 2^f lies in [-2^f, 2^f) and is negative iff y is
too high, so floor(z / 2^f) = y - [d < 0]. A product is therefore made without division first. Price, besides the
product: one truncation, one comparison of f + 1 bits, one bit to arithmetic: 1 + 3 + 1 rounds at f = 18, and
49.4 bytes an element (trio, 64 bits). It removes the rounding's dependence on the masks; nothing else changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Self

import torch
from torch import Tensor

from private_llm.kernels.forms import Form
from private_llm.protocols.boolean import Weights
from private_llm.protocols.party_end import Links
from private_llm.protocols.permutation import Permutation, ShuffledBits
from private_llm.protocols.protocol import Protocol
from private_llm.protocols.share import BitShare, Index, Share


class Exact(Protocol):
    """One party's end of `inner` with exact divisions. What divides by 2^0 costs what it costs there."""

    divides_exactly = True

    def __init__(self, inner: Protocol) -> None:
        super().__init__(inner.party, inner.transport, inner.ring)
        self.name, self._inner = inner.name, inner

    def on(self, device: torch.device | str) -> Self:
        """Draw and receive on `device` from now on."""
        self._inner.on(device)
        return super().on(device)

    def section(self, label: str, links: Links = lambda transport: transport) -> AbstractContextManager[None]:
        """As the inner protocol."""
        return self._inner.section(label, links)

    def take_witnesses(self) -> list[str]:
        """As the inner protocol."""
        return self._inner.take_witnesses()

    # -- divisions ---------------------------------------------------------------------------------------
    def truncate(self, x: Share, shift: int) -> Share:
        """floor(x / 2^shift) for |x| < 2^(ring bits - 2); the shape of x.

        Shift 18: 5 rounds, 49.4 bytes an element (trio).
        """
        if shift == 0:
            return x
        high = self._inner.truncate(x, shift)
        rest = self._inner.sub(x, self._inner.mul_public(high, 1 << shift))
        below = self._inner.inject(self._inner.msb(rest, bits=shift + 1), None, [0], [1])
        return self._inner.sub(high, below.map(lambda part: part.view(x.shape)))

    def mul(self, x: Share, y: Share, shift: int = 0) -> Share:
        """floor(x*y / 2^shift): the inner product (1 round), then `truncate`.

        Shift 18: 6 rounds, 73.4 bytes an output (trio).
        """
        return self.truncate(self._inner.mul(x, y), shift)

    def bilinear(self, form: Form, x: Share, y: Share, shift: int = 0, select: Tensor | None = None) -> Share:
        """Matrix product or convolution, exactly divided: 1 round, then `truncate` of the (selected) outputs."""
        return self.truncate(self._inner.bilinear(form, x, y, select=select), shift)

    def poly(self, x: Share, coefficients: Sequence[int], shift: int = 0) -> Share:
        """Polynomial of degree 2 or 3, exactly divided: 1 round, then `truncate`."""
        return self.truncate(self._inner.poly(x, coefficients), shift)

    def inject(self, bits: BitShare, x: Share | None, weights: Weights, constants: Weights, shift: int = 0) -> Share:
        """Weighted bits, exactly divided: 1 round, then `truncate`; 1-D [count]."""
        return self.truncate(self._inner.inject(bits, x, weights, constants), shift)

    # -- everything else as it is ---------------------------------------------------------------------------
    def add_public(self, x: Share, c: int | Tensor) -> Share:
        """Local."""
        return self._inner.add_public(x, c)

    def public(self, c: Tensor) -> Share:
        """Local."""
        return self._inner.public(c)

    def msb(self, x: Share, offsets: Sequence[int] = (0,), bits: int | None = None, low: int = 0) -> BitShare:
        """As the inner protocol."""
        return self._inner.msb(x, offsets, bits, low)

    def xor(self, x: BitShare, y: BitShare) -> BitShare:
        """Local."""
        return self._inner.xor(x, y)

    def invert(self, x: BitShare) -> BitShare:
        """Local."""
        return self._inner.invert(x)

    def and_(self, x: BitShare, y: BitShare) -> BitShare:
        """As the inner protocol."""
        return self._inner.and_(x, y)

    def a2b(self, x: Share) -> BitShare:
        """As the inner protocol."""
        return self._inner.a2b(x)

    def receive_input(self, shape: tuple[int, ...]) -> Share:
        """As the inner protocol."""
        return self._inner.receive_input(shape)

    def receive_index(self, count: int, domain: int) -> Index:
        """As the inner protocol."""
        return self._inner.receive_index(count, domain)

    def lookup(self, index: Index, table: Share | Tensor) -> Share:
        """As the inner protocol."""
        return self._inner.lookup(index, table)

    def permutation(self, size: int, *, hidden: bool = True, reuse: bool = False) -> Permutation:
        """As the inner protocol."""
        return self._inner.permutation(size, hidden=hidden, reuse=reuse)

    def shuffle(self, x: Share, order: Permutation, undo: bool = False) -> Share:
        """As the inner protocol."""
        return self._inner.shuffle(x, order, undo)

    def shuffle_bits(self, x: BitShare, order: Permutation) -> ShuffledBits:
        """As the inner protocol."""
        return self._inner.shuffle_bits(x, order)

    def open_shuffled(self, x: ShuffledBits) -> Tensor | None:
        """As the inner protocol."""
        return self._inner.open_shuffled(x)

    def verify(self) -> None:
        """As the inner protocol."""
        self._inner.verify()

    def reveal(self, pieces: Sequence[tuple[int, Share]]) -> None:
        """As the inner protocol."""
        self._inner.reveal(pieces)
