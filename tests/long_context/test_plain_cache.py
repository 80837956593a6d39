"""The plaintext executor against loops over positions, and what it promises to transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from long_context.plain_attention import NAME, policy_attention
from long_context.plain_cache import PolicyCache
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from private_llm.errors import ConfigError, DomainError, UnsupportedOp
from private_llm.kv_cache.policies.papers import H2O, TOVA, HeadMerging, InfLLM, LongCache, MPCacheConfig, SnapKV
from private_llm.kv_cache.policies.policy import KEEP_ALL, CachePolicy, Level, NoCache, Selection, SlidingWindow
from tests.hf import tiny
from tests.long_context.slow_policy import slow_policy

CALLS = (17, 1, 1, 1, 4, 1, 1, 1)
"""New tokens of each call: a prompt, steps, a turn of several tokens, steps. No token is fed twice."""
ERROR = 1e-9
"""Doubles."""
TINY = MPCacheConfig.paper(
    gamma=0.7, least=6, recent=2, first=1, levels=(Level(4, 0.7), Level(2, 0.5)), apart=1, every=2, observed=0.5
)


@dataclass(frozen=True)
class MeanClusters(LongCache):
    """A representative that no policy on offer uses."""

    @property
    def selection(self) -> Selection:
        return Selection((Level(3, 0.5),), "mean", first=self.first, recent=self.recent)


POLICIES: dict[str, CachePolicy] = {
    "keep-all": KEEP_ALL,
    "mpcache": TINY,
    "mpcache-once": MPCacheConfig.paper(gamma=0.5, least=6, recent=3, levels=(), shared_layers=1),
    "mpcache-chosen": MPCacheConfig.paper(
        gamma=1, recent=2, least=6, levels=(Level(4, 0.5),), shared_layers=3, apart=0
    ),
    "mpcache-pooled": MPCacheConfig.paper(gamma=0.5, least=8, recent=3, pool=5, levels=(), every=2),
    "h2o": H2O(gamma=0.4, least=6, recent=2),
    "tova": TOVA(gamma=0.5, least=6),
    "snapkv": SnapKV(gamma=0.5, least=8, recent=3, pool=3),
    "infllm": InfLLM(kept=0.5, first=1, recent=2, block=4, heavy=2),
    "longcache": LongCache(kept=0.4, first=1, recent=2),
    "mean": MeanClusters(first=1, recent=2),
    "head-merging": HeadMerging(2),
}


def built(name: str, layers: int = 4) -> PreTrainedModel:
    """Some layers, in doubles; the windows of Gemma are short and every other layer's."""
    changes: dict[str, object] = {"num_hidden_layers": layers}
    if name.startswith("gemma"):
        changes["layer_types"] = ["full_attention", "sliding_attention", "full_attention", "full_attention"][:layers]
    if name == "qwen2":
        changes["layer_types"] = ["full_attention"] * layers
    return tiny.build(name, **changes).double()


def windows(model: PreTrainedModel) -> list[bool]:
    config = model.config
    if getattr(config, "layer_types", None):
        return [kind == "sliding_attention" for kind in config.layer_types]
    return [getattr(config, "sliding_window", None) is not None] * config.num_hidden_layers


def run(model: PreTrainedModel, text: Tensor, mask: Tensor, cache: object) -> list[Tensor]:
    """Logits of each call."""
    done, out = 0, []
    numbers = (mask.cumsum(-1) - 1).clamp(min=0)
    for new in CALLS:
        part = slice(done, done + new)
        done += new
        with torch.no_grad():
            kwargs = {"attention_mask": mask[:, :done], "position_ids": numbers[:, part], "past_key_values": cache}
            out.append(model(text[:, part], use_cache=True, **kwargs).logits)
    return out


