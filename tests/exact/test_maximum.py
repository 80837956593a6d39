"""Maximum and arg max by tournament: exact on ties and extremes, any width, both rings."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from private_llm.approx.softmax import softmax_ragged
from private_llm.config import PrivateConfig
from private_llm.errors import DomainError, UnsupportedOp
from private_llm.exact.comparisons import comparing
from private_llm.exact.maximum import argmax, first_maximum, is_cut, maximum, maximum_ragged
from private_llm.exact.ragged_rows import Rows
from private_llm.net.ledger import Cost
from private_llm.protocols.registry import Pricing
from private_llm.protocols.registry import trio_prices as cost
from private_llm.protocols.session import Session, meta_session
from private_llm.protocols.share import Share
from private_llm.ranges import Ranges
from private_llm.ring.ring import Ring
from private_llm.tensor.fixed import Fixed
from tests.exact.prices import group_price, pair_price, tournament_price
from tests.harness import PLAIN, TRIO, run_meta, run_parties

NARROW = PrivateConfig(ring=32, frac_bits=12)
KEYS = PrivateConfig(adder="keys")
QUAD = PrivateConfig(protocol="quad")
EXACT = PrivateConfig(truncation="exact")
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
    at_once = width > 4  # fewer meet in pairs, in as many rounds
    levels_before = max(0, (width - 1).bit_length() - 4) if at_once else 2
    assert float(off.min()) >= 0.0
    assert float(off.max()) <= (levels_before * 2.0**-6 if coarse else 0.0)
    assert run.cost.rounds == levels_before + 2 * at_once
    assert run.cost == run_meta(FAR, lambda _, a: maximum(a, coarse), [x.shape])


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("lengths", [(16, 13, 1, 9), (5, 5), (1, 2, 6), (61, 57, 33, 2), (4, 3, 1)])
def test_rows_of_different_lengths_meet_at_once_too(lengths: tuple[int, ...], coarse: bool) -> None:
    """Shorter ones bring copies of their last entry, which is the largest in some and in others not."""
    rows = Rows(lengths)
    x = (torch.randn(rows.total, dtype=torch.float64) * 2**18).round() / 2**18
    last = torch.tensor(lengths).cumsum(0) - 1
    x[last[::2]] = 9.0
    run = run_parties(FAR, lambda _, a: maximum_ragged(a, rows, coarse), [x])
    off = torch.stack([part.max() for part in x.split(list(lengths))]) - run.value
    at_once = max(lengths) > 4
    levels_before = max(0, (max(lengths) - 1).bit_length() - 4) if at_once else 2
    assert float(off.min()) >= 0.0
    assert float(off.max()) <= (levels_before * 2.0**-6 if coarse else 0.0)
    assert run.cost.rounds == levels_before + 2 * at_once
    assert run.cost == run_meta(FAR, lambda _, a: maximum_ragged(a, rows, coarse), [x.shape])


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


@pytest.mark.parametrize("config", [TRIO, KEYS, QUAD], ids=["trio", "keys", "quad"])
def test_no_rows_have_no_maxima(config: PrivateConfig) -> None:
    for function in (argmax, lambda x: maximum(x, coarse=True).view(lambda part: part.squeeze(-1))):
        assert run_parties(config, lambda _, a, f=function: f(a), [torch.zeros(0, 5)]).value.shape == (0,)


@every
def test_ragged_maximum(config: PrivateConfig) -> None:
    rows = Rows((1, 7, 2, 64, 1, 33))
    x = values(1, rows.total, 1.0, 50).reshape(-1) * 100
    x[:] = x.roll(1)
    expected = torch.stack([part.max() for part in x.split(list(rows.lengths))])
    run = run_parties(config, lambda _, a: maximum_ragged(a, rows), [(x * 4).round() / 4])
    assert torch.equal(run.value, (expected * 4).round() / 4)


@pytest.mark.parametrize("config", [PLAIN, QUAD, KEYS, EXACT], ids=["plain", "quad", "keys", "exact"])
def test_coarse_maximum_is_near_and_never_above(config: PrivateConfig) -> None:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(64, 100, generator=generator, dtype=torch.float64) * 0.05
    x = (x * 2**18).round() / 2**18
    gap = x.amax(-1, keepdim=True) - run_parties(config, lambda _, a: maximum(a, coarse=True), [x]).value
    assert float(gap.min()) >= 0
    assert float(gap.max()) < 7 * 2.0**-6


def lifted(x: Fixed) -> Fixed:
    """The same value where all bits are right: what is right in the lowest bits moves up to the highest."""
    assert x.width is not None
    return x.finer(x.frac + 64 - x.width)


def spread_rows() -> Tensor:
    """Rows with near ties of all kinds, equal entries, and both ends of the domain."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(64, 100, generator=generator, dtype=torch.float64)
    x *= torch.tensor([0.0, 0.01, 1.0, 1000.0], dtype=torch.float64).repeat(16)[:, None]
    x[0, 3], x[1], x[2], x[3, ::2] = 2.0**20 - 2.0**10, 2.0**10 - 2.0**20, 2.0**20 - 2.0**10, 2.0**10 - 2.0**20
    x[3, 1::2] = 2.0**20 - 2.0**10
    return (x * 2**18).round() / 2**18


