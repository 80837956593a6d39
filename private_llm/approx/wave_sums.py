"""Functions of a bounded argument as sums of waves, which trio and dealer compute without a round.

    g(t) = constant + sum over k of amplitude_k cos(2 pi (k t / period - phase_k)),  -1/64 <= t <= top + 1/64

Arguments are multiplied by factor / 2^factor_bits so that the period is a power of two, 2^period_log2, of what results:
then it divides the ring.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from private_llm.protocols.waves import PHASE_BITS, PUBLIC_BITS, Wave, Waves

Array = np.ndarray[tuple[int], np.dtype[np.float64]]

SECRET_BITS = 19
"""Fractional bits of a wave's secret numbers, less those by which its amplitude is below 1."""


@dataclass(frozen=True)
class WaveSum:
    """A fitted sum; waves are (amplitude, phase in turns), of frequencies 1, 2, ...

    |g| stays below 1/2. `error` bounds the sum's distance from its function, and at `top` from zero, too.
    """

    top: float
    factor: int
    factor_bits: int
    period_log2: int
    constant: float
    waves: tuple[tuple[float, float], ...]
    error: float

    @property
    def fields(self) -> tuple[float, int, int, int, float, tuple[tuple[float, float], ...], float]:
        """What the constructor takes."""
        return (
            self.top, self.factor, self.factor_bits, self.period_log2, self.constant, self.waves, self.error
        )  # fmt: skip

    def value(self, t: Array) -> Array:
        """The sum in float64."""
        turns = t * (self.factor / 2**self.factor_bits / 2**self.period_log2)
        total = np.full_like(t, self.constant)
        for k, (amplitude, phase) in enumerate(self.waves, 1):
            total += amplitude * np.cos(2 * np.pi * (k * turns - phase))
        return total


@lru_cache(maxsize=64)
def waves_of(made: WaveSum, frac: int) -> Waves:
    """The public side for arguments and results with `frac` fractional bits; arguments come multiplied."""
    waves = tuple(
        Wave(k, round(amplitude * (1 << PUBLIC_BITS)), round(phase * (1 << PHASE_BITS)), _secret_bits(amplitude))
        for k, (amplitude, phase) in enumerate(made.waves, 1)
    )
    return Waves(frac, frac + made.factor_bits + made.period_log2, made.constant, waves)


def _secret_bits(amplitude: float) -> int:
    return max(1, SECRET_BITS + math.frexp(amplitude)[1])