def text_of(rows: int = 2, length: int = sum(CALLS), padded: int = 5) -> tuple[Tensor, Tensor]:
    text = torch.randint(3, 128, (rows, length), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(text)
    mask[0, :padded] = 0
    return text, mask


def apart(a: list[Tensor], b: list[Tensor], mask: Tensor) -> list[float]:
    """The largest difference of each call, where a token counts."""
    there = mask[:, : sum(CALLS)].bool().split(CALLS, dim=1)
    return [float((x - y).abs()[m].max()) for x, y, m in zip(a, b, there, strict=True)]


def both(name: str, policy: CachePolicy, padded: int = 5) -> tuple[list[Tensor], list[Tensor], Tensor, PolicyCache]:
    model, (text, mask) = built(name), text_of(padded=padded)
    cache = PolicyCache(policy, model)
    with policy_attention(model):
        got = run(model, text, mask, cache)
    with slow_policy(model, policy, windows(model)):
        want = run(model, text, mask, DynamicCache())
    return got, want, mask, cache


@pytest.mark.sampled(4)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_is_what_the_loops_make(policy: str) -> None:
    """Llama: two query heads a key head, a padded row; and it matters."""
    got, want, mask, _ = both("llama", POLICIES[policy])
    assert max(apart(got, want, mask)) < ERROR
    model, (text, mask) = built("llama"), text_of()
    whole = apart(run(model, text, mask, DynamicCache()), want, mask)
    if policy == "keep-all":
        assert max(whole) < ERROR
    else:
        assert max(whole[1:]) > 1e-3


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_depends_on_what_padding_holds(policy: str) -> None:
    model, (text, mask) = built("llama", 2), text_of()
    made = []
    for pad in (0, 97):
        with policy_attention(model):
            made.append(run(model, text.masked_fill(mask == 0, pad), mask, PolicyCache(POLICIES[policy], model)))
    assert max(apart(*made, mask)) < ERROR


@pytest.mark.sampled(4)
@pytest.mark.parametrize("policy", ["mpcache", "h2o", "infllm"])
@pytest.mark.parametrize("name", ["gpt2", "opt", "qwen2", "gemma2", "gemma3_text", "mistral", "gpt_neox"])
def test_other_families(name: str, policy: str) -> None:
    """Heads of their own, fused projections, capped scores, norms of keys, layers of the model's own windows."""
    got, want, mask, cache = both(name, POLICIES[policy])
    assert max(apart(got, want, mask)) < ERROR
    held = cache.entries()
    for entries, window in zip(held, windows(built(name)), strict=True):
        assert (entries == sum(CALLS)) == (window or policy == "infllm")


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_prompts_without_padding(name: str) -> None:
    """transformers gives no mask then."""
    got, want, mask, _ = both(name, TINY, padded=0)
    assert max(apart(got, want, mask)) < ERROR


@pytest.mark.parametrize(("name", "merged"), [("gpt2", 2), ("llama", 4), ("gemma2", 2)])
def test_merged_heads(name: str, merged: int) -> None:
    """With keys of their own; of several key heads; capped after they are merged."""
    got, want, mask, _ = both(name, HeadMerging(merged))
    assert max(apart(got, want, mask)) < ERROR


def test_evicted_entries_may_stay_under_a_mask() -> None:
    """drop=False: nothing is saved; without levels the answers are those of dropping."""
    settings = {"gamma": 0.5, "least": 6, "recent": 3, "levels": (), "every": 2}
    kept, _, mask, full = both("llama", MPCacheConfig.paper(**settings, drop=False))
    dropped, want, _, _ = both("llama", MPCacheConfig.paper(**settings))
    assert max(apart(kept, want, mask)) < ERROR
    assert max(apart(kept, dropped, mask)) < ERROR
    assert full.entries() == [sum(CALLS)] * 4
    got, want, mask, _ = both("llama", MPCacheConfig.paper(**{**settings, "levels": (Level(2, 0.5),)}, drop=False))
    assert max(apart(got, want, mask)) < ERROR


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_public_positions(name: str) -> None:
    """Attention sinks and a window, by positions, under a mask written down here; also in the model's own windows."""
    model, (text, mask) = built(name), text_of()
    cache = PolicyCache(SlidingWindow(recent=3, first=1), model)
    with policy_attention(model):
        got = run(model, text, mask, cache)
    assert cache.entries() == [4] * 4
    length, seen = text.shape[1], torch.zeros(2, 1, text.shape[1], text.shape[1], dtype=torch.bool)
    starts = [sum(CALLS[:i]) for i in range(len(CALLS))]
    for row in range(2):
        begin = int(mask[row].argmax())
        for query in range(length):
            start = max(s for s in starts if s <= query)
            for key in range(begin, query + 1):
                near = name == "llama" or key > query - model.config.sliding_window
                seen[row, 0, query, key] = near and (key >= start or key == begin or key >= start - 3)
    numbers = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        ban = torch.zeros(seen.shape, dtype=torch.float64).masked_fill_(~seen, torch.finfo(torch.float64).min)
        want = model(text, attention_mask=ban, position_ids=numbers, use_cache=False).logits
    assert max(apart(got, list(want.split(CALLS, dim=1)), mask)) < ERROR


@pytest.mark.parametrize("padded", [0, 5])
def test_nothing_left_out_is_the_full_cache_exactly(padded: int) -> None:
    """gamma = 1 and no levels: the same numbers, not near ones."""
    model, (text, mask) = built("llama").float(), text_of(padded=padded)
    want = run(model, text, mask, DynamicCache())
    with policy_attention(model):
        got = run(model, text, mask, PolicyCache(MPCacheConfig.paper(gamma=1, levels=()), model))
    assert max(apart(got, want, mask)) == 0


# -- what transformers does with a cache ------------------------------------------------------------------------
@pytest.mark.full
def test_generate_greedily_and_with_beams() -> None:
    """generate() makes what a loop makes; beams move rows about."""
    model, (text, mask) = built("llama"), text_of()
    asked = {"input_ids": text, "attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    policy = POLICIES["mpcache"]
    for beams in (1, 3):
        with policy_attention(model):
            got = model.generate(**asked, num_beams=beams, past_key_values=PolicyCache(policy, model))
        with slow_policy(model, policy, windows(model)) as state:
            want = model.generate(**asked, num_beams=beams, past_key_values=Beams(state, beams))
        assert torch.equal(got, want)
    assert not torch.equal(got, model.generate(**asked, num_beams=3))


class Beams(DynamicCache):
    """transformers' own cache, which moves the reference's state with its rows."""

    def __init__(self, state: object, beams: int) -> None:
        super().__init__()
        self.state, self.beams = state, beams

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        heads = self.state.heads
        layers, groups = {key[0] for key in heads}, {key[2] for key in heads}
        rows = enumerate(beam_idx.tolist())
        moved = {(i, to, g): copy.deepcopy(heads[i, row, g]) for to, row in rows for i in layers for g in groups}
        self.state.heads = moved


def begun(policy: CachePolicy, calls: int = 3) -> tuple[PreTrainedModel, PolicyCache, Callable[..., Tensor]]:
    model, (text, mask) = built("llama"), text_of()
    cache = PolicyCache(policy, model)
    numbers = (mask.cumsum(-1) - 1).clamp(min=0)

    def step(cache: PolicyCache, start: int, end: int, rows: slice = slice(None)) -> Tensor:
        with torch.no_grad(), policy_attention(model):
            return model(
                text[rows, start:end], attention_mask=mask[rows, :end], position_ids=numbers[rows, start:end],
                past_key_values=cache,
            ).logits  # fmt: skip

    start = 0
    for new in CALLS[:calls]:
        step(cache, start, start + new)
        start += new
    return model, cache, step


@pytest.mark.parametrize("policy", ["mpcache", "h2o", "infllm", "mpcache-once"])
def test_a_copy_goes_on_alone(policy: str) -> None:
    _, cache, step = begun(POLICIES[policy])
    twin = copy.deepcopy(cache)
    first = [step(cache, 19, 20), step(cache, 20, 22)]
    again = [step(twin, 19, 20), step(twin, 20, 22)]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert twin.layers[2].leader is twin.layers[1] or twin.layers[2].leader is None


@pytest.mark.parametrize("policy", ["mpcache", "h2o", "infllm"])
def test_rows_by_indices(policy: str) -> None:
    _, cache, step = begun(POLICIES[policy])
    twin = copy.deepcopy(cache)
    cache.batch_select_indices(torch.tensor([1]))
    want = step(twin, 19, 20)[1:]
    assert float((step(cache, 19, 20, slice(1, 2)) - want).abs().max()) < ERROR
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([1, 0]))
    assert cache.layers[0].keys.shape[0] == 2
    cache.reset()
    assert (cache.get_seq_length(), cache.entries(), cache.nbytes()) == (0, [0] * 4, 0)


def test_recent_positions_can_be_cropped_and_evicted_ones_not() -> None:
    policy = MPCacheConfig.paper(gamma=0.5, least=8, recent=4, levels=(Level(2, 0.5),))
    _, cache, step = begun(policy, calls=1)
    twin = copy.deepcopy(cache)
    want = step(cache, 17, 18)
    for start in (18, 19):
        step(cache, start, start + 1)
    assert cache.get_seq_length() == 20
    cache.crop(-3)
    assert cache.get_seq_length() == 17
    assert float((step(cache, 17, 18) - want).abs().max()) < ERROR
    twin.crop(-2)
    with pytest.raises(DomainError, match="some of them were evicted"):
        twin.crop(-8)
    with pytest.raises(DomainError, match="want a negative number"):
        twin.crop(1)
    chosen = copy.deepcopy(cache)
    chosen.crop(-1)
    assert float((step(chosen, 17, 18) - want).abs().max()) < ERROR
    twin.crop(-100)
    assert twin.get_seq_length() == 0


def test_memory_falls_and_the_length_does_not() -> None:
    _, cache, _ = begun(MPCacheConfig.paper(gamma=0.5, least=6, recent=2, levels=()), calls=1)
    _, whole, _ = begun(KEEP_ALL, calls=1)
    assert cache.entries() == [9] * 4  # of 17, rounded up
    assert cache.nbytes() == whole.nbytes() * 9 // 17
    for layer in cache.layers:
        assert layer.keys.untyped_storage().nbytes() == layer.keys.numel() * 8
    assert cache.get_seq_length() == whole.get_seq_length() == 17


def test_entries_attended_to() -> None:
    """18 held, the first one, at least 2 recent: 3 clusters of 4, which all go on; of 6 of 2, 3 are chosen."""
    policy = MPCacheConfig.paper(gamma=1, least=6, recent=2, first=1, levels=(Level(4, 0.7), Level(2, 0.5)))
    _, cache, _ = begun(policy, calls=1)
    assert cache.attended() == [17] * 4
    _, cache, _ = begun(policy, calls=2)
    assert cache.attended() == [18 - 12 + 6] * 4
    assert cache.entries() == [18] * 4


# -- the switch, and what is refused ----------------------------------------------------------------------------
def test_the_model_is_changed_inside_only() -> None:
    model = built("gemma2")
    before = model.config._attn_implementation
    with policy_attention(model) as same:
        assert same is model
        assert model.config._attn_implementation == NAME
    assert model.config._attn_implementation == before
    with pytest.raises(ZeroDivisionError), policy_attention(model):
        raise ZeroDivisionError
    assert model.config._attn_implementation == before


def test_any_other_cache_or_none_works_inside() -> None:
    model, (text, mask) = built("llama").float(), text_of()
    want = run(model, text, mask, DynamicCache())
    with policy_attention(model):
        assert max(apart(run(model, text, mask, DynamicCache()), want, mask)) == 0
        numbers = (mask.cumsum(-1) - 1).clamp(min=0)
        with torch.no_grad():
            alone = model(text, attention_mask=mask, position_ids=numbers, use_cache=False).logits
    assert max(apart(list(alone.split(CALLS, dim=1)), want, mask)) < 1e-3


def test_outside_the_context_it_is_refused() -> None:
    model, (text, mask) = built("llama"), text_of()
    with pytest.raises(UnsupportedOp, match="with policy_attention"):
        run(model, text, mask, PolicyCache(TINY, model))


def test_attention_of_a_models_own_is_refused() -> None:
    with pytest.raises(UnsupportedOp, match="attention of its own"), policy_attention(tiny.build("bloom")):
        pass


def test_heads_that_cannot_be_merged() -> None:
    model, (text, mask) = built("llama"), text_of()
    with pytest.raises(ConfigError, match="want a divisor of the 2 query heads"), policy_attention(model):
        run(model, text, mask, PolicyCache(HeadMerging(3), model))


def test_an_even_window_is_refused() -> None:
    with pytest.raises(ConfigError, match="want an odd number"):
        MPCacheConfig.paper(pool=4)


def test_no_cache_is_refused() -> None:
    with pytest.raises(ConfigError, match="use_cache=False"):
        PolicyCache(NoCache(), built("llama"))


@pytest.mark.parametrize(
    ("policy", "model", "message"),
    [("mpcache", None, "want a policy, such as"), (TINY, None, "got NoneType; want a transformers model")],
)
def test_what_is_no_policy_and_no_model_is_refused(policy: Any, model: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PolicyCache(policy, model)


def test_half_precision() -> None:
    """Ranks are made in float32; answers are those of half the bits."""
    model, (text, mask) = built("llama").bfloat16(), text_of()
    with policy_attention(model):
        got = run(model, text, mask, PolicyCache(TINY, model))
    assert got[-1].dtype == torch.bfloat16
    assert bool(torch.isfinite(got[-1]).all())
