"""Exact truncation as a part of any protocol: floor(z / 2^f) for every z, instead of at most one unit more.

With y = truncate(z), which is the floor or one unit more, d = z - y 2^f lies in [-2^f, 2^f) and is negative iff y is
too high, so floor(z / 2^f) = y - [d < 0]. A product is therefore made without division first. Price, besides the
product: one truncation, one comparison of f + 1 bits, one bit to arithmetic: 1 + 3 + 1 rounds at f = 18, and
49.4 bytes an element in trio, 86.6 in quad (64 bits). Rounding no longer depends on the masks.
"""

import dataclasses
import weakref
from collections.abc import Sequence
from types import MethodType
from typing import Any, TypeVar

from torch import Tensor

from private_llm.kernels.forms import BilinearForm
from private_llm.protocols.one_step import Exponential, Pieces
from private_llm.protocols.protocol import Protocol
from private_llm.protocols.share import BitShare, BitWeights, BitWidths, Share, check_low

EndT = TypeVar("EndT", bound=Protocol)


def exact(end: EndT) -> EndT:
    """The same end with exact divisions, without what rounds by masks (`local_truncate`, `relu_minus_waves`)."""
    lacking = {"local_truncate", "relu_minus_waves", *({"exponential", "piecewise"} - end.primitives)}
    end.take(ExactTruncation(end))
    vars(end).update({name: MethodType(getattr(Protocol, name), weakref.proxy(end)) for name in lacking})
    end.primitives, end.divides_exactly = end.primitives - lacking, True
    return end


class ExactTruncation:
    """Primitives that divide, from those of an end; 2^0 costs what it costs there. Errors are the protocol's."""

    def __init__(self, end: Protocol) -> None:
        self.end: Protocol = weakref.proxy(end)  # as families do

        def weak(method: Any) -> Any:  # noqa: ANN401 - a method of the end or of a family
            return MethodType(method.__func__, self.end) if method.__self__ is end else method

        self._truncate, self._mul, self._bilinear = weak(end.truncate), weak(end.mul), weak(end.bilinear)
        self._poly, self._inject = weak(end.poly), weak(end.inject)
        self._exponential, self._piecewise = weak(end.exponential), weak(end.piecewise)

    def truncate(self, x: Share, shift: int, widths: BitWidths | None = None) -> Share:
        """floor(x / 2^shift), |x| < 2^(bits - 2). Shift 18: 5 rounds, 49.4 bytes an element in trio, 86.6 in quad."""
        if shift == 0:
            return x
        high = self._truncate(x, shift)
        rest = self.end.sub(x, self.end.mul_public(high, 1 << shift))
        below = self._inject(self.end.msb(rest, bits=shift + 1), None, [0], [1])
        return self.end.sub(high, below.map(lambda part: part.view(x.shape)))

    def mul(self, x: Share, y: Share, shift: int = 0, widths: BitWidths | None = None) -> Share:
        """floor(x*y / 2^shift) by `truncate`. Shift 18: 6 rounds, 73.4 bytes an output in trio, 126.6 in quad."""
        return self.truncate(self._mul(x, y), shift)

    def bilinear(
        self, form: BilinearForm, x: Share, y: Share, shift: int = 0, select: Tensor | None = None,
        widths: BitWidths | None = None,
    ) -> Share:  # fmt: skip
        """Matrix product or convolution, exactly divided: 1 round, then `truncate` of the (selected) outputs."""
        return self.truncate(self._bilinear(form, x, y, select=select), shift)

    def poly(self, x: Share, coefficients: Sequence[int], shift: int = 0) -> Share:
        """Polynomial of degree 2 or 3, exactly divided: 1 round, then `truncate`."""
        return self.truncate(self._poly(x, coefficients), shift)

    def inject(
        self, bits: BitShare, x: Share | None, weights: BitWeights, constants: BitWeights, shift: int = 0,
        low: int | None = None,
    ) -> Share:  # fmt: skip
        """Weighted bits, exactly divided: 1 round, then `truncate`; 1-D [count]."""
        check_low(low, shift)
        return self.truncate(self._inject(bits, x, weights, constants, low=low), shift)

    def exponential(self, x: Share, keep: BitShare, plan: Exponential) -> Share:
        """Exponentials, exactly divided: 1 round, then `truncate`."""
        return self.truncate(self._exponential(x, keep, dataclasses.replace(plan, shift=0)), plan.shift)

    def piecewise(self, x: Share, pieces: Pieces) -> list[Share]:
        """Piecewise polynomials, exactly divided: 1 round, then `truncate` of all outputs, one after the other."""
        made = self._piecewise(x, dataclasses.replace(pieces, shifts=(0,) * len(pieces.shifts)))
        return [self.truncate(each, shift) for each, shift in zip(made, pieces.shifts, strict=True)]
