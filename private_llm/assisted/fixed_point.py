"""Public weights as whole numbers, and inputs scaled so that no product leaves the modulus.

A line of the weight is multiplied by the power of two with which its largest element just fits 16 bits; where users
choose 8 bits, by the number with which it becomes 127. Columns that are much larger than most would cost the others of
a line their bits, so a power of two goes from them into the inputs.
The client sees its inputs, so it scales each row anew, as far as the modulus allows: no calibration, and no overflow.
For a row x and the lines w of the weight, with c_k the largest |w_k| and N the largest |w|_2 of all lines,

    |w x| <= sum of c_k |x_k| over the largest entries of x  +  N |the other entries|_2,

for any number of largest entries; the smallest of these bounds becomes 0.98 of half the modulus. (Rounding x changes
w x by at most half of |w|_1, below the other 0.02 for at most `MOST_INPUTS` inputs; so do sums in float64.)
"""

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from private_llm.errors import DomainError
from private_llm.kernels import ops
from private_llm.kernels.matmul.narrow import BYTES as BYTES

LINES = {16: torch.int16, 8: torch.int8}
"""What lines of weights are, by `PrivateConfig.weight_bits`. `BYTES` says how an element then travels, and so the
modulus: 2^40 or 2^32.
"""
_WEIGHT_MOST = {16: 32639, 8: 127}
"""Digits of 8 bits, -128 to 127, as GPUs multiply them, hold no more."""
MOST_INPUTS = 1 << 18
_AT_ONCE = 1 << 19
"""Elements of a weight that are float64 at a time."""
_WIDE, _LOOKED_AT = 8.0, 256
"""Columns whose median element is larger than so many times that of most columns are scaled down; it is taken of so
many lines at least, evenly spread.
"""


@dataclass(frozen=True)
class IntegerWeight:
    """One linear map as servers compute it: `lines` int16 or int8 [outputs, inputs] are the weight, divided by
    `factors`, and its columns by `column_scales`.

    factors: float64 [outputs], of int16 lines powers of two. column_scales: powers of two that multiply inputs, float64
    [inputs]. columns: the largest absolute entry of each column of lines, float64 [inputs]. norm: the largest Euclidean
    norm of a line. error: of int8 lines, the norm of what rounding changed by that of the weight. All but norm and
    error are the same on every machine.
    """

    lines: Tensor
    factors: Tensor
    column_scales: Tensor
    columns: Tensor
    norm: float
    error: float = 0.0

    @property
    def size(self) -> int:
        """Bytes of an element of inputs and products."""
        return element_bytes(self.lines)

    @classmethod
    def of(cls, *weights: Tensor, bits: int = 16) -> "IntegerWeight":
        """From [outputs, inputs], or several with the same inputs, one after the other. bits: `weight_bits`.

        Error: at most half a unit, some 2^-15 (8 bits: 2^-8) of the largest element of each line after columns are
        scaled. Memory beside the weights: that of lines, and some MB. Raises DomainError for NaN, infinities, more than
        2^18 inputs, and no elements.
        """
        inputs, outputs = weights[0].shape[1], sum(map(len, weights))
        if inputs > MOST_INPUTS or not inputs * outputs:
            raise DomainError(f"got {outputs} x {inputs} elements; want some, and at most {MOST_INPUTS} inputs")
        pieces = [piece for each in weights for piece in each.detach().split(max(1, _AT_ONCE // inputs))]
        some = torch.cat([each.detach()[:: max(1, len(each) // _LOOKED_AT)] for each in weights])
        typical = some.double().abs().median(0).values
        wide = typical / (_WIDE * typical[typical > 0].median()) if bool((typical > 0).any()) else typical
        column_scales = _power_above(wide.clamp_min(1))
        lines = torch.empty(outputs, inputs, dtype=LINES[bits])
        factors, reaches, norms, wrong, squares, at = [], [], [0.0], 0.0, 0.0, 0
        for piece in pieces:
            exact = piece.double() / column_scales
            largest = _reach(exact, 1)
            if not bool(torch.isfinite(largest).all()):
                raise DomainError("got values that are not finite; want finite ones")
            factor = torch.where(largest > 0, largest / _WEIGHT_MOST[bits], 1.0).clamp_min(2.0**-1000)
            factors.append(_power_above(factor) if bits == 16 else factor)
            exact = exact.div_(factors[-1][:, None])
            if bits == 8:
                wrong += float((exact.round() - exact).mul_(column_scales).mul_(factor[:, None]).square_().sum())
                squares += float(piece.double().square_().sum())
            exact = exact.round_()
            norms.append(float(torch.linalg.vector_norm(exact, dim=1).max()))
            reaches.append(_reach(exact, 0))
            lines[at : at + len(piece)] = exact
            at += len(piece)
        return cls(
            lines, torch.cat(factors), column_scales, torch.stack(reaches).amax(0), max(norms), _ratio(wrong, squares)
        )

    def hidden(self, x: Tensor, mask: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [M, inputs] as whole numbers, int64, and the scale of each, float64 [M], 0 where it is not finite.

        out: overwritten with the same minus a mask, packed.
        """
        return ops.hide_rows(x, self.column_scales, self.columns, self.norm, mask, out, self.size)


def _ratio(wrong: float, squares: float) -> float:
    return math.sqrt(wrong / squares) if squares else 0.0


def _reach(x: Tensor, dim: int) -> Tensor:
    """The largest absolute values along a dimension."""
    return torch.maximum(x.amax(dim), -x.amin(dim))


def lines_digest(lines: Tensor) -> str:
    """SHA-256 of a weight as servers multiply by it, int16 or int8 [outputs, inputs], and of its shape."""
    made = hashlib.sha256("{} {} ".format(*lines.shape).encode())
    made.update(lines.contiguous().view(torch.uint8).numpy().data)
    return made.hexdigest()


def _power_above(x: Tensor) -> Tensor:
    """The smallest powers of two that are not below x, exact on every machine; x positive, float64."""
    mantissa, exponent = torch.frexp(x)
    biased = exponent.long() + 1023 - (mantissa == 0.5).long()
    return (biased << 52).view(torch.float64)


def element_bytes(lines: Tensor) -> int:
    """Of inputs and products of a weight."""
    return BYTES[8 * lines.element_size()]


def centred(x: Tensor, size: int) -> Tensor:
    """The number from -2^(8 size - 1) to 2^(8 size - 1) - 1 that is x modulo 2^(8 size)."""
    return (x << (64 - 8 * size)) >> (64 - 8 * size)
