"""The public side of functions that Trio computes in one step: piecewise polynomials, exponentials, sums of waves.

Exponentials and waves are of a masked number: a sum of a public number M and a secret mask a becomes a product. Their
tables are integers made in decimal arithmetic, because parties whose factors differ in one bit would multiply different
numbers by shares. An entry is the product of two: upper half of the digits, lower half.

An exponential: e^(M - a) = e^M e^(-a). Modulo 32 both are a digit of sixteen and a rest below 16, M = 16 i + m and
a = 16 j + r, and for x = M - a - 16 + TOP with 0 <= M - a < 16

    e^x = e^(m - 16 + TOP) e^(-r)  where i = j,   e^(m + TOP) e^(-r)  elsewhere.

A wave: cos(k (M - a)) = cos(k M) cos(k a) + sin(k M) sin(k a), and sin(k (M - a)) likewise, an inner product of two
public and two secret numbers. Angles are numbers modulo 2^angle_bits, a full turn, so the upper bits of M and a need
not be known; PLACE_BITS bits of them are told apart, and multiples follow by 2 cos(angle). The sum has PUBLIC_BITS
fractional bits from factors and most_secret more from secrets. It is needed modulo 2^wide alone, wide = shift + frac +
1: below 1/2 in absolute value, it is divided by 2^shift and leaves `frac` bits and a sign. A wave of small amplitude
has fewer secret bits, b, and is multiplied by 2^(most_secret - b): its shares need as many bits less. (SecFormer, Luo
et al. 2024, opens x less a random number whose sines its dealer has shared; here x's mask is that.)
"""

import decimal
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

from private_llm.errors import DomainError
from private_llm.kernels.address import Array
from private_llm.kernels.ops import packed_words
from private_llm.kernels.waves import Digits, Factors, Integers, Secrets
from private_llm.ring.comparison_keys import cipher_blocks, shared_ways

Polynomial = tuple[int, ...]  # coefficients of 1, x, x^2: integers, modulo the ring size


