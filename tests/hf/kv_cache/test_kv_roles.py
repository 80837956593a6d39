"""Which layer chooses for which, the policy that caches nothing, and no setting of another name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from long_context.plain_attention import policy_attention
from long_context.plain_cache import PolicyCache
from private_llm_hf import NoCache, PrivateConfig, patch
from private_llm_hf.kv_cache.cache import SecretCache
from private_llm_hf.kv_cache.model_checks import windowed_layers
from transformers import PreTrainedModel

from private_llm.kv_cache.policies.policy import KEEP_ALL, LayerSharing, SlidingWindow
from tests.hf import tiny
from tests.hf.compare import LOGIT_ERROR, worst
from tests.hf.conftest import PLAIN, TRIO
from tests.hf.kv_cache.test_kv_eviction import ASKED, MPCACHE, prompt

KINDS = ["sliding_attention", "full_attention", "full_attention", "sliding_attention", "full_attention"]


def test_the_first_layer_of_a_group_without_a_window_chooses() -> None:
    sharing, windowed = LayerSharing(layers=3, apart=1), frozenset({1, 5})
    assert [sharing.leader(number) for number in range(8)] == [0, 1, 1, 1, 4, 4, 4, 7]
    assert [sharing.leader(number, windowed) for number in (2, 3, 4, 6)] == [2, 2, 4, 4]


def mixed() -> PreTrainedModel:
    """Windows in layers 0 and 3, so a group of all five follows layer 1."""
    return tiny.build("gemma3_text", num_hidden_layers=5, layer_types=KINDS, sliding_window=8)


def test_layers_with_a_window_keep_all_under_policies_that_choose_in_secret_alone() -> None:
    recent, choices = SlidingWindow(recent=4), replace(MPCACHE, shared_layers=1)
    for policy, kept in ((recent, recent), (choices, KEEP_ALL)):
        cache = SecretCache(policy, frozenset({1}))
        assert [cache.role(number) for number in (0, 1)] == [(policy, 0), (kept, 1)]


@pytest.mark.full
def test_groups_with_windows_in_them_choose_as_in_plaintext() -> None:
    policy = replace(MPCACHE, shared_layers=5)
    assert windowed_layers(mixed().config) == {0, 3}
    model, asked = mixed(), {**prompt(5), **ASKED}  # prompt 4 has two clusters whose likenesses are equal to 8 bits
    cache = PolicyCache(policy, model)
    followed = [None if layer.leader is None else layer.leader.number for layer in cache.layers]
    assert followed == [None, None, 1, None, 1]
    with policy_attention(model), torch.no_grad():
        want = model.generate(**asked, past_key_values=cache)
    with patch(mixed(), replace(PLAIN, kv_cache=policy)) as private:
        got = private.generate(**asked)
    assert torch.equal(got.sequences, want.sequences)
    assert max(worst(a, b) for a, b in zip(got.logits, want.logits, strict=True)) < LOGIT_ERROR


@pytest.mark.sampled(2)
@pytest.mark.parametrize("config", [PLAIN, TRIO])
def test_without_a_cache_every_token_runs_the_whole_text(config: PrivateConfig) -> None:
    asked = {**prompt(), **ASKED, "max_new_tokens": 3}
    want = tiny.build("llama").generate(**asked)
    sent = []
    for policy in (KEEP_ALL, NoCache()):
        with patch(tiny.build("llama"), replace(config, kv_cache=policy)) as private, torch.no_grad():
            private.cost(reset=True)
            got = private.generate(**asked)
            sent.append(private.cost().bytes_total)
            assert torch.equal(got.sequences, want.sequences)
            held = private(**prompt(), use_cache=True).past_key_values
            assert (held is None) == (policy != KEEP_ALL)
    assert config is PLAIN or sent[1] > 2.5 * sent[0]  # three prompts instead of one
