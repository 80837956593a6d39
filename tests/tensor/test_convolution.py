"""Convolutions against PyTorch's on the same values: one truncation, so less than one unit below, never above."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from private_llm.config import PrivateConfig
from private_llm.errors import DomainError, UnsupportedOp
from private_llm.net.ledger import Cost
from private_llm.protocols.registry import trio_prices as cost
from private_llm.protocols.session import Session
from private_llm.ring.ring import Ring
from private_llm.tensor.fixed import Fixed
from private_llm.tensor.secret import SecretTensor
from tests.harness import run_meta, run_parties
from tests.tensor.secrets import noise, opened, plain_session, secret

WIDE, SMALL = plain_session(), plain_session(ring=32, frac_bits=11)

Options = dict[str, Any]
CONVOLUTIONS: list[tuple[tuple[int, ...], tuple[int, ...], Options]] = [
    ((2, 4, 7, 6), (6, 4, 3, 2), {"stride": 2, "padding": 1}),
    ((2, 4, 7, 6), (6, 2, 3, 3), {"stride": (2, 1), "padding": (0, 2), "groups": 2}),
    ((2, 6, 5, 9), (6, 1, 3, 3), {"padding": 1, "groups": 6}),
    ((2, 3, 9, 8), (6, 1, 3, 2), {"padding": "same", "groups": 3, "dilation": (2, 1)}),
    ((1, 2, 8, 9), (5, 2, 4, 3), {"padding": "same", "dilation": 2}),
    ((1, 2, 8, 9), (5, 2, 2, 3), {"padding": "valid", "dilation": 3}),
    ((3, 7, 9), (4, 3, 1, 1), {}),
]


def _weights(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    return noise(*shape, seed=1, scale=0.25), noise(shape[0], seed=2, scale=0.25)


@pytest.mark.filterwarnings("ignore:Using padding=.same.:UserWarning")
@pytest.mark.parametrize(("left", "right", "how"), CONVOLUTIONS)
@pytest.mark.parametrize("public", [False, True])
@pytest.mark.parametrize("session", [WIDE, SMALL], ids=["64", "32"])
def test_conv2d(left: tuple[int, ...], right: tuple[int, ...], how: Options, public: bool, session: Session) -> None:
    x, (weight, bias) = noise(*left), _weights(right)
    w, b = (weight, bias) if public else (secret(session, weight), secret(session, bias))
    got = opened(F.conv2d(secret(session, x), w, b, **how))
    units = (got - F.conv2d(x, weight, bias, **how)) * 2**session.frac
    assert got.shape == F.conv2d(x, weight, bias, **how).shape
    assert units.min() > -1
    assert units.max() <= 0


def test_conv1d_is_a_convolution_of_flat_images() -> None:
    options: list[Options] = [
        {"stride": 2, "padding": 3, "dilation": 2}, {"padding": "same", "groups": 2, "dilation": 2}, {"stride": (3,)}
    ]  # fmt: skip
    for how in options:
        x, weight, bias = noise(2, 4, 17), noise(6, 4 // how.get("groups", 1), 4, seed=1), noise(6, seed=2)
        want = F.conv1d(x, weight, bias, **how)
        got = opened(F.conv1d(secret(WIDE, x), secret(WIDE, weight), secret(WIDE, bias), **how))
        assert got.shape == want.shape
        assert (got - want).abs().max() < 2.0**-WIDE.frac


def test_what_no_convolution_is() -> None:
    x, w = secret(WIDE, noise(1, 2, 5, 5)), secret(WIDE, noise(3, 2, 3, 3))
    with pytest.raises(UnsupportedOp, match="share the input"):
        F.conv2d(noise(1, 2, 5, 5), w)
    with pytest.raises(UnsupportedOp, match="want stride 1"):
        F.conv2d(x, w, padding="same", stride=2)
    with pytest.raises(UnsupportedOp, match="'around'"):
        F.conv2d(x, w, padding="around")
    with pytest.raises(DomainError, match="3 groups"):
        F.conv2d(x, w, groups=3)
    with pytest.raises(DomainError, match="do not fit"):
        F.conv2d(x, w, dilation=3)
    with pytest.raises(UnsupportedOp, match="minus infinity"):
        F.conv2d(x.masked_fill(torch.ones(5, 5, dtype=torch.bool), float("-inf")), w)


def _layer(weight: Tensor | None, **how: Any) -> Callable[..., Fixed]:
    def run(session: Session, x: Fixed, *secret_weight: Fixed) -> Fixed:
        w = SecretTensor(secret_weight[0]) if secret_weight else weight
        assert w is not None
        made = F.conv2d(SecretTensor(x), w, **how)
        assert isinstance(made, SecretTensor)
        return made.to_fixed()

    return run


@pytest.mark.parametrize("bits", [64, 32])
def test_traffic_is_that_of_the_output(bits: int) -> None:
    """Secret weights: one truncated product. Public weights: one truncation. Both exact up to one unit."""
    config = PrivateConfig(ring=bits, frac_bits=11)
    x, (weight, _) = noise(2, 4, 7, 6), _weights((6, 2, 3, 3))
    how: Options = {"stride": 2, "padding": 1, "groups": 2}
    want = F.conv2d(x, weight, **how)
    cases: list[tuple[Callable[..., Fixed], list[Tensor], Callable[..., Cost]]] = [
        (_layer(None, **how), [x, weight], cost.product),
        (_layer(weight, **how), [x], cost.truncate),
    ]
    for layer, inputs, price in cases:
        run = run_parties(config, layer, inputs)
        assert (run.value - want).abs().max() <= 2 * 2.0**-11
        assert run.cost == price(Ring(bits), want.numel(), 11)
        assert run_meta(config, layer, [v.shape for v in inputs]) == run.cost
