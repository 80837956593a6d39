"""Sharding: every pair of positions meets in one AttnNode, assignments never change, and the audit's arithmetic."""

from __future__ import annotations

import pytest

from private_llm.errors import ConfigError
from private_llm.sharded.audit import audit, refuse_weak
from private_llm.sharding import ShardingPlan

PLANS = [ShardingPlan(3, 2, 1), ShardingPlan(3, 2, 2), ShardingPlan(4, 6, 2), ShardingPlan(1, 1, 1)]


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
    plan = ShardingPlan(3, 2, 2)
    one = {n: {p + 1 for p in plan.held(n, 18)} for n in range(plan.nodes)}
    assert one[0] == {1, 2, 7, 8, 13, 14}
    assert one[1] == {3, 4, 9, 10, 15, 16}
    assert one[plan.attn_endpoint(0, 0)] == {1, 7, 13}
    assert one[plan.attn_endpoint(0, 2)] == {1, 3, 7, 9, 13, 15}
    assert one[plan.attn_endpoint(3, 4)] == {4, 5, 10, 11, 16, 17}
    assert plan.attn_nodes == 21


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


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"alpha": 0}, "plan.alpha: got 0"),
        ({"c": 6, "m": 4}, "divisor of c"),
        ({"rho": 2.5}, "plan.rho: got 2.5"),
    ],
)
def test_impossible_plans_are_refused(wrong: dict[str, int], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        ShardingPlan(**wrong)  # type: ignore[arg-type]


# -- the audit -----------------------------------------------------------------------------------------------------
def gaps(plan: ShardingPlan, *colluding: int, rho: int = 3) -> tuple[int | None, int | None]:
    (finding,) = audit(plan, rho, colluding or (0,)).findings
    return finding.hidden_gap, finding.attention_gap


def test_a_comp_node_alone() -> None:
    """CompNode 0 of (alpha 4, c 6): next cluster at distance 24 - 6 + 1; foreign shards show c / m tokens at once."""
    assert gaps(ShardingPlan(4, 6, 1)) == (19, 6)
    assert gaps(ShardingPlan(4, 6, 2)) == (19, 3)
    assert gaps(ShardingPlan(2, 6, 6)) == (7, 1)
    assert gaps(ShardingPlan(1, 6, 1)) == (None, None)  # it holds everything: nothing left to win


def test_a_comp_node_behind_the_first_cluster_starts_in_the_dark() -> None:
    """CompNode 2's first row is position 12: V^13 candidates before it knows anything."""
    assert gaps(ShardingPlan(4, 6, 1), 2)[0] == 13


def test_an_attn_node_of_separate_blocks() -> None:
    """Blocks 0 and 2 of one cluster, two positions each: 0 1 . . 4 5: the gap costs V^3, the next V^(24 - 5)."""
    plan = ShardingPlan(4, 6, 3)
    node = plan.attn_endpoint(0, 2)
    assert gaps(plan, node, rho=3)[0] == 3
    assert gaps(plan, node, rho=4)[0] == 3
    assert gaps(plan, node, rho=2)[0] == 3
    assert audit(plan, 3, [node]).sound
    assert not audit(plan, 4, [node]).sound
    assert gaps(plan, plan.attn_endpoint(0, 1), rho=3)[0] == 24 - 4 + 1


def test_neighbours_that_collude_still_face_the_gap_and_all_together_know_all() -> None:
    plan = ShardingPlan(4, 6, 1)
    assert gaps(plan, 0, 1) == (24 - 12 + 1, 6)
    assert gaps(plan, 0, 2) == (7, 6)
    assert gaps(plan, 0, 1, 2, 3) == (None, None)


def test_collusion_that_closes_gaps_is_found() -> None:
    """c = 2, alpha = 3: CompNodes 0 and 2 hold 0 1 . . 4 5: the gap of 3 is below rho = 4."""
    plan = ShardingPlan(3, 2, 1, rho=2)
    assert audit(plan, 2, [0, 2]).sound
    found = audit(plan, 4, [0, 2])
    assert not found.sound
    assert "BROKEN" in str(found)
    assert "CompNode 0 + CompNode 2" in str(found)


def test_every_node_is_examined_and_the_default_is_sound() -> None:
    assert audit(ShardingPlan()).sound
    report = audit(ShardingPlan(8, 8, 4))
    assert not report.sound  # blocks of two tokens: V^2 by Theorem 6.2, though the paper recommends m = 4
    comp, attn = report.findings
    assert (comp.nodes, comp.hidden_gap, comp.attention_gap) == ("any one CompNode of 8", 9, 2)
    assert (attn.nodes, attn.hidden_gap, attn.attention_gap) == ("any one AttnNode of 528", 3, None)


def test_weak_plans_need_consent() -> None:
    with pytest.raises(ConfigError, match=r"V\^1: BROKEN(.|\n)*accept_weak_plan"):
        refuse_weak(ShardingPlan(4, 1, 1))
    refuse_weak(ShardingPlan(4, 1, 1, accept_weak_plan=True))
    refuse_weak(ShardingPlan())
    with pytest.raises(ConfigError, match="want endpoints from 0 to 43"):
        audit(ShardingPlan(8, 8, 1), colluding=[44])
