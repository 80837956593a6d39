"""Rows to queues and back: exact against loops over rows, in all protocols, with the same messages always."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from private_llm.config import PrivateConfig
from private_llm.errors import DomainError
from private_llm.oblivious.dispatch import queues_of
from private_llm.protocols.registry import protocol_names
from private_llm.protocols.session import Session
from private_llm.tensor.fixed import Fixed
from tests.harness import PLAIN, Outcome, run_parties

SHAPES = [(1, 12, 4, 5), (2, 7, 3, 7), (1, 1, 2, 1), (3, 33, 5, 9), (1, 65, 2, 64)]


def config(protocol: str, **more: object) -> PrivateConfig:
    return PrivateConfig.from_dict({"protocol": protocol, "insecure": protocol == "plain", **more})


def places_of(weights: Tensor, length: int) -> Tensor:
    """[B, queues, length, rows]: the slow way, row by row; none of weight zero."""
    batch, rows, queues = weights.shape
    found = torch.zeros(batch, queues, length, rows, dtype=torch.float64)
    for b in range(batch):
        for q in range(queues):
            best = sorted(range(rows), key=lambda row: (-float(weights[b, row, q]), row))[:length]
            for place, row in enumerate(sorted(row for row in best if weights[b, row, q] > 0)):
                found[b, q, place, row] = 1.0
    return found


def dispatched(config: PrivateConfig, weights: Tensor, x: Tensor, length: int) -> Outcome:
    """Places, rows in them, and what comes back of twice these rows."""

    def at_party(_: Session, weights: Fixed, x: Fixed) -> list[Fixed]:
        queues = queues_of(weights, length)
        rows = queues.gathered(x)
        return [queues.places, rows, queues.combined(rows.scale_int(2), weights)]

    return run_parties(config, at_party, [weights, x])


def random(batch: int, rows: int, queues: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Weights of which half are zero and some are equal, and rows."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randint(0, 16, (batch, rows, queues), generator=generator).double() / 16
    weights *= torch.randint(0, 2, weights.shape, generator=generator)
    return weights, torch.randn(batch, rows, 3, generator=generator).double()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("protocol", protocol_names())
def test_rows_come_to_their_places_and_back(protocol: str, shape: tuple[int, int, int, int]) -> None:
    batch, rows, queues, length = shape
    weights, x = random(batch, rows, queues)
    places, gathered, combined = dispatched(config(protocol), weights, x, length).values
    wanted = places_of(weights, length)
    assert torch.equal(places, wanted)
    unit = 2.0**-PLAIN.frac_bits
    held = (x / unit).round() * unit
    assert torch.allclose(gathered, torch.einsum("bqlr,brh->bqlh", wanted, held), rtol=0, atol=2 * unit)
    kept = wanted.sum(2).mT * weights
    assert torch.allclose(combined, 2 * kept.sum(-1, keepdim=True) * held, rtol=0, atol=1e-4)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 20), st.integers(1, 4), st.data())
def test_every_shape(rows: int, queues: int, data: st.DataObject) -> None:
    length = data.draw(st.integers(1, rows))
    weights, x = random(2, rows, queues, seed=rows * 100 + queues)
    places = dispatched(PLAIN, weights, x, length).values[0]
    assert torch.equal(places, places_of(weights, length))


@pytest.mark.parametrize("more", [{}, {"adder": "keys"}, {"adder": "ripple"}], ids=str)
def test_what_is_sent_depends_on_shapes_alone(more: dict[str, object]) -> None:
    costs = []
    for seed in (1, 2):
        weights, x = random(1, 12, 4, seed)
        outcome = dispatched(config("trio", **more), weights * seed, x * seed, 5)
        assert torch.equal(outcome.values[0], places_of(weights * seed, 5))
        costs.append(outcome.cost)
    assert costs[0] == costs[1]


def test_lengths_that_there_are_not() -> None:
    weights, x = random(1, 4, 2)
    for length in (0, 5):
        with pytest.raises(DomainError, match=f"queues: got a length of {length}; want 1 to 4"):
            dispatched(PLAIN, weights, x, length)
