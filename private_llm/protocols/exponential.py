"""The public side of an exponential of a secret: tables that turn a masked number into factors of the result.

e^(M - a) = e^M e^(-a): a sum of a public number M and a secret mask a becomes a product. Modulo 32 both are a digit of
sixteen and a rest below 16, M = 16 i + m and a = 16 j + r, and for x = M - a - 16 + TOP with 0 <= M - a < 16

    e^x = e^(m - 16 + TOP) e^(-r)  where i = j,   e^(m + TOP) e^(-r)  elsewhere.

Tables are integers made in decimal arithmetic, because parties whose factors differ in one bit would multiply different
numbers by shares of 2^64. An exponential is the product of two entries: upper half of the digits, lower half.
"""

from __future__ import annotations

import decimal
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from private_llm.errors import DomainError
from private_llm.kernels.exponential import Digits, Factors, Secrets

TOP = 1
"""Arguments lie in [TOP - SPAN, TOP)."""

SPAN = 16
"""How many units the range has; the modulus is twice that."""

FACTOR_BITS = 17
"""Fractional bits of public factors, which reach e^(SPAN + TOP) = 2^24.6, and of the lower half they are made of."""

_NEAR_BITS = 42
"""Fractional bits of the upper half where the digits are equal: those factors are small."""

SECRET_BITS = 38
"""Fractional bits of e^(-r): half of 2^-38 e^16 = 2^-16 of the result."""

TOTAL_BITS = FACTOR_BITS + SECRET_BITS
"""Fractional bits of the result before its division."""

GIVEN_BITS = TOTAL_BITS + 4
"""Bits that a result below e^TOP is a number of, before its division: shares need no more, where the protocol may send
less than whole ones.
"""

_COARSE_BITS, _FINE_BITS = 42, 20
"""Fractional bits of the two tables of e^(-r)."""

_FINEST = 20
"""Fractional bits of arguments that count; lower ones are left out."""


@dataclass(frozen=True)
class Exponential:
    """e^(x / 2^frac) with 2^-shift: arguments with `frac` fractional bits, results with TOTAL_BITS - shift.

    Relative error 2^-15, absolute 2^-18, and the rounding of the division. Raises DomainError for a negative frac.
    """

    frac: int
    shift: int

    def __post_init__(self) -> None:
        if self.frac < 0:
            raise DomainError(f"exponential: got {self.frac} fractional bits; want 0 or more")

    @property
    def offset(self) -> int:
        """What is added to x so that it counts from the lower end of the range: a ring element."""
        return (SPAN - TOP) << self.frac

    @property
    def _kept(self) -> int:
        return min(self.frac, _FINEST)

    @property
    def digits(self) -> Digits:
        """How masked numbers and masks are cut."""
        return _digits(self.frac, self._kept)

    @property
    def factors(self) -> Factors:
        """Of x + a + offset."""
        return _factors(self._kept)

    @property
    def secrets(self) -> Secrets:
        """e^(-r) with SECRET_BITS fractional bits."""
        return _secrets(self._kept)


@lru_cache(maxsize=32)
def _digits(frac: int, kept: int) -> Digits:
    return Digits(frac - kept, kept + 4, (kept + 4) // 2)


@lru_cache(maxsize=8)
def _factors(frac: int) -> Factors:
    fine = (frac + 4) // 2
    count, step = 1 << (frac + 4 - fine), fine - frac
    near = _powers(count, step, 1, TOP - SPAN, _NEAR_BITS)
    far = _powers(count, step, 1, TOP, FACTOR_BITS)
    return Factors(near, far, _powers(1 << fine, -frac, 1, 0, FACTOR_BITS), _NEAR_BITS, FACTOR_BITS)


@lru_cache(maxsize=8)
def _secrets(frac: int) -> Secrets:
    fine = (frac + 4) // 2
    coarse = _powers(1 << (frac + 4 - fine), fine - frac, -1, 0, _COARSE_BITS)
    return Secrets(coarse, _powers(1 << fine, -frac, -1, 0, _FINE_BITS), _COARSE_BITS + _FINE_BITS - SECRET_BITS)


def _powers(count: int, step: int, sign: int, start: int, bits: int) -> Tensor:
    """e^(start + sign k 2^step) with `bits` fractional bits, for all k below count."""
    with decimal.localcontext(decimal.Context(prec=50, rounding=decimal.ROUND_HALF_EVEN)):
        ratio = (sign * decimal.Decimal(2) ** step).exp()
        value, made = decimal.Decimal(start).exp() * (1 << bits), []
        for _ in range(count):
            made.append(int(value.to_integral_value()))
            value *= ratio
    return torch.tensor(made, dtype=torch.int64)
