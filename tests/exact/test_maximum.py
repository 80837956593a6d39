"""Maximum and arg max by tournament: exact on ties and extremes, any width, both rings."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from private_llm.config import PrivateConfig
from private_llm.errors import DomainError
from private_llm.exact.argmax import argmax, first_maximum
from private_llm.exact.maximum import levels, maximum, maximum_ragged, sizes
from private_llm.exact.ragged_rows import Rows
from private_llm.protocols.trio import cost
from private_llm.ring.ring import Ring
from tests.harness import PLAIN, TRIO, run_meta, run_parties

NARROW = PrivateConfig(ring=32, frac_bits=12)
KEYS = PrivateConfig(adder="keys")
every = pytest.mark.parametrize("config", [PLAIN, TRIO, NARROW, KEYS], ids=["plain", "trio", "trio 32", "keys"])
WIDTHS = [1, 2, 3, 5, 8, 64, 97]


def values(rows: int, width: int, largest: float, steps: int) -> Tensor:
    """Few distinct values, so that ties abound; the extremes of the domain among them."""
    generator = torch.Generator().manual_seed(width)
    x = torch.randint(-steps, steps + 1, (rows, width), generator=generator).double() / steps * largest
    x[0] = largest
    x[-1] = -largest
    return x


@every
@pytest.mark.parametrize("width", WIDTHS)
def test_maximum_is_exact(config: PrivateConfig, width: int) -> None:
    x = values(6, width, 2.0**20 - 1 if config.ring == 64 else 2.0**17, 4)
    assert torch.equal(run_parties(config, lambda _, a: maximum(a), [x]).value, x.amax(-1, keepdim=True))


@every
@pytest.mark.parametrize("width", WIDTHS)
def test_first_index_wins_ties(config: PrivateConfig, width: int) -> None:
    x = values(6, width, 2.0**20 - 1 if config.ring == 64 else 2.0**17, 2)
    expected = torch.stack([(row == row.max()).nonzero()[0, 0] for row in x])
    result = run_parties(config, lambda _, a: argmax(a), [x])
    assert torch.equal(result.elements[0].long(), expected)


def test_argmax_of_neighbouring_units() -> None:
    x = torch.arange(1000, dtype=torch.float64).roll(371) * 2.0**-18
    for config in (TRIO, KEYS):
        assert int(run_parties(config, lambda _, a: argmax(a), [x]).value) == int(x.argmax())


@pytest.mark.parametrize("truncation", ["unit", "exact"])
@pytest.mark.parametrize("protocol", ["trio", "dealer"])
def test_a_maximum_and_its_place_by_keys(protocol: str, truncation: str) -> None:
    """A round a level and two to take both apart, whatever the quotient's rounding was."""
    config = PrivateConfig.from_dict({"protocol": protocol, "truncation": truncation, "adder": "keys"})
    x = values(40, 37, 2.0**20 - 1, 3) * torch.rand(40, 1, dtype=torch.float64)
    x = (x * 2**18).round() / 2**18
    run = run_parties(config, lambda _, a: first_maximum(a), [x])
    assert torch.equal(run.values[0], x.amax(-1))
    assert torch.equal(run.elements[1].long(), torch.stack([(row == row.max()).nonzero()[0, 0] for row in x]))
    assert run.cost.rounds == 6 + (2 if truncation == "unit" else 5)
    assert run.cost == run_meta(config, lambda _, a: first_maximum(a), [x.shape])


FAR = PrivateConfig(adder="auto", bandwidth_mbit=1000.0, latency_ms=20.0)


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("width", [4, 5, 9, 16, 17, 100])
def test_the_last_entries_meet_at_once_over_a_slow_network(width: int, coarse: bool) -> None:
    """Two rounds for up to 16 entries: equal ones, neighbouring units and the ends of the domain included."""
    x = torch.cat([values(6, width, 2.0**20 - 2**10, 2), torch.randn(6, width, dtype=torch.float64)])
    x = torch.cat([x, torch.arange(width, dtype=torch.float64)[None] * 2.0**-18])
    x = (x * 2**18).round() / 2**18
    run = run_parties(FAR, lambda _, a: maximum(a, coarse), [x])
    off = x.amax(-1, keepdim=True) - run.value
    levels_before = max(0, (width - 1).bit_length() - 4)
    assert float(off.min()) >= 0.0
    assert float(off.max()) <= (levels_before * 2.0**-6 if coarse else 0.0)
    assert run.cost.rounds == levels_before + 2
    assert run.cost == run_meta(FAR, lambda _, a: maximum(a, coarse), [x.shape])


