"""Predictors with scores of a known size: the same predictions, from weights that fixed point can hold."""

from __future__ import annotations

import pytest
import torch
from private_llm_hf.sparsity.predictor import Predictor
from private_llm_hf.sparsity.settings import PredictorConfig
from private_llm_hf.sparsity.sharing import scaled

WIDTH, RANK, UNITS = 48, 16, 96


@pytest.mark.parametrize("hidden", ["linear", "relu"])
@pytest.mark.parametrize("gain", [2.0**-11, 1.0, 2.0**11])
@pytest.mark.parametrize("size", [2.0**-20, 1.0, 2.0**20])
def test_scores_are_of_one_size_and_keep_their_signs(hidden: str, gain: float, size: float) -> None:
    config = PredictorConfig(rank=RANK, hidden=hidden, threshold=0.3 * size)  # type: ignore[arg-type]
    made, chance = Predictor(WIDTH, UNITS, config), torch.Generator().manual_seed(1)
    with torch.no_grad():
        made.fc1.weight[3] = 0  # a hidden value and a unit that say nothing
        made.fc2.weight.mul_(size)
        made.fc2.bias.normal_(0, size, generator=chance)
        made.fc2.weight[5], made.fc2.bias[5] = 0, 0
    weight = gain * (0.5 + torch.rand(WIDTH, generator=chance, dtype=torch.float64))
    shift = 0.1 * gain * torch.randn(WIDTH, generator=chance, dtype=torch.float64)
    rows = torch.nn.functional.layer_norm(torch.randn(500, WIDTH, generator=chance, dtype=torch.float64), (WIDTH,))
    x = rows * weight + shift
    found = {name: value.double() for name, value in scaled(made, weight, shift).items()}
    inner = x @ found["fc1.weight"].t() + found["fc1.bias"]
    inner = inner.relu() if hidden == "relu" else inner
    scores = inner @ found["fc2.weight"].t() + found["fc2.bias"]
    with torch.no_grad():
        made.double()
        wide = made.fc1(x).relu() if hidden == "relu" else made.fc1(x)
        want = made.fc2(wide) - config.threshold
    near = want.abs() < 1e-4 * want.abs().mean()
    assert bool(((scores >= 0) == (want >= 0))[~near].all())
    largest = float(scores.abs().max())
    assert largest < 2 * (WIDTH**0.5 + 1)
    if hidden == "linear":  # by unit; the one that says nothing apart
        sizes = scores.square().mean(0).sqrt()
        assert 1 < float(sizes[sizes > 0].min()) < float(sizes.max()) < 4
    assert float(inner.square().mean().sqrt()) < 2.0**9
    for name in ("fc1.weight", "fc2.weight"):  # 18 fractional bits
        assert float(found[name].square().mean().sqrt()) > 2.0**-10
