"""The range of activations, and comparisons that pay for no more bits than the range and the purpose need."""

from __future__ import annotations

from collections.abc import Sequence

from private_llm.protocols.share import BitShare
from private_llm.ranges import REACH
from private_llm.tensor.fixed import Fixed

RANGE_BITS = REACH
"""Arguments of every comparison lie within |x| < 2^20 - 2^10: about a million."""

RESOLUTION_BITS = 6
"""Coarse comparisons are right except up to 2^-6 above a threshold."""

SHORTEST = 6
"""Least bits of magnitude of a calibrated range: thresholds reach 14."""


def reach(x: Fixed) -> int:
    """Bits of magnitude of an activation's arguments: those of calibration, one more for what its check lets pass.

    7 to 20; 20 without calibration. Public and local.
    """
    known = x.session.exponent("compare")
    return RANGE_BITS if known is None else min(RANGE_BITS, max(SHORTEST, known) + 1)


def sign_bits(x: Fixed, thresholds: Sequence[float], extra: int = 0) -> BitShare:
    """Rows [x < threshold_k] of the flattened x, exact, for |x| < 2^(reach + extra) and |threshold| < 2^10.

    24.1 bytes an element and 13.1 for each further threshold (trio, 18 fractional bits, 64-bit ring, reach 20); 4
    rounds. A 32-bit ring compares no more than its bits.
    """
    return x.below(thresholds, bits=min(x.session.ring.bits, x.frac + reach(x) + extra + 1))


def coarse_bits(x: Fixed, thresholds: Sequence[float], extra: int = 0, resolution: int = RESOLUTION_BITS) -> BitShare:
    """The same, but up to 2^-resolution above a threshold either answer is possible.

    16 bytes an element and 8.5 for each further threshold; 3 rounds. For uses that are continuous at a threshold.
    """
    bits = min(x.session.ring.bits, x.frac + reach(x) + extra + 1)
    return x.below(thresholds, bits=bits, low=max(0, x.frac - resolution))


def key_bits(x: Fixed) -> BitShare:
    """[x < 0] for ReLU, one row, with the key bits of the configuration (`relu_bits`, `relu_low`).

    Needs -2^(relu_bits-1) + 2^relu_low <= x * 2^frac < 2^(relu_bits-1), exact except up to 2^(relu_low - frac) above 0.
    Cost as `sign_bits` for 39 bits, 0.68 bytes an element less for each bit less: 12 bytes and 3 rounds for 21. A debug
    session (`debug_ranges`) names the module that leaves this range, with DomainError.
    """
    config = x.session.config
    if config.relu_bits is None:
        bits = min(x.session.ring.bits, x.frac + reach(x) + 1)
    else:
        bits = min(x.session.ring.bits, config.relu_bits + x.frac - config.frac_bits)
    return x.below([0.0], bits=bits, low=max(0, config.relu_low + x.frac - config.frac_bits))
