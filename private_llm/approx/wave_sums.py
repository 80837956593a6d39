"""Functions of a bounded argument as sums of waves, which trio and dealer compute without a round.

    g(t) = constant + sum over k of c_k cos(k a) + s_k sin(k a),  a = 2 pi t / period,  -1/64 <= t <= top + 1/64

Arguments are multiplied by factor / 2^factor_bits so that the period is a power of two, 2^period_log2, of what results:
then it divides the ring.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from private_llm.protocols.waves import PUBLIC_BITS, Wave, Waves

Array = np.ndarray[tuple[int], np.dtype[np.float64]]

SECRET_BITS = 19
"""Fractional bits of a wave's secret numbers, less those by which its coefficients are below 1."""


@dataclass(frozen=True)
class WaveSum:
    """A fitted sum; waves are the pairs (c_k, s_k).

    |g| stays below 1/2. `error` bounds the sum's distance from its function, and at `top` from zero, too.
    """

    top: float
    factor: int
    factor_bits: int
    period_log2: int
    constant: float
    waves: tuple[tuple[float, float], ...]
    error: float

    def value(self, t: Array) -> Array:
        """The sum in float64."""
        angle = t * (2 * np.pi * self.factor / 2 ** (self.factor_bits + self.period_log2))
        total = np.full_like(t, self.constant)
        for k, (c, s) in enumerate(self.waves, 1):
            total += c * np.cos(k * angle) + s * np.sin(k * angle)
        return total


@lru_cache(maxsize=64)
def waves_of(made: WaveSum, frac: int, bits: int = 64) -> Waves:
    """The public side for arguments and results with `frac` fractional bits; arguments come multiplied.

    bits: how many of the lowest bits of results are read.
    """
    whole = 1 << PUBLIC_BITS
    waves = tuple(Wave(round(c * whole), round(s * whole), _secret_bits(abs(c) + abs(s))) for c, s in made.waves)
    return Waves(frac, frac + made.factor_bits + made.period_log2, made.constant, waves, bits)


def _secret_bits(size: float) -> int:
    return max(1, SECRET_BITS - 1 + math.frexp(size)[1])
