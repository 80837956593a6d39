"""The comparison circuit evaluated on plain integers with the plan alone: no party, no kernel."""

from __future__ import annotations

from functools import reduce

import pytest
from hypothesis import given
from hypothesis import strategies as st

from private_llm.protocols.carry import carry_plan

Pair = tuple[int, int]


def join(high: Pair, low: Pair) -> Pair:
    return high[0] | (high[1] & low[0]), high[1] & low[1]


def carry_by_plan(a: int, b: int, positions: int) -> int:
    """Follow blocks and levels exactly as the kernels do."""
    plan = carry_plan(positions)
    pairs: list[Pair] = []
    bit = 0
    for size in plan.blocks:
        bits = [((a >> i) & (b >> i) & 1, ((a ^ b) >> i) & 1) for i in range(bit, bit + size)]
        pairs.append(reduce(lambda low, high: join(high, low), bits))
        bit += size
    assert bit == positions
    for groups in plan.levels:
        joined, base = [], 0
        for size in groups:
            joined.append(reduce(lambda low, high: join(high, low), pairs[base : base + size]))
            base += size
        assert base == len(pairs)
        pairs = joined
    assert len(pairs) == 1
    return pairs[0][0]


@given(st.integers(1, 63), st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1))
def test_carry_equals_integer_addition(positions: int, a: int, b: int) -> None:
    mask = (1 << positions) - 1
    assert carry_by_plan(a & mask, b & mask, positions) == ((a & mask) + (b & mask)) >> positions


@pytest.mark.parametrize(("positions", "rounds", "pre", "online"), [(63, 4, 205, 60), (31, 4, 95, 32)])
def test_price_of_the_full_ring(positions: int, rounds: int, pre: int, online: int) -> None:
    """Bits per element: 326 in a 64-bit ring (one more pre bit for the top bit), against 421 for a prefix adder."""
    plan = carry_plan(positions)
    assert (plan.rounds, plan.monomial_rows + plan.products, plan.online_rows) == (rounds, pre, online)


@pytest.mark.parametrize("positions", range(1, 64))
def test_groups_hold_two_or_three(positions: int) -> None:
    plan = carry_plan(positions)
    assert sum(plan.blocks) == positions
    assert all(size in (2, 3) for level in plan.levels for size in level)
