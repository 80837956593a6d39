"""`plain`: one party, no secrecy, the same interface and fixed-point arithmetic as the real protocols.

It exists as the reference the suite compares every protocol with, and to tell an approximation's error from a
protocol's (`CheckedPlain` checks every range). A session refuses to start it without `insecure=True`.

With every range checked it is the protocol of debug sessions (`debug_ranges`). A share has two parts: the ring
elements, and the same values as real numbers, which never wrap (share.cleartext). Local steps do the same to both. Each
operation of the protocol first makes sure that its operands agree, so a sum or a public product that wrapped is found
here at the latest; then that its own result keeps the contract, computed from the ring elements in double precision:

    division by 2^shift     |value before it| < 2^(ring bits - 2)
    no division             the value fits the ring
    comparison              -2^(bits-1) + 2^low <= x + offset < 2^(bits-1)

Errors name the module, the operation, the largest value and the limit.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from private_llm.errors import DomainError
from private_llm.kernels.forms import BilinearForm
from private_llm.net.transport import CLIENT, Transport
from private_llm.protocols.ends import ClientEnd
from private_llm.protocols.protocol import Protocol
from private_llm.protocols.share import (
    BitShare,
    BitWeights,
    BitWidths,
    Index,
    Moved,
    Permutation,
    Share,
    ShuffledBits,
    check_injected,
    check_low,
    cleartext,
    drawn,
    inverse,
    known,
    packed,
    unpacked,
    words_for,
)
from private_llm.ring.prg import Seed
from private_llm.ring.ring import Ring


class Plain(Protocol):
    """The cleartext reference: nothing is sent between parties, every division is the floor; a share has one part."""

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
        return self._quotient("a truncation", lambda part: part, (x,), shift) if shift else x

    def mul(self, x: Share, y: Share, shift: int = 0, widths: BitWidths | None = None) -> Share:
        """floor(x*y / 2^shift), where x*y wraps modulo 2^(ring bits) unnoticed."""
        return self._quotient("a product", torch.mul, (x, y), shift)

    def bilinear(
        self, form: BilinearForm, x: Share, y: Share, shift: int = 0, select: Tensor | None = None,
        widths: BitWidths | None = None,
    ) -> Share:  # fmt: skip
        """floor(B(x, y) / 2^shift), optionally at selected outputs only, 1-D; B(x, y) wraps unnoticed."""

        def made(a: Tensor, b: Tensor) -> Tensor:
            out = (form.real if a.is_floating_point() else form.product)(a, b)
            return out if select is None else out.reshape(-1)[select]

        return self._quotient(f"a {form.tag}", made, (x, y), shift)

    def poly(self, x: Share, coefficients: Sequence[int], shift: int = 0) -> Share:
        """Horner's rule in the ring, then the division; any degree."""

        def made(value: Tensor) -> Tensor:
            number = float if value.is_floating_point() else self.ring.constant
            out = torch.full_like(value, number(coefficients[-1]))
            for c in reversed(coefficients[:-1]):
                out = out * value + number(c)
            return out

        return self._quotient("a polynomial", made, (x,), shift)

    def _quotient(self, what: str, made: Callable[..., Tensor], operands: Sequence[Share], shift: int) -> Share:
        """What is made of ring elements (or of floating-point numbers, where ranges are checked), divided."""
        if shift < 0:
            raise DomainError(f"shift: got {shift}; want at least 0")
        value = made(*(x.parts[0] for x in operands))
        return Share((value >> shift if shift else value,))

    def msb(self, x: Share, offsets: Sequence[int] = (0,), bits: int | None = None, low: int = 0) -> BitShare:
        """Sign bits by comparison, exact for every `low`."""
        flat = x.parts[0].reshape(-1)
        width = bits or self.ring.bits
        rows = torch.stack([((flat + c) >> (width - 1)) & 1 for c in offsets])
        return BitShare((packed(rows),), flat.numel())

    def inject(
        self, bits: BitShare, x: Share | None, weights: BitWeights, constants: BitWeights, shift: int = 0,
        low: int | None = None,
    ) -> Share:  # fmt: skip
        """floor(sum of bit_k * (w_k x + c_k) / 2^shift), 1-D [count]; all bits of it, whatever `low` says."""
        check_low(low, shift)
        check_injected(bits, x, weights, constants)

        def made(value: Tensor) -> Tensor:
            out = torch.zeros(bits.count, dtype=value.dtype, device=value.device)
            for bit, weight, constant in zip(unpacked(bits.parts[0], bits.count), weights, constants, strict=True):
                term = _flat(constant) if x is None else value.reshape(-1) * _flat(weight) + _flat(constant)
                out = out + bit.to(value.dtype) * term
            return out

        nothing = torch.zeros(0, dtype=self.ring.dtype, device=bits.parts[0].device)
        return self._quotient("a choice by bits", made, (Share((nothing,)) if x is None else x,), shift)

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
        return Share((rows[index.to(rows.device).keys[0]],))

    def _order(self, size: int, blocks: int) -> tuple[Tensor | None, ...]:
        return (drawn(Seed.fresh().stream("plain permutations").words(size, self.device), blocks),)

    def random_bits(self, rows: int, count: int) -> BitShare:
        """Bits in the clear, from the operating system's entropy."""
        words = Seed.fresh().stream("plain bits").words(rows * words_for(count), self.device)
        return BitShare((words.view(rows, words_for(count)),), count)

    def _moved(self, parts: tuple[Tensor, ...], order: Permutation, kind: Moved, undo: bool) -> tuple[Tensor, ...]:
        p = known(order.parts[0])
        return tuple(kind.move(part, inverse(p) if undo else kind.end(p)) for part in parts)

    def _opened(self, x: ShuffledBits) -> Tensor:
        return x.bits.parts[0]

    def reveal(self, pieces: Sequence[tuple[int, Share]]) -> None:
        """The values themselves, 1 element each."""
        for endpoint, x in pieces:
            self.transport.send(endpoint, "reveal", x.parts[0].contiguous())


