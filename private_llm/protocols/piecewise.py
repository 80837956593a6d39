"""What a piecewise polynomial of a secret is, in ring elements: public, and how large its keys are."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from private_llm.ring.comparison_keys import shared_ways

Array = np.ndarray[Any, Any]

Polynomial = tuple[int, ...]
"""Coefficients of 1, x, x^2: integers, modulo the ring size."""


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
