"""The public side of a sum of waves of a secret angle: numbers that turn a masked angle into factors of the result.

cos(k (M - a)) = cos(k M) cos(k a) + sin(k M) sin(k a), and sin(k (M - a)) likewise: a wave of a public M less a secret
mask a is an inner product of two public and two secret numbers. Angles are numbers modulo 2^angle_bits, a full turn,
so the upper bits of M and a need not be known. All numbers come from integer tables made in decimal arithmetic,
because parties whose factors differ in one bit would multiply different numbers by shares: e^(i angle) is the product
of an entry for the upper and one for the lower half of its PLACE_BITS bits, and multiples follow by 2 cos(angle).

The sum has PUBLIC_BITS fractional bits from factors and most_secret more from secrets. It is needed modulo 2^wide
alone, wide = shift + frac + 1: below 1/2 in absolute value, it is divided by 2^shift and leaves `frac` bits and a sign.
A wave of small amplitude has fewer secret bits, b, and is multiplied by 2^(most_secret - b): its shares need as many
bits less. (SecFormer, Luo et al. 2024, opens x less a random number whose sines its dealer has shared; here the mask
that x has anyway is that number.)
"""

from __future__ import annotations

import decimal
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

from private_llm.errors import DomainError
from private_llm.kernels.shapes import packed_words

PUBLIC_BITS = 16
"""Fractional bits of public factors, amplitudes included."""

PLACE_BITS = 22
"""Bits of a turn that are told apart."""

TABLE_BITS = 30
"""Fractional bits of cosines and sines."""

_HALF_BITS = PLACE_BITS // 2
_PI = decimal.Decimal("3.14159265358979323846264338327950288419716939937510582097494459")

Integers = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


@dataclass(frozen=True)
class Wave:
    """(even cos(angle) + odd sin(angle)) / 2^PUBLIC_BITS, its secrets with `bits` fractional bits."""

    even: int
    odd: int
    bits: int


@dataclass(frozen=True)
class Waves:
    """constant + waves of 1, 2, ... times an angle with `angle_bits` bits a turn; results with `frac` fractional bits.

    Of results the lowest `bits` bits are right. Raises DomainError for sizes for which a 64-bit element has no room.
    """

    frac: int
    angle_bits: int
    constant: float
    waves: tuple[Wave, ...]
    bits: int = 64

    def __post_init__(self) -> None:
        if not 1 <= self.frac <= 40 or not 1 <= self.angle_bits <= 63 or not self.waves or self.shift < 1:
            raise DomainError(
                f"waves: got {self.frac} fractional bits, {self.angle_bits} bits of an angle and {len(self.waves)} "
                "waves; want 1 to 40, 1 to 63, and 1 or more, of more bits than the result"
            )
        if not self.narrow < self.bits <= 64:
            raise DomainError(f"waves: got results of {self.bits} bits; want more than {self.narrow}, and at most 64")

    @cached_property
    def most_secret(self) -> int:
        """The most bits of a secret number."""
        return max(wave.bits for wave in self.waves)

    @cached_property
    def shift(self) -> int:
        """Bits that are divided off."""
        return PUBLIC_BITS + self.most_secret - self.frac

    @cached_property
    def wide(self) -> int:
        """Bits of the sum that are sent."""
        return self.shift + self.narrow

    @cached_property
    def narrow(self) -> int:
        """Bits of the sum that are left after the division."""
        return self.frac + 1

    @property
    def above(self) -> int:
        """Bits above those that are left, which are right, too."""
        return self.bits - self.narrow

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Bits of each wave's shares."""
        return tuple(self.wide - self.most_secret + wave.bits for wave in self.waves)

    def words(self, count: int) -> int:
        """64-bit words that the shares of `count` elements' secrets take."""
        return sum(2 * packed_words(count, width) for width in self.widths)

    @cached_property
    def table(self) -> Integers:
        """By wave: factors of cosine and sine, secret bits, width. [waves, 4]"""
        rows = [
            (wave.even, wave.odd, wave.bits, width) for wave, width in zip(self.waves, self.widths, strict=True)
        ]  # fmt: skip
        return np.array(rows, dtype=np.int64)

    @cached_property
    def sizes(self) -> Integers:
        """Bits of an angle, of a place in a turn, of its lower half, of table entries, most of secrets. [5]"""
        return np.array([self.angle_bits, PLACE_BITS, _HALF_BITS, TABLE_BITS, self.most_secret], dtype=np.int64)

    @cached_property
    def first(self) -> int:
        """What the first evaluator adds to the sum: the constant, half of what is sent, less half a unit.

        Half a unit makes up for the carry of masks (trio/waves.py).
        """
        total = PUBLIC_BITS + self.most_secret
        return round(self.constant * (1 << total)) + (1 << (self.wide - 2)) - (1 << (self.shift - 1))


@lru_cache(maxsize=1)
def turns() -> Tensor:
    """cos and sin of the upper half's angles, then of the lower half's: [4, 2^(PLACE_BITS / 2)], TABLE_BITS bits."""
    size = 1 << _HALF_BITS
    with decimal.localcontext(decimal.Context(prec=50, rounding=decimal.ROUND_HALF_EVEN)):
        upper = _powers(2 * _PI / size, size)
        lower = _powers(2 * _PI / (size * size), size)
    return torch.tensor([*upper, *lower], dtype=torch.int64)


def _powers(angle: decimal.Decimal, count: int) -> tuple[list[int], list[int]]:
    """Cosines and sines of all multiples of an angle below `count` of them."""
    step_c, step_s = _series(angle)
    c, s, cosines, sines = decimal.Decimal(1), decimal.Decimal(0), [], []
    for _ in range(count):
        cosines.append(int((c * (1 << TABLE_BITS)).to_integral_value()))
        sines.append(int((s * (1 << TABLE_BITS)).to_integral_value()))
        c, s = c * step_c - s * step_s, c * step_s + s * step_c
    return cosines, sines


def _series(angle: decimal.Decimal) -> tuple[decimal.Decimal, decimal.Decimal]:
    """Cosine and sine of a small angle."""
    term, sums = decimal.Decimal(1), [decimal.Decimal(0)] * 4
    for n in range(24):
        sums[n % 4] += term
        term = term * angle / (n + 1)
    return sums[0] - sums[2], sums[1] - sums[3]