def test_many_rows_meet_in_pairs() -> None:
    """Where all pairs would take longer than the rounds that they save."""
    assert run_meta(FAR, lambda _, a: maximum(a, True), [(12, 16)]).rounds == 2
    assert run_meta(FAR, lambda _, a: maximum(a, True), [(400, 16)]).rounds > 2
    assert run_meta(PrivateConfig(adder="keys"), lambda _, a: maximum(a, True), [(12, 16)]).rounds == 4


def test_an_argmax_of_a_vocabulary_over_a_distance_takes_few_rounds() -> None:
    """Circuits for the levels of many entries, keys for those of few."""
    price = run_meta(FAR, lambda _, a: argmax(a), [(50272,)])
    assert price.rounds == 32
    assert price.total <= 300 * 50272
    assert run_meta(KEYS, lambda _, a: argmax(a), [(50272,)]).rounds == 16 + 2


def test_argmax_of_a_vocabulary_costs_log_rounds() -> None:
    price = run_meta(TRIO, lambda _, a: argmax(a), [(50272,)])
    assert price.rounds == 80
    assert price.total <= 91 * 50272


def test_meta_agrees_with_the_ledger() -> None:
    for function in (argmax, maximum):
        run = run_parties(TRIO, lambda _, a, f=function: f(a), [torch.randn(3, 77)])
        assert run_meta(TRIO, lambda _, a, f=function: f(a), [(3, 77)]) == run.cost


def test_argmax_refuses_nothing() -> None:
    with pytest.raises(DomainError, match="empty last dimension"):
        run_meta(TRIO, lambda _, a: argmax(a), [(3, 0)])


@every
def test_ragged_maximum(config: PrivateConfig) -> None:
    rows = Rows((1, 7, 2, 64, 1, 33))
    x = values(1, rows.total, 1.0, 50).reshape(-1) * 100
    x[:] = x.roll(1)
    expected = torch.stack([part.max() for part in x.split(list(rows.lengths))])
    run = run_parties(config, lambda _, a: maximum_ragged(a, rows), [(x * 4).round() / 4])
    assert torch.equal(run.value, (expected * 4).round() / 4)


@pytest.mark.parametrize("config", [PLAIN, TRIO], ids=["plain", "trio"])
def test_coarse_maximum_is_near_and_never_above(config: PrivateConfig) -> None:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(64, 100, generator=generator, dtype=torch.float64) * 0.05
    x = (x * 2**18).round() / 2**18
    gap = x.amax(-1, keepdim=True) - run_parties(config, lambda _, a: maximum(a, coarse=True), [x]).value
    assert float(gap.min()) >= 0
    assert float(gap.max()) < 7 * 2.0**-6


def test_price_per_pair() -> None:
    for coarse, low, rounds in ((False, 0, 5), (True, 12, 4)):
        price = run_meta(TRIO, lambda _, a, c=coarse: maximum(a, coarse=c), [(640, 2)])
        assert price == cost.msb(640, 40, low=low) + cost.inject(Ring(64), 640, 1, 1, 0)
        assert price.rounds == rounds


@pytest.mark.parametrize("lengths", [(1,), (1, 1), (5, 1, 8, 3), (64, 7)])
def test_sizes_of_levels_are_those_of_their_positions(lengths: tuple[int, ...]) -> None:
    def shapes(found: object) -> list[list[int]]:
        return [[each.numel() for each in (x.left, x.right, x.bye, x.order)] for x in found]  # type: ignore[attr-defined]

    assert shapes(sizes(Rows(lengths))) == shapes(levels(Rows(lengths)))