@dataclass(frozen=True)
class PiecesShape:
    """Public sizes: thresholds, degree (1 or 2), which bits are compared (as `Protocol.msb`), and outputs by shift."""

    thresholds: int
    degree: int
    bits: int
    low: int = 0
    shifts: tuple[int, ...] = (0,)

    @property
    def outputs(self) -> int:
        """Number of functions."""
        return len(self.shifts)

    @property
    def finishes(self) -> tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]:
        """(shift, outputs divided by 2^shift, undivided ones that are sent along) for each different shift.

        What is not divided goes along with the first others, and needs a finish of its own (a shift of 0) without any.
        """
        apart = tuple(o for o, s in enumerate(self.shifts) if s == 0)
        divided = [each for each in dict.fromkeys(self.shifts) if each]
        if not divided:
            return ((0, apart, ()),)
        return tuple(
            (each, tuple(o for o, s in enumerate(self.shifts) if s == each), apart if each == divided[0] else ())
            for each in divided
        )

    @property
    def levels(self) -> int:
        """Bits that a comparison looks at."""
        return self.bits - 1 - self.low

    @property
    def words(self) -> int:
        """Words of a key's value: the powers of the mask."""
        return self.degree + 1

    def cipher_blocks(self, count: int) -> int:
        """Of the party that has most of `count` keys' work: making one takes it twice what one way costs another."""
        ways = -(-self.thresholds // _SHARED)
        return count * max(2, ways) * cipher_blocks(self.levels, self.words)


_SHARED = 3  # thresholds that take as long as one way alone: most share their ways' first half (3.3 for SiLU)


@dataclass(frozen=True)
class Pieces:
    """Functions of one secret x, with common thresholds.

    Output o is rest[o](x) + sum_k [x + offsets[k] < 0] steps[o][k](x), divided by 2^shifts[o]. Every polynomial has the
    same number of coefficients, 2 or 3. bits, low: what is promised of x + offsets[k], as in `Protocol.msb`.
    """

    offsets: tuple[int, ...]
    steps: tuple[tuple[Polynomial, ...], ...]
    rest: tuple[Polynomial, ...]
    bits: int
    low: int = 0
    shifts: tuple[int, ...] = (0,)

    @property
    def shape(self) -> PiecesShape:
        """Its public sizes."""
        return PiecesShape(len(self.offsets), len(self.rest[0]) - 1, self.bits, self.low, self.shifts)

    @cached_property
    def arrays(self) -> tuple[Array, Array, Array]:
        """Offsets [thresholds], steps [outputs, thresholds, words] and rest [outputs, words] as uint64."""
        return _unsigned(self.offsets), _unsigned(self.steps), _unsigned(self.rest)

    @cached_property
    def ways(self) -> Array:
        """How many steps a key's evaluation takes at each level for all thresholds (`comparison_keys.shared_ways`)."""
        return shared_ways(self.arrays[0], self.shape.levels, self.low)


def _unsigned(values: object) -> Array:
    wide = np.array(values, dtype=object) % (1 << 64)
    return np.asarray(wide.astype(np.uint64))


# -- exponentials ------------------------------------------------------------------------------------------------------
TOP = 1  # arguments lie in [TOP - SPAN, TOP)
SPAN = 16  # how many units the range has; the modulus is twice that

FACTOR_BITS = 17  # fractional bits of public factors, up to e^(SPAN + TOP) = 2^24.6, and of their lower halves

_NEAR_BITS = 42  # fractional bits of the upper half where the digits are equal: those factors are small
SECRET_BITS = 38  # fractional bits of e^(-r): half of 2^-38 e^16 = 2^-16 of the result
TOTAL_BITS = FACTOR_BITS + SECRET_BITS  # fractional bits of the result before its division

GIVEN_BITS = TOTAL_BITS + 4  # bits of a result below e^TOP before its division: where they may, shares have no more

_COARSE_BITS, _FINE_BITS = 42, 20  # fractional bits of the two tables of e^(-r)
_FINEST = 20  # fractional bits of arguments that count; lower ones are left out


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


# -- waves -------------------------------------------------------------------------------------------------------------
PUBLIC_BITS = 16  # fractional bits of public factors, amplitudes included
PLACE_BITS = 22  # bits of a turn that are told apart
TABLE_BITS = 30  # fractional bits of cosines and sines

_HALF_BITS = PLACE_BITS // 2
_PI = decimal.Decimal("3.14159265358979323846264338327950288419716939937510582097494459")


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
        waves = zip(self.waves, self.widths, strict=True)
        return np.array([(wave.even, wave.odd, wave.bits, width) for wave, width in waves], dtype=np.int64)

    @cached_property
    def sizes(self) -> Integers:
        """Bits of an angle, of a place in a turn, of its lower half, of table entries, most of secrets. [5]"""
        return np.array([self.angle_bits, PLACE_BITS, _HALF_BITS, TABLE_BITS, self.most_secret], dtype=np.int64)

    @cached_property
    def first(self) -> int:
        """What the first evaluator adds: the constant, half of what is sent, less half a unit for the masks' carry."""
        total = PUBLIC_BITS + self.most_secret
        return round(self.constant * (1 << total)) + (1 << (self.wide - 2)) - (1 << (self.shift - 1))


@lru_cache(maxsize=1)
def turns() -> Tensor:
    """cos and sin of the upper half's angles, then of the lower half's: [4, 2^(PLACE_BITS / 2)], TABLE_BITS bits."""
    size = 1 << _HALF_BITS
    with decimal.localcontext(decimal.Context(prec=50, rounding=decimal.ROUND_HALF_EVEN)):
        upper = _turned(2 * _PI / size, size)
        lower = _turned(2 * _PI / (size * size), size)
    return torch.tensor([*upper, *lower], dtype=torch.int64)


def _turned(angle: decimal.Decimal, count: int) -> tuple[list[int], list[int]]:
    """Cosines and sines of all multiples of an angle below `count` of them."""
    step_c, step_s = _series(angle)
    c, s, cosines, sines = decimal.Decimal(1), decimal.Decimal(0), [], []
    for _ in range(count):
        cosines.append(int((c * (1 << TABLE_BITS)).to_integral_value()))
        sines.append(int((s * (1 << TABLE_BITS)).to_integral_value()))
        c, s = c * step_c - s * step_s, c * step_s + s * step_c
    return cosines, sines


def _series(angle: decimal.Decimal) -> tuple[decimal.Decimal, decimal.Decimal]:
    term, sums = decimal.Decimal(1), [decimal.Decimal(0)] * 4
    for n in range(24):
        sums[n % 4] += term
        term = term * angle / (n + 1)
    return sums[0] - sums[2], sums[1] - sums[3]
