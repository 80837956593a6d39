"""The script's formulas of GEMM, SOMM, SIMM and SpGEMM, against real runs of small products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import compare_sparse_products
import pytest
import torch
from torch import Tensor

from private_llm.config import PrivateConfig
from private_llm.oblivious.sparse_products import sparse_input_product, sparse_output_product
from private_llm.protocols.registry import dealer_prices as dealer
from private_llm.ring.ring import RING64
from tests.harness import run_parties

POSITIONS, NEURONS, WIDTH = 4, 7, 3
CONFIGS = {
    "dealer, remask": PrivateConfig(protocol="dealer", matmul="remask"),
    "dealer": PrivateConfig(protocol="dealer"),
    "trio": PrivateConfig(),
}


@pytest.fixture
def script() -> Any:
    return compare_sparse_products


@pytest.fixture
def active() -> Tensor:
    """Two neurons that nobody needs, and a position without any."""
    pattern = torch.zeros(POSITIONS, NEURONS, dtype=torch.bool)
    pattern[[0, 0, 1, 3, 3], [0, 2, 2, 5, 6]] = True
    return pattern


def sent(setting: str, program: Callable[..., Any], *shapes: tuple[int, ...]) -> int:
    return run_parties(CONFIGS[setting], program, [torch.zeros(shape).double() for shape in shapes]).cost.total


def alone(active: Tensor) -> list[Tensor]:
    """Each active entry as a pattern of its own."""
    return [torch.zeros_like(active).index_put((i, j), torch.tensor(True)) for i, j in active.nonzero()]


@pytest.mark.parametrize("setting", CONFIGS)
def test_fc1(script: Any, active: Tensor, setting: str) -> None:
    found = script.methods_fc1(*script.SETTINGS[setting], script.counted(active), WIDTH)
    shapes = (POSITIONS, WIDTH), (WIDTH, NEURONS)
    assert found["GEMM"] == sent(setting, lambda _, x, w: x.matmul(w), *shapes)
    assert found["SOMM"] == sent(setting, lambda _, x, w: sparse_output_product(x, w, active), *shapes)
    # messages are whole words, so products by themselves cost a little more to finish than all at once
    single = [sent(setting, lambda _, x, w, p=p: sparse_output_product(x, w, p), *shapes) for p in alone(active)]
    finished = script.dealer.product(RING64, 1, script.FRAC).total
    together = script.dealer.product(RING64, len(single), script.FRAC).total
    assert found["SpGEMM"] == sum(single) - len(single) * finished + together


@pytest.mark.parametrize("setting", CONFIGS)
def test_fc2(script: Any, active: Tensor, setting: str) -> None:
    found = script.methods_fc2(*script.SETTINGS[setting], script.counted(active), WIDTH)
    weight = (NEURONS, WIDTH)
    assert found["GEMM"] == sent(setting, lambda _, x, w: x.matmul(w), (POSITIONS, NEURONS), weight)
    count = int(active.sum())
    assert found["SIMM"] == sent(setting, lambda _, x, w: sparse_input_product(x, w, active), (count,), weight)
    single = [sent(setting, lambda _, x, w, p=p: sparse_input_product(x, w, p), (1,), weight) for p in alone(active)]
    finished = dealer.product(RING64, WIDTH, script.FRAC).total
    together = dealer.product(RING64, 3 * WIDTH, script.FRAC).total
    assert found["SpGEMM"] == sum(single) - len(single) * finished + together


def test_patterns_have_the_sparsity_that_was_asked_for(script: Any) -> None:
    values = [torch.randn(512, 64, generator=torch.Generator().manual_seed(3))]
    for level in script.LEVELS:
        for name, activities in script.patterns(level, values, script.np.random.default_rng(0)).items():
            for a in activities:
                assert a.active / (a.positions * a.neurons) == pytest.approx(1 - level, abs=0.002), name
    assert script.patterns(0.9, values, script.np.random.default_rng(0))["shared"][0].columns == 1638


def test_the_paper_s_saving_appears_where_positions_share_their_neurons(script: Any) -> None:
    """Section 7.6: 8.1x at 90 %."""
    prices, remask = script.SETTINGS["dealer, remask"]
    found = script.methods_fc1(prices, remask, script.Activity(512, 16384, 512 * 1638, 512, 1638), 4096)
    assert found["GEMM"] / found["SOMM"] == pytest.approx(8.1, abs=0.15)


@pytest.mark.parametrize(
    ("count", "text"), [(504_000, "0.504 MB"), (25.8e6, "25.8 MB"), (1.37e9, "1.37 GB"), (990e9, "990 GB")]
)
def test_sizes_have_decimal_units(script: Any, count: float, text: str) -> None:
    assert script.size(count) == text


def test_ratios_say_which_way_they_go(script: Any) -> None:
    assert [script.times(ratio) for ratio in (1 / 725, 0.5, 1.0, 8.17, 99.3)] == ["1/725", "1/2", "1x", "8.2x", "99x"]
