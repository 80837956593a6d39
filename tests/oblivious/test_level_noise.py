"""Noise on how many are active: its distribution and its delta, that nothing active is lost, and what it costs."""

from __future__ import annotations

import importlib
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from private_llm.errors import ConfigError, DomainError
from private_llm.net.ledger import Cost
from private_llm.oblivious.level_noise import LevelNoise, distribution, dummy_bits, noisy_choose, spent
from private_llm.protocols.prices import Prices
from private_llm.protocols.registry import protocol_names
from private_llm.protocols.session import Session
from private_llm.protocols.share import BitShare
from private_llm.tensor.fixed import Fixed, arithmetic
from tests.harness import TRIO, run_meta, run_parties
from tests.oblivious.test_budget import config, pattern
from tests.protocols.test_suite import prices

PROTOCOLS = protocol_names()
SECRET = [name for name in PROTOCOLS if name != "plain"]
every = pytest.mark.parametrize("protocol", PROTOCOLS)

SMALL = LevelNoise(epsilon=1.0, delta=0.01)
"""Few dummies, so that every number of them is seen."""


def active_of(session: Session, scores: Fixed) -> BitShare:
    return session.protocol.invert(scores.less_than([0.0]))


def made_by(noise: LevelNoise) -> np.ndarray:
    """The distribution of the active dummies, from the coins themselves: those of one source are one digit."""
    total = np.ones(1)
    coins = noise.coins()
    for source in sorted({coin.source for coin in coins}):
        digit = [coin for coin in coins if coin.source == source]
        weight, chances = digit[0].weight, sorted((coin.chance / 2**64 for coin in digit), reverse=True)
        assert {coin.weight for coin in digit} == {weight}
        exact = np.zeros(weight * len(digit) + 1)
        exact[::weight] = -np.diff([1.0, *chances, 0.0])  # the number of the digit's coins that are set
        total = np.convolve(total, exact)
    return total


@pytest.mark.parametrize(
    "noise",
    [
        SMALL,
        LevelNoise(8.0, 0.1),
        LevelNoise(0.5, 1e-6),
        LevelNoise(0.1, 1e-9),
        LevelNoise(0.5, 1e-6, 10),
        LevelNoise(0.3, 1e-12, 3),
    ],
)
def test_coins_make_the_distribution_and_it_keeps_the_promise(noise: LevelNoise) -> None:
    chances = made_by(noise)
    assert len(chances) == noise.dummies + 1
    assert np.allclose(chances, distribution(noise, noise.mean + 1), rtol=1e-9, atol=1e-15)
    assert np.allclose(chances @ np.arange(len(chances)), noise.mean)
    for apart in range(1, noise.sensitivity + 1):
        for sign in (1, -1):
            lower, upper = (np.pad(chances, pad)[::sign] for pad in ((0, apart), (apart, 0)))
            exceeds = np.maximum(lower - math.exp(noise.epsilon) * upper, 0).sum()
            assert exceeds <= spent(noise, noise.mean + 1) * (1 + 1e-5) + 1e-14
    assert exceeds == pytest.approx(spent(noise, noise.mean + 1), rel=1e-5, abs=1e-14)
    assert spent(noise, noise.mean + 1) <= noise.delta


@pytest.mark.parametrize("epsilon", [0.5, 0.1, 0.05, 0.01])
def test_no_more_dummies_than_a_cut_tail_asks_for(epsilon: float) -> None:
    """The mean of a two-sided geometric number that is cut where its tail is delta, and an eighth more at most."""
    noise, q = LevelNoise(epsilon, 1e-6), math.exp(-epsilon)
    cut = math.log(1e-6 / (1 - q)) / math.log(q)
    assert cut - 2 < noise.mean < 1.15 * cut + 2


