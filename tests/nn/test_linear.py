"""Layers that share their input: the same results in whatever order they are called, in fewer rounds."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from private_llm.nn.linear import SharedInput, SharedProducts, can_share
from private_llm.tensor.fixed import Fixed
from tests.harness import TRIO, run_parties
from tests.tensor.secrets import noise, opened, plain_session, secret

SIZES = (6, 2, 2)


def _layers(make: object, bias: bool = True) -> list[nn.Linear]:
    layers = []
    for number, size in enumerate(SIZES):
        layer = nn.Linear(4, size, bias=bias)
        layer.weight = nn.Parameter(make(noise(size, 4, seed=number)), requires_grad=False)  # type: ignore[operator]
        if bias:
            layer.bias = nn.Parameter(make(noise(size, seed=9 + number)), requires_grad=False)  # type: ignore[operator]
        layers.append(layer)
    return layers


def _want(x: Tensor, index: int, bias: bool = True) -> Tensor:
    return F.linear(x, noise(SIZES[index], 4, seed=index), noise(SIZES[index], seed=9 + index) if bias else None)


@pytest.mark.parametrize("public", [False, True])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 1, 0), (0,)])
def test_pieces_are_right_in_any_order(order: tuple[int, ...], public: bool) -> None:
    session = plain_session()
    layers = _layers(Tensor.float if public else lambda values: secret(session, values))
    group = SharedInput(layers, "group", session)
    for seed in (30, 31):  # a second input must not meet pieces of the first
        values = noise(2, 3, 4, seed=seed)
        x = secret(session, values)
        for index in order:
            assert (opened(group.piece(index, x)) - _want(values, index)).abs().max() <= 2**-17
    assert [tuple(layer.weight.shape) for layer in layers] == [(size, 4) for size in SIZES]


def test_another_input_or_a_changed_one_is_computed_anew() -> None:
    session = plain_session()
    group = SharedInput(_layers(lambda values: secret(session, values), bias=False), "group", session)
    first, second = noise(3, 4, seed=30), noise(3, 4, seed=31)
    x = secret(session, first)
    group.piece(0, x)
    assert (opened(group.piece(1, secret(session, second))) - _want(second, 1, False)).abs().max() <= 2**-17
    x = secret(session, first)
    group.piece(0, x)
    x += 1
    assert (opened(group.piece(1, x)) - _want(first + 1, 1, False)).abs().max() <= 2**-17


def test_three_layers_cost_the_rounds_of_one() -> None:
    values = noise(3, 4, seed=30)
    weights = [noise(size, 4, seed=number) for number, size in enumerate(SIZES)]

    def run(session: object, x: Fixed, *shares: Fixed) -> list[Fixed]:
        from private_llm.tensor.secret import SecretTensor

        layers = [nn.Linear(4, size, bias=False) for size in SIZES]
        for layer, share in zip(layers, shares, strict=True):
            layer.weight = nn.Parameter(SecretTensor(share), requires_grad=False)
        group = SharedInput(layers, "q+k+v", x.session)
        source = SecretTensor(x)
        return [group.piece(index, source).value(full=True) for index in range(3)]  # type: ignore[attr-defined]

    done = run_parties(TRIO, run, [values, *weights])
    for index, value in enumerate(done.values):
        assert (value - _want(values, index, False)).abs().max() <= 2**-17
    assert done.cost.rounds == 2
    assert {scope for scope, _, _ in done.ledgers[1].sent} == {"q+k+v"}


def test_what_can_share() -> None:
    same = [nn.Linear(4, 2), nn.Linear(4, 3)]
    assert can_share(same)
    assert not can_share(same[:1])
    assert not can_share([*same, nn.Linear(5, 2)])
    assert not can_share([*same, nn.Linear(4, 2, bias=False)])
    assert not can_share([*same, nn.Identity()])


def test_pieces_are_let_go_when_all_are_taken() -> None:
    """Of a long prompt they are as large as the layer's outputs, and every layer of a model would keep its own."""
    made: list[weakref.ref[Tensor]] = []

    def make(x: Tensor) -> list[Tensor]:
        out = [x + 1, x + 2]
        made.extend(map(weakref.ref, out))
        return out

    pieces, x = SharedProducts(), torch.ones(3)
    first = pieces.take(0, x, make)
    assert torch.equal(pieces.take(1, x, make), x + 2)
    source = weakref.ref(x)
    del first, x
    assert source() is None
    assert [each() for each in made] == [None, None]
