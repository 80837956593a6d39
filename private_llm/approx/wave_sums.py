"""Functions of a bounded argument as sums of waves, which trio and dealer compute without a round.

    g(t) = constant + sum over k of c_k cos(k a) + s_k sin(k a),  a = 2 pi t / period,  0 <= t <= top

and a little beyond both ends, as far as coarse comparisons let arguments go.
Arguments are multiplied by factor / 2^factor_bits so that the period is a power of two, 2^period_log2, of what results:
then it divides the ring.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from private_llm.protocols.one_step import PUBLIC_BITS, Wave, Waves

Array = np.ndarray[tuple[int], np.dtype[np.float64]]

SECRET_BITS = 17
"""Fractional bits of a wave's secret numbers, less those by which its coefficients are below 1."""


ANGLE_BITS = 15
"""Fractional bits of arguments that angles keep: cut from them they are less than 2^-14 off, sums half of that."""


@dataclass(frozen=True)
class WaveSum:
    """A fitted sum; waves are the pairs (c_k, s_k).

    |g| stays below 1/2. Comparisons of arguments may be wrong up to 2^-resolution above a threshold. `error` bounds the
    sum's distance from its function, and at `top` from zero and from what the function is 2^-resolution below it.
    """

    top: float
    factor: int
    factor_bits: int
    period_log2: int
    resolution: int
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


def angle_frac(frac: int) -> int:
    """How many of an argument's fractional bits its angle keeps."""
    return min(frac, ANGLE_BITS)


@lru_cache(maxsize=64)
def waves_of(made: WaveSum, frac: int, bits: int = 64) -> Waves:
    """The public side for results with `frac` fractional bits; arguments with `angle_frac` bits come multiplied.

    bits: how many of the lowest bits of results are read.
    """
    whole = 1 << PUBLIC_BITS
    waves = tuple(Wave(round(c * whole), round(s * whole), _secret_bits(abs(c) + abs(s))) for c, s in made.waves)
    return Waves(frac, angle_frac(frac) + made.factor_bits + made.period_log2, made.constant, waves, bits)


def _secret_bits(size: float) -> int:
    return max(1, SECRET_BITS - 1 + math.frexp(size)[1])
