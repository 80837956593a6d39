"""scripts/studies/at_budget.py: policies at one budget attend to so much, with their other settings as they were."""

from __future__ import annotations

import pytest
from at_budget import mpcache_at, policies_at
from long_context.budget import attended

from private_llm.errors import ConfigError
from private_llm.kv_cache.policies.papers import MPCacheConfig


@pytest.mark.parametrize("length", [1024, 3000])
@pytest.mark.parametrize("budget", [0.05, 0.1, 0.3, 0.5])
def test_policies_at_a_budget_attend_to_so_much(budget: float, length: int) -> None:
    for name, policy in policies_at(budget, length).items():
        share = attended(policy, length) / length
        assert 0.75 * budget < share < 1.05 * budget + 1 / length, name


def test_mpcache_at_a_budget_keeps_other_settings() -> None:
    made = mpcache_at(0.2, 2048, MPCacheConfig.paper(gamma=1, shared_layers=4))
    assert (made.gamma, made.shared_layers) == (1, 4)
    with pytest.raises(ConfigError, match="less than what always stays"):
        mpcache_at(0.01, 100, MPCacheConfig.paper(gamma=1, recent=60, least=70))
    with pytest.raises(ConfigError, match="want more than 40"):
        policies_at(0.01, 1024)
