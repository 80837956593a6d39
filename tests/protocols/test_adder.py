"""The automatic choice between the two adders: few rounds or few bytes, from public sizes and the network."""

from __future__ import annotations

import pytest
import torch

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError
from private_llm.net.ledger import Cost
from private_llm.protocols.prices import Adder
from private_llm.protocols.registry import trio_prices as cost
from private_llm.ring.ring import Ring
from tests.protocols.parties import ring_values, run_ring


def test_the_faster_one_on_the_stated_network() -> None:
    """10 MB against 4 MB at 80 Mbit/s: 0.6 s saved; 59 rounds more at 5 ms: 0.295 s lost. At 20 ms: 1.18 s lost."""
    prefix, ripple = Cost({(0, 2): 10_000_000, (1, 2): 0}, 4), Cost({(0, 2): 4_000_000, (1, 2): 0}, 63)
    assert Adder("auto", 80, 5).ripples(lambda: prefix, lambda: ripple)
    assert not Adder("auto", 80, 20).ripples(lambda: prefix, lambda: ripple)
    assert not Adder("prefix", 80, 5).ripples(lambda: prefix, lambda: ripple)
    assert Adder("ripple", 80, 20).ripples(lambda: prefix, lambda: ripple)


def test_a_party_that_receives_from_two_is_as_busy_as_their_sum() -> None:
    """Both links of 1 MB end at party 2: 0.2 s at 80 Mbit/s; one link of 1.5 MB takes 0.15 s."""
    two, one = Cost({(0, 2): 1_000_000, (1, 2): 1_000_000}, 1), Cost({(0, 2): 1_500_000}, 1)
    assert Adder("auto", 80, 0).ripples(lambda: two, lambda: one)


def test_without_a_bandwidth_it_takes_few_rounds_and_asks_for_no_price() -> None:
    def unasked() -> Cost:
        raise AssertionError("asked")

    assert not Adder("auto").ripples(unasked, unasked)


@pytest.mark.parametrize(("n", "latency_ms", "ripples"), [(64, 1.0, False), (200_000, 0.01, True)])
def test_a_comparison_pays_for_the_chosen_adder(n: int, latency_ms: float, ripples: bool) -> None:
    config = PrivateConfig(bandwidth_mbit=100, latency_ms=latency_ms)
    x = ring_values(64, (n,), 60)
    run = run_ring(config, [x], lambda p, a: p.inject(p.msb(a), None, [0], [1]), (n,))
    comparison = cost.msb_ripple(n, 64) if ripples else cost.msb(n, 64)
    assert run.cost == comparison + cost.inject(Ring(64), n, 1, 0, 0)
    assert torch.equal(run.result, (x < 0).long())


@pytest.mark.parametrize(("protocol", "ripples"), [("trio", False), ("quad", True)])
def test_a_protocol_decides_by_its_own_prices(protocol: str, ripples: bool) -> None:
    """Four thresholds: quad sends the monomials once for each, so it saves more by rippling."""
    config = PrivateConfig.from_dict({"protocol": protocol, "bandwidth_mbit": 1, "latency_ms": 0.2})
    x = ring_values(64, (200,), 30)
    run = run_ring(config, [x], lambda p, a: p.inject(p.msb(a, [0, 1, 2, 3], 32), None, [0] * 4, [1] * 4), (200,))
    assert run.cost.rounds == (31 if ripples else 4) + 1


@pytest.mark.parametrize("wrong", [{"bandwidth_mbit": 0.0}, {"latency_ms": -1.0}, {"bandwidth_mbit": -5.0}])
def test_a_network_that_cannot_exist_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"(bandwidth_mbit|latency_ms): got"):
        PrivateConfig.from_dict(wrong)