@pytest.mark.parametrize("protocol", ["trio", "dealer"])
@pytest.mark.parametrize("rows", [None, Rows((1, 99)), Rows((2, 3, 95))])
def test_a_maximum_of_cut_entries_is_near_and_never_above(protocol: str, rows: Rows | None) -> None:
    """Less than 3/16 below, at any masks; also of a few entries, and of one that meets nobody."""
    config, x = PrivateConfig.from_dict({"protocol": protocol}), spread_rows()
    if rows is None:
        run = run_parties(config, lambda _, a: lifted(maximum(a, coarse=True)), [x])
        gap = x.amax(-1, keepdim=True) - run.value
    else:
        flat, every = x.reshape(-1), Rows(rows.lengths * 64)
        run = run_parties(config, lambda _, a: lifted(maximum_ragged(a, every, coarse=True)), [flat])
        gap = torch.stack([part.max() for part in flat.split(list(every.lengths))]) - run.value
    assert float(gap.min()) > 0
    assert float(gap.max()) < 3 / 16


@pytest.mark.parametrize("size", [3, 4, 5, 7, 8, 9, 15, 16])
@pytest.mark.parametrize("protocol", ["trio", "dealer"])
def test_groups_of_cut_entries_meet_at_once(protocol: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Near and never above, with equal entries, and the last group filled with copies."""
    config, x = PrivateConfig.from_dict({"protocol": protocol}), spread_rows()[:, : 2 * size + 1]
    monkeypatch.setattr("private_llm.exact.maximum._group_size", lambda x, rows, width: size if width > 3 else 3)
    run = run_parties(config, lambda _, a: lifted(maximum(a, coarse=True)), [x])
    gap = x.amax(-1, keepdim=True) - run.value
    assert float(gap.min()) > 0
    assert float(gap.max()) < 3 / 16
    if protocol == "trio":
        assert run.cost == group_price(64 * 3, size, 26) + group_price(64, 3, 26)


def test_groups_are_chosen_by_the_network_and_never_take_longer() -> None:
    """Over a slow link all meet at once, over a narrow one in pairs; ripple adders and whole entries know pairs."""
    far = replace(TRIO, adder="prefix", bandwidth_mbit=1000, latency_ms=20)
    narrow = replace(TRIO, adder="prefix", bandwidth_mbit=1, latency_ms=0.1)
    rounds = {}
    for name, config in (("far", far), ("default", TRIO), ("narrow", narrow)):
        run = run_meta(config, lambda _, a: lifted(maximum(a, coarse=True)), [(32, 513)])
        assert run == tournament_price(32, 513, 26, config)
        pairs = Cost()
        for n in (256, 128, 64, 32, 16, 8, 4, 2, 1, 1):
            pairs = pairs + pair_price(32 * n, 26)
        assert Pricing.of(config).seconds(run) <= Pricing.of(config).seconds(pairs)
        rounds[name] = run.rounds
    assert rounds["far"] < rounds["default"] < rounds["narrow"] == 40
    assert run_meta(replace(TRIO, adder="ripple"), lambda _, a: maximum(a, coarse=True), [(32, 16)]).rounds == 4 * 26


NETWORKS = [(10.0, 200.0), (100_000.0, 0.0), (1000.0, 1.0), (1000.0, 20.0), (1.0, 0.1)]
"""Mbit/s and ms, by which all methods are chosen."""


@st.composite
def problems(draw: st.DrawFn) -> tuple[PrivateConfig, int | None, Rows, Tensor]:
    """A configuration, a calibrated exponent of scores, and ragged rows: ties, ends of the range, neighbours."""
    protocol, adder = (
        draw(st.sampled_from(["trio", "trio", "dealer", "quad"])),
        draw(st.sampled_from(["prefix", "auto"])),
    )
    bandwidth, latency = draw(st.sampled_from(NETWORKS))
    network = {"latency_ms": latency} if adder == "prefix" else {"latency_ms": latency, "bandwidth_mbit": bandwidth}
    known = draw(st.sampled_from([None, -3, 6, 9, 18]))
    end = (2**20 - 2**10 if known is None else 2 ** max(known, 6)) << 18
    near = draw(st.integers(-end, end - 3))
    values = torch.tensor([near, near + 1, near + 3, -end, end, *draw(st.lists(st.integers(-end, end), max_size=3))])
    values = values[draw(st.integers(0, 4)) :]
    lengths = draw(st.lists(st.sampled_from([1, 2, 3, 5, 8, 13, 15, 16, 17, 33, 65]), min_size=1, max_size=3))
    rows = Rows(tuple(lengths * draw(st.sampled_from([1, 1, 4]))))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    found = values[torch.randint(len(values), (rows.total,), generator=generator)].double() / 2**18
    return PrivateConfig.from_dict({"protocol": protocol, "adder": adder, **network}), known, rows, found


@given(problems())
@settings(max_examples=30, deadline=None)
def test_maxima_are_near_and_softmax_is_right_whatever_the_network(
    problem: tuple[PrivateConfig, int | None, Rows, Tensor],
) -> None:
    config, known, rows, x = problem

    def out(session: Session, x: Fixed) -> list[Fixed]:
        if known is not None:
            session.numerics.ranges = Ranges({session.protocol.module: {"score": known}})
        with comparing(session, "score"):
            return [maximum_ragged(x, rows, coarse=True).restore_high_bits(), softmax_ragged(x, rows)]

    near, shares = run_parties(config, out, [x]).values
    parts = x.split(list(rows.lengths))
    gap = torch.stack([part.max() for part in parts]) - near
    assert float(gap.min()) >= 0
    assert float(gap.max()) < 1 / 4
    assert torch.allclose(shares, torch.cat([part.softmax(-1) for part in parts]), rtol=0, atol=5e-4)


@pytest.mark.parametrize(("known", "width"), [(4, 13), (9, 16), (19, 26), (30, 26)])
def test_a_known_range_makes_the_ring_of_cut_entries_smaller(
    known: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out(session: Session, x: Fixed) -> Fixed:
        session.numerics.ranges = Ranges({session.protocol.module: {"score": known}})
        with comparing(session, "score"):
            return lifted(maximum(x, coarse=True))

    x = spread_rows().clamp(-(2.0 ** min(known, 18)), 2.0 ** min(known, 18))
    run = run_parties(TRIO, out, [x])
    gap = x.amax(-1, keepdim=True) - run.value
    assert float(gap.min()) > 0
    assert float(gap.max()) < 3 / 16
    bits = (max(known, 6) + 1 if known < 19 else 20) + 6
    assert bits == width
    assert run.cost == tournament_price(64, 100, width)
    pairs = Cost()
    for n in (50, 25, 12, 6, 3, 2, 1):
        pairs = pairs + pair_price(64 * n, width)
    assert run.cost.rounds < pairs.rounds
    with monkeypatch.context() as patched:
        patched.setattr("private_llm.exact.maximum._group_size", lambda x, rows, width: 2)
        assert run_parties(TRIO, out, [x]).cost == pairs


def test_entries_are_cut_where_the_protocol_can_and_bits_are_left() -> None:
    sessions = [
        meta_session(config, 1) for config in (TRIO, PrivateConfig(protocol="dealer"), KEYS, EXACT, NARROW, QUAD)
    ]
    held = [Fixed(session, Share((torch.empty(4, dtype=torch.int64, device="meta"),) * 2), 18) for session in sessions]
    assert [is_cut(x) for x in held] == [True, True, False, False, False, False]
    assert is_cut(replace(held[0], width=40))
    assert not is_cut(replace(held[0], width=39))
    assert not is_cut(replace(held[0], frac=3))
    with pytest.raises(DomainError, match="local_truncate"):
        held[0].local_truncate(4, 51)
    with pytest.raises(UnsupportedOp, match="local division"):
        held[5].local_truncate(4, 26)


def test_price_per_pair() -> None:
    price = run_meta(TRIO, lambda _, a: maximum(a), [(640, 2)])
    assert price == cost.msb(640, 40) + cost.inject(Ring(64), 640, 1, 1, 0)
    assert price.rounds == 5
    price = run_meta(TRIO, lambda _, a: maximum(a, coarse=True), [(640, 2)])
    assert price == cost.msb(640, 26) + cost.inject(Ring(64), 640, 1, 1, 0, low=26)
    assert price.total == 640 * 28.75
    assert price.rounds == 4
    price = run_meta(EXACT, lambda _, a: maximum(a, coarse=True), [(640, 2)])
    assert price == cost.msb(640, 40, low=12) + cost.inject(Ring(64), 640, 1, 1, 0)


@pytest.mark.parametrize("lengths", [(1,), (1, 1), (5, 1, 8, 3), (64, 7)])
def test_levels_on_meta_are_as_large_as_those_of_a_device(lengths: tuple[int, ...]) -> None:
    def shapes(found: object) -> list[list[int]]:
        return [[each.numel() for each in (x.left, x.right, x.bye, x.order)] for x in found]  # type: ignore[attr-defined]

    meta, cpu = (Rows(lengths).numbers(torch.device(name)).tournament for name in ("meta", "cpu"))
    assert shapes(meta) == shapes(cpu)
