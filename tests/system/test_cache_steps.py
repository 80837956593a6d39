"""What bench_mpcache.py counts is what the ledgers of parties that compute book, in every policy and protocol."""

from __future__ import annotations

import pytest
from cache_steps import AttentionShape, counted, timed

from private_llm.config import PrivateConfig
from private_llm.kv_cache.policies.papers import H2O, HeadMerging, InfLLM, LongCache, MPCacheConfig, SnapKV
from private_llm.kv_cache.policies.policy import KEEP_ALL, CachePolicy, Level

SMALL = MPCacheConfig.paper(gamma=0.5, least=16, recent=3, levels=(Level(8, 0.5), Level(4, 0.5)))
POLICIES = [
    KEEP_ALL, SMALL, MPCacheConfig.paper(gamma=1.0, recent=2, levels=(Level(4, 0.3),), gather="keys", shared_layers=1),
    MPCacheConfig.paper(
        gamma=0.6, least=20, recent=2, levels=(Level(4, 0.5),), gather="shuffled-scores", shared_layers=3
    ),
    LongCache(recent=2), H2O(gamma=0.5, least=8), SnapKV(least=40), InfLLM(block=8, recent=1),
]  # fmt: skip


GROUPED, ODD = AttentionShape(4, 2, 8, 52), AttentionShape(3, 3, 4, 41)


@pytest.mark.parametrize(
    ("protocol", "shape", "policies"),
    [
        ("trio", GROUPED, [*POLICIES, HeadMerging(2)]),
        ("trio", ODD, [SMALL, HeadMerging(3)]),
        ("dealer", ODD, [KEEP_ALL, SMALL]),
        ("quad", GROUPED, [KEEP_ALL, SMALL]),
    ],
)
def test_counts_are_the_ledgers(protocol: str, shape: AttentionShape, policies: list[CachePolicy]) -> None:
    config = PrivateConfig(protocol=protocol)
    found = timed(config, policies, shape, repeat=2)
    for policy, run in zip(policies, found, strict=True):
        priced = counted(config, policy, shape, period=len(run.steps))
        assert (run.prompt, run.steps) == (priced.prompt, priced.steps), policy
        assert run.seconds["min"] > 0


def test_what_is_kept_decides_about_bytes_and_memory() -> None:
    shape, config = AttentionShape(4, 4, 8, 256), PrivateConfig()
    full, half, quarter = (
        counted(config, policy, shape, 1)
        for policy in (KEEP_ALL, MPCacheConfig.paper(gamma=0.5, levels=()), MPCacheConfig.paper(gamma=0.25, levels=()))
    )
    assert full.steps[0][0] > half.steps[0][0] > quarter.steps[0][0]
    assert full.held_bytes == 2 * half.held_bytes == 4 * quarter.held_bytes == 2 * 2 * 4 * 8 * 256 * 8
    assert full.prompt[0] < half.prompt[0]


def test_a_party_that_fails_is_heard_of() -> None:
    with pytest.raises(Exception, match="head merging"):
        timed(PrivateConfig(), [HeadMerging(3)], AttentionShape(4, 4, 8, 12), 1)
