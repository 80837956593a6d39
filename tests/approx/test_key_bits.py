"""ReLU on fewer key bits: exact within the stated range, off by less than 2^(low - frac) above zero, and cheaper."""

from __future__ import annotations

import pytest
import torch

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, DomainError
from private_llm.exact.comparisons import relu
from private_llm.protocols.registry import trio_prices as cost
from private_llm.protocols.session import Session
from private_llm.ring.ring import Ring
from private_llm.tensor.fixed import Fixed
from tests.harness import run_parties


def config(ring: int, protocol: str = "trio", **more: object) -> PrivateConfig:
    frac = {64: 18, 32: 10}[ring]
    return PrivateConfig.from_dict(
        {"ring": ring, "frac_bits": frac, "protocol": protocol, "insecure": protocol == "plain", **more}
    )


@pytest.mark.parametrize(("ring", "key"), [(64, 24), (64, 64), (32, 15), (32, 32)])
def test_exact_over_the_whole_stated_range(ring: int, key: int) -> None:
    settings = config(ring, relu_bits=key)
    top = 2.0 ** (min(key, ring - 2) - 1)
    units = torch.cat(
        [torch.linspace(-top, top - 1, 2001, dtype=torch.float64).round(), torch.tensor([0.0, 1.0, -1.0])]
    )
    x = units / 2**settings.frac_bits
    run = run_parties(settings, lambda _, a: relu(a), [x])
    assert torch.equal(run.value, x.relu())
    assert run.cost == cost.msb(len(x), key) + cost.inject(Ring(ring), len(x), 1, 1, 0)


@pytest.mark.parametrize("ring", [64, 32])
def test_ignored_low_bits_may_clear_tiny_positive_values_only(ring: int) -> None:
    settings = config(ring, relu_bits=20, relu_low=4)
    units = torch.arange(-(2**19) + 2**4, 2**19, 37, dtype=torch.float64)
    units = torch.cat([units, torch.arange(-40, 40, dtype=torch.float64)])
    x = units / 2**settings.frac_bits
    run = run_parties(settings, lambda _, a: relu(a), [x])
    tiny = (units >= 0) & (units < 2**4)
    assert torch.equal(run.value[~tiny], x.relu()[~tiny])
    assert bool(((run.value[tiny] == 0) | (run.value[tiny] == x[tiny])).all())
    assert run.cost == cost.msb(len(x), 20, low=4) + cost.inject(Ring(ring), len(x), 1, 1, 0)


def test_a_debug_session_names_the_module_that_leaves_the_range() -> None:
    settings = config(64, "plain", debug_ranges=True, relu_bits=24)

    def layer(session: Session, a: Fixed) -> Fixed:
        with session.module("layers.0.act"):
            return relu(a)

    run_parties(settings, layer, [torch.tensor([31.9, -31.9])])
    with pytest.raises(DomainError, match=r"module 'layers.0.act' meets 2\^23.0"):
        run_parties(settings, layer, [torch.tensor([1.0, 33.0])])


@pytest.mark.parametrize("wrong", [{"relu_bits": 18}, {"relu_bits": 65}, {"relu_low": -1}, {"relu_low": 18}])
def test_impossible_key_bits_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"relu_(bits|low): got"):
        PrivateConfig.from_dict(wrong)
