from __future__ import annotations

import pytest
import torch
from private_llm_hf.sparsity.predictor import HeadActivity, active_neurons, block_counts
from torch import nn
from transformers.pytorch_utils import Conv1D


def test_a_neuron_is_active_if_it_is_not_zero() -> None:
    assert active_neurons(torch.tensor([[0.0, -0.0, 1e-30, -2.0]])).tolist() == [[False, False, True, True]]


def test_heads_are_left_out_from_the_smallest_until_the_tolerance() -> None:
    projection = nn.Linear(4, 4)
    with torch.no_grad():
        projection.weight.copy_(torch.eye(4))
        projection.bias.fill_(100.0)  # no part of what heads do
    outputs = torch.tensor([[10.0, 0.5, 0.4, 0.2], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    find = HeadActivity(projection, heads=4, tolerance=0.1)
    # 0.2 + 0.4 fit into a tenth of 10.02, and 0.5 no more, though 0.5 alone would
    assert find(outputs).tolist() == [[True, True, False, False], [True] * 4, [False] * 4]


@pytest.mark.parametrize("kind", [nn.Linear, Conv1D])
@pytest.mark.parametrize("tolerance", [0.05, 0.3, 0.8])
def test_leaving_inactive_heads_out_moves_the_output_by_no_more(kind: type[nn.Module], tolerance: float) -> None:
    torch.manual_seed(0)
    projection = nn.Linear(48, 20) if kind is nn.Linear else Conv1D(20, 48)
    with torch.no_grad():
        projection.weight.normal_()
    sizes = torch.tensor([4.0, 2.0, 1.0, 0.5, 0.1, 0.05]).repeat_interleave(8)
    outputs = torch.randn(200, 48) * sizes
    active = HeadActivity(projection, 6, tolerance)(outputs)
    kept = outputs * active.repeat_interleave(8, dim=1)
    with torch.no_grad():
        moved = (projection(kept) - projection(outputs)).norm(dim=1)
        whole = (projection(outputs) - projection(torch.zeros(1, 48))).norm(dim=1)
    assert bool((moved <= tolerance * whole * (1 + 1e-4)).all())
    assert 0.0 < float(active.float().mean()) < 1.0


def test_blocks_count_their_neurons_and_the_last_may_be_short() -> None:
    active = torch.tensor([[1, 0, 1, 1, 0, 0, 1]]).bool()
    assert block_counts(active, 3).tolist() == [[2.0, 1.0, 1.0]]
    assert block_counts(active, 1).tolist() == [[1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0]]
