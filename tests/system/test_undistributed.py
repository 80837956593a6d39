"""All nodes in one place give what one attention over everything gives."""

from __future__ import annotations

import pytest
import torch
from undistributed import Undistributed

from private_llm.token_sharding import ForwardStep, ShardingPlan
from tests.token_sharding.nodes.test_nodes import CAUSAL, FULL, WINDOW, Session

PLANS = [ShardingPlan(1, 1, 1, partials="open"), ShardingPlan(3, 2, 1), ShardingPlan(3, 4, 2, partials="open")]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_sharded_attention_without_links(plan: ShardingPlan) -> None:
    calls = [FULL, CAUSAL, WINDOW]
    session = Session(plan, calls, 2, 29)
    padding = torch.ones(2, 29, dtype=torch.bool)
    padding[1, :4] = False
    step = ForwardStep(None, 2, 0, 29, padding)
    nodes = Undistributed(plan, calls)
    nodes.begin(step)
    for rows, right in zip(session.rows, session.truth(step), strict=True):
        found = nodes.attend(*rows)
        assert float((found - right)[0].abs().max()) < 2e-6
        assert float((found - right)[1, :, 4:].abs().max()) < 2e-6
