"""The smallest budget within a stated loss, and policies that attend to equally much."""

from __future__ import annotations

import math

import pytest
import torch
from at_budget import policies_at
from long_context.budget import attended, forced, record, smallest_budget
from long_context.plain_attention import policy_attention
from long_context.plain_cache import PolicyCache
from transformers import DynamicCache

from private_llm.errors import ConfigError
from private_llm.kv_cache.policies.papers import MPCacheConfig
from private_llm.kv_cache.policies.policy import KEEP_ALL, CachePolicy
from tests.hf import tiny
from tests.long_context.test_plain_cache import TINY, built, text_of


def ladder() -> list[MPCacheConfig]:
    return [MPCacheConfig.paper(gamma=gamma, least=4, recent=2, levels=()) for gamma in (0.3, 0.5, 0.7, 0.9, 1.0)]


def losses(measure: str, continuation: int = 8) -> tuple[list[float], torch.Tensor]:
    """Of each policy, by transformers' own cache and a cache of one policy each."""
    model, (text, _) = built("llama"), text_of(rows=6)
    start = text.shape[1] - continuation
    best, nats = [], []
    for policy in (None, *ladder()):
        cache = DynamicCache() if policy is None else PolicyCache(policy, model)
        made = []
        with torch.no_grad(), policy_attention(model):
            model(text[:, :start], past_key_values=cache)
            for at in range(start, text.shape[1] - 1):
                made.append(model(text[:, at : at + 1], past_key_values=cache).logits[:, -1])
        logits = torch.stack(made, 1).log_softmax(-1)
        best.append(logits.argmax(-1))
        nats.append(-float(logits.gather(-1, text[:, start + 1 :, None]).mean()))
    if measure == "agreement":
        return [1 - float((one == best[0]).double().mean()) for one in best[1:]], text
    return [math.exp(one - nats[0]) - 1 for one in nats[1:]], text


@pytest.mark.parametrize("measure", ["agreement", "perplexity"])
def test_the_first_policy_within_the_loss_is_found(measure: str) -> None:
    want, text = losses(measure)
    assert want[-1] == pytest.approx(0, abs=1e-9)
    allowed = sorted(want)[1]
    told: list[CachePolicy] = []
    found = smallest_budget(built("llama"), text, allowed + 1e-5, measure, 8, ladder(), trying=told.append)
    assert told == [one.policy for one in found.tried]
    at = ladder().index(found.policy)
    assert want[at] <= allowed + 1e-5
    assert at == 0 or want[at - 1] > allowed
    assert found.tokens == 6 * 7
    for one in found.tried:
        assert one.loss(measure) == pytest.approx(want[ladder().index(one.policy)], abs=1e-5)  # of float32


def test_without_one_that_fits_everything_is_kept() -> None:
    _, (text, _) = built("llama"), text_of(rows=6)
    assert smallest_budget(built("llama"), text, 0.0, continuation=8, policies=ladder()[:2]).policy == KEEP_ALL


def test_bad_settings_are_refused() -> None:
    model, (text, _) = built("llama"), text_of(rows=2)
    with pytest.raises(ConfigError, match=r"cannot show a loss of 0.01; want 15 or more rows"):
        smallest_budget(model, text, 0.01, continuation=8)
    with pytest.raises(ConfigError, match="want 0 or more"):
        smallest_budget(model, text, -0.1)
    with pytest.raises(ConfigError, match="and a prompt"):
        smallest_budget(model, text, 0.5, continuation=text.shape[1])
    with pytest.raises(ConfigError, match="got none"):
        smallest_budget(model, text, 0.5, continuation=8, policies=[])


def test_forced_text_is_what_single_steps_predict() -> None:
    model, (text, _) = built("llama"), text_of(padded=0)
    with policy_attention(model), torch.no_grad():
        prefill = record(model, input_ids=text[:, :17])
        found = forced(model, prefill, TINY, text[:, 17:])
        cache, places = PolicyCache(TINY, model), []
        for start, end in ((0, 17), *((at, at + 1) for at in range(17, text.shape[1] - 1))):
            places.append(model(text[:, start:end], past_key_values=cache).logits[:, -1])
    logits = torch.stack(places, 1)
    assert torch.equal(found.best, logits.argmax(-1))
    want = torch.nn.functional.cross_entropy(logits.transpose(1, 2), text[:, 17:], reduction="none")
    assert float((found.loss - want).abs().max()) < 1e-4
    assert 0 < found.attended < found.held < 1


def test_the_count_is_that_of_the_cache() -> None:
    model = tiny.build("llama", max_position_embeddings=400)
    text = torch.randint(3, 128, (1, 301), generator=torch.Generator().manual_seed(1))
    for policy in policies_at(0.3, 300).values():
        cache = PolicyCache(policy, model)
        with torch.no_grad(), policy_attention(model):
            model(text[:, :300], past_key_values=cache)
            model(text[:, 300:], past_key_values=cache)
        assert cache.attended()[0] == attended(policy, 300), policy.name
