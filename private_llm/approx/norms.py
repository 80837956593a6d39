"""Layer norm and RMS norm, fused: mean, sum of squares, inverse root per row, and the scaling of the elements.

    d = x - mean                          one or two truncations per row (layer norm only)
    v = sum of d^2                        one inner product per row, truncated
    r = sqrt(width / (v + width eps))     normalise.py, per row
    y = d r weight + bias                 one product per element, one more for a secret weight

Real models have rows whose entries reach 25,000 beside rows near 30 (massive activations), and one ring product cannot
hold the squares of both: with 18 fractional bits v stays below 2^25 or wraps. Where the range of the rows is known
(`square`, from calibration) and fits, v is one sum. Otherwise each row is summed twice, as it is and divided by a
public power of two, and the right result is chosen per row inside the protocol:

    c = d / 2^s                           one truncation per element, of s bits
    v, v' = sum of d^2, sum of c^2        v may wrap, v' cannot
    r, r'                                 both by the same comparisons, in the same messages
    r = r if v' < t else r' / 2^s         one bit per row that the comparisons have made already; garbage times 0 is 0

The truncation rounds without bias (the carry of a random mask), so v' is exact to 2^-12 of a row that needs it.
Where it is known, too, that weights stay below 2^gain, the last product needs no rounds of its own: d weight is made
beside the squares, in the same messages, and one product with r follows.

Domain: |x| <= 2^20, mean squares from 2^-12 to 2^36, in rows of up to 2^14 entries (18 fractional bits).
"""

import math
from functools import lru_cache, partial

import torch
from torch import Tensor

from private_llm.approx.chain import need_wide_ring
from private_llm.approx.lines import REACH, Lines, WideLines, bits_below, octaves_apart, power_by_lines, takes_lines
from private_llm.approx.normalise import THIRDS, power, powers, price
from private_llm.approx.tables import RSQRT
from private_llm.errors import DomainError
from private_llm.kernels.forms import InnerAndScaled
from private_llm.protocols.share import Share
from private_llm.tensor.fixed import Fixed
from private_llm.tensor.scale import encoded

SQUARE_BITS = 30  # most fractional bits of the sum of squares; a square has 6 more, so that the whole range fits

INVERSE_BITS = 15  # significant bits of the smallest inverse root: relative error 2^-16


MEAN_BITS = 3  # fractional bits that deviations from the mean have more than the row, whose mean is off by a unit


WIDEST = 36  # mean squares stay below 2^WIDEST in rows that nobody has measured
LARGEST = 20  # entries, and means, stay within +-2^LARGEST
_SMALLEST = 2.0**-13  # comparison keys are used for norms only where mean squares of this size are inside their range

_REACH_DOWN = math.sqrt(math.ldexp(1.0, -round(2 * REACH)))  # 2^-REACH by operations that all machines round alike

_WRAP_FREE = 61  # bits that a product may have before its truncation
_SUM_BITS = 16  # significant bits of the smallest sum of squares, where it has no more bits than it needs

_FINER = 8  # most fractional bits that a row times its weights has more: weights may then be as small as 2^-8


def layer_norm(
    x: Fixed, weight: Fixed | Tensor | None, bias: Fixed | Tensor | None, eps: float, frac: int | None = None,
    square: int = WIDEST, gain: int | None = None,
) -> Fixed:  # fmt: skip
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension, with `frac` (default: session) bits.

    x [.., width] gives [.., width]; weight and bias [width]. Mean squares of rows stay below 2^square, and if `gain` is
    given, weights below 2^gain (0 without one): a secret weight then takes 2 rounds less, unless the ring has no room
    for it. Relative error of a row 1e-4 (5e-5 where one sum is enough) and 2^-17 absolute. With a known range that
    fits: 33 bytes an element without weight, 64 with a secret one, 48 with a public one, 4 to 5 kB a row; 15 rounds
    without weight, 16 with a public, 17 with a secret one; one more for the mean where the width is no power of two.
    Without known range: 16 to 18 bytes an element and 4 to 5 kB a row more, and 3 rounds. By comparison keys, in rows
    of known range, 9 rounds with a secret weight, relative error of a row 2e-4. Raises DomainError for eps <= 0, a
    32-bit ring, or rows with too many fractional bits for their width.
    """
    need_wide_ring(x, "layer_norm")
    width, reach = x.shape[-1], LARGEST
    lines = lines_of(x, eps, square, centred=True)
    if lines is not None:
        d = _deviations(x, line_bits(x.frac, width, square))
        y = _scaled(d, weight, eps * _ratio_squared(width), frac, square, lines, gain)
        return y if bias is None else y + bias
    fine = squared_bits(x.frac, width, square, gain)
    if one_sum(x.frac, width, square):  # which bounds the mean, too
        reach = min(LARGEST, max(1, math.ceil((_WRAP_FREE + 1 - _log2(width)) / 2) - x.frac))
    x = x.finer(deviation_bits(x.frac, width, square))
    d = x - _mean(x, reach)
    y = _scaled(d.finer(max(d.frac, fine)), weight, eps, frac, square, gain=gain)
    return y if bias is None else y + bias


def rms_norm(
    x: Fixed, weight: Fixed | Tensor | None, eps: float, frac: int | None = None, square: int = WIDEST,
    gain: int | None = None,
) -> Fixed:  # fmt: skip
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, of the shape of x [.., width]; weight [width].

    Error, bytes and `gain` as `layer_norm`, without its mean and bias. 14 rounds without weight, 15 with a public, 16
    with a secret one (14 with `gain`); 3 more without known range; by keys 8 (6). Raises as `layer_norm`.
    """
    need_wide_ring(x, "rms_norm")
    lines = lines_of(x, eps, square)
    bits = line_bits if lines is not None else partial(squared_bits, gain=gain)
    return _scaled(x.finer(bits(x.frac, x.shape[-1], square)), weight, eps, frac, square, lines, gain)


