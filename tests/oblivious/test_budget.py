"""A fixed number of active elements of each vector: which are taken, that nothing else is opened, and what it costs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from private_llm.config import PrivateConfig
from private_llm.errors import DomainError
from private_llm.oblivious.budget import ChosenUnits, choose
from private_llm.protocols.registry import protocol_names
from private_llm.protocols.session import Session
from private_llm.tensor.fixed import Fixed
from tests.harness import TRIO, run_meta, run_parties

PROTOCOLS = protocol_names()
every = pytest.mark.parametrize("protocol", PROTOCOLS)


def config(protocol: str) -> PrivateConfig:
    return PrivateConfig.from_dict({"protocol": protocol, "insecure": protocol == "plain"})


def pattern(count: int, active: int, seed: int = 0) -> Tensor:
    """1.0 at active positions, -1.0 elsewhere."""
    chosen = torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:active]
    return torch.full((count,), -1.0).index_fill_(0, chosen, 1.0).double()


def chosen(session: Session, scores: Fixed, budget: int, vectors: int = 1) -> ChosenUnits:
    return choose(session, session.protocol.invert(scores.less_than([0.0])), budget, vectors)


@every
@pytest.mark.parametrize(
    ("units", "active", "budget"),
    [(1, [1], 1), (1, [0, 1], 1), (64, [10, 16, 60], 16), (100, [0, 100], 7), (100, [30], 30), (77, [5, 77], 77)],
)
def test_active_rows_are_taken_and_put_back(protocol: str, units: int, active: list[int], budget: int) -> None:
    scores = torch.cat([pattern(units, many, seed) for seed, many in enumerate(active)])
    count = len(scores)
    x = torch.arange(1.0, 2 * count + 1).view(count, 2).double()
    counts: list[int] = []

    def program(session: Session, s: Fixed, rows: Fixed) -> list[Fixed]:
        choice = chosen(session, s, budget, len(active))
        counts.append(len(choice.places))
        taken = choice.take(rows)
        return [taken, choice.put_back(taken.scale_int(3))]

    taken, back = run_parties(config(protocol), program, [scores, x]).values
    keep = back[:, 0] != 0
    assert set(counts) == {budget * len(active)}
    assert sorted(map(tuple, taken.tolist())) == sorted(map(tuple, x[keep].tolist()))
    assert torch.equal(back, 3 * x * keep[:, None])
    for row, many in enumerate(active):
        kept, wanted = keep.view(-1, units)[row], scores.view(-1, units)[row] > 0
        assert int(kept.sum()) == budget
        assert int((kept & wanted).sum()) == min(many, budget)


def test_which_active_ones_are_left_out_is_random_in_every_vector() -> None:
    """Eight of eight active, two chosen: no place of a vector is favoured, and vectors choose by themselves."""
    seen, apart = torch.zeros(3, 8), 0

    def program(session: Session, s: Fixed) -> list[Fixed]:
        return [choice.put_back(choice.take(s)) for choice in (chosen(session, s, 2, 3) for _ in range(100))]

    for found in run_parties(TRIO, program, [torch.ones(24).double()]).values:
        rows = found.view(3, 8) != 0
        seen += rows
        apart += not torch.equal(rows[0], rows[1])
    assert float(((seen - 25) ** 2 / 25).sum()) < 80  # about 16 degrees of freedom
    assert apart > 80


def test_what_is_opened_does_not_depend_on_the_data() -> None:
    """Three places of nine: each is opened equally often, whether none, some or all elements are active."""
    for active in (0, 3, 9):
        seen: Counter[int] = Counter()
        for _ in range(4):
            places: list[Tensor] = []

            def program(session: Session, s: Fixed, places: list[Tensor] = places) -> Fixed:
                for _ in range(25):
                    places.append(chosen(session, s, 3).places)
                return s

            run_parties(TRIO, program, [pattern(9, active)])
            seen.update(int(place) for each in places[:: TRIO.parties] for place in each)
        assert set(seen) == set(range(9))
        expected = sum(seen.values()) / 9
        assert sum((n - expected) ** 2 / expected for n in seen.values()) < 60  # 8 degrees of freedom, p = 5e-10


@every
def test_the_cost_is_the_same_for_every_pattern_and_without_data(protocol: str) -> None:
    def program(session: Session, s: Fixed) -> Fixed:
        return chosen(session, s, 20, 2).put_back(chosen(session, s, 20, 2).take(s))

    costs = [run_parties(config(protocol), program, [pattern(200, active)]).cost for active in (0, 20, 200)]
    assert costs[0] == costs[1] == costs[2]
    if protocol in ("trio", "dealer"):
        meta = run_meta(config(protocol), program, [(200,)])
        assert ({k: v for k, v in meta.sent.items() if v}, meta.rounds) == (
            {k: v for k, v in costs[0].sent.items() if v},
            costs[0].rounds,
        )


@pytest.mark.parametrize("budget", [0, -1, 7])
def test_impossible_budgets_are_refused(budget: int) -> None:
    with pytest.raises(DomainError, match=f"got {budget}; want 1 to 6, the elements of a vector"):
        run_meta(TRIO, lambda session, s: chosen(session, s, budget, 2), [(12,)])


def test_unequal_vectors_are_refused() -> None:
    with pytest.raises(DomainError, match="got 1 rows of 12 bits; want one, of 5 equal vectors"):
        run_meta(TRIO, lambda session, s: chosen(session, s, 1, 5), [(12,)])


@pytest.mark.parametrize("method", ["take", "put_back"])
def test_other_numbers_of_rows_are_refused(method: str) -> None:
    def program(session: Session, s: Fixed) -> Any:
        return getattr(chosen(session, s, 2), method)(s.view(lambda part: part[:5]))

    with pytest.raises(DomainError, match=rf"{method}: got rows \(5,\)"):
        run_meta(TRIO, program, [(6,)])
