"""The estimate of token sharding is the ledger of a real run: every byte on every link, for prefill and decoding."""

from __future__ import annotations

from collections import defaultdict

import pytest
from private_llm_hf import PrivateConfig
from private_llm_hf.costs import Costs
from private_llm_hf.estimate import estimate

from private_llm.sharding import ShardingPlan
from tests.bench.test_estimate import real
from tests.hf import tiny

PLAN = ShardingPlan(3, 3, 1)


def settings(plan: ShardingPlan = PLAN) -> PrivateConfig:
    return PrivateConfig(protocol="cascade", plan=plan, timeout_s=30)


def sent(costs: Costs) -> dict[tuple[str, int, int], int]:
    """Bytes by what they are and link."""
    found: dict[tuple[str, int, int], int] = defaultdict(int)
    for ledger in costs.ledgers:
        for (_, what, to), count in ledger.sent.items():
            found[what, ledger.party, to] += count
    return dict(found)


@pytest.mark.parametrize(
    ("name", "new", "plan"),
    [
        ("llama", 9, PLAN),
        ("mistral", 4, ShardingPlan(2, 4, 2, rho=2)),
        ("opt", 0, PLAN),
        ("gpt2", 3, ShardingPlan(2, 6, 2, wire="float16")),
        ("bert", 0, PLAN),
        ("modernbert", 0, ShardingPlan(1, 4, 1)),
    ],
    ids=str,
)
def test_every_link_and_the_rounds(name: str, new: int, plan: ShardingPlan) -> None:
    model = tiny.build(name)
    found = estimate(type(model), model.config, settings(plan), sequence=13, new_tokens=new, batch=2)
    run = real(model, settings(plan), 13, new)
    assert sent(found.costs) == sent(run)
    assert found.costs.rounds == run.rounds
    assert sum(layer.bytes_total for layer in found.layers()) == found.costs.bytes_total


@pytest.mark.parametrize(
    ("name", "protocol", "new"), [("llama", "trio", 4), ("opt", "quad", 2), ("gpt2", "dealer", 0), ("bert", "trio", 0)]
)
def test_a_split_costs_its_parties_and_its_nodes(name: str, protocol: str, new: int) -> None:
    model = tiny.build(name)
    config = PrivateConfig.from_dict({"protocol": protocol, "plan": PLAN, "split": 1, "timeout_s": 60})
    found = estimate(type(model), model.config, config, sequence=13, new_tokens=new, batch=2)
    run = real(model, config, 13, new)
    assert sent(found.costs) == sent(run)
    assert found.costs.rounds == run.rounds
    assert found.costs.preprocessing.total == run.preprocessing.total
    layers = found.layers()
    assert sum(layer.bytes_total for layer in layers) == found.costs.bytes_total
    attending = [layer.name for layer in layers if layer.stages and layer.rounds]
    assert len(attending) == 1
    assert [layer.name for layer in layers if layer.name in attending] == attending