def _flat(c: int | Tensor) -> int | Tensor:
    return c.reshape(-1) if isinstance(c, Tensor) else c


class CheckedPlain(Plain):
    """The cleartext reference, which refuses to wrap: methods that meet a wrapped value raise DomainError."""

    _lenient = False

    @contextmanager
    def may_wrap(self) -> Iterator[None]:
        """Inside, values may leave the ring, and no method raises for it."""
        self._lenient = True
        try:
            yield
        finally:
            self._lenient = False

    def expect_rows(self, what: str, x: Share, square: float) -> None:
        """Raises DomainError if a row's sum of squares, in squared ring elements, reaches `square`; x [.., width]."""
        largest = float(self.check("an operand", x).parts[0].double().square().sum(-1).max()) if x.numel() else 0.0
        if not largest < square:
            self._refuse(what, largest, square, "a sum of squares")

    def check(self, what: str, x: Share) -> Share:
        """The ring elements of x alone. Raises DomainError if a local step before this one wrapped."""
        elements, *real = x.parts
        if real and elements.numel():
            size = 2.0**self.ring.bits
            drift = float((real[0].double() - elements).abs().max())
            if not drift <= size / 2:  # a real number that overflowed is not a number in the worst case
                self._refuse(what, float(real[0].abs().max()), size / 2, "a value")
        return Share((elements,))

    def _fits(self, what: str, exact: Tensor, shift: int) -> None:
        limit = 2.0 ** (self.ring.bits - (2 if shift else 1))
        largest = float(exact.abs().max()) if exact.numel() else 0.0
        if not largest < limit:
            self._refuse(what, largest, limit, "a value before truncation" if shift else "a value")

    def _where(self) -> str:
        rule = self.ledger.op_name
        return f"{f' of {rule}' if rule else ''} in module '{self.module or 'unknown'}'"

    def _refuse(self, what: str, largest: float, limit: float, kind: str) -> None:
        if self._lenient:
            return
        raise DomainError(
            f"{what}{self._where()} reaches 2^{math.log2(largest):.1f}; a {self.ring.bits}-bit ring holds {kind} "
            f"below 2^{math.log2(limit):.0f}, {largest / limit:.3g} times less "
            "(lower frac_bits, or use the 64-bit ring)"
        )

    # -- local -------------------------------------------------------------------------------------------
    def public(self, c: Tensor) -> Share:
        """c itself."""
        return cleartext(c.to(self.ring.dtype), watched=True)

    # -- products ------------------------------------------------------------------------------------------
    def _quotient(self, what: str, made: Callable[..., Tensor], operands: Sequence[Share], shift: int) -> Share:
        operands = [self.check("an operand", x) for x in operands]
        self._fits(what, made(*(x.parts[0].double() for x in operands)), shift)
        return _watched(super()._quotient(what, made, operands, shift))

    def bilinear_public(self, form: BilinearForm, x: Share, c: Tensor, shift: int = 0, left: bool = False) -> Share:
        """floor(B(x, c) / 2^shift), or of B(c, x); limits as `mul`."""
        x = self.check("an operand", x)
        pair = (c.double(), x.parts[0].double()) if left else (x.parts[0].double(), c.double())
        self._fits(f"a {form.tag}", form.real(*pair), shift)
        return _watched(super().bilinear_public(form, x, c, shift, left))

    # -- comparisons and bits --------------------------------------------------------------------------------
    def msb(self, x: Share, offsets: Sequence[int] = (0,), bits: int | None = None, low: int = 0) -> BitShare:
        """Sign bits of values that keep their promised range. Raises DomainError, naming the module, for others."""
        x = self.check("an operand", x)
        value = x.parts[0].double()
        half = 2.0 ** ((bits or self.ring.bits) - 1)
        for offset in offsets if value.numel() else ():
            top, bottom = float(value.max()) + offset, float(value.min()) + offset
            reached = max(top, -bottom)
            if not self._lenient and (top >= half or bottom < (1 << low if low else 0) - half):
                raise DomainError(
                    f"a comparison{self._where()} meets 2^{math.log2(reached):.1f}, beyond its promised range of "
                    f"2^{math.log2(half):.0f} (activations of this model are too large)"
                )
        return super().msb(x, offsets, bits, low)

    def a2b(self, x: Share, bits: int | None = None) -> BitShare:
        """Bits of two's complement. Raises DomainError if a local step before wrapped."""
        return super().a2b(self.check("an operand", x), bits)

    # -- leaving and entering the sharing ----------------------------------------------------------------------
    def receive_input(self, shape: tuple[int, ...]) -> Share:
        """The client's values."""
        return _watched(super().receive_input(shape))

    def lookup(self, index: Index, table: Share | Tensor) -> Share:
        """Row selection. Raises DomainError if a shared table wrapped in a local step before."""
        return _watched(super().lookup(index, table if isinstance(table, Tensor) else self.check("an operand", table)))

    def reveal(self, pieces: Sequence[tuple[int, Share]]) -> None:
        """The values themselves. Raises DomainError if a local step before wrapped."""
        super().reveal([(endpoint, self.check("an output", x)) for endpoint, x in pieces])


def _watched(x: Share) -> Share:
    return cleartext(x.parts[0], watched=True)


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