@pytest.mark.full
@every
def test_what_is_opened_beyond_the_count_has_the_distribution(protocol: str) -> None:
    """500 openings of each of two counts: chi-square over every value of the noise, p = 1e-12."""
    for active in (0, 5):
        seen: Counter[int] = Counter()
        for _ in range(5):
            found: list[int] = []

            def program(session: Session, s: Fixed, found: list[int] = found) -> Fixed:
                bits = active_of(session, s)
                for _ in range(100):
                    found.append(len(noisy_choose(session, bits, SMALL).places))
                return s

            run = run_parties(config(protocol), program, [pattern(5, active)])
            seen.update(sorted(found)[:: len(run.ledgers)])  # all parties open alike
        assert min(seen) >= active
        wanted = 500 * distribution(SMALL, SMALL.mean + 1)
        got = np.array([seen[active + number] for number in range(len(wanted))])
        assert got.sum() == 500
        common = wanted >= 2
        squares = ((got - wanted) ** 2 / wanted)[common].sum()
        assert common.sum() == 9
        assert squares < 74  # 8 degrees of freedom: p = 1e-12
        assert got[~common].sum() < 25  # 2.7 are expected


@pytest.mark.full
@every
def test_dummies_of_one_coin_agree_and_others_do_not(protocol: str) -> None:
    """Bits from 300 draws: each digit's coins are nested, and each coin is set as often as it should be."""
    noise = LevelNoise(0.5, 1e-3)
    coins = noise.coins()

    def program(session: Session, s: Fixed) -> list[Fixed]:
        return [arithmetic(session, dummy_bits(session.protocol, noise), [1.0], 0) for _ in range(300)]

    draws = torch.stack(run_parties(config(protocol), program, [pattern(5, 1)]).values)
    assert draws.shape == (300, noise.dummies)
    blocks = draws.split([coin.weight for coin in coins], dim=1)
    tossed = torch.stack([block[:, 0] for block in blocks], dim=1)
    assert all(torch.equal(block, block[:, :1].expand_as(block)) for block in blocks)
    for at, coin in enumerate(coins):
        chance = coin.chance / 2**64
        assert abs(float(tossed[:, at].mean()) - chance) < 7 * math.sqrt(chance * (1 - chance) / 300) + 0.02
        for other in range(at):
            if coins[other].source == coin.source:
                ordered = tossed[:, [at, other]] if coin.chance < coins[other].chance else tossed[:, [other, at]]
                assert not (ordered[:, 0] > ordered[:, 1]).any()
            elif 0.2 < chance < 0.8 and 0.2 < coins[other].chance / 2**64 < 0.8:
                assert abs(float(torch.corrcoef(tossed[:, [at, other]].mT)[0, 1])) < 0.42  # 7 standard deviations


@every
@pytest.mark.parametrize(("count", "active"), [(1, 0), (1, 1), (64, 10), (100, 100), (130, 31)])
def test_every_active_row_is_taken_and_put_back(protocol: str, count: int, active: int) -> None:
    scores, x = pattern(count, active), torch.arange(1.0, 2 * count + 1).view(count, 2).double()
    counts: list[int] = []

    def program(session: Session, s: Fixed, rows: Fixed) -> list[Fixed]:
        choice = noisy_choose(session, active_of(session, s), SMALL)
        counts.append(len(choice.places))
        taken = choice.take(rows)
        return [taken, choice.put_back(taken.scale_int(3))]

    taken, back = run_parties(config(protocol), program, [scores, x]).values
    (size,) = set(counts)
    keep = scores > 0
    assert active <= size <= active + SMALL.dummies
    wanted = [*x[keep].tolist(), *[[0.0, 0.0]] * (size - active)]
    assert sorted(map(tuple, taken.tolist())) == sorted(map(tuple, wanted))
    assert torch.equal(back, 3 * x * keep[:, None])


@pytest.mark.full
def test_places_are_uniform_whatever_is_active() -> None:
    for active in (0, 3, 6):
        seen: Counter[int] = Counter()
        for _ in range(8):
            places: list[Tensor] = []

            def program(session: Session, s: Fixed, places: list[Tensor] = places) -> Fixed:
                for _ in range(25):
                    places.append(noisy_choose(session, active_of(session, s), SMALL).places)
                return s

            run_parties(TRIO, program, [pattern(6, active)])
            seen.update(int(place) for each in places[:: TRIO.parties] for place in each)
        size = 6 + SMALL.dummies
        assert set(seen) == set(range(size))
        expected = sum(seen.values()) / size
        assert sum((n - expected) ** 2 / expected for n in seen.values()) < 90  # 15 degrees of freedom: p = 1e-12


