"""Sums over all tokens instead of one for each shard: what algebra needs then, what sparse recovery still gets."""

from __future__ import annotations

import pytest
import torch
from attacks.attacked import RowsAt
from attacks.collusion import Loot, collude
from attacks.view import ALL, view_of
from transformers import GPT2Config, GPT2LMHeadModel

from private_llm.token_sharding import ShardingPlan

V, EVERYTHING = 200, torch.arange(200)


@pytest.fixture(scope="module")
def first() -> RowsAt:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=V, n_embd=64, n_layer=1, n_head=2, n_positions=64, initializer_range=0.2)
    return RowsAt(GPT2LMHeadModel(config).eval(), 0)


def masked(alpha: int, c: int) -> ShardingPlan:
    return ShardingPlan(alpha, c, 1, accept_weak_plan=True, front=0)


def loot_of(first: RowsAt, plan: ShardingPlan, node: int, length: int, attack: str) -> tuple[Loot, list[int]]:
    ids = torch.randint(0, V, (length,), generator=torch.Generator().manual_seed(3))
    view = view_of(plan, [node], first.call, 0, ids, first.of(ids))
    assert view.shards == [ALL]
    return collude([(view, first)], EVERYTHING, V, [attack]), ids.tolist()


def test_algebra_reads_a_total_only_with_as_many_rows_as_unknown_tokens(first: RowsAt) -> None:
    """CompNode 1 has four rows: four unknown tokens before them are read, eight (CompNode 2's) are not."""
    plan = masked(3, 4)
    loot, truth = loot_of(first, plan, 1, 8, "algebra")
    assert loot.text(8, -1) == truth
    loot, _ = loot_of(first, plan, 2, 12, "algebra")
    assert sorted(loot.tokens) == [8, 9, 10, 11]


def test_sparse_recovery_reads_more_unknown_tokens_than_there_are_rows(first: RowsAt) -> None:
    """Eight unknown tokens, four rows of 2 x 33 numbers: rank the candidates, then one least squares."""
    loot, truth = loot_of(first, masked(3, 4), 2, 12, "totals")
    assert loot.text(12, -1) == truth
    assert {loot.how[p] for p in range(8)} == {"totals"}
    assert loot.candidates == {"totals": 8 * V}


def test_what_does_not_add_up_is_not_believed(first: RowsAt) -> None:
    """One row against eight tokens: 66 numbers for 8 x 200 candidates."""
    loot, truth = loot_of(first, masked(3, 4), 2, 9, "totals")
    assert all(truth[p] == token for p, token in loot.tokens.items())
    assert sorted(loot.tokens) == [8]
