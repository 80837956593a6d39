"""Units opened in their owner's order: which, how many, uniformly filled up, and what it costs."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

from private_llm.config import PrivateConfig
from private_llm.errors import DomainError, ProtocolAbort
from private_llm.net.ledger import Cost
from private_llm.oblivious import budget as budgets
from private_llm.oblivious.budget import opened_units
from private_llm.protocols.registry import protocol_names
from private_llm.protocols.session import Session
from private_llm.ring.ring import Ring
from private_llm.tensor.fixed import Fixed
from tests.harness import TRIO, run_meta, run_parties
from tests.protocols.test_suite import prices

every = pytest.mark.parametrize("protocol", protocol_names())


def config(protocol: str) -> PrivateConfig:
    return PrivateConfig(protocol=protocol, insecure=protocol == "plain")


def scores(counts: list[int], units: int, seed: int = 0) -> Tensor:
    """A vector for each count: 1.0 at that many places, -1.0 elsewhere."""
    chance = torch.Generator().manual_seed(seed)
    made = torch.full((len(counts), units), -1.0, dtype=torch.float64)
    for row, count in enumerate(counts):
        made[row, torch.randperm(units, generator=chance)[:count]] = 1.0
    return made


def opened(protocol: str, x: Tensor, budget: int | None, times: int = 1) -> list[Tensor]:
    """What each party is told, in each of `times` calls."""
    seen: list[Tensor] = []

    def program(session: Session, s: Fixed) -> Fixed:
        for _ in range(times):
            bits = session.protocol.invert(s.less_than([0.0]))
            seen.append(opened_units(session, bits, len(x), budget))
        return s

    run_parties(config(protocol), program, [x])
    return seen


@every
@pytest.mark.parametrize("units", [1, 40, 130])
def test_a_budget_opens_all_active_units_and_as_many_others_as_are_lacking(protocol: str, units: int) -> None:
    budget = max(1, units // 3)
    x = scores([0, budget // 2, budget, min(units, budget + 4), units], units)
    seen = opened(protocol, x, budget)
    for found in seen:
        assert torch.equal(found, seen[0])
        assert found.sum(1).tolist() == [budget] * 5
    active = x > 0
    for row in range(5):
        both = int((seen[0][row] & active[row]).sum())
        assert both == min(int(active[row].sum()), budget)


@every
def test_without_a_budget_what_is_active_is_opened(protocol: str) -> None:
    x = scores([3, 0, 11], 77)
    for found in opened(protocol, x, None):
        assert torch.equal(found, x > 0)


def test_what_fills_a_vector_up_is_uniform_and_differs_from_vector_to_vector() -> None:
    """Two active of six, four opened: each of the others is opened half of the time, in either vector alike."""
    x = torch.tensor([[1.0, 1, -1, -1, -1, -1], [-1.0, -1, -1, -1, 1, 1]], dtype=torch.float64)
    sets: Counter[tuple[int, ...]] = Counter()
    apart = 0
    for found in opened("trio", x, 4, times=300)[:: TRIO.parties]:
        first, second = (tuple(row.nonzero()[:, 0].tolist()) for row in found)
        sets[first] += 1
        apart += [place - 2 for place in first[2:]] != list(second[:2])
    assert len(sets) == 6  # two of four
    expected = sum(sets.values()) / 6
    assert sum((n - expected) ** 2 / expected for n in sets.values()) < 70  # 5 degrees of freedom, p = 1e-13
    assert 150 < apart < 295  # equal one time in six


@every
@pytest.mark.parametrize("budget", [None, 20])
def test_the_price_is_known(protocol: str, budget: int | None) -> None:
    def program(session: Session, s: Fixed) -> Fixed:
        opened_units(session, session.protocol.invert(s.less_than([0.0])), 3, budget)
        return s

    costs = [run_parties(config(protocol), program, [scores([n] * 3, 70)]).cost for n in (0, 20, 70)]
    assert costs[0] == costs[1] == costs[2]
    if protocol in ("trio", "dealer"):
        meta = run_meta(config(protocol), program, [(3, 70)])
        assert {k: v for k, v in meta.sent.items() if v} == {k: v for k, v in costs[0].sent.items() if v}
        assert meta.rounds == costs[0].rounds
        cost, count, ring = prices(protocol), 210, Ring(64)
        price = cost.msb(count, 64)
        if budget is not None:
            filled = cost.permutation(count) + cost.shuffle_bits(count) + cost.inject(ring, count, 1, 0, 0)
            filled += cost.msb(2 * count, 9) + cost.gate(count) + cost.shuffle_bits(count, undo=True)
            price += filled
        price += cost.open_shuffled(count)
        assert total(price) == total(costs[0])
        assert price.rounds == costs[0].rounds


def total(cost: Cost) -> int:
    return sum(cost.sent.values())


def test_another_number_of_units_than_the_budget_ends_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """As parties who disagree open it: in any vector, whatever the batch has in all."""
    monkeypatch.setattr(budgets, "filled", lambda session, active, vectors, budget: active)
    for counts in ([1, 3], [3, 1], [2, 3]):
        with pytest.raises(ProtocolAbort, match="a vector has other than 2 units"):
            opened("plain", scores(counts, 6), 2)
    assert opened("plain", scores([2, 2], 6), 2)[0].sum(1).tolist() == [2, 2]


@pytest.mark.parametrize(
    ("vectors", "budget", "message"), [(3, 0, "budget: got 0"), (3, 5, "want 1 to 4"), (5, 2, "5 equal")]
)
def test_impossible_wishes_are_refused(vectors: int, budget: int, message: str) -> None:
    def program(session: Session, s: Fixed) -> Fixed:
        opened_units(session, s.less_than([0.0]), vectors, budget)
        return s

    with pytest.raises(DomainError, match=message):
        run_meta(TRIO, program, [(12,)])
