"""The KV cache manager's decisions: nothing missing is read, nothing is made twice, and when prefetching pays."""

from __future__ import annotations

import pytest
import torch
from comet_cache.refill import RefillCost, RefillManager, RefillStep
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, DomainError

REMASK = RefillCost(weight=2.0, token=1.0)
FREE = RefillCost(weight=0.0, token=0.0, entry=5.0)


@st.composite
def runs(draw: st.DrawFn, rows: int = 2) -> list[Tensor]:
    """Patterns bool [B, G], one for each step of one position."""
    batch, heads = draw(st.integers(1, rows)), draw(st.integers(1, 4))
    count = draw(st.integers(1, 25))
    bits = draw(st.lists(st.booleans(), min_size=count * batch * heads, max_size=count * batch * heads))
    return list(torch.tensor(bits).view(count, batch, heads))


costs = st.one_of(
    st.none(), st.builds(RefillCost, weight=st.floats(0, 4), token=st.floats(0, 2), entry=st.floats(0, 2))
)


def planned(run: list[Tensor], cost: RefillCost | None) -> list[RefillStep]:
    manager = RefillManager(*run[0].shape, cost)
    return [manager.step(active) for active in run]


def pairs(step: RefillStep) -> list[tuple[int, int, int]]:
    """(row, head, position) of every entry."""
    batch, heads = step.start.shape
    return [
        (b, g, t)
        for b in range(batch)
        for g in range(heads)
        for t in range(int(step.start[b, g]), int(step.stop[b, g]))
    ]


@given(runs(), costs)
@settings(max_examples=150, deadline=None)
def test_no_active_head_lacks_an_entry_and_none_is_made_twice(run: list[Tensor], cost: RefillCost | None) -> None:
    made: set[tuple[int, int, int]] = set()
    for number, (step, active) in enumerate(zip(planned(run, cost), run, strict=True)):
        new = pairs(step)
        assert not made.intersection(new)
        assert len(new) == len(set(new)) == step.entries
        made.update(new)
        for row, head in active.nonzero().tolist():
            assert all((row, head, t) in made for t in range(number + 1))
        assert {(row, head) for row, head, _ in new} == set(map(tuple, step.listed.nonzero().tolist()))
        assert step.tokens == len({(row, t) for row, _, t in new})
        assert step.heads == len({head for _, head, _ in new})
        if cost is None:
            assert not bool((step.listed & ~active).any())


@given(runs(), costs)
@settings(max_examples=80, deadline=None)
def test_separate_products_make_the_same_entries(run: list[Tensor], cost: RefillCost | None) -> None:
    for number, step in enumerate(planned(run, cost)):
        first, *others = step.apart(number)
        together = [entry for part in (first, *others) for entry in pairs(part)]
        assert sorted(together) == sorted(pairs(step))
        assert all(t == number for _, _, t in pairs(first))
        assert all(len({(row, head) for row, head, _ in pairs(part)}) == 1 for part in others)
        assert all(t < number for part in others for _, _, t in pairs(part))
        apart = sum(part.bytes(REMASK) for part in (first, *others))
        assert apart >= step.bytes(REMASK)
        assert sum(part.bytes(FREE) for part in (first, *others)) == step.bytes(FREE)


@given(runs())
@settings(max_examples=80, deadline=None)
def test_where_operands_cost_nothing_all_ways_cost_the_same(run: list[Tensor]) -> None:
    steps = planned(run, FREE)
    assert [s.bytes(FREE) for s in steps] == [s.bytes(FREE) for s in planned(run, None)]


def next_use(run: list[Tensor], head: int, after: int) -> int | None:
    return next((t for t in range(after + 1, len(run)) if bool(run[t][0, head])), None)


def pays(run: list[Tensor], cost: RefillCost) -> bool:
    """Each prefetched head is used again, and then all other heads that are used were used since the prefetch."""
    for number, (step, active) in enumerate(zip(planned(run, cost), run, strict=True)):
        for head in (step.listed & ~active)[0].nonzero()[:, 0].tolist():
            use = next_use(run, head, number)
            if use is None:
                return False
            others = [g for g in run[use][0].nonzero()[:, 0].tolist() if g != head]
            if not all(any(bool(run[t][0, g]) for t in range(number, use)) for g in others):
                return False
    return True


def total(run: list[Tensor], cost: RefillCost, prefetch: bool) -> float:
    return sum(step.bytes(cost) for step in planned(run, cost if prefetch else None))


@st.composite
def quiet_runs(draw: st.DrawFn) -> list[Tensor]:
    """One row; few heads at a time, so that they lack much when they are used."""
    heads = draw(st.integers(2, 4))
    used = draw(st.lists(st.sets(st.integers(0, heads - 1), max_size=2), min_size=5, max_size=40))
    return [torch.tensor([[g in step for g in range(heads)]]) for step in used]


@given(quiet_runs(), st.sampled_from([0.0, 1.0, 2.0, 3.0]), st.sampled_from([0.0, 1.0]))
@settings(max_examples=300, deadline=None)
def test_prefetching_never_costs_more_where_it_is_used_alone(run: list[Tensor], weight: float, entry: float) -> None:
    """And in any case no more than the weights of what is prefetched, and the tokens and entries that it adds."""
    cost = RefillCost(weight, 1.0, entry)
    ahead, merged = total(run, cost, True), total(run, cost, False)
    if pays(run, cost):
        assert ahead <= merged
    regret = 0.0
    for step, active in zip(planned(run, cost), run, strict=True):
        mine = step.listed & ~active
        without = RefillStep(step.start, torch.where(mine, step.start, step.stop))
        regret += step.bytes(cost) - without.bytes(cost)
    assert ahead <= merged + regret


