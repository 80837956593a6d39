"""The audit's arithmetic, counted by hand; tests/attacks compares it with what attacks gain."""

from __future__ import annotations

import warnings

import pytest

from private_llm.errors import ConfigError, WeakProtection
from private_llm.token_sharding.plans import ShardingPlan
from private_llm.token_sharding.plans.audit import Finding, Setting, audit, fewest, refuse_weak, warn_weak


def one(plan: ShardingPlan, *colluding: int, rho: int = 3, **setting: object) -> Finding:
    (finding,) = audit(plan, rho, colluding or (0,), Setting(**setting)).findings  # type: ignore[arg-type]
    return finding


def gaps(plan: ShardingPlan, *colluding: int, rho: int = 3, **setting: object) -> tuple[int | None, int | None]:
    finding = one(plan, *colluding, rho=rho, **setting)
    return finding.hidden_gap, finding.attention_gap


def open_plan(alpha: int, c: int, m: int, rho: int = 3) -> ShardingPlan:
    return ShardingPlan(alpha, c, m, rho, accept_weak_plan=True, partials="open")


def test_a_comp_node_alone() -> None:
    """CompNode 0 of (alpha 4, c 6): 18 unknown tokens to its next cluster; foreign shards show c / m tokens at once."""
    assert gaps(open_plan(4, 6, 1)) == (18, 6)
    assert gaps(open_plan(4, 6, 2)) == (18, 3)
    assert gaps(open_plan(2, 6, 6), rho=1) == (6, 1)
    assert gaps(open_plan(1, 6, 1)) == (None, None)  # it holds everything: nothing left to win


def test_held_tokens_are_known_so_gaps_are_what_lies_between() -> None:
    """Two held positions with one between: V candidates, not V^2 (the paper's distance counts the held one, too)."""
    plan = open_plan(3, 1, 1)
    node = plan.attn_endpoint(0, 2)
    assert gaps(plan, node, rho=2)[0] == 1
    assert one(plan, node, rho=2).broken(2)
    assert one(plan, node, rho=2, length=7).gained == 2


def test_a_comp_node_behind_the_first_cluster_starts_in_the_dark() -> None:
    """CompNode 2's first row is position 12: V^12 candidates before it knows anything."""
    assert gaps(open_plan(4, 6, 1), 2)[0] == 12


def test_an_attn_node_of_separate_blocks() -> None:
    """Blocks 0 and 2 of one cluster, two positions each: 0 1 . . 4 5: the gap costs V^2, the next V^(24 - 6)."""
    plan = open_plan(4, 6, 3)
    node = plan.attn_endpoint(0, 2)
    assert gaps(plan, node, rho=2)[0] == 2
    assert audit(plan, 2, [node]).sound
    assert not audit(plan, 3, [node]).sound
    assert gaps(plan, plan.attn_endpoint(0, 1), rho=3)[0] == 24 - 4


def test_neighbours_that_collude_still_face_the_gap_and_all_together_hold_all() -> None:
    plan = open_plan(4, 6, 1)
    assert gaps(plan, 0, 1) == (12, 6)
    assert gaps(plan, 0, 2) == (6, 6)
    everybody = one(plan, 0, 1, 2, 3)
    assert (everybody.held, everybody.length, everybody.hidden_gap) == (96, 96, None)
    assert everybody.broken(1)


@pytest.mark.parametrize("plan", [open_plan(1, 8, 1), open_plan(2, 3, 1)], ids=str)
def test_one_node_that_holds_all_breaks_a_plan(plan: ShardingPlan) -> None:
    assert not audit(plan).sound
    assert "of 32 tokens" in str(audit(plan)) or "24 of 24 tokens" in str(audit(plan))


def test_collusion_that_closes_gaps_is_found() -> None:
    """c = 2, alpha = 3: CompNodes 0 and 2 hold 0 1 . . 4 5: the gap of 2 is below rho = 3."""
    plan = open_plan(3, 2, 1, rho=2)
    assert audit(plan, 2, [0, 2]).sound
    found = audit(plan, 3, [0, 2])
    assert not found.sound
    assert "BROKEN" in str(found)
    assert "CompNode 0 + CompNode 2" in str(found)


def test_a_known_prefix_cuts_the_first_block() -> None:
    """Blocks of three with a beginning-of-text token: two unknown tokens in the first."""
    plan = open_plan(3, 3, 1)
    assert audit(plan).sound
    assert gaps(plan, 1, known=1)[1] == 2
    assert gaps(plan, 1, known=3)[1] == 3
    assert not audit(plan, setting=Setting(known=1)).sound
    with pytest.raises(ConfigError, match="known prefix: got -1"):
        Setting(known=-1)
    with pytest.raises(ConfigError, match="length: got 3"):
        Setting(known=4, length=3)


def test_behind_a_split_nodes_know_no_token_but_the_first_cluster_falls() -> None:
    """CompNode 0's first rows depend on its own tokens alone, V candidates each; the others see V^(first row + 1)."""
    plan = open_plan(4, 6, 1)
    first, second = one(plan, 0, split=True), one(plan, 1, split=True)
    assert (first.opened, second.opened) == (6, 0)
    assert (first.hidden_gap, second.hidden_gap) == (6 * 3 + 1, 6 + 1)
    assert "finds 6 of these, V candidates each" in str(audit(plan, colluding=[0], setting=Setting(split=True)))
    assert one(plan, plan.attn_endpoint(0, 1), split=True).opened == 12


