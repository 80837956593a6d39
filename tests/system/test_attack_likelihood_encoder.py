"""An encoder has no front to search from, but other texts name its tokens after a split, too."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attacks.attacked import RowsAt
from attacks.likelihood import rank_anywhere
from attacks.view import View, view_of
from torch import Tensor
from transformers import AutoModel, BertConfig

from private_llm.errors import DomainError
from private_llm.token_sharding import ShardingPlan

PLAN = ShardingPlan(2, 4, 1, accept_weak_plan=True)
VOCABULARY = torch.arange(5, 200)
LENGTH = 16


@pytest.fixture(scope="module")
def model() -> RowsAt:
    """A small BERT with random weights, attacked behind its first layer."""
    torch.manual_seed(3)
    config = BertConfig(
        vocab_size=200, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=64, initializer_range=0.15,
    )  # fmt: skip
    return RowsAt(AutoModel.from_config(config).eval(), 1)


@pytest.fixture(scope="module")
def pieces() -> Tensor:
    """Random texts: two that are attacked, and the attacker's own."""
    return torch.from_numpy(np.random.default_rng(5).integers(5, 200, (802, LENGTH)))


def seen(model: RowsAt, ids: Tensor) -> View:
    """What CompNode 1 of two sees: masked results of its own rows."""
    return view_of(PLAN, [1], model.call, model.layer, ids, model.of(ids))


def ranks(model: RowsAt, view: View, ids: Tensor, texts: Tensor) -> list[int]:
    """Where the true token of every unknown position stands among 195; 98 by chance."""
    unknown = [position for position in range(LENGTH) if position not in view.rows]
    return [
        rank_anywhere(view, model, place, VOCABULARY, texts).tolist().index(int(ids[place])) + 1 for place in unknown
    ]


def test_true_tokens_are_among_the_likeliest(model: RowsAt, pieces: Tensor) -> None:
    """Sum of 24 ranks: 637 here, 2350 by chance; 842 without the others' mean, 1225 without their covariance."""
    found = [ranks(model, seen(model, ids), ids, pieces[2:]) for ids in pieces[:2]]
    assert [len(each) for each in found] == [12, 12]
    assert sum(map(sum, found)) < 740


def test_what_the_node_sees_matters(model: RowsAt, pieces: Tensor) -> None:
    found = ranks(model, seen(model, pieces[1]), pieces[0], pieces[2:])
    assert sum(rank <= 10 for rank in found) <= 3


def test_rows_of_many_texts_are_those_of_each(model: RowsAt, pieces: Tensor) -> None:
    together = model.everywhere(pieces[:3])
    for number in range(3):
        for many, one in zip(together, model.of(pieces[number]), strict=True):
            assert torch.allclose(many[number], one, atol=1e-5)


def test_a_position_that_is_seen_and_texts_of_another_length_are_refused(model: RowsAt, pieces: Tensor) -> None:
    view = seen(model, pieces[0])
    with pytest.raises(DomainError, match="a position whose row is not seen"):
        rank_anywhere(view, model, min(view.rows), VOCABULARY, pieces[2:])
    with pytest.raises(DomainError, match="texts have 9 tokens; want at least one result, 16 tokens"):
        rank_anywhere(view, model, 0, VOCABULARY, pieces[2:, :9])
