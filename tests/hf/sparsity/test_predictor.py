from __future__ import annotations

import pytest
import torch
from private_llm_hf.sparsity.predictor import Predictor
from private_llm_hf.sparsity.settings import PredictorConfig

from private_llm.errors import ConfigError


def made(units: int = 10, width: int = 6, **settings: object) -> Predictor:
    return Predictor(width, units, PredictorConfig(**{"rank": 3, **settings}), seed=5)


@pytest.mark.parametrize("hidden", ["linear", "relu"])
def test_it_is_two_layers_and_a_strict_threshold(hidden: str) -> None:
    predictor = made(hidden=hidden)
    with torch.no_grad():
        predictor.fc1.bias.add_(0.3)
        predictor.fc2.bias.add_(-0.2)
    predictor.requires_grad_(False)
    x = torch.randn(2, 7, 6, dtype=torch.float16)
    h = x.float() @ predictor.fc1.weight.T + 0.3
    want = (h.relu() if hidden == "relu" else h) @ predictor.fc2.weight.T - 0.2
    torch.testing.assert_close(predictor(x), want)
    assert torch.equal(predictor.predict(x), predictor(x) > 0)
    at = float(predictor(x)[0, 0, 0])
    assert not predictor.with_config(PredictorConfig(rank=3, hidden=hidden, threshold=at)).predict(x)[0, 0, 0]


def test_a_budget_is_kept_to_at_random_among_what_is_predicted() -> None:
    predictor = made(budget=0.35)
    scores = torch.tensor([[9.0, -1, 8, 7, 6, -2, -3, -4, -5, -6], [-1.0] * 9 + [2.0]])
    assert predictor.most == 3
    drawn = torch.stack([predictor.select(scores, torch.Generator().manual_seed(seed)) for seed in range(200)])
    assert drawn.sum(2).unique().tolist() == [3]
    often = drawn.float().mean(0)
    assert often[0].nonzero()[:, 0].tolist() == [0, 2, 3, 4]
    assert float((often[0, [0, 2, 3, 4]] - 3 / 4).abs().max()) < 0.15
    assert often[1, 9] == 1
    assert float((often[1, :9] - 2 / 9).abs().max()) < 0.15
    assert made(budget=0.01).most == 1
    assert made().most == 10


def test_blocks_cover_all_neurons() -> None:
    predictor = made(units=10, block=4)
    assert predictor.fc2.weight.shape == (3, 3)
    found = predictor.expand(torch.tensor([[True, False, True]]))
    assert found.tolist() == [[True] * 4 + [False] * 4 + [True] * 2]


def test_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    first = made()
    torch.manual_seed(2)
    assert torch.equal(first.fc1.weight, made().fc1.weight)
    other = Predictor(6, 10, PredictorConfig(rank=3), seed=6)
    assert not torch.equal(first.fc1.weight, other.fc1.weight)


def test_shapes_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="rank: got 7 for inputs of width 6"):
        made(rank=7)
    with pytest.raises(ConfigError, match="width 0"):
        made(width=0)
    with pytest.raises(ConfigError, match="another predictor for another shape"):
        made().with_config(PredictorConfig(rank=2))
