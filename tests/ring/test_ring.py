"""Encoding into the ring and out of it, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from private_llm.errors import ConfigError, DomainError
from private_llm.ring.ring import RING32, RING64, Ring


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20), st.integers(4, 20))
def test_encode_rounds_to_half_a_unit(values: list[float], frac: int) -> None:
    x = torch.tensor(values, dtype=torch.float64)
    back = RING64.decode(RING64.encode(x, frac), frac)
    assert float((back - x).abs().max()) <= 0.5 / (1 << frac)


@pytest.mark.parametrize("ring", [RING64, RING32])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinity_are_refused(ring: Ring, value: float) -> None:
    with pytest.raises(DomainError, match="1 of 2 values are NaN or infinite"):
        ring.encode(torch.tensor([0.0, value]), 8)


def test_values_beyond_the_ring_are_refused_with_the_limit() -> None:
    with pytest.raises(DomainError, match="must stay below 262144 with 12"):
        RING32.encode(torch.tensor([300000.0]), 12)
    RING32.encode(torch.tensor([262143.0]), 12)


def test_only_two_rings_exist() -> None:
    with pytest.raises(ConfigError, match="want 32 or 64"):
        Ring(128)


@given(st.integers(-(2**70), 2**70))
def test_constants_reduce_like_two_s_complement(value: int) -> None:
    for ring in (RING64, RING32):
        reduced = ring.constant(value)
        assert -(2 ** (ring.bits - 1)) <= reduced < 2 ** (ring.bits - 1)
        assert (reduced - value) % 2**ring.bits == 0


def test_empty_tensors_encode() -> None:
    assert RING64.encode(torch.zeros(0, 3), 18).shape == (0, 3)