def price(of: Prices, count: int, noise: LevelNoise) -> Cost:
    """Coins in a tree over 64 random bits, then the shuffle and the opening."""
    total, size = Cost(), count + noise.dummies
    for pairs in (32, 16, 8, 4, 2, 1):
        total += of.gate(len(noise.coins()), 2 * pairs - 1)
    return total + of.permutation(size) + of.shuffle_bits(size) + of.open_shuffled(size)


@pytest.mark.parametrize("protocol", SECRET)
@pytest.mark.parametrize("noise", [SMALL, LevelNoise(0.1)])
def test_the_cost_is_that_of_the_formula_for_every_pattern(protocol: str, noise: LevelNoise) -> None:
    wanted = price(prices(protocol), 200, noise)

    def alone(session: Session, s: Fixed) -> Fixed:
        ones = session.protocol.random_bits(1, 200)
        choice = noisy_choose(session, ones, noise, expected=7)
        sizes.append(len(choice.places))
        return s

    sizes: list[int] = []
    for active in (0, 200):
        cost = run_parties(config(protocol), alone, [pattern(200, active)]).cost
        assert {k: v for k, v in cost.sent.items() if v} == {k: v for k, v in wanted.sent.items() if v}
        assert cost.rounds == wanted.rounds
    assert wanted.rounds == {"trio": 9, "dealer": 8, "quad": 12}[protocol]
    if protocol != "quad":
        sizes.clear()
        meta = run_meta(config(protocol), alone, [(200,)])
        assert {k: v for k, v in meta.sent.items() if v} == {k: v for k, v in wanted.sent.items() if v}
        assert set(sizes) == {7 + noise.mean}


@pytest.mark.parametrize("protocol", SECRET)
def test_no_party_can_tell_random_bits_from_what_it_holds(protocol: str) -> None:
    """Every sum of a party's components agrees with the bits half of the time; all parties' together are the bits."""
    count, held = 6400, {}

    def program(session: Session, s: Fixed) -> Fixed:
        bits = session.protocol.random_bits(1, count)
        held[session.party] = bits.parts
        return arithmetic(session, bits, [1.0], 0)

    value = run_parties(config(protocol), program, [pattern(5, 1)]).value
    assert abs(float(value.mean()) - 0.5) < 0.05
    for parts in held.values():
        lanes = [torch.from_numpy(np.unpackbits(p.numpy().view(np.uint8), bitorder="little")[:count]) for p in parts]
        for chosen in range(1, 1 << len(lanes)):
            guess = sum(lane for at, lane in enumerate(lanes) if chosen >> at & 1) % 2
            assert abs(float((guess == value).double().mean()) - 0.5) < 0.05  # 8 standard deviations


def test_counts_tell_texts_apart_as_far_as_noise_lets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parent.parent.parent / "scripts" / "studies"))
    script: Any = importlib.import_module("level_noise")
    counts = torch.randint(0, 100, (6, 64), generator=torch.Generator().manual_seed(1))
    assert script.share_told(counts, None) == 1.0
    assert script.share_told(counts[:1].repeat(6, 1), LevelNoise(0.5)) == 0.5
    assert script.share_told(counts, LevelNoise(1.0)) == 1.0
    assert 0.3 < script.share_told(counts, LevelNoise(0.5, 1e-6, 1000)) < 0.7


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"epsilon": 0.0}, "got epsilon=0.0; want more than 0"),
        ({"epsilon": 9.0}, "want more than 0 and at most 8"),
        ({"epsilon": math.nan}, "got epsilon=nan"),
        ({"epsilon": 1.0, "delta": 0.0}, "0 is impossible for noise that never takes away"),
        ({"epsilon": 1.0, "delta": 1.0}, "less than 1"),
        ({"epsilon": 1.0, "delta": math.nan}, "got delta=nan"),
        ({"epsilon": 1.0, "sensitivity": 0}, "want at least 1 element"),
        ({"epsilon": 0.01, "sensitivity": 3000}, "takes more than 1966080 dummies"),
    ],
)
def test_impossible_noise_is_refused(settings: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LevelNoise(**settings)


def test_several_vectors_are_refused() -> None:
    with pytest.raises(DomainError, match="got 2 vectors; want one"):
        run_meta(TRIO, lambda session, s: noisy_choose(session, s.less_than([0.0, 1.0]), SMALL), [(6,)])
