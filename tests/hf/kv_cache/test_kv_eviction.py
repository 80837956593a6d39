"""Private generation under policies that choose by secrets: tokens and logits are those of the plaintext executor.

The executor (`scripts/long_context`) has tests of its own against loops. LOGIT_ERROR is that of `compare.py`;
prompts are such that no ranking is too close to call.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from long_context.plain_attention import policy_attention
from long_context.plain_cache import PolicyCache
from private_llm_hf import PrivateConfig, patch
from private_llm_hf.client.preprocess import GeneratePlan
from private_llm_hf.tools.estimate import estimate
from process_memory import live_bytes
from torch import Tensor
from transformers import PreTrainedModel

from private_llm.errors import ConfigError, PrivateLLMError, UnsupportedOp
from private_llm.kv_cache.evicting import EvictingLayer
from private_llm.kv_cache.policies.papers import H2O, TOVA, HeadMerging, InfLLM, LongCache, MPCacheConfig, SnapKV
from private_llm.kv_cache.policies.policy import KEEP_ALL, CachePolicy, Level
from private_llm.net.local import LocalMesh
from private_llm.net.transport import Transport
from private_llm.nn.attention import AttentionQuery
from private_llm.sparsity_config import CometConfig
from private_llm.tensor.fixed import Fixed
from tests.hf import tiny
from tests.hf.compare import LOGIT_ERROR, worst
from tests.hf.conftest import PLAIN, TRIO
from tests.hf.models import families, test_sinks
from tests.hf.sparsity.models import sparse
from tests.hf.sparsity.test_private import saved
from tests.recording import RecordingTransport

PROMPT = 40
SECTION = (Level(4, 0.5), Level(2, 0.5))
MPCACHE = MPCacheConfig.paper(gamma=0.5, least=16, recent=4, levels=SECTION, apart=0)
STREAM = replace(MPCACHE, every=2, first=2)
ONCE = replace(MPCACHE, levels=())
POLICIES: dict[str, CachePolicy] = {
    "once": ONCE, "mpcache": MPCACHE, "stream": STREAM, "keys": replace(STREAM, gather="keys"),
    "shuffled": replace(STREAM, gather="shuffled-scores"), "scores": replace(STREAM, gather="scores"),
    "hidden": replace(ONCE, drop=False, every=2), "h2o": H2O(gamma=0.5, least=16), "tova": TOVA(gamma=0.5, least=16),
    "snapkv": SnapKV(gamma=0.5, least=16, recent=6), "infllm": InfLLM(block=4, heavy=2, kept=0.5, recent=0),
    "longcache": LongCache(kept=0.3), "merging": HeadMerging(2),
}  # fmt: skip
PROTOCOLS = {
    "trio": TRIO, "quad": PrivateConfig(protocol="quad", timeout_s=60),
    "dealer": PrivateConfig(protocol="dealer", timeout_s=60),
}  # fmt: skip


def prompt(seed: int = 4, rows: int = 2) -> dict[str, Tensor]:
    """Rows of PROMPT tokens; the first is padded on the left."""
    ids = torch.randint(3, 90, (2, PROMPT), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    return {"input_ids": ids[2 - rows :], "attention_mask": mask[2 - rows :]}


ASKED: dict[str, Any] = {
    "max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0,
    "return_dict_in_generate": True, "output_logits": True,
}  # fmt: skip


def built(name: str) -> PreTrainedModel:
    if name == "granite_swa":
        return test_sinks.build(name)
    if name == "gemma3_text":
        return tiny.build(name, layer_types=["sliding_attention", "full_attention"])
    return tiny.build(name) if name in tiny.ALL else families.build(name)


def plain(model: PreTrainedModel, policy: CachePolicy, **asked: Any) -> Any:
    with policy_attention(model), torch.no_grad():
        return model.generate(**asked, past_key_values=PolicyCache(policy, model))


def check(name: str, config: PrivateConfig, policy: CachePolicy, seed: int = 4, **changes: Any) -> None:
    asked = {**prompt(seed), **ASKED, **changes}
    want = plain(built(name), policy, **asked)
    with patch(built(name), replace(config, kv_cache=policy)) as private, torch.no_grad():
        got = private.generate(**asked)
    assert torch.equal(got.sequences, want.sequences)
    if "num_beams" not in changes:
        assert max(worst(a, b) for a, b in zip(got.logits, want.logits, strict=True)) < LOGIT_ERROR


@pytest.mark.sampled(4)
@pytest.mark.parametrize("policy", POLICIES)
def test_policies(policy: str) -> None:
    # LongCache ranks single entries by 8 bits of likeness: near ties, as in the text of seed 4, may fall otherwise.
    check("llama", PLAIN, POLICIES[policy], 6 if policy == "longcache" else 4)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "name", ["gpt2", "qwen3", "gemma2", "gemma3_text", "gpt_bigcode", "olmo2", "granite_swa", "gpt_neox"]
)
def test_families(name: str) -> None:
    """Caps, windows in some layers, one key head for all, norms of keys, sinks, partly rotated queries."""
    check(name, PLAIN, STREAM)


def test_opt() -> None:
    check("opt", PLAIN, STREAM, seed=5)


def test_what_is_evicted_matters() -> None:
    """The comparisons above could tell a cache that keeps all."""
    asked = {**prompt(), **ASKED}
    whole, evicted = tiny.build("llama").generate(**asked), plain(tiny.build("llama"), MPCACHE, **asked)
    apart = [worst(a, b) for a, b in zip(whole.logits, evicted.logits, strict=True)]
    assert apart[0] < LOGIT_ERROR / 100  # a prompt is read whole
    assert apart[1] > 10 * LOGIT_ERROR


@pytest.mark.sampled(6)
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("gather", ["scores", "shuffled-scores", "keys"])
def test_protocols(protocol: str, gather: str) -> None:
    check("llama", PROTOCOLS[protocol], replace(STREAM, gather=gather), max_new_tokens=4)  # type: ignore[arg-type]


SETTINGS = {
    "parallel sessions": replace(TRIO, parallel_sessions=2),
    "rotated roles": replace(TRIO, parallel_sessions=2, rotate_roles=True),
    "public weights": replace(TRIO, weights="public"),
    "checked ranges": replace(PLAIN, debug_ranges=True),
}  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", SETTINGS)
def test_settings(name: str) -> None:
    check("llama", SETTINGS[name], MPCACHE, max_new_tokens=4)


def test_a_revealed_token() -> None:
    asked = {**prompt(), **ASKED, "max_new_tokens": 4, "output_logits": False}
    with patch(built("llama"), replace(TRIO, kv_cache=MPCACHE, reveal="token")) as private:
        got = private.generate(**asked)
    assert torch.equal(got.sequences, plain(built("llama"), MPCACHE, **asked).sequences)


# -- ways of generating ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("policy", [MPCACHE, STREAM, ONCE])
def test_beams(policy: CachePolicy) -> None:
    check("llama", PLAIN, policy, num_beams=3, num_return_sequences=2, output_logits=False)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("turn", [3, 9])
@pytest.mark.parametrize("policy", [MPCACHE, STREAM, POLICIES["hidden"]])
def test_turns_of_a_chat_go_on_with_what_was_kept(policy: CachePolicy, turn: int) -> None:
    """A long turn evicts again, a short one does not."""
    more = torch.randint(3, 90, (1, turn), generator=torch.Generator().manual_seed(8))

    def talk(model: Any, cache: object) -> Tensor:
        asked = {**ASKED, "output_logits": False}
        with torch.no_grad():
            first = model.generate(prompt()["input_ids"][1:], **asked, past_key_values=cache)
            text = torch.cat([first.sequences, more], 1)
            made: Tensor = model.generate(text, **asked, past_key_values=first.past_key_values).sequences
        return made

    with patch(built("llama"), replace(PLAIN, kv_cache=policy)) as private:
        got = talk(private, None)
    model = built("llama")
    with policy_attention(model):
        assert torch.equal(got, talk(model, PolicyCache(policy, model)))


def test_a_copied_cache_goes_on_for_itself() -> None:
    ids = prompt()["input_ids"][1:]
    with patch(built("llama"), replace(PLAIN, kv_cache=STREAM)) as private, torch.no_grad():
        cache = private(ids, use_cache=True).past_key_values
        assert (cache.position, cache.kv_length) == (PROMPT, 20)
        twin = copy.deepcopy(cache)
        for step in range(3):
            first = private(ids[:, step : step + 1], past_key_values=cache).logits
        for step in range(3):
            second = private(ids[:, step : step + 1], past_key_values=twin).logits
    assert worst(first, second) < LOGIT_ERROR


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore::private_llm.errors.NeedsDistillation")
@pytest.mark.parametrize("approximations", ["mpcformer", "secformer"])
def test_a_softmax_of_squares_meets_no_score_far_below_others(approximations: str) -> None:
    """It would give nearly all weight to padding in a chosen cluster, and to hidden entries."""
    config = replace(PLAIN, approximations=approximations, plugins=("rivals",))
    with pytest.raises(ConfigError, match="drop=False with approximations="):
        replace(config, kv_cache=POLICIES["hidden"])
    asked = prompt()
    with patch(built("llama"), replace(config, kv_cache=STREAM)) as private, torch.no_grad():
        with pytest.raises(UnsupportedOp, match="got padding under kv_cache 'mpcache'"):
            private.generate(**asked, **ASKED)
        private(**asked, use_cache=False)
        unpadded = {"input_ids": asked["input_ids"][1:], "attention_mask": asked["attention_mask"][1:]}
        assert private.generate(**unpadded, **ASKED).sequences.shape == (1, PROMPT + 6)
    with patch(built("llama"), replace(config, kv_cache=ONCE)) as private, torch.no_grad():
        assert private.generate(**asked, **ASKED).sequences.shape == (2, PROMPT + 6)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", [KEEP_ALL, STREAM, POLICIES["hidden"]])
@pytest.mark.parametrize("crop", [False, True])
def test_an_emptied_cache_takes_another_batch(policy: CachePolicy, crop: bool) -> None:
    ids = prompt()["input_ids"]
    with patch(built("llama"), replace(PLAIN, kv_cache=policy)) as private, torch.no_grad():
        cache = private(ids, use_cache=True).past_key_values
        private(ids[:, :1], past_key_values=cache)
        if crop:
            cache.crop(-cache.position)
        else:
            cache.reset()
        fresh = private(ids[1:], use_cache=True).past_key_values
        private(ids[1:], past_key_values=cache)
        got, want = (private(ids[1:, :1], past_key_values=each).logits for each in (cache, fresh))
    assert torch.equal(got, want)


def test_preprocessed_calls_are_refused() -> None:
    """The helping party works ahead of the data, and what is opened in a secret order is not there yet."""

    def ahead() -> None:
        with patch(built("llama"), replace(TRIO, kv_cache=MPCACHE)) as private:
            private.preprocess(GeneratePlan(prompt=PROMPT, new_tokens=3, batch=2))
            private.generate(prompt()["input_ids"], max_new_tokens=3, do_sample=False, eos_token_id=None)

    with pytest.raises(PrivateLLMError, match="the helping party, which would run ahead, has to be told"):
        ahead()


@pytest.mark.full
def test_with_heads_and_neurons_left_out_under_four_parties(tmp_path: Path) -> None:
    """Comet, MPCache and quad in one configuration; with all heads predicted it is the executor's answer."""
    model, policy = sparse("llama"), replace(MPCACHE, shared_layers=1)
    asked = {**prompt(), **ASKED, "max_new_tokens": 4}
    found = {}
    for name, heads, predicted in (("all", 1.0, (0, 1, 2, 3)), ("two", 0.5, (1, 2))):
        folder = saved(model, "llama", tmp_path / name, "ffn heads", predicted)
        for base in (PLAIN, PROTOCOLS["quad"]):
            comet = CometConfig(folder, orders="kept", neuron_budget=1.0, head_budget=heads)
            with patch(model, replace(base, kv_cache=policy, sparsity=comet)) as private, torch.no_grad():
                found[name, base.protocol] = private.generate(**asked)
    for name in ("all", "two"):
        one, other = found[name, "plain"], found[name, "quad"]
        assert torch.equal(one.sequences, other.sequences)
        assert max(worst(a, b) for a, b in zip(one.logits, other.logits, strict=True)) < LOGIT_ERROR
    want = plain(model, policy, **asked)
    assert max(worst(a, b) for a, b in zip(found["all", "quad"].logits, want.logits, strict=True)) < LOGIT_ERROR
    assert worst(found["two", "quad"].logits[0], want.logits[0]) > 10 * LOGIT_ERROR


