"""The 32-bit ring: values below 2^(30 - 2 frac) survive products, means and public factors; bounds in units.

A sum counts as a value of its own and stays below 2^(30 - frac).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import private_llm.nn  # noqa: F401 - completes the table of operations
from private_llm.errors import DomainError
from private_llm.protocols.session import Session
from private_llm.tensor.secret import SecretTensor
from tests.tensor.secrets import noise, opened, plain_session, secret

FRACS = [8, 12, 13]


def _session(frac: int) -> tuple[Session, float, float]:
    """(session, one unit, the largest value)."""
    return plain_session(ring=32, frac_bits=frac), 2.0**-frac, 2.0 ** (30 - 2 * frac)


def _settled(x: Tensor) -> Tensor:
    assert isinstance(x, SecretTensor)
    return opened(x.to_fixed())


@pytest.mark.parametrize("frac", FRACS)
@pytest.mark.parametrize("count", [2, 3, 7, 9, 16, 49, 64, 1000, 3136])
def test_means_over_the_whole_range(frac: int, count: int) -> None:
    """1/n is off by half a unit, or 2^e/n after a division by 2^e that is off by one: at most two units more."""
    session, unit, largest = _session(frac)
    x = torch.full((3, count), min(largest, 2.0 ** (30 - frac) / count) - 1, dtype=torch.float64)
    x[1] = -x[1]
    x[2] = (noise(count) * 1024).round() / 1024 % 1
    x = (x / unit).round() * unit
    got = _settled(secret(session, x).mean(-1))
    few = count < 1 << max(0, frac - 8)
    scaled = x.sum(-1).abs() / (1 if few else 2.0 ** (count.bit_length() - 1))
    bound = 0 if count & (count - 1) == 0 else scaled * unit / 2 + (0 if few else 2 * unit)
    assert ((got - x.mean(-1)).abs() <= bound + unit).all()


@pytest.mark.parametrize("frac", FRACS)
def test_public_factors_have_the_bits_of_weights(frac: int) -> None:
    session, unit, largest = _session(frac)
    for factor in (0.3, -0.01, 1.7, 2.0**-9, 0.25, largest / 5):
        x = torch.tensor([largest - 1, 1.0, -3.5, -largest + 1], dtype=torch.float64) / max(1.0, factor)
        x = (x / unit).round() * unit
        exact = x * factor
        error = (_settled(secret(session, x) * factor) - exact).abs()
        assert (error <= x.abs() * unit / 2 + unit).all()
        table = torch.tensor([factor, 1.0, factor, factor])
        error = (_settled(secret(session, x) * table) - x * table.double()).abs()
        assert (error <= x.abs() * unit / 2 + unit).all()


@pytest.mark.parametrize("frac", FRACS)
def test_a_product_after_a_mean_has_the_whole_range(frac: int) -> None:
    """Bits that a mean by a power of two leaves behind are truncated before the next product, which has no room."""
    session, unit, largest = _session(frac)
    x = torch.full((1, 1, 4, 4), largest / 2, dtype=torch.float64)
    x[..., 0, 0] = 1.0
    weight = torch.full((1, 1, 1, 1), 1.875, dtype=torch.float64)
    got = _settled(F.conv2d(F.avg_pool2d(secret(session, x), 2), secret(session, weight)))
    want = F.conv2d(F.avg_pool2d(x, 2), weight)
    assert (got - want).abs().max() <= 3 * unit


def test_functions_that_need_wide_products_say_so() -> None:
    session = plain_session(ring=32, frac_bits=12)
    x, ones = secret(session, noise(4, 8)), secret(session, torch.ones(8, dtype=torch.float64))
    calls: list[Callable[[], Tensor]] = [
        lambda: F.gelu(x), lambda: F.silu(x), lambda: torch.sigmoid(x), lambda: torch.tanh(x),
        lambda: F.softmax(x, -1), lambda: F.layer_norm(x, (8,), ones, ones), lambda: F.rms_norm(x, (8,), ones),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(DomainError, match=r"need a 64-bit ring; got 32 bits \(set ring=64, or use ReLU models"):
            call()
