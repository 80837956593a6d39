"""The interface of arithmetic on shares of ring elements: sums, products and divisions.

`shift=s` divides the exact result by 2^s (floor, plus at most one unit) and requires
|result before division| < 2^(ring bits - 2), which only debug sessions check: beyond, results are garbage. `shift=0`
divides nothing and wraps modulo 2^(ring bits). A shift outside 0 .. ring bits - 3 raises DomainError (plain: below 0).

Bytes are over all links, preprocessing included, e the bytes of an element (8 or 4); figures are in the 64-bit ring at
s = 18, and dealer's are trio's but for `matmul="remask"` (dealer.py). Exact formulas: `prices.py`. Shapes that do
not broadcast raise torch's RuntimeError.

Products and quotients may be right in their lowest bits alone, because nobody reads the others (`BitWidths`): of x*y k
bits are right, and |x*y| < 2^(k-2); of the quotient r bits are wanted. Under trio and dealer k bits are then opened
instead of the ring's, and r bits are shared. Which r is enough is told by who reads the result: a product below 2^(k-2)
again wants k bits of its factors.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from operator import add, neg, sub

from torch import Tensor

from private_llm.errors import DomainError, UnsupportedOp
from private_llm.kernels.forms import BilinearForm, Conv2d, Matmul
from private_llm.protocols.ends import PartyEnd
from private_llm.protocols.share import Share
from private_llm.ring.ring import Ring


@dataclass(frozen=True, slots=True)
class BitWidths:
    """How many of the lowest bits are right of x, which they hold: |x| < 2^(given-2), and are wanted of x / 2^shift.

    Where no more than given - shift bits are wanted, x may be any number modulo 2^given.
    """

    valid_in: int
    needed_out: int

    def fields(self, shift: int) -> int:
        """Bits above those that a division leaves right by itself: with none, its second exchange goes."""
        return max(0, self.needed_out - self.valid_in + shift)

    def check(self, ring: Ring, shift: int) -> None:
        """Raise DomainError for bits that the ring does not have, and for a shift that leaves none."""
        valid, needed, bits = self.valid_in, self.needed_out, ring.bits
        if not (0 <= shift <= valid - 3 and 3 <= valid <= bits and 1 <= needed <= bits):
            raise DomainError(
                f"bit widths: got a division by 2^{shift} of {valid} bits of which {needed} are needed; want a shift "
                f"from 0 to the valid bits less 3, and at most the {bits} bits of the ring"
            )


def taking_part(form: BilinearForm, y: Share) -> tuple[BilinearForm, Share]:
    """B and what it reads of y: for protocols that mask, or add up, whole operands. Local; copies if B reads a part."""
    narrowed = form.narrowed()
    if narrowed is None:
        return form, y
    smaller, take = narrowed
    return smaller, y.map(take)


class Arithmetic(PartyEnd):
    """Sums are local; each product costs one finish of its output's size, whatever it sums over."""

    divides_exactly = False
    """Whether every division is the floor, never one unit more."""

    has_narrow = False
    """Whether divisions make use of `widths` (in a 64-bit ring): where `local_truncate` is there."""

    def may_wrap(self) -> AbstractContextManager[None]:
        """Around steps whose values may leave the ring, because what wrapped is multiplied by zero later on. Local.

        Only debug sessions, which refuse every other wrap, do anything here.
        """
        return nullcontext()

    def expect_rows(self, what: str, x: Share, square: float) -> None:
        """State that rows of x [.., width] have sums of squares, in squared ring elements, below `square`. Local.

        Debug sessions alone look: they raise DomainError, with `what` as the name of the value.
        """

    # -- local (no communication) ---------------------------------------------------------------------
    def add(self, x: Share, y: Share) -> Share:
        """x + y, broadcasting. Local."""
        return Share(tuple(map(add, x.parts, y.parts)))

    def sub(self, x: Share, y: Share) -> Share:
        """x - y, broadcasting. Local."""
        return Share(tuple(map(sub, x.parts, y.parts)))

    def neg(self, x: Share) -> Share:
        """-x, in the shape of x. Local."""
        return x.map(neg)

    def mul_public(self, x: Share, c: int | Tensor) -> Share:
        """x times public ring constants (signed ints, or a tensor), broadcasting; nothing is divided. Local."""
        return x.map(lambda part: part * c)

    @abstractmethod
    def add_public(self, x: Share, c: int | Tensor) -> Share:
        """x plus public ring constants, broadcasting; an int is reduced modulo 2^(ring bits). Local."""

    @abstractmethod
    def public(self, c: Tensor) -> Share:
        """A share of public ring elements c (known to everybody), in the shape of c. Local."""

    # -- products ---------------------------------------------------------------------------------------
    @abstractmethod
    def truncate(self, x: Share, shift: int, widths: BitWidths | None = None) -> Share:
        """floor(x / 2^shift), plus at most one unit, for |x| < 2^(ring bits - 2); the shape of x.

        `shift=0` returns x, local. 1 round. Bytes an element: trio e + 3 s / 8 (14.75), quad 2 e + 5 s / 8 (27.25);
        none under plain, which is exact. With `widths` (see `mul`) trio (r + 3 n) / 8, also for a shift of 0, which
        makes more bits right. Raises DomainError for a shift outside the ring.
        """

    def local_truncate(self, x: Share, shift: int) -> Share:
        """x / 2^shift rounded to an integer that is less than two units away, modulo 2^(b - shift). Local.

        b: how many of the lowest bits of x are right (all of the ring's, but for narrow results). The shape of x; what
        is shared is right in its lowest b - shift bits alone. Raises UnsupportedOp under a protocol without it
        (`has_narrow`).
        """
        raise UnsupportedOp("a local division: this protocol has none; want trio or dealer")

    @abstractmethod
    def mul(self, x: Share, y: Share, shift: int = 0, widths: BitWidths | None = None) -> Share:
        """Elementwise product x*y with broadcasting, divided by 2^shift; before a division |x*y| < 2^(ring bits - 2).

        widths: k bits of x*y are right and r bits of the result wanted; nothing is promised of those above. Where the
        protocol has that (`has_narrow`: trio and dealer, 64-bit ring) it takes 2 k + r + 3 n bits, n = max(0, r + shift
        - k), and with n = 0 one round less, and x*y may be any number modulo 2^k; elsewhere, and without a shift,
        nothing changes.

        Bytes an output: trio 3 (e + s / 8) (30.75; 24 without shift), quad 5 (e + s / 8) (51.25; 40); 2 rounds, 1
        without shift. Raises DomainError for a shift outside the ring.
        """

    @abstractmethod
    def bilinear(
        self, form: BilinearForm, x: Share, y: Share, shift: int = 0, select: Tensor | None = None,
        widths: BitWidths | None = None,
    ) -> Share:  # fmt: skip
        """B(x, y) of a bilinear form, divided by 2^shift; rounds and bytes an output as `mul`, whatever it sums over.

        With `select` (int64, flat positions in the output) only those outputs are made, as a 1-D share; nothing is sent
        for the others. widths: as for `mul`. Raises DomainError for operands that do not fit the form, and as `mul`.
        """

    def matmul(
        self, x: Share, y: Share, shift: int = 0, select: Tensor | None = None, widths: BitWidths | None = None
    ) -> Share:  # fmt: skip
        """torch.matmul of x [..., M, K] and y [..., K, N] to [..., M, N], divided by 2^shift.

        `select`, `widths`, rounds, bytes and errors as `bilinear`.
        """
        return self.bilinear(Matmul(), x, y, shift, select, widths)

    def conv2d(self, x: Share, w: Share, conv: Conv2d, shift: int = 0) -> Share:
        """Convolution of x [B, C, H, W] with w [O, C / groups, kh, kw] to [B, O, H', W'], divided by 2^shift.

        Rounds and bytes of one `mul` of the output's size; errors as `bilinear`.
        """
        return self.bilinear(conv, x, w, shift)

    def bilinear_public(self, form: BilinearForm, x: Share, c: Tensor, shift: int = 0, left: bool = False) -> Share:
        """B(x, c), or B(c, x) if `left`, for public ring elements c, divided by 2^shift: local but for a truncation.

        The shape of the form's output. That is 1 round and the bytes of `truncate` on the outputs, or nothing if
        `shift` is 0. Errors as `bilinear`.
        """
        made = x.map(lambda part: form.product(c, part) if left else form.product(part, c))
        macs = form.macs(c.shape, x.shape) if left else form.macs(x.shape, c.shape)
        self.ledger.add_macs(macs * len(x.parts))
        return self.truncate(made, shift)

    @abstractmethod
    def poly(self, x: Share, coefficients: Sequence[int], shift: int = 0) -> Share:
        """c0 + c1 x + c2 x^2 (+ c3 x^3) with public ring coefficients (degree 2 or 3), in one step, divided by 2^shift.

        The shape of x. The exact value before division must stay below 2^(ring bits - 2). 2 rounds (1 without shift);
        bytes an element in trio 38.75 for degree 2, 46.75 for degree 3, in quad 67.25 and 83.25. Raises DomainError for
        another degree (plain takes any) and for a shift outside the ring.
        """
