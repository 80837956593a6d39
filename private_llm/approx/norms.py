"""Layer norm and RMS norm, fused: mean, sum of squares, inverse root per row, and the scaling of the elements.

    d = x - mean                          one truncation per row (layer norm only)
    v = sum of d^2                        one inner product per row, truncated
    r = sqrt(width / (v + width eps))     rsqrt.py, per row
    y = d r weight + bias                 one product per element, one more for a secret weight

Range: v < 2^26 (18 fractional bits; 2^30 with 16), so the root mean square may reach 295 at width 768 and 128 at
width 4096, and a single outlier 8191; |mean| < 2^12.
"""

from __future__ import annotations

import math

from torch import Tensor

from private_llm.approx.chain import need_wide_ring
from private_llm.approx.coefficients import RSQRT
from private_llm.approx.normalise import THIRDS, power
from private_llm.errors import DomainError
from private_llm.tensor.fixed import Fixed

SQUARE_BITS = 30
"""Most fractional bits of the sum of squares; 6 less than those of a square, so that the whole range can be scaled."""

INVERSE_BITS = 24
"""Fractional bits of the inverse root."""


def layer_norm(
    x: Fixed, weight: Fixed | Tensor | None, bias: Fixed | Tensor | None, eps: float, frac: int | None = None
) -> Fixed:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension, with `frac` (default: session) bits.

    Absolute error about 5e-5 of the normalised value plus 2^-17. 33 bytes an element without weight, 64 with a secret
    one, 48 with a public one, and about 5 kB a row; 15 rounds without weight, 16 with a public, 17 with a secret one.
    """
    width = x.shape[-1]
    need_wide_ring(x, "layer_norm")
    whole = math.ceil(math.log2(width))
    bits = 61 - x.frac - whole - 12
    if bits < 12:
        raise DomainError(f"layer_norm: rows of {width} with {x.frac} fractional bits leave the ring; truncate first")
    # width 2^-whole lies in (1/2, 1]: its inverse keeps `bits` bits whatever the width.
    raw = x.proto.mul_public(x.sum(-1, keepdim=True).share, round(2.0 ** (bits + whole) / width))
    mean = x.with_share(x.proto.truncate(raw, bits + whole))
    y = _scaled(x - mean, weight, eps, frac)
    return y if bias is None else y + bias


def rms_norm(x: Fixed, weight: Fixed | Tensor | None, eps: float, frac: int | None = None) -> Fixed:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension. Error and cost as `layer_norm`, 1 round less."""
    need_wide_ring(x, "rms_norm")
    return _scaled(x, weight, eps, frac)


def _scaled(d: Fixed, weight: Fixed | Tensor | None, eps: float, frac: int | None) -> Fixed:
    """d / sqrt(mean(d^2) + eps) * weight."""
    if not eps > 0:
        raise DomainError(f"norm: got eps={eps!r}; want a positive number (it bounds the inverse root)")
    width = d.shape[-1]
    row, column = d.view(lambda part: part.unsqueeze(-2)), d.view(lambda part: part.unsqueeze(-1))
    bits = min(SQUARE_BITS, 2 * d.frac - 6)
    square = row.matmul(column, frac=bits).view(lambda part: part.squeeze(-1))
    low, high = max(0.98 * width * eps, 2.0 ** (10 - bits)), 2.0 ** (62 - 2 * d.frac)
    inverse = power(square + width * eps, THIRDS, RSQRT, low, high, INVERSE_BITS, gain=math.sqrt(width))
    y = d.mul(inverse, frac=frac)
    if weight is None:
        return y
    return y.mul(weight, frac=frac) if isinstance(weight, Fixed) else y.scale(weight, frac=frac)
