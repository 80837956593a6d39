"""A fixed number of active elements: which are taken, that nothing else is opened, and what it costs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from private_llm.config import PrivateConfig
from private_llm.errors import DomainError
from private_llm.oblivious.budget import Choice, choose
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


def kept(scores: Tensor, budget: int) -> Tensor:
    """The active positions within the budget: the first ones."""
    active = scores > 0
    return active & (active.cumsum(0) <= budget)


def chosen(session: Session, scores: Fixed, budget: int) -> Choice:
    return choose(session, session.protocol.invert(scores.below([0.0])), budget)


@every
@pytest.mark.parametrize(
    ("count", "active", "budget"),
    [(1, 1, 1), (1, 0, 1), (64, 10, 16), (100, 0, 7), (100, 100, 7), (100, 30, 30), (130, 31, 30), (77, 5, 77)],
)
def test_active_rows_are_taken_and_put_back(protocol: str, count: int, active: int, budget: int) -> None:
    scores, x = pattern(count, active), torch.arange(1.0, 2 * count + 1).view(count, 2).double()
    counts: list[int] = []

    def program(session: Session, s: Fixed, rows: Fixed) -> list[Fixed]:
        choice = chosen(session, s, budget)
        counts.append(len(choice.places))
        taken = choice.take(rows)
        return [taken, choice.put_back(taken.scale_int(3))]

    taken, back = run_parties(config(protocol), program, [scores, x]).values
    keep = kept(scores, budget)
    assert set(counts) == {budget}
    assert taken.shape == (budget, 2)
    dummies = budget - int(keep.sum())
    assert sorted(map(tuple, taken.tolist())) == sorted(map(tuple, [*x[keep].tolist(), *[[0.0, 0.0]] * dummies]))
    assert torch.equal(back, 3 * x * keep[:, None])


def test_what_is_opened_does_not_depend_on_the_data() -> None:
    """Five positions of nine: each is opened equally often, whether none, some or all elements are active."""
    for active in (0, 3, 6):
        seen: Counter[int] = Counter()
        for _ in range(8):
            places: list[Tensor] = []

            def program(session: Session, s: Fixed, places: list[Tensor] = places) -> Fixed:
                for _ in range(25):
                    places.append(chosen(session, s, 3).places)
                return s

            run_parties(TRIO, program, [pattern(6, active)])
            seen.update(int(place) for each in places[:: TRIO.parties] for place in each)
        assert set(seen) == set(range(9))
        expected = sum(seen.values()) / 9
        assert sum((n - expected) ** 2 / expected for n in seen.values()) < 60  # 8 degrees of freedom, p = 5e-10


@every
def test_the_cost_is_the_same_for_every_pattern_and_without_data(protocol: str) -> None:
    def program(session: Session, s: Fixed) -> Fixed:
        return chosen(session, s, 20).put_back(chosen(session, s, 20).take(s))

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
    with pytest.raises(DomainError, match=f"got budget={budget} and 1 vectors of 6 bits; want a budget of 1 to 6"):
        run_meta(TRIO, lambda session, s: chosen(session, s, budget), [(6,)])


@pytest.mark.parametrize("method", ["take", "put_back"])
def test_other_numbers_of_rows_are_refused(method: str) -> None:
    def program(session: Session, s: Fixed) -> Any:
        return getattr(chosen(session, s, 2), method)(s.view(lambda part: part[:5]))

    with pytest.raises(DomainError, match=rf"{method}: got rows \(5,\)"):
        run_meta(TRIO, program, [(6,)])
