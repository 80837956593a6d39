"""Norms and activations on secret tensors: the rule calls the right approximation with the right arguments.

The approximations' own errors are measured in tests/approx; here the bound (2e-3 for values up to about 6) only tells
one function, spelling or argument from another: the closest pair, the two GELUs, is compared on its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import private_llm.nn  # noqa: F401 - registers the rules
from private_llm.approx.norms import line_bits
from private_llm.config import PrivateConfig
from private_llm.errors import PlaintextLeak, UnsupportedOp
from private_llm.nn.modules import PrivateQuickGELU, PrivateRMSNorm
from private_llm.protocols.session import meta_session
from private_llm.ranges import Ranges
from private_llm.tensor.secret import SecretTensor
from tests.harness import meta_fixed
from tests.tensor.secrets import noise, opened, plain_session, secret

S = plain_session()
BOUND = 2e-3

POINTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu_method": lambda x: x.relu(),
    "relu_module": nn.ReLU(),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "silu_module": nn.SiLU(),
    "tanh": torch.tanh,
    "tanh_module": nn.Tanh(),
    "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
    "exp_below": lambda x: torch.exp(x - 6.0),
    "hardswish": F.hardswish,
    "hardswish_module": nn.Hardswish(),
    "hardsigmoid": F.hardsigmoid,
    "clamp": lambda x: x.clamp(-1.5, 2.0),
    "clamp_low": lambda x: torch.clamp(x, min=-1.5),
    "clamp_high": lambda x: x.clamp(max=2.0),
}


@pytest.mark.parametrize("name", POINTWISE)
def test_pointwise_functions(name: str) -> None:
    x = torch.linspace(-6, 6, 500, dtype=torch.float64).view(20, 25)
    got = POINTWISE[name](secret(S, x))
    assert isinstance(got, SecretTensor)
    assert (opened(got) - POINTWISE[name](x)).abs().max() <= BOUND


def test_exp_to_its_bound() -> None:
    x = torch.linspace(-20, 12, 700, dtype=torch.float64).view(20, 35)
    assert ((opened(torch.exp(secret(S, x))) - x.exp()).abs() <= 8e-4 * x.exp() + 2.0**-17).all()
    assert (opened(secret(S, torch.tensor([12.0, 13.0, 4000.0])).exp()) / math.exp(12) - 1).abs().max() < 8e-4


def test_an_exp_beyond_its_bound_is_noticed() -> None:
    """By the check at the end of a call: the bounded value is not what the model asked for."""
    session = plain_session()
    for largest, fine in ((12.2, True), (12.3, False)):
        session.checks.pending.clear()
        torch.exp(secret(session, torch.tensor([[0.0, largest, -3.0]])))
        excess, bits, _ = session.checks.pending[-1]
        assert (int(excess.parts[0].abs().max()) < 1 << bits) == fine


@pytest.mark.parametrize("settings", [{"beta": 2.0}, {"threshold": 5.0}])
def test_other_softpluses_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(UnsupportedOp, match="softplus with beta"):
        F.softplus(secret(S, noise(3, 4)), **settings)


def test_a_clamp_by_tensors_is_refused() -> None:
    with pytest.raises(UnsupportedOp, match="public numbers"):
        secret(S, noise(3, 4)).clamp(min=torch.zeros(4))


def test_an_in_place_relu_rebinds() -> None:
    x = noise(3, 4)
    value = secret(S, x)
    assert nn.ReLU(inplace=True)(value) is value
    assert (opened(value) - x.relu()).abs().max() <= BOUND


def test_a_scaled_input_is_settled_first() -> None:
    x = noise(3, 4)
    assert (opened(F.relu(secret(S, x) * 0.3)) - (x * 0.3).relu()).abs().max() <= BOUND


def test_the_two_gelus_differ_as_they_should() -> None:
    x = torch.linspace(-4, 4, 500, dtype=torch.float64)
    difference = opened(F.gelu(secret(S, x))) - opened(F.gelu(secret(S, x), approximate="tanh"))
    want = F.gelu(x) - F.gelu(x, approximate="tanh")  # up to 4.7e-4
    assert (difference - want).abs().max() <= 4e-4


def test_tanh_is_exact_enough_for_soft_caps() -> None:
    """The error is relative up to 3.5 (as precise_tanh states), plus a unit for the encoding of x."""
    x = torch.linspace(-9, 9, 5001, dtype=torch.float64)
    error = (opened(torch.tanh(secret(S, x))) - x.tanh()).abs()
    assert (error - 4e-5 * x.tanh().abs())[x.abs() < 3.5].max() <= 2 * 2**-18
    assert error.max() <= 1.1e-4


def test_modules_that_replace_hand_spelled_ones() -> None:
    x = torch.linspace(-5, 5, 300, dtype=torch.float64)
    assert (opened(nn.GELU("tanh")(secret(S, x))) - F.gelu(x, approximate="tanh")).abs().max() <= BOUND
    assert (opened(PrivateQuickGELU()(secret(S, x))) - x * torch.sigmoid(1.702 * x)).abs().max() <= BOUND


@pytest.mark.parametrize("affine", ["none", "secret", "public"])
def test_layer_norm(affine: str) -> None:
    x, weight, bias = noise(5, 64, scale=3), noise(64, seed=1), noise(64, seed=2)
    if affine == "none":
        got, want = F.layer_norm(secret(S, x), (64,)), F.layer_norm(x, (64,))
    else:
        w, b = (secret(S, weight), secret(S, bias)) if affine == "secret" else (weight, bias)
        got, want = F.layer_norm(secret(S, x), (64,), w, b, 1e-6), F.layer_norm(x, (64,), weight, bias, 1e-6)
    assert (opened(got) - want).abs().max() <= BOUND
    with pytest.raises(UnsupportedOp, match="last dimension"):
        F.layer_norm(secret(S, x), (5, 64))


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("public", [False, True])
def test_rms_norm(offset: float, public: bool) -> None:
    x, weight = noise(5, 64, scale=3), noise(64, seed=1)
    held = nn.Parameter(weight.float() if public else secret(S, weight), requires_grad=False)
    got = PrivateRMSNorm(held, 1e-6, offset)(secret(S, x))
    assert (opened(got) - F.rms_norm(x, (64,), weight + offset, 1e-6)).abs().max() <= BOUND
    if not offset:
        again = F.rms_norm(secret(S, x), (64,), held, 1e-6)
        assert torch.equal(opened(again), opened(got))
    with pytest.raises(PlaintextLeak, match="must be secret"):
        PrivateRMSNorm(held, 1e-6)(x)
    assert "eps=1e-06" in repr(PrivateRMSNorm(None, 1e-6))


def test_a_norm_by_lines_leaves_its_rows_less_room() -> None:
    """They are squared with more fractional bits, so the check at the end of a call has a tighter bound for them."""
    session, width, square = meta_session(PrivateConfig(adder="keys"), 1), 96, 8
    session.numerics.ranges = Ranges({session.protocol.module: {"square": square}})
    F.rms_norm(SecretTensor(meta_fixed(session, (3, width), session.frac)), (width,), None, 1e-6)
    more = line_bits(session.frac, width, square) - session.frac
    assert more > 0
    _, bits, _ = session.checks.pending[-1]
    assert bits == 30 - more