def lines_of(x: Fixed, eps: float, square: int, centred: bool = False) -> Lines | WideLines | None:
    """Inverse roots of rows of x, or of their deviations, by keys; None: another way. Sums reach 2^-REACH. Local."""
    if "piecewise" not in x.session.protocol.primitives or not x.numel():
        return None
    rows, found = x.numel() // x.shape[-1], _lines(x.frac, x.shape[-1], eps, square, centred)
    if found is None:
        return None
    if isinstance(found, WideLines):
        count, low, high = 2 * rows, 2.0 ** (found.log2_low + 1), 2.0**found.log2_high
    else:
        count, low, high = rows, found.low, found.high
    facts = found.own, rows, THIRDS, low, high
    return found if takes_lines(x, count, found, price, x.session.ring, *facts) else None


@lru_cache(maxsize=256)
def _lines(frac: int, width: int, eps: float, square: int, centred: bool) -> Lines | WideLines | None:
    """Lines for rows with `frac` fractional bits; of a range too wide for one table two copies, if they reach all."""
    fine = line_bits(frac, width, square)
    smaller = _ratio_squared(width) if centred else 1.0
    if not one_sum(fine, width, square) or not eps > 0:
        return None
    widest, usual = _WRAP_FREE - 2 * fine, width * smaller * _SMALLEST
    bits, gain = _inverse_bits(widest - _log2(width)), math.sqrt(width)
    least = 0.98 * width * (eps * smaller)
    low = max(least, math.ldexp(_REACH_DOWN, widest))
    if low <= max(least, usual) and 2 * low <= 2.0**widest:
        return Lines(RSQRT.power, max(0, _SUM_BITS - bits_below(low)), low, 2.0**widest, bits, gain)
    least = 0.98 * width * eps * smaller
    for start in (least, max(least, usual)):
        apart = octaves_apart(start, widest)
        if apart is None or 2 * start > 2.0**widest:
            continue
        own = max(0, _SUM_BITS - 1 - bits_below(start), _SUM_BITS - 2 - (widest - 2 * apart))
        found = WideLines(own, widest, bits, gain, apart)
        if own <= 2 * fine and found.fit:
            return found
    return None


def _ratio_squared(width: int) -> float:
    """Between a quarter and 1: by what squares of `_deviations` are too small."""
    ratio = width / (1 << _log2(width))
    return ratio * ratio


def _deviations(x: Fixed, fine: int) -> Fixed:
    """(x - mean) width / 2^ceil(log2 width), `fine` fractional bits; local, or a truncation an element if bits drop."""
    width, whole = x.shape[-1], _log2(x.shape[-1])
    apart = x.scale_int(width) - x.sum(-1, keepdim=True)
    return x.with_share(apart.share, x.frac + whole).rescale(fine)


def one_sum(frac: int, width: int, square: int) -> bool:
    """Whether rows of mean squares below 2^square, with `frac` fractional bits, need no second sum of squares."""
    return frac <= fitting_bits(width, square)


def deviation_bits(frac: int, width: int, square: int) -> int:
    """Fractional bits of deviations from the mean: up to MEAN_BITS more, but so that one sum stays enough if it was."""
    if not one_sum(frac, width, square):
        return frac + MEAN_BITS
    return min(frac + MEAN_BITS, fitting_bits(width, square))


def line_bits(frac: int, width: int, square: int) -> int:
    """Fractional bits of rows that are squared for lines (lines.py): up to 6 more, as one sum has room for.

    The smallest sums then have enough of them. Those of `frac` where there is no room.
    """
    return max(frac, min(frac + 2 * MEAN_BITS, fitting_bits(width, square)))


