"""Softmax of dense rows, and of ragged rows that hold the allowed entries only.

    m = approximate row maximum, less than 3/16 below the true one            maximum.py, coarse
    e = exp(x - m), 0 or e^-14 far below m, with 24 fractional bits           activations.py
    s = sum of e over the row, 0.99 <= s <= n e^(1/4)                         local
    p = e / s                                                                 normalise.py, one product

(Quad, plain and comparison keys: at most log2(n) / 64.) Subtracting any m near the maximum leaves the quotient
unchanged, so a coarse tournament suffices. Causal and padded positions are simply not among the entries: nothing is
computed for them. A sink is one more entry of each row that counts in m and s, and has no p.
"""

import math

from torch import Tensor

from private_llm.approx.activations import exp
from private_llm.approx.normalise import fitting, reciprocal
from private_llm.approximations import approximations_of
from private_llm.errors import DomainError
from private_llm.exact.maximum import concatenated, maximum, maximum_ragged
from private_llm.exact.ragged_rows import Rows
from private_llm.tensor.fixed import Fixed

EXP_BITS = 24  # fractional bits of e^(x - m)
INVERSE_BITS = 24  # fractional bits of inverse sums, less those of the largest sum (see `reciprocal`)
LONGEST = 1 << 16  # entries a row may have: the coarse maximum then stays within exp's range


def softmax(x: Fixed, sink: Fixed | None = None, present: Tensor | None = None) -> Fixed:
    """Softmax over the last dimension of x, |x| < 2^20; 64-bit ring only. Any shape.

    sink: one more entry of each row, [..., 1] with the fractional bits of x. present: a public factor, 0 for entries
    that are copies of another one of their row and count nothing, 1 for the others; without a sink. Where
    `PrivateConfig.approximations` names another system's softmax, that one. Ours: absolute error at
    most 5e-4 (measured: below 1e-4 on rows of 128 normal scores of deviation 3). About 154 bytes an entry at n = 128;
    at most 4 ceil(log2 n) + 15 rounds, by comparison keys ceil(log2 n) + 6; one more beyond 6301 entries. Raises
    DomainError for rows of 0 or more than 65,536 entries and in a 32-bit ring.
    """
    other = approximations_of(x.session.config.approximations)
    if other is not None:
        theirs: Fixed = other.softmax(x, sink)
        return theirs
    e, inverse = unscaled(x if sink is None else concatenated([x, sink], -1), EXP_BITS, present)
    own = e if sink is None else e.view(lambda part: part[..., :-1])
    return own.mul(fitting(inverse, own.frac))


def softmax_ragged(x: Fixed, rows: Rows, sink: Fixed | None = None) -> Fixed:
    """Softmax of each row of the flat x [n], to [n]; row lengths are public, sum to n, may be 0.

    sink: one more entry of each row, [rows]. Otherwise as `softmax`. The longest row decides about rounds. Raises
    DomainError if lengths and x disagree, and if all rows are empty.
    """
    other = approximations_of(x.session.config.approximations)
    if other is not None:
        theirs: Fixed = other.ragged(x, rows, sink)
        return theirs
    rows.check(x)
    every = rows
    if sink is not None:
        every, x = rows.longer, rows.append(x, sink)
    e, inverse = unscaled_ragged(x, every, EXP_BITS)
    own = e if sink is None else rows.without_last(e)
    return own.mul(rows.spread(fitting(inverse, own.frac)))


def unscaled(x: Fixed, frac: int, present: Tensor | None = None) -> tuple[Fixed, Fixed]:
    """Softmax before its last product: e^(x - m) [..., n] with `frac` fractional bits, and 1 / their sum [..., 1]; else
    as `softmax`.
    """
    check_width(x.shape[-1])
    e = exp(x - maximum(x, coarse=True), frac)
    e = e if present is None else e.scale_int(present)
    return e, inverse_sum(e.sum(-1, keepdim=True), x.shape[-1])


def unscaled_ragged(x: Fixed, rows: Rows, frac: int) -> tuple[Fixed, Fixed]:
    """The same for each row of the flat x [n]: ([n], [rows])."""
    rows.check(x)
    check_width(rows.longest)
    e = exp(x - rows.spread(maximum_ragged(x, rows, coarse=True)), frac)
    return e, inverse_sum(rows.sum(e), rows.longest)


def sum_bits(width: int) -> int:
    """Bits of magnitude of a row's sum of e^(x - m)."""
    return math.ceil(math.log2(_largest_sum(width)))


def inverse_bits(width: int) -> int:
    """Fractional bits of the inverse of a row's sum."""
    return INVERSE_BITS + sum_bits(width)


def _largest_sum(width: int) -> float:
    return 1.3 * width


def inverse_sum(total: Fixed, width: int) -> Fixed:
    """1 / sums of e^(x - m) over rows of up to `width` entries: `reciprocal`, at its cost."""
    return reciprocal(total, 0.99, _largest_sum(width))


def check_width(width: int) -> None:
    """Raise DomainError for rows that are empty or longer than LONGEST."""
    if not 1 <= width <= LONGEST:
        raise DomainError(f"softmax: got rows of {width} entries; want 1 to {LONGEST}")
