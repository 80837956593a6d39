"""Public weights as whole numbers, and inputs scaled so that no product leaves the modulus.

A line of the weight is multiplied by the power of two with which its largest element just fits 16 bits. Columns that
are much larger than most would cost the others of a line their bits, so a power of two goes from them into the inputs.
The client sees its inputs, so it scales each row anew, as far as the modulus allows: no calibration, and no overflow.
For a row x and the lines w of the weight, with c_k the largest |w_k| and N the largest |w|_2 of all lines,

    |w x| <= sum of c_k |x_k| over the largest entries of x  +  N |the other entries|_2,

for any number of largest entries; the smallest of these bounds becomes 0.98 of half the modulus. (Rounding x changes
w x by at most half of |w|_1, far below the other 0.02 for at most `MOST_INPUTS` inputs; so do sums in float64.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from private_llm.errors import DomainError

BITS = 40
"""The modulus is 2^40: results travel in five bytes."""
BYTES = BITS // 8
_WEIGHT_MOST = 32767
_FILLED = 0.98 * 2.0 ** (BITS - 1)
_LARGEST = 2.0 ** (BITS - 2)
"""Inputs stay below, also where the weight has only zeros for them."""
MOST_INPUTS = 1 << 18
_WIDE = 8.0
"""Columns stay below so many times the median column."""
_LARGE_ENTRIES = 8
"""How many of the largest entries of a row its bound looks at."""


@dataclass(frozen=True)
class IntegerWeight:
    """One linear map as servers compute it: `lines` int16 [outputs, inputs] are the weight times 2^`exponents`, and its
    columns divided by `column_scales`.

    exponents: int64 [outputs]. column_scales: powers of two that multiply inputs, float64 [inputs]. columns: the
    largest absolute entry of each column of lines, float64 [inputs]. norm: the largest Euclidean norm of a line.
    """

    lines: Tensor
    exponents: Tensor
    column_scales: Tensor
    columns: Tensor
    norm: float

    @classmethod
    def of(cls, weight: Tensor) -> IntegerWeight:
        """From [outputs, inputs], with an error of at most half a unit, 2^-15 of the largest element of each line.

        Raises DomainError for NaN, infinities, and more than 2^18 inputs.
        """
        exact = weight.detach().double()
        if exact.shape[1] > MOST_INPUTS or not bool(torch.isfinite(exact).all()):
            raise DomainError(
                f"got values that are not finite, or {exact.shape[1]} inputs; want finite ones, {MOST_INPUTS} at most"
            )
        columns = exact.abs().amax(0)
        wide = columns / (_WIDE * columns[columns > 0].median()) if bool((columns > 0).any()) else columns
        column_scales = torch.exp2(torch.ceil(torch.log2(wide.clamp_min(1))))
        exact = exact / column_scales
        largest = exact.abs().amax(1)
        found = torch.floor(torch.log2(_WEIGHT_MOST / largest.clamp_min(torch.finfo(torch.float32).tiny)))
        exponents = torch.where(largest > 0, found, torch.zeros_like(found))
        lines = torch.round(exact * torch.exp2(exponents)[:, None])
        norm = float(torch.linalg.vector_norm(lines, dim=1).max()) if lines.numel() else 0.0
        return cls(lines.to(torch.int16), exponents.long(), column_scales, lines.abs().amax(0), norm)

    def scaled(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [M, inputs] as whole numbers, int64, and the scale of each row, float64 [M, 1].

        Raises DomainError for NaN and infinities.
        """
        exact = x.detach().double() * self.column_scales
        if not bool(torch.isfinite(exact).all()):
            raise DomainError("got an input with NaN or infinite values; want finite ones")
        entries, order = exact.abs().topk(min(_LARGE_ENTRIES, exact.shape[1]), dim=1)
        first = torch.zeros(len(exact), 1, dtype=torch.float64)
        before = torch.cat([first, torch.cumsum(self.columns[order] * entries, 1)], 1)
        squares = torch.cat([first, torch.cumsum(entries.square(), 1)], 1)
        after = (exact.square().sum(1, keepdim=True) * (1 + 1e-12) - squares).clamp_min(0).sqrt() * self.norm
        bound = (before + after).amin(1, keepdim=True)
        scale = torch.minimum(_FILLED / bound.clamp_min(1e-300), _LARGEST / entries[:, :1].clamp_min(1e-250))
        return torch.round(exact * scale).long(), scale

    def values(self, products: Tensor, scale: Tensor) -> Tensor:
        """What whole products [M, outputs] of rows with these scales mean: float32."""
        return (products.double() / scale * torch.exp2(-self.exponents.double())).float()


def centred(x: Tensor) -> Tensor:
    """The number from -2^39 to 2^39 - 1 that is x modulo 2^40."""
    return (x << (64 - BITS)) >> (64 - BITS)


def packed(x: Tensor) -> Tensor:
    """Elements modulo 2^40 as bytes, uint8 [5 n]."""
    return x.contiguous().view(torch.uint8).view(-1, 8)[:, :BYTES].contiguous().view(-1)


def unpacked(raw: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The inverse of `packed`: int64 of this shape, from 0 to 2^40 - 1."""
    wide = torch.zeros(raw.numel() // BYTES, 8, dtype=torch.uint8)
    wide[:, :BYTES] = raw.view(-1, BYTES)
    return wide.view(torch.int64).view(shape)