def test_without_a_causal_mask_every_row_depends_on_the_whole_text() -> None:
    """19 tokens over 3 x 3: CompNode 0 holds 0-2, 9-11 and 18; each foreign shard has six unknown ones; at 10, one."""
    plan = open_plan(3, 3, 1)
    assert gaps(plan, 0, causal=False, length=19) == (12, 6)
    assert gaps(plan, 0, causal=False, length=7, rho=1) == (4, 1)
    assert not audit(plan, setting=Setting(causal=False, length=7)).sound
    assert gaps(plan, 0, causal=False, split=True, length=19) == (19, None)


def test_every_node_is_examined() -> None:
    report = audit(open_plan(8, 8, 4))
    assert not report.sound  # blocks of two tokens: V^2 by Theorem 6.2, though the paper recommends m = 4
    comp, attn = report.findings
    assert (comp.nodes, comp.hidden_gap, comp.attention_gap) == ("any one CompNode of 8", 8, 2)
    assert (attn.nodes, attn.hidden_gap) == ("any one AttnNode of 528", 2)
    assert comp.gained == 224


def test_the_fewest_nodes_that_break_a_plan() -> None:
    assert fewest(open_plan(4, 1, 1)) == [0]
    assert fewest(open_plan(2, 3, 1)) == [3]  # AttnNode (0, 1) holds both shards
    plan = open_plan(3, 3, 1)
    pair = fewest(plan)
    assert len(pair) == 2
    assert set().union(*(plan.held(node, 30) for node in pair)) == set(range(30))
    plan = open_plan(8, 8, 1)
    four = fewest(plan)
    assert len(four) == 4
    assert set().union(*(plan.held(node, 128) for node in four)) == set(range(128))


def test_the_default_is_sound_and_weak_plans_need_consent() -> None:
    assert audit(ShardingPlan()).sound
    with pytest.raises(ConfigError, match=r"V\^1(.|\n)*BROKEN(.|\n)*accept_weak_plan"):
        refuse_weak(ShardingPlan(4, 1, 1))
    refuse_weak(ShardingPlan(4, 1, 1, accept_weak_plan=True))
    refuse_weak(ShardingPlan())
    with pytest.raises(ConfigError, match="want endpoints from 0 to 43"):
        audit(ShardingPlan(8, 8, 1), colluding=[44])
    with pytest.raises(ConfigError, match="colluding: got"):
        audit(ShardingPlan(8, 8, 1), colluding=[])


def test_what_searches_leave_out_is_said_and_warned_of() -> None:
    """There is no setting in which a node that computes gains nothing."""
    plan = ShardingPlan()
    assert audit(plan).sound
    assert "CompNode can work out other tokens at layer 0" in str(audit(plan))
    assert "from the front of the text" in str(audit(plan, setting=Setting(split=True)))
    encoder = Setting(split=True, causal=False, length=64)
    assert "rank other tokens by the likelihood" in str(audit(plan, setting=encoder))
    with pytest.warns(WeakProtection, match="likelihood"):
        warn_weak(plan, encoder)
    with pytest.warns(WeakProtection, match=r"(?s)'trio', 'quad' or 'dealer'.*accept_weak_plan"):
        warn_weak(plan)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_weak(open_plan(8, 8, 2))


def test_masked_results_follow_the_rank_rule() -> None:
    """front 0: CompNode 1 has four rows against four unknown tokens; front 2: six unknown, so triples remain."""
    for front, gap in ((0, 1), (2, 3)):
        plan = ShardingPlan(4, 4, 1, accept_weak_plan=True, front=front)
        assert gaps(plan, 1, length=8 + front)[1] == gap
    assert one(ShardingPlan(4, 4, 1, accept_weak_plan=True, front=0), 1, length=8).gained == 4
    assert not one(plan, 1).algebra
    assert gaps(plan, plan.attn_endpoint(1, 2))[1] is None  # AttnNodes get no results


def test_two_attn_nodes_of_its_shard_open_a_comp_node_s_sums() -> None:
    """Ring of shard 0: nodes (0, 1) and (0, 3) collude with CompNode 0, so what (0, 2) adds is theirs."""
    plan = ShardingPlan(5, 3, 1, accept_weak_plan=True)
    together = [0, plan.attn_endpoint(0, 1), plan.attn_endpoint(0, 3)]
    assert gaps(plan, *together)[1] == 1
    assert gaps(plan, *together[:2])[1] == 3 * 3 - 3 + 1  # one of them alone: the sum of shards 2, 3 and 4, three rows


def test_huge_clusters_take_no_longer() -> None:
    """A cluster beyond any text: in the positions that are examined CompNode 0 holds everything."""
    found = audit(ShardingPlan(2, 10**7, 1))
    assert found.findings[0].held == found.findings[0].length == 4096
    assert not found.sound


def test_grouped_queries_want_a_longer_front_and_the_error_names_it() -> None:
    plan, setting = ShardingPlan(8, 8, 2), Setting(queries=4)
    refuse_weak(plan)
    with pytest.raises(ConfigError, match="pass front=30, which is enough") as refused:
        refuse_weak(plan, setting)
    assert "from attention results V^1 (gains 30): BROKEN" in str(refused.value)
    refuse_weak(ShardingPlan(8, 8, 2, front=30), setting)
    with pytest.raises(ConfigError, match="away") as refused:  # eight equations a row: more than new tokens
        refuse_weak(plan, Setting(queries=8))
    assert "which is enough" not in str(refused.value)


def test_a_plan_audits_itself() -> None:
    plan = ShardingPlan(8, 8, 2)
    assert plan.audit(4, colluding=[0, 2]) == audit(plan, 4, [0, 2])
    assert plan.audit() == audit(plan)