def test_layers_whose_heads_are_in_orders_of_their_own_share_no_choices(tmp_path: Path) -> None:
    """A key head would follow the choices of another."""
    model = sparse("llama")
    folder = saved(model, "llama", tmp_path, "ffn heads", (0, 1, 2, 3))
    comet = CometConfig(folder, orders="kept", neuron_budget=1.0, head_budget=1.0)
    with pytest.raises(ConfigError, match="shared_layers: got 2 with heads that are predicted"):
        patch(model, replace(PLAIN, kv_cache=MPCACHE, sparsity=comet))
    comet = CometConfig(folder, orders="kept", neuron_budget=1.0, heads=False)
    with patch(model, replace(PLAIN, kv_cache=MPCACHE, sparsity=comet)) as private:
        got = private.generate(**prompt(), **ASKED)
    want = plain(model, MPCACHE, **prompt(), **ASKED)
    assert max(worst(a, b) for a, b in zip(got.logits, want.logits, strict=True)) < LOGIT_ERROR


# -- what is sent, and what is held ---------------------------------------------------------------------------
@pytest.mark.sampled(6)
@pytest.mark.parametrize("gather", ["scores", "shuffled-scores"])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_transcripts_of_two_prompts_are_equal(protocol: str, gather: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes, tags and order of all messages of every party: one token again and again, and noise."""
    recorded: list[RecordingTransport] = []
    original: Callable[[LocalMesh, int], Transport] = LocalMesh.transport

    def recording(mesh: LocalMesh, number: int) -> Transport:
        recorded.append(RecordingTransport(original(mesh, number)))
        return recorded[-1]

    monkeypatch.setattr(LocalMesh, "transport", recording)
    policy = replace(STREAM, gather=gather)  # type: ignore[arg-type]
    seen = []
    for ids in (prompt()["input_ids"], torch.full((2, PROMPT), 7)):
        recorded.clear()
        with patch(built("llama"), replace(PROTOCOLS[protocol], kv_cache=policy)) as private:
            for transport in recorded:
                transport.messages.clear()
            private.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)
            seen.append({transport.ledger.party: transport.outline for transport in recorded})
    assert sum(map(len, seen[0].values())) > 1000
    assert seen[0] == seen[1]


@pytest.mark.full
@pytest.mark.parametrize("policy", ["once", "scores", "shuffled"])
def test_an_estimate_knows_what_is_sent(policy: str) -> None:
    model, config = tiny.build("llama"), replace(TRIO, kv_cache=POLICIES[policy])
    ids = prompt()["input_ids"][1:]
    with patch(model, config) as private:
        private.cost(reset=True)
        private.generate(ids, max_new_tokens=7, do_sample=False, eos_token_id=None)
        ran = private.cost()
        made = estimate(type(model), model.config, config, PROMPT, 7, ranges=private.parties.ranges)
    assert (made.costs.bytes_total, made.costs.rounds) == (ran.bytes_total, ran.rounds)


@pytest.mark.full
def test_what_parties_hold_falls_with_gamma() -> None:
    """In all, against a second cache of a session, so that what a session holds beside caches is there already."""
    ids, held = prompt()["input_ids"], {}
    for gamma in (0.25, 0.5, 1.0):
        policy = MPCacheConfig.paper(gamma=gamma, least=8, recent=4, levels=(), shared_layers=1)
        with patch(built("llama"), replace(TRIO, kv_cache=policy)) as private, torch.no_grad():
            caches = [private(ids, use_cache=True).past_key_values]
            private.cost()  # answered after the call is over at every party
            gc.collect()
            before = live_bytes()
            caches.append(private(ids, use_cache=True).past_key_values)
            private.cost()
            gc.collect()
            held[gamma] = live_bytes() - before
            assert caches[1].kv_length == int(gamma * PROMPT)
    assert held[0.25] < 0.6 * held[0.5] < 0.4 * held[1.0]


def test_each_layer_forgets_before_the_next_attends(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a prompt is never held whole by all layers; memory is that of the entries that stay."""
    seen: list[tuple[int, int]] = []
    original = EvictingLayer.attend

    def watched(layer: EvictingLayer, call: AttentionQuery, queries: int) -> Fixed:
        out = original(layer, call, queries)
        rows = layer.buffer._rows
        if rows is None:
            raise AssertionError("nothing is held")
        parts = [part for each in rows for part in each.parts]
        stored = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in parts}
        entry = sum(part[:, :, 0].numel() * part.element_size() for part in parts)
        seen.append((layer.buffer.length, sum(stored.values()) // entry))
        return out

    monkeypatch.setattr(EvictingLayer, "attend", watched)
    with patch(built("llama"), replace(PLAIN, kv_cache=ONCE)) as private, torch.no_grad():
        private(**prompt(), use_cache=True)
    assert [length for length, _ in seen] == [20, 20]
    assert max(stored for _, stored in seen) <= 20
