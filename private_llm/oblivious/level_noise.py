"""A noisy number of active elements: differential privacy for how many are active, with all of them kept.

An opened pattern tells how many bits are set. Here 2 T dummies are put beside the n elements, a secret number N of
them active, and n + 2 T bits are opened in a secret order: all that is learned is count + N. Comet (appendix E) flips
zeros of the pattern itself, by XOR with a pattern of N ones; that keeps ones only where the two do not meet, which
takes a rank for each zero and a comparison with N, 30 bytes an element (budget.py), and saturates at n. A dummy needs
neither; it costs its place in the shuffle.

N = T + G1 - G2 with G1 and G2 geometric, P(g) ~ exp(-epsilon g / sensitivity), cut at T, T + 1 = r 2^j. The digits of
such a number are independent (Dwork et al., Eurocrypt 2006): j binary ones and a last one below r <= 15, held as r - 1
bits [digit >= i]. Each of these bits is a coin of public chance, and a coin that is repeated as 2^i dummies counts 2^i:
no sum, no comparison of elements. A coin is [U < t] for 64 random bits that no party knows (`Protocol.random_bits`,
local); coins of one digit share U. 6 rounds for all of them at once. So no party knows any part of N, and none can bias
it where the protocol withstands cheaters.

What it promises: neighbours are two inputs whose counts at this opening differ by at most `sensitivity`. For every set
of observations, P(one) <= exp(epsilon) P(other) + delta. As N >= 0, an opened number below the larger count gives the
smaller one away, so delta cannot be 0; it is computed from the distribution, rounding of coins included (`spent`). m
openings of one input add up: m epsilon, m delta. A sensitivity of 1 covers a change of one element; whole inputs
differ by more (docs/studies/secret-orders.md has figures).
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from private_llm.errors import ConfigError, DomainError
from private_llm.oblivious.budget import ChosenUnits
from private_llm.oblivious.counting import each
from private_llm.protocols.protocol import Protocol
from private_llm.protocols.session import Session
from private_llm.protocols.share import BitShare, packed, relaned, unpacked

_PRECISION = 64  # random bits of a coin; a power of two
_LEAST_DELTA = 1e-12  # well above what rounding of coins and sums in double precision add

_SIZES: tuple[int, ...] = (*range(2, 8), *(ratio << low for low in range(17) for ratio in range(8, 16)))
"""Numbers of values T + 1 of a geometric number: steps of at most an eighth, and 2 (16 + 14) coins at most."""


Floats = np.ndarray[tuple[int], np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Coin:
    """A secret bit, set with `chance` (units of 2^-64) by random number `source`, and repeated as `weight` dummies."""

    chance: int
    weight: int
    source: int


@dataclass(frozen=True, slots=True)
class LevelNoise:
    """Noise on a count: (epsilon, delta) for counts that differ by at most `sensitivity`.

    Raises ConfigError for epsilon outside 0 to 8, delta outside 1e-12 to 1, a sensitivity below 1, or noise of more
    than two million dummies.
    """

    epsilon: float
    delta: float = 1e-6
    sensitivity: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.epsilon <= 8:
            raise ConfigError(f"LevelNoise: got epsilon={self.epsilon}; want more than 0 and at most 8")
        if not _LEAST_DELTA <= self.delta < 1:
            raise ConfigError(
                f"LevelNoise: got delta={self.delta}; want {_LEAST_DELTA} or more and less than 1 (0 is impossible for "
                "noise that never takes away)"
            )
        if self.sensitivity < 1:
            raise ConfigError(f"LevelNoise: got sensitivity={self.sensitivity}; want at least 1 element")
        _values(self)

    @property
    def mean(self) -> int:
        """T, the dummies that are active in the mean; the distribution is symmetric about it."""
        return _values(self) - 1

    @property
    def dummies(self) -> int:
        """Dummies of an opening, 2 T: the largest noise."""
        return 2 * self.mean

    def coins(self) -> list[Coin]:
        """All coins; their weights add up to 2 T."""
        low = max(_values(self).bit_length() - 4, 0)
        digits = [(1 << digit, 2) for digit in range(low)] + [(1 << low, _values(self) >> low)]
        found = []
        for number in range(2):
            for at, (weight, radix) in enumerate(digits):
                odds = [math.exp(-self.epsilon / self.sensitivity * weight * value) for value in range(radix)]
                for least in range(1, radix):
                    chance = round(sum(odds[least:]) / sum(odds) * 2.0**_PRECISION)
                    # the second number counts down from T
                    chance = (1 << _PRECISION) - chance if number else chance
                    found.append(Coin(chance, weight, number * len(digits) + at))
        return found


def noisy_choose(session: Session, active: BitShare, noise: LevelNoise, expected: int = 0) -> ChosenUnits:
    """All active positions of `active` (one vector of n bits) and some dummies: count + N places, N as `noise` says.

    Coins (120 gates each, at most 60; 6 rounds), then one shuffle and opening of n + 2 T bits: 3 kB (quad 5) and for
    each of these bits 1 byte in trio, 5 in dealer and 2 in quad; 9, 8 and 12 rounds. expected: the count that a session
    on meta tensors takes for granted; it has no part elsewhere. Raises DomainError for more than one vector.
    """
    if active.rows != 1:
        raise DomainError(f"noisy_choose: got {active.rows} vectors; want one")
    protocol = session.protocol
    dummies = dummy_bits(protocol, noise)
    size = active.count + noise.dummies
    both = tuple(
        packed(torch.cat([unpacked(part, active.count), unpacked(more, noise.dummies)], dim=1))
        for part, more in zip(active.parts, dummies.parts, strict=True)
    )
    order = protocol.permutation(size)
    opened = protocol.open_shuffled(protocol.shuffle_bits(BitShare(both, size), order))
    places = torch.arange(expected + noise.mean) if opened.is_meta else opened[0].nonzero()[:, 0]
    return ChosenUnits(order, places, active.count)


def dummy_bits(protocol: Protocol, noise: LevelNoise) -> BitShare:
    """2 T bits of which a secret number N is set, in an order that is no secret: [1, 2 T]. 6 rounds."""
    coins = noise.coins()
    tossed = _tossed(protocol, coins)
    owner = torch.arange(len(coins)).repeat_interleave(torch.tensor([coin.weight for coin in coins]))
    return _taken(tossed, owner)


def _tossed(protocol: Protocol, coins: Sequence[Coin]) -> BitShare:
    """One bit for each coin, known to nobody: [1, coins].

    [U < chance], U of 64 bits, the first row the highest: `below` tells it of a segment of rows, `equal` whether U and
    the chance agree there, and neighbouring segments are joined in a tree. Coins of one source have one U.
    """
    chances = [[coin.chance >> (_PRECISION - 1 - row) & 1 for coin in coins] for row in range(_PRECISION)]
    sources = torch.tensor([coin.source for coin in coins])
    uniform = _taken(protocol.random_bits(_PRECISION, int(sources.max()) + 1), sources)
    digits = packed(torch.tensor(chances)).to(uniform.parts[0].device)
    inverted = protocol.invert(uniform)
    below = each(inverted, lambda part: part & digits)
    equal = protocol.xor(each(uniform, lambda part: part & digits), each(inverted, lambda part: part & ~digits))
    equal = equal.some(0, _PRECISION - 1)  # of all segments but the last, of which nobody asks it
    while equal.rows:
        pairs = below.rows // 2
        first = each(equal, lambda part: torch.cat([part[::2], part[:-1:2]]))
        seconds = zip(below.parts, equal.parts, strict=True)
        second = BitShare(tuple(torch.cat([part[1::2], more[1::2]]) for part, more in seconds), uniform.count)
        joined = protocol.and_(first, second)
        below = protocol.xor(each(below, lambda part: part[::2]), joined.some(0, pairs))
        equal = joined.some(pairs, pairs - 1)
    return below


def _taken(bits: BitShare, columns: Tensor) -> BitShare:
    return relaned(bits, lambda part: part[:, columns.to(part.device)], len(columns))


@lru_cache(maxsize=64)
def _values(noise: LevelNoise) -> int:
    """T + 1: the least one with which noise keeps to its delta."""
    at = bisect_left(_SIZES, -noise.delta, key=lambda values: -spent(noise, values))
    if at == len(_SIZES):
        raise ConfigError(
            f"LevelNoise: got epsilon={noise.epsilon} at sensitivity={noise.sensitivity} and delta={noise.delta}, "
            f"which takes more than {2 * _SIZES[-1]} dummies; want a larger epsilon or delta, or a fixed budget"
        )
    return _SIZES[at]


def distribution(noise: LevelNoise, values: int) -> Floats:
    """Chance of 0, 1, .. 2 T active dummies, T = values - 1, but for the rounding of coins.

    Of T + G1 - G2: P(T + d) ~ q^|d| (1 - q^(2 (T - |d| + 1))), the pairs of numbers that are d apart summed up.
    """
    apart = np.abs(np.arange(1 - values, values))
    rate = noise.epsilon / noise.sensitivity
    chances = np.exp(-rate * apart) * -np.expm1(-2 * rate * (values - apart))
    return np.asarray(chances / chances.sum())


def spent(noise: LevelNoise, values: int) -> float:
    """What P(one) exceeds exp(epsilon) P(other) by, over all numbers, for counts `sensitivity` apart.

    The distribution is symmetric and log-concave, so neither the other direction nor nearer counts exceed it by more.
    Rounding moves at most 2^-65 of each of 60 coins' chances.
    """
    chances = np.pad(distribution(noise, values), (0, noise.sensitivity))
    other = np.concatenate([np.zeros(noise.sensitivity), chances[: -noise.sensitivity]])
    rounding = (1 + math.exp(noise.epsilon)) * 60 * 2.0 ** -(_PRECISION + 1)
    return float(np.maximum(chances - math.exp(noise.epsilon) * other, 0).sum()) + rounding
