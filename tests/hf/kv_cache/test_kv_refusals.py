"""What policies of the KV cache refuse, before anything is sent, and what they leave alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from private_llm_hf import PrivateConfig, patch

from private_llm.errors import ConfigError
from private_llm.kv_cache.policies.papers import H2O, HeadMerging, InfLLM, LongCache, MPCacheConfig, SnapKV
from private_llm.kv_cache.policies.policy import CachePolicy, Level
from tests.hf import tiny
from tests.hf.compare import LOGIT_ERROR, worst
from tests.hf.conftest import PLAIN
from tests.hf.kv_cache.test_kv_eviction import ASKED, MPCACHE, built, check, plain, prompt


@pytest.mark.parametrize("name", ["bloom", "falcon", "mpt", "gptj", "t5", "bert"])
def test_models_whose_attention_cannot_follow_are_refused(name: str) -> None:
    """Biases by position are added to scores there (bloom, mpt, t5), or attention has a form of its own."""
    with pytest.raises(ConfigError, match=f"kv_cache 'mpcache' needs a decoder.*'{name}' is not"):
        patch(built(name), replace(PLAIN, kv_cache=MPCACHE))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", [MPCACHE, H2O(), LongCache()])
def test_windows_in_every_layer_are_refused(policy: CachePolicy) -> None:
    for name in ("mistral", "gemma3_text"):
        with pytest.raises(ConfigError, match="every layer of this model has one"):
            patch(tiny.build(name), replace(PLAIN, kv_cache=policy))
    check("mistral", PLAIN, HeadMerging(2))


def test_a_window_that_is_taken_out_is_no_hindrance() -> None:
    model = tiny.build("mistral", sliding_window=None)
    asked = {**prompt(), **ASKED}
    with patch(model, replace(PLAIN, kv_cache=MPCACHE)) as private:
        got = private.generate(**asked).sequences
    assert torch.equal(got, plain(tiny.build("mistral", sliding_window=None), MPCACHE, **asked).sequences)


@pytest.mark.parametrize(("name", "merged"), [("llama", 3), ("gpt2", 3), ("gpt_bigcode", 5), ("llama", 8)])
def test_heads_that_do_not_merge_are_refused(name: str, merged: int) -> None:
    with pytest.raises(ConfigError, match=f"got {merged} merged heads for"):
        patch(built(name), replace(PLAIN, kv_cache=HeadMerging(merged)))


def test_merged_heads_with_sinks_are_refused() -> None:
    with pytest.raises(ConfigError, match="sinks of their own"):
        patch(built("granite_swa"), replace(PLAIN, kv_cache=HeadMerging(2)))


def test_nodes_of_a_sharding_plan_keep_all() -> None:
    with pytest.raises(ConfigError, match="nodes of a sharding plan keep all"):
        PrivateConfig(protocol="cascade", kv_cache=MPCACHE)


BAD: list[tuple[type[CachePolicy], dict[str, Any], str]] = [
    (MPCacheConfig, {"gamma": 0}, "gamma: got 0; want a share above 0"),
    (MPCacheConfig, {"gamma": 1.5}, "gamma: got 1.5"),
    (MPCacheConfig, {"gamma": float("nan")}, "gamma: got nan"),
    (MPCacheConfig, {"alpha": float("nan")}, "alpha: got nan"),
    (MPCacheConfig, {"alpha": -0.1}, "alpha: got -0.1"),
    (MPCacheConfig, {"observed": 0.0}, "observed: got 0.0"),
    (MPCacheConfig, {"observed": 1.5}, "observed: got 1.5"),
    (MPCacheConfig, {"observed": 0}, "observed: got 0; want a whole number of tokens"),
    (MPCacheConfig, {"observed": True}, "observed: got True"),
    (MPCacheConfig, {"observed": "20%"}, "observed: got '20%'.*or a share of the prompt"),
    (MPCacheConfig, {"levels": ((32, 0.5), (32, 0.5))}, "got size 32 after 32"),
    (MPCacheConfig, {"levels": ((16, 0.5), (32, 0.5))}, "got size 32 after 16"),
    (MPCacheConfig, {"levels": ((32, 0.5), (12, 0.5))}, "got size 12 after 32"),
    (MPCacheConfig, {"levels": ((0, 0.5),)}, "got a size of 0"),
    (MPCacheConfig, {"levels": ((4, 0),)}, "got a share of 0"),
    (MPCacheConfig, {"levels": 32}, "levels: got 32"),
    (MPCacheConfig, {"least": 20, "recent": 16, "first": 4}, "want less together than least=20"),
    (MPCacheConfig, {"most": 10}, "most: got 10; want at least 64"),
    (MPCacheConfig, {"every": 0}, "every: got 0"),
    (MPCacheConfig, {"shared_layers": 0}, "shared_layers: got 0"),
    (MPCacheConfig, {"gather": "rows"}, "gather: got 'rows'"),
    (MPCacheConfig, {"drop": 1}, "drop: got 1"),
    (H2O, {"first": 32}, "first: got 32; want less than half of least=64"),
    (SnapKV, {"pool": 4}, "pool: got 4; want an odd number"),
    (InfLLM, {"heavy": 33}, "heavy: got 33; want at most block=32"),
    (HeadMerging, {"merged": 0}, "merged: got 0"),
]


@pytest.mark.parametrize(("kind", "values", "message"), BAD)
def test_bad_settings_are_refused(kind: type[CachePolicy], values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kind(**values)


@pytest.mark.parametrize(
    "policy",
    [
        replace(MPCACHE, least=64, levels=()),
        replace(MPCACHE, gamma=1.0, levels=(Level(64, 0.5),)),
        replace(MPCACHE, gamma=1.0, levels=(Level(4, 1.0),)),
    ],
)
def test_texts_that_are_too_short_lose_nothing(policy: CachePolicy) -> None:
    """A budget or clusters longer than the prompt: the answer is that of the model."""
    asked = {**prompt(), **ASKED}
    with patch(built("llama"), replace(PLAIN, kv_cache=policy)) as private:
        got = private.generate(**asked)
    want = tiny.build("llama").generate(**asked)
    assert max(worst(a, b) for a, b in zip(got.logits, want.logits, strict=True)) < LOGIT_ERROR


def test_sharing_beyond_the_model_is_sharing_by_all() -> None:
    check("llama", PLAIN, replace(MPCACHE, shared_layers=100, apart=0))
    check("llama", PLAIN, replace(MPCACHE, shared_layers=2, apart=100))
