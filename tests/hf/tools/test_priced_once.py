"""An estimate that prices equal layers once is the estimate that runs every layer: bytes, rounds, products, memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import transformers as tr
from private_llm_hf import PrivateConfig
from private_llm_hf.tools.estimate import Estimate, estimate
from torch import nn

from private_llm.kv_cache.policies.papers import H2O, LongCache, MPCacheConfig
from private_llm.kv_cache.policies.policy import Level, SlidingWindow
from private_llm.token_sharding import ShardingPlan
from tests.hf import tiny
from tests.hf.tools.test_estimate import entries

KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
LIKE_LLAMA = {"qwen2", "qwen3", "mistral", "phi3"}
SMALL = MPCacheConfig.paper(gamma=0.7, least=6, recent=2, levels=(Level(4, 0.6), Level(2, 0.5)), apart=1)
SEQUENCE = 13  # longer than the windows, and enough for the nodes of a plan


def deep(name: str) -> tuple[type[tr.PreTrainedModel], tr.PretrainedConfig]:
    """A tiny model of three layers, of two kinds where its family has two."""
    kind, make = tiny.ALL[name]
    config = make()
    config.num_hidden_layers = 3
    if getattr(config, "layer_types", None) is not None:
        two = getattr(config, "sliding_window", None) is not None or name == "modernbert"
        config.layer_types = KINDS if two else ["full_attention"] * 3
    if name == "t5":
        config.num_decoder_layers = 3
    return kind, config


def both(name: str, settings: dict[str, Any], new: int, **changes: object) -> tuple[Estimate, Estimate]:
    kind, config = deep(name)
    for key, value in changes.items():
        setattr(config, key, value)
    private = PrivateConfig(**settings)
    once, each = (
        estimate(kind, config, private, sequence=SEQUENCE, new_tokens=new, every_layer=every) for every in (False, True)
    )
    return once, each


def check(once: Estimate, each: Estimate) -> None:
    assert entries(once.costs) == entries(each.costs)
    assert once.costs.bytes_total > 0
    assert (once.weight_bytes, once.cache_bytes) == (each.weight_bytes, each.cache_bytes)
    assert [layer.name for layer in once.layers()] == [layer.name for layer in each.layers()]


@pytest.mark.full
@pytest.mark.parametrize("name", sorted({*tiny.ALL} - LIKE_LLAMA))
def test_every_family(name: str) -> None:
    check(*both(name, {}, 2 if name in tiny.DECODERS or name == "t5" else 0))


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "settings", "new"),
    [
        ("qwen3", {"protocol": "quad"}, 2),
        ("t5", {"protocol": "dealer", "weights": "public"}, 2),
        ("opt", {"weights": "public", "protocol": "quad", "reveal": "token"}, 2),
        ("gpt2", {"truncation": "exact"}, 2),
        ("gemma2", {"protocol": "plain", "insecure": True}, 2),
        ("llama", {"kv_cache": SlidingWindow(recent=4, first=1)}, 5),
        ("gemma2", {"kv_cache": SlidingWindow(recent=9, first=2), "protocol": "dealer"}, 4),
        ("opt", {"split": 2, "plan": ShardingPlan(3, 3, 1)}, 2),
        ("llama", {"kv_cache": SMALL}, 4),
        ("gpt2", {"kv_cache": replace(SMALL, apart=0, shared_layers=3, every=2), "protocol": "quad"}, 5),
        ("qwen3", {"kv_cache": replace(SMALL, apart=1, drop=False), "protocol": "dealer"}, 3),
        ("opt", {"kv_cache": H2O(gamma=0.4, least=6, recent=1)}, 4),
        ("llama", {"kv_cache": LongCache(kept=0.3, first=1, recent=2)}, 3),
        ("gemma2", {"kv_cache": SMALL}, 3),
    ],
    ids=str,
)
def test_every_protocol(name: str, settings: dict[str, Any], new: int) -> None:
    check(*both(name, settings, new))


@pytest.mark.full
@pytest.mark.parametrize("policy", [SMALL, replace(SMALL, apart=0, shared_layers=2, every=1)], ids=str)
def test_leaders_and_followers_of_a_deep_model(policy: MPCacheConfig) -> None:
    """Seven layers: leaders that are like the first, followers behind leaders that did not run."""
    kind, config = deep("llama")
    config.num_hidden_layers = 7
    once, each = (
        estimate(kind, config, PrivateConfig(kv_cache=policy), SEQUENCE, 4, every_layer=every)
        for every in (False, True)
    )
    check(once, each)
    layers = {layer.name: layer.bytes_total for layer in once.layers() if ".layers." in layer.name}
    leads, follows = layers["model.layers.3"], layers["model.layers.4"]
    assert (leads > follows) == (policy.sharing.leader(4) == 3)


def test_layers_with_settings_of_their_own_are_priced_by_themselves() -> None:
    """GPT-2's attention divided by the number of the layer: another public factor, another cost, in each layer."""
    once, each = both("gpt2", {}, 2, scale_attn_by_inverse_layer_idx=True)
    check(once, each)
    assert len({(layer.bytes_total, layer.rounds) for layer in once.layers() if ".h." in layer.name}) > 1


def test_a_layer_runs_once_and_what_sees_no_cache_once_for_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    runs = {"LlamaAttention": 0, "LlamaMLP": 0}

    def counted(kind: type[nn.Module]) -> None:
        forward = kind.forward

        def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            runs[kind.__name__] += 1
            return forward(self, *args, **kwargs)

        monkeypatch.setattr(kind, "forward", run)

    counted(modeling_llama.LlamaAttention)
    counted(modeling_llama.LlamaMLP)
    estimate(*deep("llama"), PrivateConfig(), sequence=7, new_tokens=3)
    traced = 3  # layers, once, to see who reads a norm
    assert runs == {"LlamaAttention": 3 * 3 + traced, "LlamaMLP": 3 * 2 + traced}  # a prompt, then single tokens


@pytest.mark.sampled(2)
@pytest.mark.parametrize("settings", [{}, {"protocol": "cascade", "plan": ShardingPlan(3, 3, 1)}], ids=str)
def test_the_part_before_the_first_token_is_that_of_one_token(settings: dict[str, Any]) -> None:
    kind, config = deep("opt")
    private = PrivateConfig(**settings)
    several, one = (estimate(kind, config, private, sequence=SEQUENCE, new_tokens=new) for new in (3, 1))
    assert several.prompt is not None
    assert entries(several.prompt.costs) == entries(one.costs)
    assert [layer.bytes_total for layer in several.prompt.layers()] == [layer.bytes_total for layer in one.layers()]
    assert several.costs.bytes_total > several.prompt.costs.bytes_total
    assert estimate(kind, config, private, sequence=SEQUENCE).prompt is None
