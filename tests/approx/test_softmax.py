"""Softmax, dense and ragged: error, extremes, row patterns, cost."""

from __future__ import annotations

import math
import weakref

import pytest
import torch
from torch import Tensor

from private_llm.approx.normalise import QUARTERS, grid
from private_llm.approx.softmax import softmax, softmax_ragged
from private_llm.config import PrivateConfig
from private_llm.errors import DomainError
from private_llm.exact.ragged_rows import Rows
from private_llm.net.ledger import Cost
from private_llm.protocols.one_step import TOTAL_BITS
from private_llm.protocols.registry import trio_prices as cost
from private_llm.protocols.share import BitWidths
from private_llm.ring.ring import Ring
from tests.exact.prices import tournament_price
from tests.harness import PLAIN, TRIO, run_meta, run_parties

both = pytest.mark.parametrize("config", [PLAIN, TRIO], ids=["plain", "trio"])
BOUND = 5e-4
R = Ring(64)


def scores(*shape: int, seed: int = 0, spread: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64) * spread


def dense(config: PrivateConfig, x: Tensor) -> Tensor:
    return run_parties(config, lambda _, a: softmax(a), [x]).value


def causal_rows(heads: int, queries: int, keys: int) -> Rows:
    return Rows(tuple(keys - queries + 1 + q for _ in range(heads) for q in range(queries)))


PATTERNS = {
    "causal": causal_rows(3, 9, 9),
    "causal with a cache": causal_rows(2, 4, 11),
    "one": Rows((1,)),
    "ones": Rows((1, 1, 1)),
    "mixed": Rows((5, 64, 1, 2, 3, 128, 7)),
    "equal": Rows((6,) * 8),
}


def ragged_truth(x: Tensor, rows: Rows) -> Tensor:
    return torch.cat([part.softmax(0) for part in x.split(list(rows.lengths)) if part.numel()])


@both
@pytest.mark.parametrize("shape", [(24, 128), (2, 3, 5, 7), (65, 1), (33, 2), (3, 1000)])
def test_normal_scores(config: PrivateConfig, shape: tuple[int, ...]) -> None:
    x = scores(*shape)
    p = dense(config, x)
    assert p.shape == x.shape
    assert float((p - x.softmax(-1)).abs().max()) <= 1e-4
    # Each term carries half a unit of truncation, the reciprocal 2e-5.
    assert float((p.sum(-1) - 1).abs().max()) <= 2e-5 + shape[-1] * 2.0**-18


@both
def test_extreme_scores(config: PrivateConfig) -> None:
    """One-hot, uniform, ties, gaps around the clip, and scores near the end of the domain."""
    rows = [
        [5e5] + [-5e5] * 15,
        [-5e5] * 15 + [5e5],
        [3.25] * 16,
        [-5e5] * 16,
        [100.0, 100.0] + [0.0] * 14,
        [14.0 + k / 64 for k in range(15)] + [0.0],
        [0.0] + [-14.0 - k / 64 for k in range(15)],
        [k / 1024 for k in range(16)],
    ]
    x = torch.tensor(rows, dtype=torch.float64)
    assert float((dense(config, x) - x.softmax(-1)).abs().max()) <= 1e-4


@both
def test_long_rows_with_a_heavy_tail(config: PrivateConfig) -> None:
    """A thousandfold tail is where small absolute errors of exp add up."""
    x = torch.cat([torch.zeros(2, 1), scores(2, 4095, spread=1.0) - 11.0], 1)
    truth = x.softmax(-1)
    assert float((dense(config, x) - truth).abs().max()) <= BOUND


@both
@pytest.mark.parametrize("rows", PATTERNS.values(), ids=PATTERNS.keys())
def test_ragged_rows(config: PrivateConfig, rows: Rows) -> None:
    x = scores(rows.total, seed=3)
    run = run_parties(config, lambda _, a: softmax_ragged(a, rows), [x])
    assert float((run.value - ragged_truth(x, rows)).abs().max()) <= 1e-4
    lengths = torch.tensor(rows.lengths)
    again = run_parties(PLAIN, lambda _, a: softmax_ragged(a, Rows.of(lengths)), [x])
    assert float((again.value - run.value).abs().max()) <= 1e-4
    assert run_meta(config, lambda _, a: softmax_ragged(a, rows), [(rows.total,)]) == run.cost


