"""Piecewise linear functions; exact, in rings of 32 and 64 bits. Bytes: trio, 18 fractional bits, 64-bit ring.

Comparison keys, where they are chosen, take 1 round instead of 5 and about a kilobyte an element.
"""

from __future__ import annotations

from private_llm.errors import DomainError
from private_llm.exact.comparisons import bounded_span, chosen_below, exact_span, key_span
from private_llm.tensor.fixed import Fixed


def relu(x: Fixed) -> Fixed:
    """max(x, 0) for |x| < 2^20, any shape. 56 bytes an element, 5 rounds.

    The configuration's `relu_bits` narrows the range and the price, `relu_low` lets it clear tiny positive values.
    """
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


def hardtanh(x: Fixed, low: float = -1.0, high: float = 1.0) -> Fixed:
    """The clamp that PyTorch calls hardtanh: two bounds, so 85 bytes an element and 5 rounds. Errors as `clamp`."""
    return clamp(x, low, high)
