"""The interface of arithmetic on shares of ring elements: sums, products and divisions.

`shift=s` divides the exact result by 2^s (floor, plus at most one unit) and requires
|result before division| < 2^(ring bits - 2). `shift=0` divides nothing.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import add, neg, sub

from torch import Tensor

from private_llm.kernels.forms import Conv2d, Form, Matmul
from private_llm.protocols.party_end import PartyEnd
from private_llm.protocols.share import Share


class Arithmetic(PartyEnd):
    """Sums are local; each product costs one finish of its output's size, whatever it sums over."""

    divides_exactly = False
    """Whether every division is the floor, never one unit more."""

    def may_wrap(self) -> AbstractContextManager[None]:
        """Around steps whose values may leave the ring, because what wrapped is multiplied by zero later on.

        Only debug sessions, which refuse every other wrap, do anything here.
        """
        return nullcontext()

    def expect_rows(self, what: str, x: Share, square: float) -> None:
        """State that the sums of squares of rows, in squared ring elements, are below `square`.

        Debug sessions alone look.
        """

    # -- local (no communication) ---------------------------------------------------------------------
    def add(self, x: Share, y: Share) -> Share:
        """x + y, broadcasting. Local."""
        return Share(tuple(map(add, x.parts, y.parts)))

    def sub(self, x: Share, y: Share) -> Share:
        """x - y, broadcasting. Local."""
        return Share(tuple(map(sub, x.parts, y.parts)))

    def neg(self, x: Share) -> Share:
        """-x. Local."""
        return x.map(neg)

    def mul_public(self, x: Share, c: int | Tensor) -> Share:
        """x times public ring constants, broadcasting, no truncation. Local."""
        return x.map(lambda part: part * c)

    @abstractmethod
    def add_public(self, x: Share, c: int | Tensor) -> Share:
        """x plus public ring constants, broadcasting. Local."""

    @abstractmethod
    def public(self, c: Tensor) -> Share:
        """A share of public ring elements (known to everybody). Local."""

    # -- products ---------------------------------------------------------------------------------------
    @abstractmethod
    def truncate(self, x: Share, shift: int) -> Share:
        """floor(x / 2^shift), plus at most one unit."""

    @abstractmethod
    def mul(self, x: Share, y: Share, shift: int = 0) -> Share:
        """Elementwise product with broadcasting, divided by 2^shift."""

    @abstractmethod
    def bilinear(self, form: Form, x: Share, y: Share, shift: int = 0, select: Tensor | None = None) -> Share:
        """B(x, y) of a bilinear form, divided by 2^shift; traffic of one finish of the output's size.

        With `select` (int64, flat positions in the output) only those outputs are made, as a 1-D share;
        nothing is sent for the others.
        """

    def matmul(self, x: Share, y: Share, shift: int = 0, select: Tensor | None = None) -> Share:
        """torch.matmul of x [..., M, K] and y [..., K, N], divided by 2^shift; `select` as in `bilinear`."""
        return self.bilinear(Matmul(), x, y, shift, select)

    def conv2d(self, x: Share, w: Share, conv: Conv2d, shift: int = 0) -> Share:
        """Convolution of x [B, C, H, W] with w [O, C / groups, kh, kw], divided by 2^shift."""
        return self.bilinear(conv, x, w, shift)

    def bilinear_public(self, form: Form, x: Share, c: Tensor, shift: int = 0, left: bool = False) -> Share:
        """B(x, c), or B(c, x) if `left`, for public ring elements c, divided by 2^shift: local but for a truncation."""
        made = x.map(lambda part: form.product(c, part) if left else form.product(part, c))
        macs = form.macs(c.shape, x.shape) if left else form.macs(x.shape, c.shape)
        self.ledger.add_macs(macs * len(x.parts))
        return self.truncate(made, shift)

    @abstractmethod
    def poly(self, x: Share, coefficients: Sequence[int], shift: int = 0) -> Share:
        """c0 + c1 x + c2 x^2 (+ c3 x^3) with public ring coefficients (degree 2 or 3), in one step, divided by 2^shift.

        The exact value before division must stay below 2^(ring bits - 2).
        """
