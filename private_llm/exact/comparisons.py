"""The range of activations, and comparisons that pay for no more bits than the range and the purpose need.

Piecewise linear functions; exact, in rings of 32 and 64 bits. Bytes: trio, 18 fractional bits, 64-bit ring.

Comparison keys, where they are chosen, take 1 round instead of 5 and about a kilobyte an element.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from private_llm.errors import DomainError
from private_llm.protocols.one_step import Pieces, PiecesShape
from private_llm.protocols.session import Session
from private_llm.protocols.share import BitShare
from private_llm.ranges import REACH
from private_llm.tensor.fixed import Fixed, step_price

RANGE_BITS = REACH  # arguments of every comparison lie within |x| < 2^20 - 2^10: about a million
RESOLUTION_BITS = 6  # coarse comparisons are right except up to 2^-6 above a threshold
SHORTEST = 6  # least bits of magnitude of a calibrated range: thresholds reach 14


def reach(x: Fixed) -> int:
    """Bits of magnitude that are compared, 7 to 20: those of calibration and one to spare, or 20. Public and local."""
    known = x.session.exponent(x.session.numerics.compared_quantity)
    return RANGE_BITS if known is None else min(RANGE_BITS, max(SHORTEST, known) + 1)


@contextmanager
def comparing(session: Session, quantity: str) -> Iterator[None]:
    """Inside, what is compared has the calibrated range `quantity`, not that of activations. Local."""
    kept, session.numerics.compared_quantity = session.numerics.compared_quantity, quantity
    try:
        yield
    finally:
        session.numerics.compared_quantity = kept


def bounded_span(x: Fixed, *bounds: float) -> tuple[int, int]:
    """As `exact_span`, with room for x - bound where calibration's range is smaller than twice a bound. Public."""
    known, most = reach(x), max(abs(bound) for bound in bounds)
    if known == RANGE_BITS or most <= 2.0 ** (known - 1):
        return exact_span(x)
    return exact_span(x, math.frexp(most + 2.0**known)[1] - known)


def exact_span(x: Fixed, extra: int = 0) -> tuple[int, int]:
    """(bits, low) of a comparison that is exact for |x| < 2^(reach + extra). Public and local."""
    return min(x.session.ring.bits, x.frac + reach(x) + extra + 1), 0


def coarse_span(x: Fixed, extra: int = 0, resolution: int = RESOLUTION_BITS) -> tuple[int, int]:
    """The same where either answer will do up to 2^-resolution above a threshold."""
    return min(x.session.ring.bits, x.frac + reach(x) + extra + 1), max(0, x.frac - resolution)


def key_span(x: Fixed) -> tuple[int, int]:
    """(bits, low) of ReLU's comparison, by the configuration (`relu_bits`, `relu_low`).

    Needs -2^(relu_bits-1) + 2^relu_low <= x * 2^frac < 2^(relu_bits-1), exact except up to 2^(relu_low - frac) above 0.
    Cost as `sign_bits` for 39 bits, 0.68 bytes an element less for each bit less: 12 bytes and 3 rounds for 21. A debug
    session (`debug_ranges`) names the module that leaves this range, with DomainError.
    """
    config = x.session.config
    more = x.frac - config.frac_bits
    bits = x.frac + reach(x) + 1 if config.relu_bits is None else config.relu_bits + more
    return min(x.session.ring.bits, bits), max(0, config.relu_low + more)


def sign_bits(x: Fixed, thresholds: Sequence[float], extra: int = 0) -> BitShare:
    """Rows [x < threshold_k] of the flattened x, exact, for |x| < 2^(reach + extra) and |threshold| < 2^10.

    24.1 bytes an element and 13.1 for each further threshold (trio, 18 fractional bits, 64-bit ring, reach 20); 4
    rounds. A 32-bit ring compares no more than its bits.
    """
    return x.less_than(thresholds, *exact_span(x, extra))


def coarse_bits(x: Fixed, thresholds: Sequence[float], extra: int = 0, resolution: int = RESOLUTION_BITS) -> BitShare:
    """The same; either answer up to 2^-resolution above a threshold. 3 rounds, 16 bytes and 8.5 a threshold more."""
    return x.less_than(thresholds, *coarse_span(x, extra, resolution))


def chosen_below(
    x: Fixed, thresholds: Sequence[float], weights: Sequence[int], constants: Sequence[float], span: tuple[int, int]
) -> Fixed:
    """sum over k of [x < threshold_k] (weights_k x + constants_k), in the shape of x; span: as `exact_span`.

    One comparison and one injection, 5 or 4 rounds, or comparison keys, 1 round, where `PrivateConfig.adder` says so.
    Bytes of both: their prices. Raises DomainError as `Fixed.less_than` and `Fixed.select`.
    """
    bits, low = span
    if "piecewise" not in x.session.protocol.primitives:
        return x.select(x.less_than(thresholds, bits, low), weights, constants)
    shape = PiecesShape(len(thresholds), 1, bits, low)
    count, rows, ring = x.numel(), len(thresholds), x.session.ring
    weighted = sum(weight != 0 for weight in weights)
    if not x.proto.takes_keys(count, shape, step_price, ring, count, bits, rows, low, weighted):
        return x.select(x.less_than(thresholds, bits, low), weights, constants)
    steps = tuple((round(c * (1 << x.frac)), weight) for c, weight in zip(constants, weights, strict=True))
    offsets = tuple(-round(threshold * (1 << x.frac)) for threshold in thresholds)
    x = x.right_in(bits)
    (made,) = x.proto.piecewise(x.share, Pieces(offsets, (steps,), ((0, 0),), bits, low))
    return x.with_share(made)


def relu(x: Fixed) -> Fixed:
    """max(x, 0), |x| < 2^20, any shape: 56 bytes an element, 5 rounds; `relu_bits` and `relu_low` make it cheaper."""
    return x + chosen_below(x, [0.0], [-1], [0.0], key_span(x))


def absolute(x: Fixed) -> Fixed:
    """|x| for |x| < 2^20, any shape. 56 bytes an element, 5 rounds."""
    return x + chosen_below(x, [0.0], [-2], [0.0], exact_span(x))


def clamp(x: Fixed, low: float | None = None, high: float | None = None) -> Fixed:
    """min(max(x, low), high) for |x| < 2^20 - 2^10 and public bounds below 2^10 in size, any shape.

    56 bytes an element for one bound, 85 for two; 5 rounds. Raises DomainError without a bound or with low > high.
    """
    if low is None and high is None:
        raise DomainError("clamp: got no bound; want low, high or both")
    if low is not None and high is not None and low > high:
        raise DomainError(f"clamp: got low={low:g} above high={high:g}")
    if high is None:
        bound = low or 0.0
        return x + chosen_below(x, [bound], [-1], [bound], bounded_span(x, bound))
    if low is None:
        return chosen_below(x, [high], [1], [-high], bounded_span(x, high)) + high
    return chosen_below(x, [low, high], [-1, 1], [low, -high], bounded_span(x, low, high)) + high


def hardtanh(x: Fixed, min_val: float = -1.0, max_val: float = 1.0) -> Fixed:
    """The clamp that PyTorch calls hardtanh: two bounds, so 85 bytes an element and 5 rounds. Errors as `clamp`."""
    return clamp(x, min_val, max_val)
