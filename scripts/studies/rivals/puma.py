"""PUMA's functions (Dong et al., arXiv 2307.12533): a piecewise GELU, and e^x by squaring for softmax.

    GELU: 0 below -4, a cubic up to -1.95, a sextic up to 3, x above (constants in `formulas`)
    e^x ~ (1 + x / 32)^32, 0 below -14, for x less the maximum of its row

PUMA gives nothing for SiLU; this library's own is used. With u = x / 4 and v = u^2:

    1. [x < -4], [x < -1.95], [x < 3] by one coarse comparison
    2. v; then v (b4 + b6 v); then cubic = (u - r)(p2 v + p1 u + p0) beside sextic = x / 2 + b0 + v (b2 + v (b4 + b6 v))
    3. each piece times its bit, and the sum truncated by one bit
"""

from private_llm.approx.chain import need_wide_ring
from private_llm.approx.normalise import fitting
from private_llm.approx.softmax import check_width, inverse_sum
from private_llm.exact.comparisons import coarse_bits
from private_llm.exact.maximum import concatenated, maximum, maximum_ragged
from private_llm.exact.ragged_rows import Rows
from private_llm.tensor.fixed import Fixed
from rivals.formulas import PUMA_BOTTOM, PUMA_BREAKS, PUMA_SEXTIC, PUMA_SQUARES

_ROOT, _P0, _P1, _P2 = -0.9734325009934914, -0.5191968826343889, -1.201795052303054, -0.7061845779594066
"""PUMA's cubic in u = x / 4 by its real root: (u - root)(p2 u^2 + p1 u + p0)."""

_FRAC, _BITS = 20, 16
"""Fractional bits of u and its powers, and of the coefficients."""


def puma_gelu(x: Fixed) -> Fixed:
    """PUMA's GELU of x (any shape), for |x| < 2^20 - 2^10; 64-bit ring only, else DomainError.

    Absolute error 5e-5 from its formula, 0.02 from GELU; the formula jumps by up to 0.02 at its three breaks, where up
    to 2^-6 above either side may be taken. Exactly x or 0 beyond. 282 bytes an element, 13 rounds.
    """
    need_wide_ring(x, "PUMA's GELU")
    rows = coarse_bits(x, PUMA_BREAKS)
    low, middle, high = (rows.row(k) for k in range(3))
    half = x.with_share(x.share, x.frac + 1)
    out = half.frac
    with x.proto.may_wrap():  # far from the middle the polynomials are garbage, which a bit takes away
        u = x.with_share(x.share, x.frac + 2).rescale(_FRAC)
        v = u.mul(u, frac=_FRAC)
        b0, _, b2, _, b4, _, b6 = (c * float(4**k) for k, c in enumerate(PUMA_SEXTIC))
        w = v.mul(_sum(b4, (b6, v)), frac=_FRAC)
        left = (u - _ROOT).stack(v)
        right = _sum(_P0, (_P1, u), (_P2, v)).stack(_sum(b2, (1.0, w)))
        both = left.mul(right, frac=out)
        cubic = both.view(lambda part: part[0]).select(x.proto.xor(low, middle), [1], [0.0])
        sextic = (both.view(lambda part: part[1]) + half + b0).select(x.proto.xor(middle, high), [1], [0.0])
    above = x.select(x.proto.invert(high), [1], [0.0])
    return (cubic + sextic + above).rescale(x.frac)


def puma_exp(x: Fixed, frac: int = 24) -> Fixed:
    """(1 + x / 32)^32 with `frac` fractional bits for -2^21 + 2^10 < x <= 0, any shape; 64-bit ring only.

    Clipped at -14 (where it is 1e-8, PUMA's 0), then five squares. Error 4e-6 from the formula, 0.0085 from e^x.
    216 bytes an element, 14 rounds.
    """
    need_wide_ring(x, "PUMA's exponential")
    keep = x.proto.invert(coarse_bits(x, [PUMA_BOTTOM], extra=1, resolution=2))
    above = x.select(keep, [1], [-PUMA_BOTTOM])
    y = above.with_share(above.share, above.frac + PUMA_SQUARES) + (1 + PUMA_BOTTOM / 2.0**PUMA_SQUARES)
    for _ in range(PUMA_SQUARES - 1):
        y = y.mul(y, frac=28)
    return y.mul(y, frac=frac)


def puma_softmax(x: Fixed, sink: Fixed | None = None) -> Fixed:
    """e^(x - max x) over its sum by `puma_exp`, as `approx.softmax.softmax`; the maximum is exact."""
    entries = x if sink is None else concatenated([x, sink], -1)
    check_width(entries.shape[-1])
    e = puma_exp(entries - maximum(entries, coarse=False))
    own = e if sink is None else e.view(lambda part: part[..., :-1])
    return own.mul(fitting(inverse_sum(e.sum(-1, keepdim=True), entries.shape[-1]), own.frac))


def puma_softmax_ragged(x: Fixed, rows: Rows, sink: Fixed | None = None) -> Fixed:
    """The same of each row of the flat x [n], as `approx.softmax.softmax_ragged`."""
    rows.check(x)
    every = rows
    if sink is not None:
        every, x = rows.longer, rows.append(x, sink)
    check_width(every.longest)
    e = puma_exp(x - every.spread(maximum_ragged(x, every, coarse=False)))
    own = e if sink is None else rows.without_last(e)
    return own.mul(rows.spread(fitting(inverse_sum(every.sum(e), every.longest), own.frac)))


def _sum(constant: float, *terms: tuple[float, Fixed]) -> Fixed:
    """constant + sum of c x, with `_BITS` more fractional bits than the x (all `_FRAC`). Local."""
    parts = [x.scale_int(round(c * (1 << _BITS))) for c, x in terms]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total.with_share(total.share, _FRAC + _BITS) + constant
