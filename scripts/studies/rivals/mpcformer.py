"""MPCFormer's functions (Li et al., ICLR 2023): Quad for GELU, 2Quad for softmax. Models need distillation for them.

    GELU(x)    ~ x^2 / 8 + x / 4 + 1 / 2 = (x + 1)^2 / 8 + 3 / 8      one product
    softmax(x) ~ (x + 5)^2 / sum of (x + 5)^2                         one product, a reciprocal per row, one product

Positions that a mask hides are not among the entries and count as zero. Row sums are divided by the public power of two
2^k above the length of their row, which costs nothing, so that the reciprocal's range is that of mean squares:
0.4 to 256 for (x + 5)^2 over a row. What lies beyond it gives rows whose sum is not 1, which the guard sees
where it is off by 1/2 or more.
"""

import math
from collections.abc import Callable, Sequence

import torch

from private_llm.approx.chain import need_wide_ring
from private_llm.approx.normalise import fitting, reciprocal
from private_llm.approx.softmax import check_width
from private_llm.exact.maximum import concatenated
from private_llm.exact.ragged_rows import Rows
from private_llm.tensor.fixed import Fixed
from private_llm.tensor.range_check import watch_flat
from rivals.formulas import SHIFT

SMALLEST, LARGEST = 0.2, 256.0
"""Range of the means whose reciprocal is taken; the divisor is up to twice the length of a row."""

Inverse = Callable[[Fixed], Fixed]
"""From means within SMALLEST and LARGEST to their reciprocals."""


def quad(x: Fixed) -> Fixed:
    """x^2 / 8 + x / 4 + 1 / 2 for |x| < 2^12, any shape; 64-bit ring only, else DomainError.

    Exact up to 2 units of the last place. 32 bytes an element, 2 rounds. GELU itself is up to 0.5 off below -2 and
    x^2 / 8 off above 4.
    """
    need_wide_ring(x, "MPCFormer's GELU")
    y = x + 1.0
    return y.mul(y.with_share(y.share, y.frac + 3), frac=x.frac) + 0.375


def inverse(mean: Fixed) -> Fixed:
    """Reciprocals by this library's own method: relative error 2e-5, 8 rounds, 1.4 kB a row (2.2 in rows of 128)."""
    return reciprocal(mean, SMALLEST, LARGEST)


def two_quad(x: Fixed, sink: Fixed | None = None, inverse: Inverse = inverse) -> Fixed:
    """2Quad over the last dimension of x [..., n] with |x| < 2^11; sink [..., 1] as for `approx.softmax.softmax`.

    Error 1e-4. About 81 bytes an entry at n = 128 (64 without the row work), 12 rounds; one more
    for rows beyond 2048 entries. Raises DomainError for rows of 0 or more than 65,536 entries and in a 32-bit ring.
    """
    entries = x if sink is None else concatenated([x, sink], -1)
    bits = _length_bits(entries.shape[-1])
    e = _squares(entries)
    total = e.sum(-1, keepdim=True)
    factor = _moved(inverse(_moved(total, bits)), bits)
    own = e if sink is None else e.view(lambda part: part[..., :-1])
    p = own.mul(fitting(factor, e.frac))
    if sink is None:
        _watch(p.sum(-1))
    return p


def two_quad_ragged(x: Fixed, rows: Rows, sink: Fixed | None = None, inverse: Inverse = inverse) -> Fixed:
    """2Quad of each row of the flat x [n], to [n], as `two_quad`; the longest row decides about rounds."""
    rows.check(x)
    every = rows
    if sink is not None:
        every, x = rows.longer, rows.append(x, sink)
    bits = _length_bits(every.longest)
    less = torch.tensor([1 << (bits - _length_bits(n)) for n in every.lengths], device=x.share.parts[0].device)
    e = _squares(x)
    factor = _moved(inverse(_moved(every.sum(e).scale_int(less), bits)).scale_int(less), bits)
    own = e if sink is None else rows.without_last(e)
    p = own.mul(rows.spread(fitting(factor, e.frac)))
    if sink is None:
        _watch(rows.sum(p), rows.batch)
    return p


def _squares(x: Fixed) -> Fixed:
    need_wide_ring(x, "2Quad")
    y = x + SHIFT
    return y.mul(y)


def _moved(x: Fixed, bits: int) -> Fixed:
    """x / 2^bits, by moving the point."""
    return x.with_share(x.share, x.frac + bits)


def _watch(sums: Fixed, counts: Sequence[int] = ()) -> None:
    """Owe a check that rows sum to 1. counts: as for `watch_flat`."""
    watch_flat(sums - 1.0, sums.frac - 1, counts)


def _length_bits(width: int) -> int:
    check_width(width)
    return math.ceil(math.log2(width))
