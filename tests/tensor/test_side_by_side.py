"""Comparisons of few elements with several thresholds: bits, rows and bytes as if each threshold were alone."""

import pytest
import torch
from torch import Tensor

from private_llm.config import PrivateConfig
from private_llm.net.ledger import Cost
from private_llm.protocols.registry import trio_prices
from private_llm.protocols.session import Session
from private_llm.protocols.share import BitShare
from private_llm.tensor.fixed import Fixed, less_than_price
from tests.harness import PLAIN, TRIO, run_meta, run_parties

THRESHOLDS = [-3.0, -0.5, 0.0, 0.25, 1.0, 2.0, 1000.0]
CONFIGS = [
    PLAIN, TRIO, PrivateConfig(protocol="dealer"), PrivateConfig(protocol="quad"), PrivateConfig(ring=32, frac_bits=12),
    PrivateConfig(adder="ripple"),
]  # fmt: skip


def rows_of_bits(session: Session, x: Fixed) -> list[Fixed]:
    """[x < threshold] as numbers, a result for each threshold."""
    rows = x.less_than(THRESHOLDS)
    assert isinstance(rows, BitShare)
    assert (rows.rows, rows.count) == (len(THRESHOLDS), x.numel())
    found = []
    for row in range(rows.rows):
        made = session.protocol.inject(rows.row(row), None, (1,), (1,))
        found.append(Fixed(session, made, 0))
    return found


def elements(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(count, generator=generator, dtype=torch.float64) * 2
    x[0] = 0.25  # a threshold itself
    return (x * 2**12).round() / 2**12


@pytest.mark.parametrize("config", CONFIGS, ids=["plain", "trio", "dealer", "quad", "trio 32", "ripple"])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 16, 31, 32, 33])
def test_each_threshold_has_its_row(config: PrivateConfig, count: int) -> None:
    x = elements(count)
    run = run_parties(config, rows_of_bits, [x])
    for values, threshold in zip(run.values, THRESHOLDS, strict=True):
        assert torch.equal(values, (x < threshold).double())


@pytest.mark.parametrize(("count", "lanes"), [(1, 1), (3, 4), (32, 32)])
def test_few_elements_fill_words(count: int, lanes: int) -> None:
    def compared(_: Session, x: Fixed) -> Fixed:
        x.less_than(THRESHOLDS, bits=40, low=3)
        return x

    cost = run_meta(TRIO, compared, [(count,)])
    assert cost == trio_prices.msb(7 * lanes, 40, 1, 3) == less_than_price(trio_prices, count, 40, 7, 3)
    assert cost.total < trio_prices.msb(count, 40, 7, 3).total


def test_many_elements_share_what_depends_on_masks_alone() -> None:
    def compared(_: Session, x: Fixed) -> Fixed:
        x.less_than(THRESHOLDS, bits=40)
        return x

    assert run_meta(TRIO, compared, [(33,)]) == trio_prices.msb(33, 40, 7) == less_than_price(trio_prices, 33, 40, 7)
    assert run_meta(TRIO, compared, [(0,)]) == Cost()