def run_of(*used: str) -> list[Tensor]:
    """A step for each word of zeros and ones."""
    return [torch.tensor([[bit == "1" for bit in word]]) for word in used]


def test_prefetching_can_gain() -> None:
    """Head 1 is away for 7 steps; head 0 comes back after 4 and brings its tokens, which head 1 needs as well."""
    run = run_of("00", "00", "00", "00", "10", "10", "10", "01")
    assert pays(run, REMASK)
    assert (total(run, REMASK, True), total(run, REMASK, False)) == (20.0, 23.0)


def test_prefetching_can_lose() -> None:
    """Two heads are prefetched and come back together: the tokens are saved once, the weights paid twice."""
    run = run_of("000", "000", "000", "100", "011")
    cost = RefillCost(weight=2.5, token=1)
    assert not pays(run, cost)
    assert (total(run, cost, True), total(run, cost, False)) == (17.5, 16.5)


def test_prefetching_for_nothing_costs_its_weights() -> None:
    run = run_of("00", "00", "00", "10")
    assert total(run, REMASK, True) == total(run, REMASK, False) + REMASK.weight


@pytest.mark.parametrize(
    ("missing", "shared", "listed", "worth"),
    [(129, 129, False, True), (128, 128, False, False), (300, 128, False, False), (300, 129, False, True),
     (1, 1, True, True), (5, 0, True, False)],
)  # fmt: skip
def test_the_rule_is_the_papers(missing: int, shared: int, listed: bool, worth: bool) -> None:
    """OPT-6.7B: heads of 128 in a hidden size of 4096, from 129 misses on."""
    assert RefillCost(2 * 128 * 4096 * 16, 2 * 4096 * 16).worth(missing, shared, listed) is worth
    if not listed:
        w, x = 4096 * 128, 4096
        assert worth is (missing > w / x + (missing - shared))


@pytest.mark.parametrize(
    ("config", "threshold"),
    [({"protocol": "trio"}, None), ({"protocol": "dealer"}, None), ({"protocol": "quad"}, None),
     ({"protocol": "dealer", "matmul": "remask"}, 256)],
)  # fmt: skip
def test_costs_of_protocols(config: dict[str, str], threshold: int | None) -> None:
    cost = RefillCost.of(PrivateConfig.from_dict(config), 4096, 128)
    if threshold is None:
        assert (cost.weight, cost.token) == (0, 0)
        assert not cost.worth(10**9, 10**9)
    else:
        assert (cost.weight, cost.token) == (2 * 128 * 4096 * 16, 4096 * 16)
        assert [cost.worth(n, n) for n in (threshold, threshold + 1)] == [False, True]
    assert cost.entry == {"trio": 30.75, "dealer": 30.75}.get(config["protocol"], cost.entry / 256) * 256 > 0


def test_a_row_of_the_batch_that_uses_a_head_pays_its_weights() -> None:
    """Head 1 is active in row 1, so row 0, where head 0 brings its tokens, takes it along."""
    manager = RefillManager(3, 2, RefillCost(weight=100, token=1))
    manager.step(torch.zeros(3, 2, dtype=torch.bool), 3)
    step = manager.step(torch.tensor([[True, False], [False, True], [False, False]]))
    assert step.stop.tolist() == [[4, 4], [4, 4], [0, 0]]  # row 2 lists no tokens, so nothing comes for free there
    assert (step.heads, step.tokens, step.entries) == (2, 8, 16)


def test_eviction_and_shortening_keep_the_count() -> None:
    manager = RefillManager(1, 3)
    manager.step(torch.tensor([[True, False, False]]), 4)
    manager.step(torch.tensor([[False, True, False]]), 2)
    manager.keep(torch.tensor([[0, 3, 5]]))
    assert (manager.length, manager.filled.tolist()) == (3, [[2, 3, 0]])
    manager.crop(1)
    assert (manager.length, manager.filled.tolist()) == (1, [[1, 1, 0]])
    manager.select(torch.tensor([0, 0]))
    assert pairs(manager.step(torch.tensor([[True, True, True], [False, False, False]])))[0] == (0, 0, 1)


@pytest.mark.parametrize(
    ("active", "new"), [(torch.ones(1, 3), 1), (torch.ones(1, 2).bool(), 1), (torch.ones(1, 3).bool(), 0)]
)
def test_other_patterns_are_refused(active: Tensor, new: int) -> None:
    with pytest.raises(DomainError, match=r"want bool \(1, 3\) for one or more"):
        RefillManager(1, 3).step(active, new)


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_costs_that_are_none_are_refused(bad: float) -> None:
    with pytest.raises(ConfigError, match=r"RefillCost\.token: got"):
        RefillCost(1.0, bad)


def test_a_protocol_without_prices_needs_a_cost() -> None:
    with pytest.raises(ConfigError, match="states no prices; give RefillCost"):
        RefillCost.of(PrivateConfig(protocol="plain", insecure=True), 16, 4)
