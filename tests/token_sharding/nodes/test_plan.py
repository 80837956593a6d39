"""Sharding: every pair of positions meets in one AttnNode, and assignments never change."""

from __future__ import annotations

import dataclasses

import pytest

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError
from private_llm.token_sharding.plans import ShardingPlan

PLANS = [ShardingPlan(3, 2, 1), ShardingPlan(3, 2, 2, front=0), ShardingPlan(4, 6, 2, front=7), ShardingPlan(1, 1, 1)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("plan", PLANS)
def test_every_pair_of_positions_meets_once(plan: ShardingPlan) -> None:
    length = 3 * plan.delta + 5
    endpoints = {plan.attn_endpoint(j, k) for j in range(plan.beta) for k in range(plan.beta)}
    assert endpoints == set(range(plan.alpha, plan.nodes))
    for x in range(length):
        for y in range(length):
            meeting = [n for n in range(plan.alpha, plan.nodes) if {x, y} <= plan.held(n, length)]
            j, k = plan.shard_of(x), plan.shard_of(y)
            if j != k:
                assert meeting == [plan.attn_endpoint(j, k)]
            assert plan.attn_shards(plan.attn_endpoint(j, k)) == (min(j, k), max(j, k))


def test_the_paper_s_example() -> None:
    """Section 6.4: alpha = 3, c = 2, N = 18, positions counted from 1."""
    plan = ShardingPlan(3, 2, 2, front=0)
    one = {n: {p + 1 for p in plan.held(n, 18)} for n in range(plan.nodes)}
    assert one[0] == {1, 2, 7, 8, 13, 14}
    assert one[1] == {3, 4, 9, 10, 15, 16}
    assert one[plan.attn_endpoint(0, 0)] == {1, 7, 13}
    assert one[plan.attn_endpoint(0, 2)] == {1, 3, 7, 9, 13, 15}
    assert one[plan.attn_endpoint(3, 4)] == {4, 5, 10, 11, 16, 17}
    assert plan.attn_nodes == 21


def test_the_front_of_a_text_belongs_to_its_first_block() -> None:
    """A block of 2 and rho - 1 = 2 further positions under masks; the pattern begins behind them."""
    plan = ShardingPlan(3, 4, 2)
    assert plan.front == 4
    assert [plan.shard_of(p) for p in range(18)] == [0] * 4 + [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 0, 0]
    assert [plan.first_of_shard(shard) for shard in range(6)] == [0, 6, 8, 10, 12, 14]
    assert ShardingPlan(3, 4, 2, partials="open").front == 0
    assert ShardingPlan(1, 4, 1).front == 0
    assert ShardingPlan.from_dict(dataclasses.asdict(plan)) == plan


@pytest.mark.parametrize("plan", PLANS)
def test_more_text_moves_no_position(plan: ShardingPlan) -> None:
    for node in range(plan.nodes):
        longer = plan.held(node, 40)
        assert {p for p in longer if p < 17} == plan.held(node, 17)


def test_comp_nodes_and_shards_partition_the_text() -> None:
    plan = ShardingPlan(4, 6, 3)
    for rows, count in ((plan.rows_of_comp, plan.alpha), (plan.rows_of_shard, plan.beta)):
        together = sorted(p for part in range(count) for p in rows(part, 5, 77))
        assert together == list(range(5, 77))
    assert all(plan.owner(plan.shard_of(p)) == plan.comp_of(p) for p in range(200))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(("start", "stop"), [(0, 1), (0, 50), (7, 8), (13, 29), (40, 40)])
def test_rows_are_those_of_the_definition(plan: ShardingPlan, start: int, stop: int) -> None:
    for comp in range(plan.alpha):
        assert plan.rows_of_comp(comp, start, stop) == [p for p in range(start, stop) if plan.comp_of(p) == comp]
    for shard in range(plan.beta):
        assert plan.rows_of_shard(shard, start, stop) == [p for p in range(start, stop) if plan.shard_of(p) == shard]
        assert plan.shard_of(plan.first_of_shard(shard)) == shard


def test_nodes_agree_on_all_but_what_a_client_accepts() -> None:
    plan = ShardingPlan(4, 6, 2, front=7)
    agreed = PrivateConfig(protocol="cascade", plan=plan).agreement()
    other = {"alpha": 3, "c": 8, "m": 3, "wire": "float16", "partials": "open", "front": 8}
    own = {"rho": 2, "accept_weak_plan": True}
    assert {*other, *own} == {field.name for field in dataclasses.fields(plan)}
    for name, value in {**other, **own}.items():
        changed = PrivateConfig(protocol="cascade", plan=dataclasses.replace(plan, **{name: value}))  # type: ignore[arg-type]
        assert (changed.agreement() == agreed) is (name in own), name


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"alpha": 0}, "plan.alpha: got 0"),
        ({"c": 6, "m": 4}, "divisor of c"),
        ({"rho": 2.5}, "plan.rho: got 2.5"),
        ({"partials": "closed"}, "plan.partials: got 'closed'; want one of 'masked', 'open'"),
        ({"front": -1}, "plan.front: got -1; want 0 or a positive integer"),
        ({"front": True}, "plan.front: got True"),
    ],
)
def test_impossible_plans_are_refused(wrong: dict[str, int], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        ShardingPlan(**wrong)  # type: ignore[arg-type]
