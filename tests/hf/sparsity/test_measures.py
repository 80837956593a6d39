from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from private_llm_hf.sparsity.predictor import Measures, measures_of, threshold_for
from torch import Tensor


def test_shares_are_counted_over_all_batches() -> None:
    first = torch.tensor([[True, True, False, False]]), torch.tensor([[3.0, 0, 1, 0]])
    found = measures_of([first, (torch.tensor([[True, False, False, False]]), torch.tensor([[1.0, 0, 0, 0]]))])
    # of 5 active neurons 4 are in predicted blocks; of 3 predicted blocks 2 are active; of 8 blocks 3 are active
    assert found == Measures(2, recall=4 / 5, precision=2 / 3, activity=3 / 8, predicted=3 / 8, most=2)
    assert found.f1 == pytest.approx(2 * (4 / 5) * (2 / 3) / (4 / 5 + 2 / 3))


def test_within_a_budget_shares_are_those_of_what_a_run_draws() -> None:
    """Two of four predicted are drawn; where one is predicted, one of the three others fills up."""
    first = torch.tensor([[True] * 4 + [False]]), torch.tensor([[1.0, 1, 0, 0, 1]])
    found = measures_of([first, (torch.tensor([[True] + [False] * 4]), torch.tensor([[0.0, 4, 0, 0, 0]]))], budget=2)
    assert found == Measures(2, recall=(1 + 1) / 7, precision=1 / 3, activity=4 / 10, predicted=3 / 10, most=2)


def test_where_nothing_happens_nothing_is_missed() -> None:
    found = measures_of([(torch.zeros(2, 3, dtype=torch.bool), torch.zeros(2, 3))])
    assert (found.recall, found.precision) == (1.0, 1.0)
    assert threshold_for(0.9, lambda: iter([(torch.randn(2, 3), torch.zeros(2, 3))])) == 0.0


@pytest.mark.parametrize("recall", [0.5, 0.9, 0.95, 0.999])
@pytest.mark.parametrize("spread", [1e-3, 1.0, 1e3])
def test_the_threshold_reaches_the_recall_and_little_more(recall: float, spread: float) -> None:
    chance = torch.Generator().manual_seed(0)
    active = torch.rand(400, 50, generator=chance) < 0.1
    scores = spread * (torch.randn(400, 50, generator=chance) + active)  # classes overlap: F1 wants a lower recall

    def data() -> Iterator[tuple[Tensor, Tensor]]:
        yield scores[:150], active[:150].float()
        yield scores[150:], active[150:].float()

    threshold = threshold_for(recall, data)
    found = float((scores[active] > threshold).double().mean())
    assert found >= recall
    if recall >= 0.9:
        assert found - recall < 2e-3


def test_where_all_is_active_nothing_is_left_out() -> None:
    scores = torch.linspace(-1, 1, 100)[:, None]
    threshold = threshold_for(0.5, lambda: iter([(scores, torch.ones(100, 1))]))
    assert bool((scores > threshold).all())


def test_blocks_weigh_by_their_neurons() -> None:
    scores = torch.tensor([[3.0, 2.0, 1.0, 2.5]])
    counts = torch.tensor([[1.0, 1.0, 8.0, 0.0]])
    threshold = threshold_for(0.8, lambda: iter([(scores, counts)]))
    assert threshold < 1.0, "two of three active blocks hold a fifth of the neurons"