def squared_bits(frac: int, width: int, square: int, gain: int | None) -> int:
    """Fractional bits of rows that are squared beside their product with weights below 2^gain: as `line_bits`.

    Those of `frac` where a bound of the weights is not known, or one sum of squares not enough.
    """
    return frac if gain is None or not one_sum(frac, width, square) else line_bits(frac, width, square)


def fitting_bits(width: int, square: int) -> int:
    """Most fractional bits of a sum of squares, their mean < 2^square: (61 - square - ceil(log2 width)) / 2, floor."""
    return (_WRAP_FREE - square - _log2(width)) // 2


@lru_cache(maxsize=64)
def _eps_of_both(eps: float, shift: int, dims: int) -> Tensor:
    """What is added to sums of squares, and to those of rows divided by 2^shift: [2, 1, ..]; never written to."""
    return torch.tensor([eps, eps * 4.0**-shift], dtype=torch.float64).view(2, *[1] * (dims - 1))


def _log2(width: int) -> int:
    return math.ceil(math.log2(width))


def _mean(x: Fixed, reach: int) -> Fixed:
    """Means within +-2^reach, to 2^-f: the sum times an integer factor, and if that is coarse, its remainder too."""
    width = x.shape[-1]
    total, whole = x.sum(-1, keepdim=True), _log2(width)
    mean, bits = _divided(total, width, reach)
    if width == 1 << whole or reach - bits <= -x.frac:
        return mean
    rest = total - mean.scale_int(width)
    return mean + _divided(rest, width, max(1, reach - bits))[0]


def _divided(total: Fixed, width: int, reach: int) -> tuple[Fixed, int]:
    """(total / width for quotients within +-2^reach, bits of its factor): relative error 2^-bits, one truncation."""
    whole = _log2(width)
    bits = min(_WRAP_FREE - total.frac - whole - reach, 40)
    if bits < 8:
        raise DomainError(
            f"layer_norm: rows of {width} with {total.frac} fractional bits leave the ring; truncate first"
        )
    # width 2^-whole lies in (1/2, 1]: its inverse keeps `bits` bits whatever the width.
    raw = total.proto.mul_public(total.share, round(2.0 ** (bits + whole) / width))
    return total.with_share(total.proto.truncate(raw, bits + whole)), bits


def _scaled(
    d: Fixed, weight: Fixed | Tensor | None, eps: float, frac: int | None, square: int,
    lines: Lines | WideLines | None = None, gain: int | None = None,
) -> Fixed:  # fmt: skip
    """d / sqrt(mean(d^2) + eps) * weight."""
    if not eps > 0:
        raise DomainError(f"norm: got eps={eps!r}; want a positive number (it bounds the inverse root)")
    width = d.shape[-1]
    if not one_sum(d.frac, width, square):
        return _times(d.mul(_inverse_root_of_any_row(d, eps), frac=frac), weight, frac)
    bits = lines.own if lines is not None else min(SQUARE_BITS, 2 * d.frac - 6)
    if gain is not None and lines is None and not isinstance(weight, Tensor):
        bits = min(bits, max(0, _SUM_BITS - bits_below(0.98 * width * eps)))
    if isinstance(weight, Fixed) and gain is not None:
        finer = _finer_weight(d, bits, weight.frac, gain)
        if finer is not None:
            total, y = _squares_and_scaled(d, weight.finer(weight.frac + finer), bits)
            return y.mul(_inverse_root(total, d, eps, lines), frac=frac)
    return _times(d.mul(_inverse_root(_squares(d, bits), d, eps, lines), frac=frac), weight, frac)


def _times(y: Fixed, weight: Fixed | Tensor | None, frac: int | None) -> Fixed:
    if weight is None:
        return y
    return y.mul(weight, frac=frac) if isinstance(weight, Fixed) else y.scale(weight, frac=frac)


def _finer_weight(d: Fixed, bits: int, weight: int, gain: int) -> int | None:
    """By how many bits a weight below 2^gain, with `weight` fractional bits, is made finer beside squares with `bits`.

    Entries of d are below 2^30.5 in ring elements: neither their products with the weights nor those with the inverse
    root leave the ring, and they are at least as fine as d. None if that cannot be. Public and local.
    """
    width, shift = d.shape[-1], 2 * d.frac - bits
    made = d.frac + weight - shift
    largest = math.ceil(_log2(width) / 2) + gain + made + _root_bits(d)
    finer = min(max(0, _FINER + d.frac - made), _WRAP_FREE - 31 - weight - gain, _WRAP_FREE - largest)
    return None if finer < max(0, d.frac - made) else finer


