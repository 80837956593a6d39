"""The option --kv-cache: every policy and setting is read, and what is not known is answered with what is."""

from __future__ import annotations

import json
from typing import Any

import pytest
from private_llm_cli.app import app
from private_llm_cli.kv_cache import kv_cache_of
from typer.testing import CliRunner

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError
from private_llm.kv_cache.policies import POLICIES
from private_llm.kv_cache.policies.papers import H2O, HeadMerging, InfLLM, MPCacheConfig, SnapKV
from private_llm.kv_cache.policies.policy import CachePolicy, KeepAll, Level, SlidingWindow


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("keep-all", KeepAll()),
        ("sliding-window, recent=9, first=2", SlidingWindow(9, 2)),
        (
            "mpcache,gamma=0.25,levels=32:0.5+16:0.4,every=64",
            MPCacheConfig(gamma=0.25, levels=(Level(32, 0.5), Level(16, 0.4)), every=64),
        ),
        ("mpcache,levels=none,drop=false,most=NONE,gather=keys", MPCacheConfig(levels=(), drop=False, gather="keys")),
        ("mpcache,preset=paper,recent=8", MPCacheConfig.paper(recent=8)),
        ("h2o,every=none,gamma=1", H2O(every=None, gamma=1)),
        ("snapkv,gamma=.3", SnapKV(gamma=0.3)),
        ("infllm,kept=5e-2", InfLLM(kept=0.05)),
        ("head-merging,merged=4", HeadMerging(4)),
    ],
)
def test_texts_are_policies(text: str, policy: CachePolicy) -> None:
    assert PrivateConfig.from_dict(kv_cache_of(text)).kv_cache == policy


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_goes_by_its_name_alone(name: str) -> None:
    assert PrivateConfig.from_dict(kv_cache_of(name)).kv_cache == POLICIES[name]()


def test_nothing_given_is_nothing_set() -> None:
    assert kv_cache_of("") == {}


def test_an_unknown_name_is_answered_with_all_policies_and_their_settings() -> None:
    with pytest.raises(ConfigError) as caught:
        kv_cache_of("mpcash")
    for name in POLICIES:
        assert name in str(caught.value)
    assert "mpcache (gamma, least, most, recent" in str(caught.value)
    assert "infllm (kept, first, recent, block, heavy)" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("mpcache,gama=0.5", "unknown key.*gama.*settings: mpcache .gamma"),
        ("mpcache,gamma", "KEY=VALUE"),
        ("mpcache,preset=papers", "preset=paper"),
        ("mpcache,gamma=", "KEY=VALUE"),
        ("mpcache,gamma=0.5,gamma=0.2", "once"),
        ("mpcache,gamma=lots", "gamma: got 'lots'; want a share"),
        ("mpcache,levels=32", "32:0.5"),
        ("mpcache,levels=a:b", "size of 'a'"),
        ("mpcache,drop=2", "drop: got 2"),
        ("sliding-window,recent=0.5", "whole number"),
    ],
)
def test_what_is_wrong_is_said(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        kv_cache_of(text)


def estimated(*options: str) -> dict[str, Any]:
    result = CliRunner().invoke(
        app, ["estimate", "gpt2", "--seq", "40", "--new", "2", "--gmacs", "40", "--json", *options]
    )
    assert result.exit_code == 0, result.output
    row: dict[str, Any] = json.loads(result.stdout)
    return row


@pytest.mark.full
def test_an_estimate_shows_what_a_policy_saves() -> None:
    policy = "mpcache,gamma=0.5,least=12,recent=4,levels=4:0.5"
    full, kept = estimated(), estimated("--kv-cache", policy)
    saving = kept["kv_cache"]
    assert "kv_cache" not in full
    assert saving["policy"]["name"] == "mpcache"
    assert saving["full"]["bytes_total"] == full["bytes_total"]
    assert saving["full"]["cache"] == full["memory_per_party"]["cache"] > kept["memory_per_party"]["cache"]
    for part in ("prompt", "token"):
        assert saving[part]["full"]["rounds"] > 0
    prompt, token = saving["prompt"], saving["token"]
    assert prompt["kept"]["bytes"] > prompt["full"]["bytes"]  # it evicts
    assert token["kept"]["bytes"] < token["full"]["bytes"]
    assert prompt["kept"]["bytes"] + token["kept"]["bytes"] == kept["bytes_total"]


def test_an_estimate_prints_the_saving() -> None:
    result = CliRunner().invoke(
        app, ["estimate", "gpt2", "--seq", "40", "--new", "2", "--gmacs", "40", "--kv-cache", "sliding-window,recent=8"]
    )
    assert result.exit_code == 0, result.output
    assert "beside a full cache" in result.output
    assert "each further token" in result.output
