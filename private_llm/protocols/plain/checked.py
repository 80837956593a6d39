"""`plain` with every range checked: the protocol of debug sessions (`debug_ranges`).

A share has two parts: the ring elements, and the same values as real numbers, which never wrap (share.cleartext).
Local steps do the same to both. Each operation of the protocol first makes sure that its operands agree, so a sum or
a public product that wrapped is found here at the latest; then that its own result keeps the contract,
computed from the ring elements in double precision:

    division by 2^shift     |value before it| < 2^(ring bits - 2)
    no division             the value fits the ring
    comparison              -2^(bits-1) + 2^low <= x + offset < 2^(bits-1)

Errors name the module, the operation, the largest value and the limit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from private_llm.errors import DomainError
from private_llm.kernels.forms import Form
from private_llm.protocols.arithmetic import BitWidths
from private_llm.protocols.plain.party import Plain
from private_llm.protocols.protocol import Weights
from private_llm.protocols.share import BitShare, Index, Share, cleartext


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
        largest = float(self._operand(x).parts[0].double().square().sum(-1).max()) if x.numel() else 0.0
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

    def _operand(self, x: Share) -> Share:
        return self.check("an operand", x)

    def _fits(self, what: str, exact: Tensor, shift: int) -> None:
        """Before a division by 2^shift."""
        limit = 2.0 ** (self.ring.bits - (2 if shift else 1))
        largest = float(exact.abs().max()) if exact.numel() else 0.0
        if not largest < limit:
            self._refuse(what, largest, limit, "a value before truncation" if shift else "a value")

    def _refuse(self, what: str, largest: float, limit: float, kind: str) -> None:
        if self._lenient:
            return
        rule = self.ledger.op_name
        raise DomainError(
            f"{what}{f' of {rule}' if rule else ''} in module '{self.ledger.scope_name or 'unknown'}' reaches "
            f"2^{math.log2(largest):.1f}; a {self.ring.bits}-bit ring holds {kind} below 2^{math.log2(limit):.0f}, "
            f"{largest / limit:.3g} times less "
            "(lower frac_bits, or use the 64-bit ring)"
        )

    # -- local -------------------------------------------------------------------------------------------
    def public(self, c: Tensor) -> Share:
        """c itself."""
        return cleartext(c.to(self.ring.dtype), watched=True)

    # -- products ------------------------------------------------------------------------------------------
    def truncate(self, x: Share, shift: int, widths: BitWidths | None = None) -> Share:
        """floor(x / 2^shift). Raises DomainError for |x| >= 2^(ring bits - 2)."""
        if not shift:
            return x
        x = self._operand(x)
        self._fits("a truncation", x.parts[0].double(), shift)
        return _watched(super().truncate(x, shift))

    def mul(self, x: Share, y: Share, shift: int = 0, widths: BitWidths | None = None) -> Share:
        """floor(x*y / 2^shift). Raises DomainError for |x*y| >= 2^(ring bits - 2), or the ring's half without shift."""
        x, y = self._operand(x), self._operand(y)
        self._fits("a product", x.parts[0].double() * y.parts[0].double(), shift)
        return _watched(super().mul(x, y, shift))

    def bilinear(
        self, form: Form, x: Share, y: Share, shift: int = 0, select: Tensor | None = None,
        widths: BitWidths | None = None,
    ) -> Share:  # fmt: skip
        """floor(B(x, y) / 2^shift), checked at the selected outputs only; limits as `mul`."""
        x, y = self._operand(x), self._operand(y)
        exact = form.real(x.parts[0].double(), y.parts[0].double())
        self._fits(f"a {form.tag}", exact if select is None else exact.reshape(-1)[select], shift)
        return _watched(super().bilinear(form, x, y, shift, select))

    def bilinear_public(self, form: Form, x: Share, c: Tensor, shift: int = 0, left: bool = False) -> Share:
        """floor(B(x, c) / 2^shift), or of B(c, x); limits as `mul`."""
        x = self._operand(x)
        pair = (c.double(), x.parts[0].double()) if left else (x.parts[0].double(), c.double())
        self._fits(f"a {form.tag}", form.real(*pair), shift)
        return _watched(super().bilinear_public(form, x, c, shift, left))

    def poly(self, x: Share, coefficients: Sequence[int], shift: int = 0) -> Share:
        """Horner's rule; checked in double precision before the division."""
        x = self._operand(x)
        value = x.parts[0].double()
        exact = torch.full_like(value, float(coefficients[-1]))
        for c in reversed(coefficients[:-1]):
            exact = exact * value + float(c)
        self._fits("a polynomial", exact, shift)
        return _watched(super().poly(x, coefficients, shift))

    # -- comparisons and bits --------------------------------------------------------------------------------
    def msb(self, x: Share, offsets: Sequence[int] = (0,), bits: int | None = None, low: int = 0) -> BitShare:
        """Sign bits of values that keep their promised range.

        Raises DomainError, with the module's name, for others.
        """
        x = self._operand(x)
        value = x.parts[0].double()
        half = 2.0 ** ((bits or self.ring.bits) - 1)
        for offset in offsets if value.numel() else ():
            top, bottom = float(value.max()) + offset, float(value.min()) + offset
            reached = max(top, -bottom)
            if not self._lenient and (top >= half or bottom < (1 << low if low else 0) - half):
                rule = self.ledger.op_name
                raise DomainError(
                    f"a comparison{f' of {rule}' if rule else ''} in module '{self.ledger.scope_name or 'unknown'}' "
                    f"meets 2^{math.log2(reached):.1f}, beyond its promised range of 2^{math.log2(half):.0f} "
                    "(activations of this model are too large)"
                )
        return super().msb(x, offsets, bits, low)

    def inject(
        self, bits: BitShare, x: Share | None, weights: Weights, constants: Weights, shift: int = 0,
        low: int | None = None,
    ) -> Share:  # fmt: skip
        """sum of bit_k * (w_k x + c_k), divided by 2^shift; checked before the division."""
        x = None if x is None else self._operand(x)
        real = None if x is None else Share((x.parts[0].double(),))
        self._fits("a choice by bits", self._injected(bits, real, weights, constants, torch.float64), shift)
        return _watched(super().inject(bits, x, weights, constants, shift, low))

    def a2b(self, x: Share, bits: int | None = None) -> BitShare:
        """Bits of two's complement. Raises DomainError if a local step before wrapped."""
        return super().a2b(self._operand(x), bits)

    # -- leaving and entering the sharing ----------------------------------------------------------------------
    def receive_input(self, shape: tuple[int, ...]) -> Share:
        """The client's values."""
        return _watched(super().receive_input(shape))

    def lookup(self, index: Index, table: Share | Tensor) -> Share:
        """Row selection. Raises DomainError if a shared table wrapped in a local step before."""
        return _watched(super().lookup(index, table if isinstance(table, Tensor) else self._operand(table)))

    def reveal(self, pieces: Sequence[tuple[int, Share]]) -> None:
        """The values themselves. Raises DomainError if a local step before wrapped."""
        super().reveal([(endpoint, self.check("an output", x)) for endpoint, x in pieces])


def _watched(x: Share) -> Share:
    return cleartext(x.parts[0], watched=True)
