"""Caches under protocol "assisted" are the client's: policies and transformers' own do what they do in plaintext."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from long_context.plain_attention import policy_attention
from long_context.plain_cache import PolicyCache
from private_llm_hf import PrivateConfig

from private_llm.errors import ConfigError
from private_llm.kv_cache.policies.papers import H2O, TOVA, HeadMerging, InfLLM, LongCache, MPCacheConfig, SnapKV
from private_llm.kv_cache.policies.policy import CachePolicy, Level, SlidingWindow
from tests.hf.compare import BATCH
from tests.hf.test_assisted import assisted

IDS = torch.arange(44)[None] % 60 + 3
POLICIES: list[CachePolicy] = [
    MPCacheConfig(gamma=0.5, least=8, observed=4, recent=4, first=1, levels=(Level(4, 0.5),)),
    H2O(least=8, recent=4), TOVA(least=8), SnapKV(least=8, recent=4), SlidingWindow(first=1, recent=8), InfLLM(),
    LongCache(), HeadMerging(),
]  # fmt: skip


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Any, Any]]:
    with assisted("llama") as both:
        yield both


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_policies_keep_and_attend_to_what_they_do_in_plaintext(policy: CachePolicy, pair: tuple[Any, Any]) -> None:
    found = []
    for model in pair:
        cache = PolicyCache(policy, model)
        with policy_attention(model):
            text = model.generate(IDS, past_key_values=cache, max_new_tokens=4, do_sample=False, eos_token_id=None)
        found.append((text.tolist(), cache.entries(), cache.attended()))
    assert found[0] == found[1]
    evicts = policy.eviction is not None or isinstance(policy, SlidingWindow)
    assert (max(found[1][1]) < 30) == evicts


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_caches_of_transformers(kind: str) -> None:
    with assisted(kind) as (plain, private):
        for name in ("dynamic", "static"):
            how = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": name}
            assert torch.equal(private.generate(**BATCH, **how), plain.generate(**BATCH, **how))


def test_the_setting_of_other_protocols_says_what_to_do_instead() -> None:
    with pytest.raises(
        ConfigError, match=r"kv_cache: .*generate\(\) a cache that evicts \(`private-llm docs kv-cache`"
    ):
        PrivateConfig(protocol="assisted", kv_cache=H2O())
