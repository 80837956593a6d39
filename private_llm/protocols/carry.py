"""The plan of a comparison: which carries a subtraction joins, level by level. Public, no parties.

A sign bit of x = M - λ is bit `bits-1` of M + s, s = -λ, hence M_top ^ s_top ^ carry out of the lower
bits. The lower positions form blocks of at most three bits whose generate/propagate pair is a
polynomial of degree at most three in the bits of s with coefficients in the bits of M; blocks are joined
three (or two) at a time: (g2,p2)(g1,p1)(g0,p0) = (g2 ^ p2 g1 ^ p2 p1 g0, p2 p1 p0). The lowest group
never needs its propagate. 63 positions: 21 blocks, then 7, 3, 1 groups: four levels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

BLOCK = 3
"""Bits per block: 7 monomials for 3 bits cost fewer messages in sum than 3 for 2 or 15 for 4."""


@dataclass(frozen=True)
class CarryPlan:
    """Sizes, lowest first: `blocks` of bits, then the groups joined at each level. Sums are computed once."""

    positions: int
    blocks: tuple[int, ...]
    levels: tuple[tuple[int, ...], ...]

    @cached_property
    def monomial_rows(self) -> int:
        """Rows the helper shares for the blocks: all monomials of each block's bits."""
        return sum((1 << size) - 1 for size in self.blocks)

    @cached_property
    def block_rows(self) -> int:
        """Generate and propagate rows after the blocks (the lowest propagate is not made)."""
        return 2 * len(self.blocks) - 1

    @cached_property
    def product_rows(self) -> tuple[int, ...]:
        """Mask products the helper shares for each level of joins."""
        return tuple(sum(_PRODUCTS[(size, index == 0)] for index, size in enumerate(groups)) for groups in self.levels)

    @cached_property
    def joined_rows(self) -> tuple[int, ...]:
        """Rows after each level."""
        return tuple(2 * len(groups) - 1 for groups in self.levels)

    @cached_property
    def opened_rows(self) -> tuple[int, ...]:
        """Rows that each evaluator sends: after the blocks, then after each level."""
        return (self.block_rows, *self.joined_rows)

    @cached_property
    def products(self) -> int:
        """Mask products of all levels."""
        return sum(self.product_rows)

    @cached_property
    def online_rows(self) -> int:
        """Rows each evaluator sends, all levels together."""
        return sum(self.opened_rows)

    def helped_rows(self, thresholds: int) -> int:
        """Rows that the helper sends: monomials and the top bit once for all thresholds, products for each."""
        return self.monomial_rows + 1 + self.products * thresholds

    @cached_property
    def rounds(self) -> int:
        """Exchanges."""
        return 1 + len(self.levels)


_PRODUCTS = {(3, True): 4, (3, False): 7, (2, True): 1, (2, False): 2}
"""Products of masks in a join of (size, lowest group?): see `kernels.reference`."""


@cache
def carry_plan(positions: int) -> CarryPlan:
    """The plan for a carry out of `positions` >= 1 bits."""
    blocks = [BLOCK] * (positions // BLOCK)
    if positions % BLOCK:
        blocks.insert(0, positions % BLOCK)
    levels = []
    count = len(blocks)
    while count > 1:
        groups = (count + 2) // 3
        threes = count - 2 * groups
        sizes = (3,) * threes + (2,) * (groups - threes)
        levels.append(sizes)
        count = groups
    return CarryPlan(positions, tuple(blocks), tuple(levels))