def test_empty_rows_count_for_nothing() -> None:
    x = scores(5)
    run = run_parties(TRIO, lambda _, a: softmax_ragged(a, Rows.of([0, 3, 0, 2, 0])), [x])
    other = run_parties(TRIO, lambda _, a: softmax_ragged(a, Rows((3, 2))), [x])
    assert run.cost == other.cost
    assert float((run.value - ragged_truth(x, Rows((3, 2)))).abs().max()) <= 1e-4


def price(entries: int, row_count: int, width: int) -> Cost:
    """The module's steps, in formulas: tournament, exp, reciprocal of the row sums, product."""
    total = tournament_price(row_count, width, 26)
    total = total + cost.msb(entries, 40, low=18) + cost.exponential(R, entries, TOTAL_BITS - 24)
    high = 1.3 * width
    whole = math.ceil(math.log2(high))
    thresholds, _ = grid(QUARTERS, 0.99, high)
    count = len(thresholds)
    given = 24 + 6 + whole + 4
    assert row_count <= 8  # which all thresholds meet side by side, 8 lanes each
    total = total + cost.msb(8 * count, 24 + whole + 2, low=15)
    total = total + cost.inject(R, row_count, count, count, 0, low=given)
    total = total + cost.truncate(R, row_count, 24 + 6 + whole - 18, BitWidths(given, 64))
    total = total + cost.poly(R, row_count, 3, 3 * 18 + 6 - 18)
    total = total + cost.inject(R, row_count, count, count, 0)
    return total + cost.product(R, entries, 24 + 24 + whole - 18)


def test_price_is_the_sum_of_its_steps() -> None:
    run = run_parties(TRIO, lambda _, a: softmax(a), [scores(7, 64)])
    assert run.cost == price(7 * 64, 7, 64)
    assert run_meta(TRIO, lambda _, a: softmax(a), [(7, 64)]) == run.cost


def test_aims_for_a_bert_layer() -> None:
    """12 x 128 x 128: at most 80 MB over all links (32 here), and 129 / 256 of it, plus row work, when causal."""
    whole = run_meta(TRIO, lambda _, a: softmax(a), [(12, 128, 128)])
    assert whole.total <= 32e6
    assert whole.rounds == 43
    rows = causal_rows(12, 128, 128)
    half = run_meta(TRIO, lambda _, a: softmax_ragged(a, rows), [(rows.total,)])
    assert half.total <= 0.54 * whole.total


@pytest.mark.parametrize("width", [6301, 6302, 20_000, 65_536])
def test_one_entry_of_a_long_row_may_have_all_of_it(width: int) -> None:
    x = torch.full((2, width), -20.0, dtype=torch.float64)
    x[0, 5] = x[1, -1] = 4.0
    x[1, 7] = 3.5
    p = dense(TRIO, x)
    assert float((p - x.softmax(-1)).abs().max()) <= 1e-4
    rounds = run_meta(TRIO, lambda _, a: softmax(a), [(1, width)]).rounds
    assert rounds == tournament_price(1, width, 26).rounds + 15 + (width > 6301)
    assert rounds < 4 * math.ceil(math.log2(width))


def test_refusals() -> None:
    with pytest.raises(DomainError, match="rows of 0 entries"):
        run_meta(TRIO, lambda _, a: softmax(a), [(3, 0)])
    with pytest.raises(DomainError, match="want 1 to 65536"):
        run_meta(TRIO, lambda _, a: softmax(a), [(1, 65537)])
    with pytest.raises(DomainError, match="10 entries in sum"):
        run_meta(TRIO, lambda _, a: softmax_ragged(a, Rows((4, 6))), [(11,)])
    with pytest.raises(DomainError, match="negative"):
        Rows((3, -1))
    with pytest.raises(DomainError, match="64-bit ring"):
        run_meta(PrivateConfig(ring=32, frac_bits=12), lambda _, a: softmax(a), [(3, 4)])


def test_rows_are_planned_once_while_somebody_holds_them() -> None:
    rows = Rows((5, 3))
    first = rows.numbers(torch.device("cpu")).tournament
    assert rows.numbers(torch.device("cpu")).tournament is first
    assert [level.left.numel() for level in first] == [3, 2, 1]
    plan = weakref.ref(first[0])
    del first, rows  # plans are as large as the scores: those of every length ever met would fill the memory
    assert plan() is None
