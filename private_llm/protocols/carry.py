"""The plan of a comparison: which carries a subtraction joins, level by level. Public, no parties.

A sign bit of x = M - λ is bit `bits-1` of M + s, s = -λ, hence M_top ^ s_top ^ carry out of the lower
bits. The lower positions form blocks of at most three bits whose generate/propagate pair is a
polynomial of degree at most three in the bits of s with coefficients in the bits of M; blocks are joined
three (or two) at a time: (g2,p2)(g1,p1)(g0,p0) = (g2 ^ p2 g1 ^ p2 p1 g0, p2 p1 p0). The lowest group
never needs its propagate. 63 positions: 21 blocks, then 7, 3, 1 groups: four levels.
"""

from dataclasses import dataclass
from functools import cache

BLOCK = 3  # bits per block: 7 monomials for 3 bits cost fewer messages in sum than 3 for 2 or 15 for 4


@dataclass(frozen=True)
class CarryPlan:
    """Sizes, lowest first, and numbers of rows.

    blocks: of bits. levels: the groups joined at each level. Of the helper: monomial_rows for the blocks (all monomials
    of each block's bits), product_rows for each level of joins (mask products), `products` in all. Generate and
    propagate rows, the lowest propagate not made: block_rows after the blocks, joined_rows after each level; each
    evaluator sends these, opened_rows, one after the other, `online_rows` in all. rounds: exchanges.
    """

    positions: int
    blocks: tuple[int, ...]
    levels: tuple[tuple[int, ...], ...]
    monomial_rows: int
    product_rows: tuple[int, ...]
    products: int
    block_rows: int
    joined_rows: tuple[int, ...]
    opened_rows: tuple[int, ...]
    online_rows: int
    rounds: int

    def helped_rows(self, thresholds: int) -> int:
        """Rows that the helper sends: monomials and the top bit once for all thresholds, products for each."""
        return self.monomial_rows + 1 + self.products * thresholds


_PRODUCTS = {(3, True): 4, (3, False): 7, (2, True): 1, (2, False): 2}
"""Products of masks in a join of (size, lowest group?): see `tests/kernels/reference.py`."""


@cache
def carry_plan(positions: int) -> CarryPlan:
    """The plan for a carry out of `positions` >= 1 bits."""
    blocks = [BLOCK] * (positions // BLOCK)
    if positions % BLOCK:
        blocks.insert(0, positions % BLOCK)
    levels: list[tuple[int, ...]] = []
    count = len(blocks)
    while count > 1:
        groups = (count + 2) // 3
        threes = count - 2 * groups
        sizes = (3,) * threes + (2,) * (groups - threes)
        levels.append(sizes)
        count = groups
    products = tuple(sum(_PRODUCTS[(size, index == 0)] for index, size in enumerate(sizes)) for sizes in levels)
    block_rows, joined = 2 * len(blocks) - 1, tuple(2 * len(sizes) - 1 for sizes in levels)
    return CarryPlan(
        positions, tuple(blocks), tuple(levels), sum((1 << size) - 1 for size in blocks), products, sum(products),
        block_rows, joined, (block_rows, *joined), block_rows + sum(joined), 1 + len(levels),
    )  # fmt: skip
