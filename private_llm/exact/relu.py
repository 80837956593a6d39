"""Piecewise linear functions; exact, in rings of 32 and 64 bits. Bytes: trio, 18 fractional bits, 64-bit ring."""

from __future__ import annotations

from private_llm.errors import DomainError
from private_llm.exact.comparisons import key_bits, sign_bits
from private_llm.tensor.fixed import Fixed


def relu(x: Fixed) -> Fixed:
    """max(x, 0) for |x| < 2^20, any shape. 56 bytes an element, 5 rounds.

    The configuration's `relu_bits` narrows the range and the price, `relu_low` lets it clear tiny positive values.
    """
    return x.choose(x.proto.invert(key_bits(x)), [1], [0.0])


def absolute(x: Fixed) -> Fixed:
    """|x| for |x| < 2^20, any shape. 56 bytes an element, 5 rounds."""
    return x + x.choose(sign_bits(x, [0.0]), [-2], [0.0])


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
        return x + x.choose(sign_bits(x, [bound]), [-1], [bound])
    if low is None:
        return x.choose(sign_bits(x, [high]), [1], [-high]) + high
    return x.choose(sign_bits(x, [low, high]), [-1, 1], [low, -high]) + high


def hardtanh(x: Fixed, low: float = -1.0, high: float = 1.0) -> Fixed:
    """The clamp that PyTorch calls hardtanh: two bounds, so 85 bytes an element and 5 rounds. Errors as `clamp`."""
    return clamp(x, low, high)
