"""Exact truncation as a part of any protocol: floor(z / 2^f) for every z, instead of at most one unit more.

With y = truncate(z), which is the floor or one unit more, d = z - y 2^f lies in [-2^f, 2^f) and is negative iff y is
too high, so floor(z / 2^f) = y - [d < 0]. A product is therefore made without division first. Price, besides the
product: one truncation, one comparison of f + 1 bits, one bit to arithmetic: 1 + 3 + 1 rounds at f = 18, and
49.4 bytes an element in trio, 86.6 in quad (64 bits). Rounding no longer depends on the masks.
"""

# mypy: disable-error-code="safe-super"
# What super() leads to is abstract here; the protocol among the bases has it.

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import Tensor

from private_llm.kernels.forms import BilinearForm
from private_llm.protocols.arithmetic import BitWidths
from private_llm.protocols.one_step import Exponential, Pieces
from private_llm.protocols.protocol import BitWeights, Protocol, check_low
from private_llm.protocols.share import BitShare, Share


class ExactTruncation(Protocol):
    """Named before a protocol among the bases of a class, makes its divisions exact.

    What divides by 2^0 costs what it costs there. Errors are the protocol's.
    """

    divides_exactly = True
    # rounding depends on masks in these
    local_truncate = Protocol.local_truncate
    relu_minus_waves = Protocol.relu_minus_waves

    def __init_subclass__(cls) -> None:
        """Exponentials are there where the protocol below has them."""
        super().__init_subclass__()
        cls.has_exponentials = super().exponential is not Protocol.exponential

    def truncate(self, x: Share, shift: int, widths: BitWidths | None = None) -> Share:
        """floor(x / 2^shift) for |x| < 2^(ring bits - 2); the shape of x.

        Shift 18: 5 rounds, 49.4 bytes an element in trio, 86.6 in quad (64 bits).
        """
        if shift == 0:
            return x
        high = super().truncate(x, shift)
        rest = self.sub(x, self.mul_public(high, 1 << shift))
        below = self.inject(self.msb(rest, bits=shift + 1), None, [0], [1])
        return self.sub(high, below.map(lambda part: part.view(x.shape)))

    def mul(self, x: Share, y: Share, shift: int = 0, widths: BitWidths | None = None) -> Share:
        """floor(x*y / 2^shift): the product (1 round), then `truncate`.

        Shift 18: 6 rounds, 73.4 bytes an output in trio, 126.6 in quad (64 bits).
        """
        return self.truncate(super().mul(x, y), shift)

    def bilinear(
        self, form: BilinearForm, x: Share, y: Share, shift: int = 0, select: Tensor | None = None,
        widths: BitWidths | None = None,
    ) -> Share:  # fmt: skip
        """Matrix product or convolution, exactly divided: 1 round, then `truncate` of the (selected) outputs."""
        return self.truncate(super().bilinear(form, x, y, select=select), shift)

    def poly(self, x: Share, coefficients: Sequence[int], shift: int = 0) -> Share:
        """Polynomial of degree 2 or 3, exactly divided: 1 round, then `truncate`."""
        return self.truncate(super().poly(x, coefficients), shift)

    def inject(
        self, bits: BitShare, x: Share | None, weights: BitWeights, constants: BitWeights, shift: int = 0,
        low: int | None = None,
    ) -> Share:  # fmt: skip
        """Weighted bits, exactly divided: 1 round, then `truncate`; 1-D [count]."""
        check_low(low, shift)
        return self.truncate(super().inject(bits, x, weights, constants, low=low), shift)

    def exponential(self, x: Share, keep: BitShare, plan: Exponential) -> Share:
        """Exponentials, exactly divided: 1 round, then `truncate`."""
        return self.truncate(super().exponential(x, keep, dataclasses.replace(plan, shift=0)), plan.shift)

    def piecewise(self, x: Share, pieces: Pieces) -> list[Share]:
        """Piecewise polynomials, exactly divided: 1 round, then `truncate` of all outputs, one after the other."""
        made = super().piecewise(x, dataclasses.replace(pieces, shifts=(0,) * len(pieces.shifts)))
        return [self.truncate(each, shift) for each, shift in zip(made, pieces.shifts, strict=True)]
