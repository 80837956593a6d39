"""Means of secrets that hold wherever the mean does: sums are divided by powers of two before they can leave the ring.

With f fractional bits, values up to V = 2^(ring bits - 2 - 2 f) have room for a product, and a sum of up to 2^f of them
for a truncation. So

1. an operand with surplus bits that leave too little room is truncated first;
2. more than 2^f entries are added in two steps, with a division by a power of two between them;
3. 1 / count has at most f bits after the point. Where that is too coarse, the sum is divided by a power of two first
   (one truncation of the results), so that a factor near 1 remains.

A power of two moves into the fractional bits and costs nothing. Error of 1 / count, relative: 2^-14 in a 64-bit ring
(18 fractional bits), 2^-f or 2^-9 in a 32-bit ring; and a few units of the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from private_llm.tensor.fixed import Fixed
from private_llm.tensor.scale import CONSTANT_BITS, dyadic, encoded
from private_llm.tensor.secret import SecretTensor

Partial = Callable[[Tensor], Tensor]
"""Sums over a part of the entries; linear."""


def mean_of(x: SecretTensor, first: Partial, then: Partial, sizes: tuple[int, int], counts: int | Tensor) -> Fixed:
    """then(first(x)) / counts, where `first` and `then` add at most `sizes` entries each.

    `counts` is a number or a tensor that broadcasts to the result. Local up to 2^f entries (f fractional bits; a
    truncation of its results, 1 round, if `counts` is no small number or power of two). Beyond, one truncation of each
    sum of `first`; beyond 2^f entries in one step, one of every entry.
    """
    steps = [_log2(size) for size in sizes]
    value = x.value(full=True) if sum(steps) <= _room(x.value(full=True)) else x.to_fixed()
    if sum(steps) <= _room(value):
        return divided(value.view(lambda part: then(first(part))), counts)
    before = [max(0, bits - _room(value)) for bits in steps]
    between = steps[0] - before[0]
    value = _shifted(_shifted(value, before[0]).view(first), between)
    value = _shifted(value, before[1]).view(then)
    return divided(value, counts / 2.0 ** (before[0] + between + before[1]))


def divided(total: Fixed, counts: float | Tensor) -> Fixed:
    """Sums to means, total / counts; counts are positive numbers, or a tensor of them that broadcasts.

    A power of two is exact and local. Another factor is local while counts < 2^(room - 14) (room - 8 in a 32-bit ring),
    room = 2 f - frac bits, else 1 truncation of the results; errors as in the module header. More fractional bits come
    out (in a 64-bit ring, or for one number).
    """
    session = total.session
    largest = float(counts.max()) if isinstance(counts, Tensor) else float(counts)
    octave = max(0, math.frexp(largest)[1] - 1)
    if not isinstance(counts, Tensor) and math.frexp(largest)[0] == 0.5:
        return total.with_share(total.share, total.frac + math.frexp(largest)[1] - 1)
    behind = _room(total)
    if largest >= 2.0 ** (behind - (14 if session.ring.bits == 64 else 8)):
        total, behind = _shifted(total, octave), session.frac
    else:
        octave = 0
    if isinstance(counts, Tensor):
        bits = min(CONSTANT_BITS, behind)
        factors = encoded(total, 2.0**octave / counts.double(), bits)
        out = total.with_share(total.proto.mul_public(total.share, factors), total.frac + bits)
        return out if session.ring.bits == 64 else out.rescale(session.frac)
    factor = 2.0**octave / counts
    n, exponent = dyadic(factor, max(1, min(CONSTANT_BITS, behind + math.frexp(factor)[1])))
    return total.with_share(total.scale_int(n).share, total.frac - exponent)


def _room(x: Fixed) -> int:
    """How many times a value of x may double before it leaves no room for a truncation."""
    return 2 * x.session.frac - x.frac


def _shifted(x: Fixed, bits: int) -> Fixed:
    """x / 2^bits with the session's fractional bits: one truncation, none for bits = 0."""
    return x.with_share(x.share, x.frac + bits).rescale(x.session.frac) if bits else x


def _log2(count: int) -> int:
    return max(0, count - 1).bit_length()