def _squares_and_scaled(d: Fixed, weight: Fixed, bits: int) -> tuple[Fixed, Fixed]:
    """Sums of squares of the rows with `bits` fractional bits, [.., 1], and d weight: one product."""
    rows, shift = d.numel() // d.shape[-1], 2 * d.frac - bits
    flat = d.view(lambda part: part.reshape(rows, -1))
    pairs = zip(flat.share.parts, weight.share.parts, strict=True)
    factors = Share(tuple(torch.cat([part, row.reshape(1, -1).to(part.device)]) for part, row in pairs))
    made = d.with_share(d.proto.bilinear(InnerAndScaled(), flat.share, factors, shift))
    total = made.view(lambda part: part[:, :1].reshape(*d.shape[:-1], 1))
    scaled = made.view(lambda part: part[:, 1:].reshape(d.shape))
    return total.with_share(total.share, bits), scaled.with_share(scaled.share, d.frac + weight.frac - shift)


def _inverse_bits(square: int) -> int:
    """Fractional bits of inverse roots of mean squares up to 2^square."""
    return INVERSE_BITS + max(3, math.ceil(square / 2))


def _root_bits(d: Fixed) -> int:
    """Fractional bits of the inverse roots of rows whose squares fill what one sum holds."""
    return _inverse_bits(_WRAP_FREE - 2 * d.frac - _log2(d.shape[-1]))


def _squares(d: Fixed, frac: int) -> Fixed:
    row, column = d.view(lambda part: part.unsqueeze(-2)), d.view(lambda part: part.unsqueeze(-1))
    return row.matmul(column, frac=frac).view(lambda part: part.squeeze(-1))


def _inverse_root(square: Fixed, d: Fixed, eps: float, lines: Lines | WideLines | None) -> Fixed:
    """1 / sqrt(mean(d^2) + eps) of rows whose squares fit, from their sums: [.., 1]."""
    width, widest = d.shape[-1], _WRAP_FREE - 2 * d.frac
    if lines is not None:
        return power_by_lines(square + width * eps, lines)
    low = max(0.98 * width * eps, 2.0 ** (10 - square.frac))
    high = max(2.0**widest, 2 * low)
    return power(square + width * eps, THIRDS, RSQRT, low, high, _root_bits(d), gain=math.sqrt(width))


def _inverse_root_of_any_row(d: Fixed, eps: float) -> Fixed:
    """The same by two sums. Each row of the second half of `both` is the row of the first divided by 2^s."""
    width, whole = d.shape[-1], _log2(d.shape[-1])
    widest = WIDEST + whole
    shift = max((5 + d.frac) // 2, math.ceil((widest + 2 * d.frac - _WRAP_FREE) / 2))
    if shift >= d.frac:
        raise DomainError(f"norm: rows of {width} with {d.frac} fractional bits leave the ring; truncate first")
    small = d.with_share(d.proto.truncate(d.share, shift))
    d.proto.expect_rows("a norm's row, divided,", small.share, 2.0**_WRAP_FREE)
    with d.proto.may_wrap():
        return _chosen_root(d.stack(small), eps, shift)


def _chosen_root(both: Fixed, eps: float, shift: int) -> Fixed:
    """The inverse root from rows [0] or from rows divided by 2^shift [1], whichever is right."""
    width, widest, frac = both.shape[-1], WIDEST + _log2(both.shape[-1]), both.frac
    square = _squares(both, min(SQUARE_BITS, 2 * both.frac - 6))
    eps_of_both = _eps_of_both(width * eps, shift, square.share.parts[0].dim())
    square = square.with_share(square.proto.add_public(square.share, encoded(square, eps_of_both, square.frac)))
    # A first sum is right below `change`, a second one exact enough from there on.
    change = min(width * 2.0 ** (27 - 2 * frac + 2 * shift), 2.0 ** (_WRAP_FREE - 1 - 2 * frac))
    low = max(min(max(0.98 * width * eps, width * 2.0**-24), change * 4.0**-shift / 2), 2.0 ** (10 - square.frac))
    high = max(2.0 ** (widest - 2 * shift), change)
    bits = _inverse_bits(WIDEST)
    found = powers(square, THIRDS, RSQRT, low, high, bits, gain=math.sqrt(width))
    row = max(i for i, t in enumerate(found.thresholds) if t <= change * 4.0**-shift)
    first = found.value.view(lambda part: part[0]).scale_int(1 << shift)
    second = found.value.view(lambda part: part[1])
    # The bits of the first half are those of sums that may have wrapped: they choose between zero and zero.
    apart = first - second
    pair = apart.view(lambda part: torch.stack([torch.zeros_like(part), part]).reshape(-1))
    picked = both.proto.inject(found.below.row(row), pair.share, [1], [0])
    chosen = second + second.with_share(picked).view(lambda part: part.view(2, *second.shape)[1])
    return chosen.with_share(both.proto.truncate(chosen.share, shift))
