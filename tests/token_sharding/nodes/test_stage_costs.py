"""Cost formulas against the ledgers of nodes that run, and the paper's equations against numbers worked out by hand."""

from __future__ import annotations

import dataclasses

import pytest

from private_llm.token_sharding.nodes.facts import AttentionCall, ForwardStep
from private_llm.token_sharding.nodes.stage_costs import (
    Card,
    Stage,
    attention_stages,
    cache_bytes,
    cards,
    comp_sizes,
    paper_bytes,
    paper_seconds,
    shard_sizes,
)
from private_llm.token_sharding.plans import ShardingPlan
from tests.token_sharding.nodes.prices import layer_bytes
from tests.token_sharding.nodes.test_nodes import CAUSAL, FULL, WINDOW, Session

PLANS = [
    ShardingPlan(1, 4, 1), ShardingPlan(3, 2, 1), ShardingPlan(3, 4, 2), ShardingPlan(2, 3, 3),
    ShardingPlan(3, 4, 2, wire="float16"), ShardingPlan(4, 8, 2), ShardingPlan(4, 8, 2, partials="open"),
    ShardingPlan(3, 4, 2, wire="float16", partials="open"),
]  # fmt: skip
CALLS = [FULL, CAUSAL, WINDOW]
STEPS = [ForwardStep(1, 2, 0, 17), ForwardStep(1, 2, 17, 1), ForwardStep(1, 2, 18, 3)]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_bytes_of_every_link_and_the_cache_are_those_of_a_run(plan: ShardingPlan) -> None:
    """Prefill of 17 (some shards may be empty), one token, three tokens."""
    session = Session(plan, CALLS, 2, 21)
    for step in STEPS:
        for link in session.links:
            link.ledger.reset()
        session.step(step)
        for index, what in enumerate(("rows", "partial")):
            found: dict[tuple[int, int], int] = {}
            for call in CALLS:
                for link, count in attention_stages(plan, call, step)[index].sent.items():
                    found[link] = found.get(link, 0) + count
            real = {
                (link.me, to): count
                for link in session.links
                for (_, op, to), count in link.ledger.sent.items()
                if op == what
            }
            assert found == real
    held = {
        node.shards: sum(k.numel() + v.numel() for k, v in node._kept[1].values()) * 4 if 1 in node._kept else 0
        for node in session.attns
    }
    expected = cache_bytes(plan, CALLS, 2, 21)
    assert {plan.attn_endpoint(*shards): count for shards, count in held.items()} == expected


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("length", [3, 17, 64])
def test_a_forward_s_sum_is_that_of_the_format(plan: ShardingPlan, length: int) -> None:
    stages = [stage for call in CALLS for stage in attention_stages(plan, call, ForwardStep(None, 2, 0, length))]
    assert sum(sum(stage.sent.values()) for stage in stages) == layer_bytes(plan, CALLS, 2, length)


def test_attention_work_is_all_pairs_of_the_plain_attention_and_of_new_rows_only() -> None:
    """Every query meets every key in one node; a decode step computes one row against all keys."""
    plan = ShardingPlan(3, 4, 2)
    _, back = attention_stages(plan, FULL, ForwardStep(None, 2, 0, 29))
    assert sum(back.macs.values()) == 2 * 4 * 29 * 29 * (8 + 6)
    _, back = attention_stages(plan, FULL, ForwardStep(1, 2, 28, 1))
    assert sum(back.macs.values()) == 2 * 4 * 1 * 29 * (8 + 6)
    shard = plan.shard_of(28)
    assert set(back.macs) <= {plan.attn_endpoint(shard, other) for other in range(plan.beta)}


def test_sizes_are_those_of_the_definition() -> None:
    plan = ShardingPlan(3, 4, 2)
    for start, stop in ((0, 29), (28, 29), (5, 19)):
        positions = range(start, stop)
        assert shard_sizes(plan, start, stop) == [
            sum(plan.shard_of(p) == shard for p in positions) for shard in range(plan.beta)
        ]
        assert comp_sizes(plan, start, stop) == [
            sum(plan.comp_of(p) == comp for p in positions) for comp in range(plan.alpha)
        ]


# -- time ---------------------------------------------------------------------------------------------------------
def test_the_busiest_card_counts_in_its_busier_direction() -> None:
    sent = {(0, 5): 100, (0, 6): 200, (1, 5): 250, (5, 0): 7}
    assert cards(sent) == {0: Card(300, 7), 1: Card(250, 0), 5: Card(7, 350), 6: Card(0, 200)}
    assert Card(300, 7).most == 300
    stage = Stage("", "rows", sent, {0: 50, 1: 80})
    assert stage.seconds(bandwidth=100.0, latency=0.5, speed=20.0) == pytest.approx(0.5 + 3.5 + 4.0)
    assert Stage("", "rows", {}, {0: 40}).seconds(100.0, 0.5, 20.0) == pytest.approx(2.0)


def test_equation_1_by_hand() -> None:
    """BERT's shapes: a layer of 128 tokens worked out, and Table 7: base at alpha 8, large at alpha 4 (GB)."""
    assert paper_bytes(1, 2, 64, 12, 12, 128) == 2 * (2 * 768 + 2 * 768 + 24) * 128 == 792_576
    assert round(12 * paper_bytes(8, 2, 64, 12, 12, 128) / 1e9, 3) == 0.076
    assert round(24 * paper_bytes(4, 2, 64, 16, 16, 128) / 1e9, 3) == 0.101


def test_equation_2_by_hand() -> None:
    """H = 3, H_KV = 1, d = 4, F = 2, beta = 5, B = 100 B/s, tau = 7 s, |R| = 6, |S| = 2.

    Out: 5 x 2 x 4 x (3 + 2) x 6 = 1200 bytes, 12 s. Back: 2 x (4 + 2) x 3 x 2 = 72 bytes, 0.72 s. Twice 7 s.
    """
    assert paper_seconds(5, 2, 4, 3, 1, 6, 2, bandwidth=100.0, latency=7.0) == pytest.approx(26.72)


@pytest.mark.parametrize(
    "plan", [ShardingPlan(4, 8, 2, partials="open"), ShardingPlan(3, 2, 1, partials="open")], ids=str
)
def test_stages_differ_from_equation_2_where_they_should(plan: ShardingPlan) -> None:
    """Rows out: the same. Back: one number less a row and head, both shards of a node, and the receiving card."""
    call, tokens, bandwidth, latency = AttentionCall(3, 1, 4, 4, 1.0), 50, 100.0, 0.25
    out, back = attention_stages(plan, call, ForwardStep(None, 1, 0, tokens))
    rows, queries = max(comp_sizes(plan, 0, tokens)), shard_sizes(plan, 0, tokens)
    no_queries = paper_seconds(plan.beta, 4, 4, 3, 1, rows, 0, bandwidth, latency)
    assert out.seconds(bandwidth, latency, 1.0) + latency == pytest.approx(no_queries)
    longest = max(queries) + sorted(queries)[-2]
    leaving = max(card.out for node, card in cards(back.sent).items() if node >= plan.alpha)
    assert leaving == longest * 3 * (4 + 1) * 4
    arriving = max(card.into for card in cards(back.sent).values())
    assert arriving == plan.beta * rows * 3 * (4 + 1) * 4
    without_work = dataclasses.replace(back, macs={})
    assert without_work.seconds(bandwidth, latency, 1.0) == pytest.approx(latency + arriving / bandwidth)
