"""Chains against exact integer arithmetic, and what they refuse."""

from __future__ import annotations

import pytest
import torch

from private_llm.approx.chain import Chain, Form, Step, evaluate
from private_llm.config import PrivateConfig
from private_llm.errors import DomainError
from private_llm.net.ledger import Cost
from private_llm.protocols.registry import trio_prices as cost
from private_llm.ring.ring import Ring
from tests.harness import PLAIN, TRIO, run_meta, run_parties

CHAIN = Chain(
    argument=12,
    error=0.0,
    steps=(
        Step(Form(12, 0, (1,)), Form(14, 4321, (-3,)), 11),
        Step(Form(16, -777, (5, 0)), Form(12, 0, (1, 2)), 13),
        Step(Form(13, 0, (0, 0, 1)), Form(15, 99, (8, -16, 4)), 10),
    ),
)


def integers(raw: int) -> int:
    """The chain in Python's integers, floor division included."""
    values = [raw]
    for step in CHAIN.steps:
        left, right = (
            form.constant + sum(w * v for w, v in zip(form.weights, values, strict=False))
            for form in (step.left, step.right)
        )
        values.append((left * right) >> (step.left.frac + step.right.frac - step.frac))
    return values[-1]


def test_plain_equals_integer_arithmetic_and_trio_nearly() -> None:
    raws = torch.randint(-9000, 9001, (500,), generator=torch.Generator().manual_seed(4))
    x = raws.double() / 2**12
    expected = torch.tensor([integers(int(raw)) for raw in raws])
    assert torch.equal(run_parties(PLAIN, lambda _, a: evaluate(CHAIN, a), [x], [12]).elements[0], expected)
    trio = run_parties(TRIO, lambda _, a: evaluate(CHAIN, a), [x], [12])
    # One unit of v1 and of v2 moves the result by at most |d v3 / d v1| + |d v3 / d v2| + 1 < 60 units here.
    assert int((trio.elements[0] - expected).abs().max()) < 60
    shifts = (15, 15, 18)
    price = sum((cost.product(Ring(64), 500, shift) for shift in shifts), Cost())
    assert trio.cost == price
    assert trio.cost.rounds == 6


def test_last_step_may_keep_more_bits() -> None:
    x = torch.tensor([0.5, -1.25], dtype=torch.float64)
    fine = run_parties(PLAIN, lambda _, a: evaluate(CHAIN, a, frac=20), [x], [12])
    coarse = run_parties(PLAIN, lambda _, a: evaluate(CHAIN, a), [x], [12])
    assert torch.equal(fine.elements[0] >> 10, coarse.elements[0])


def test_refusals() -> None:
    with pytest.raises(DomainError, match="got an argument with 18"):
        run_meta(TRIO, lambda _, a: evaluate(CHAIN, a), [(3,)])
    with pytest.raises(DomainError, match="64-bit ring"):
        run_meta(PrivateConfig(ring=32, frac_bits=12), lambda _, a: evaluate(CHAIN, a), [(3,)])
