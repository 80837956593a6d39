"""A cache that evicts: tokens and logits are those of a plaintext model whose mask forbids what was evicted.

The reference has no cache: it runs the whole text every time under a mask that is written down here, position by
position. LOGIT_ERROR is that of `compare.py`: eviction adds no rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
import transformers as tr
from private_llm_hf import PrivateConfig, patch
from private_llm_hf.checkpoint.miniature import miniature
from private_llm_hf.client.preprocess import GeneratePlan
from private_llm_hf.tools.estimate import estimate
from torch import Tensor
from transformers import PreTrainedModel

from private_llm.errors import ConfigError, DomainError, PartyFailed, UnsupportedOp
from private_llm.kv_cache.policies.papers import MPCacheConfig
from private_llm.kv_cache.policies.policy import KEEP_ALL, CacheFacts, CachePolicy, SlidingWindow
from tests.hf import tiny
from tests.hf.compare import BATCH, LOGIT_ERROR, MASK, PADDED, worst
from tests.hf.conftest import PLAIN, TRIO
from tests.hf.models import families
from tests.tensor.secrets import opened

PROMPT = PADDED.shape[1]
WINDOW = SlidingWindow(recent=3, first=1)
CONFIGS = {"plain": replace(PLAIN, kv_cache=WINDOW), "trio": replace(TRIO, kv_cache=WINDOW)}


def allowed(mask: Tensor) -> Tensor:
    """bool [B, 1, S, S]: which positions a query may see, for a prompt of PROMPT read at once and single steps."""
    rows, length = mask.shape
    made = torch.zeros(rows, 1, length, length, dtype=torch.bool)
    for row in range(rows):
        begin = int(mask[row].argmax())
        for query in range(length):
            for key in range(begin, query + 1):
                sink, recent = key - begin < WINDOW.first, key >= query - WINDOW.recent
                made[row, 0, query, key] = query < PROMPT or key == query or sink or recent
    return made


def windowed(model: PreTrainedModel) -> PreTrainedModel:
    """The plaintext model, generating under the mask of `allowed`, without a cache."""
    original = type(model)

    def forward(
        self: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: object
    ) -> object:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        ban = torch.zeros(mask.shape[0], 1, mask.shape[1], mask.shape[1])
        ban.masked_fill_(~allowed(mask), torch.finfo(torch.float32).min)
        opt = self.config.model_type == "opt"
        kwargs["position_ids"] = mask.cumsum(-1) * mask - 1 if opt else (mask.cumsum(-1) - 1).clamp(min=0)
        kwargs["use_cache"] = False
        return original.forward(self, input_ids=input_ids, attention_mask=ban, **kwargs)

    model.__class__ = type(f"Windowed{original.__name__}", (original,), {"forward": forward})
    model.generation_config.use_cache = False
    return model


@pytest.mark.sampled(3)
@pytest.mark.parametrize("protocol", CONFIGS)
@pytest.mark.parametrize("name", ["llama", "opt", "gpt2"])
def test_tokens_and_logits_are_those_of_the_forbidding_mask(name: str, protocol: str) -> None:
    """Batch 2, padded on the left; Llama has two query heads per key head."""
    asked = {**BATCH, "max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    with patch(tiny.build(name), CONFIGS[protocol]) as private, torch.no_grad():
        got = private.generate(**asked)
    want, whole = windowed(tiny.build(name)).generate(**asked), tiny.build(name).generate(**asked)
    assert torch.equal(got.sequences, want.sequences)
    assert max(worst(a, b) for a, b in zip(got.logits, want.logits, strict=True)) < LOGIT_ERROR
    apart = [worst(a, b) for a, b in zip(want.logits, whole.logits, strict=True)]
    assert apart[0] < LOGIT_ERROR / 100  # the prompt is read whole
    assert min(apart[1:]) > 10 * LOGIT_ERROR  # and what is evicted matters


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["qwen3", "mistral", "gemma3_text", "gpt_neox", "gpt_bigcode", "ctrl", "olmo2"])
def test_other_families(name: str) -> None:
    """Norms of queries and keys; the model's own windows, which are longer than ours; one key head for all."""
    build = tiny.build if name in tiny.ALL else families.build
    asked = {**BATCH, "max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    with patch(build(name), CONFIGS["plain"]) as private, torch.no_grad():
        got = private.generate(**asked)
    want = windowed(build(name)).generate(**asked)
    assert torch.equal(got.sequences, want.sequences)
    assert max(worst(a, b) for a, b in zip(got.logits, want.logits, strict=True)) < LOGIT_ERROR


def test_values_stay_in_range_and_guarded_while_entries_go() -> None:
    """A debug session checks every tensor, those that were moved too."""
    asked = {**BATCH, "max_new_tokens": 4, "do_sample": False}
    with patch(tiny.build("llama"), replace(CONFIGS["plain"], debug_ranges=True)) as private:
        assert torch.equal(private.generate(**asked), windowed(tiny.build("llama")).generate(**asked))


@pytest.mark.parametrize("protocol", CONFIGS)
def test_beams(protocol: str) -> None:
    asked = {**BATCH, "max_new_tokens": 6, "num_beams": 3, "do_sample": False}
    with patch(tiny.build("llama"), CONFIGS[protocol]) as private:
        assert torch.equal(private.generate(**asked), windowed(tiny.build("llama")).generate(**asked))


@pytest.fixture(scope="module")
def private() -> Iterator[PreTrainedModel]:
    with patch(tiny.build("llama"), CONFIGS["plain"]) as made:
        yield made


def reference(tokens: Tensor, mask: Tensor) -> Tensor:
    """Logits of a whole text [B, S, V]."""
    with torch.no_grad():
        made: Tensor = windowed(tiny.build("llama"))(tokens, attention_mask=mask).logits
    return made


def test_two_steps_and_what_the_handle_says(private: PreTrainedModel) -> None:
    text = torch.cat([PADDED, torch.tensor([[11, 12], [13, 14]])], 1)
    mask = torch.cat([MASK, torch.ones(2, 2, dtype=torch.int64)], 1)
    want, numbers = reference(text, mask), (mask.cumsum(-1) - 1).clamp(min=0)
    cache = None
    for begin, end, held in [(0, 5, 4), (5, 6, 4), (6, 7, 4)]:
        out = private(
            text[:, begin:end], attention_mask=mask[:, :end], position_ids=numbers[:, begin:end], use_cache=True,
            past_key_values=cache,
        )  # fmt: skip
        cache = out.past_key_values
        assert worst(out.logits, want[:, begin:end], mask[:, begin:end]) < LOGIT_ERROR
        assert (cache.position, cache.kv_length, cache.get_seq_length()) == (end, held, end)
    assert "position=7, kv_length=4" in repr(cache)


def test_a_short_text_evicts_nothing(private: PreTrainedModel) -> None:
    cache = private(PADDED[1:, :4], use_cache=True).past_key_values
    assert (cache.position, cache.kv_length) == (4, 4)
    cache = private(PADDED[1:, 4:], past_key_values=cache).past_key_values
    assert (cache.position, cache.kv_length) == (5, 4)


def test_recent_positions_can_be_cropped_and_evicted_ones_not(private: PreTrainedModel) -> None:
    text = torch.cat([PADDED[1:], torch.tensor([[11, 12, 13, 14, 15]])], 1)
    cache = private(text[:, :5], use_cache=True).past_key_values
    for step in range(5, 8):
        cache = private(text[:, step : step + 1], past_key_values=cache).past_key_values
    assert (cache.position, cache.kv_length) == (8, 4)
    twin = copy.deepcopy(cache)
    with pytest.raises(DomainError, match="only the last 3 positions"):
        cache.crop(-4)
    cache.crop(-2)  # 0 and 5 are left
    assert (cache.position, cache.kv_length) == (6, 2)
    with pytest.raises(DomainError, match="only the last 1 positions"):
        cache.crop(-2)
    got = private(text[:, 6:7], past_key_values=cache).logits
    ban = allowed(torch.ones(1, 7, dtype=torch.int64))
    ban[0, 0, 6] = torch.tensor([1, 0, 0, 0, 0, 1, 1]).bool()
    additive = torch.zeros(ban.shape).masked_fill_(~ban, torch.finfo(torch.float32).min)
    with torch.no_grad():
        want = tiny.build("llama")(text[:, :7], attention_mask=additive).logits[:, 6:]
    assert worst(got, want) < LOGIT_ERROR
    assert (cache.position, cache.kv_length) == (7, 3)
    want = reference(text, torch.ones_like(text))
    for step in (8, 9):
        got = private(text[:, step : step + 1], past_key_values=twin).logits
        assert worst(got, want[:, step : step + 1]) < LOGIT_ERROR
        assert (twin.position, twin.kv_length) == (step + 1, 4)
    with pytest.raises(DomainError, match="only the last 3 positions"):
        twin.crop(-4)
    twin.crop(-10)
    assert (twin.position, twin.kv_length) == (0, 0)
    again = private(text[:, :5], past_key_values=twin)
    assert worst(again.logits, reference(text[:, :5], torch.ones(1, 5, dtype=torch.int64))) < LOGIT_ERROR
    assert twin.kv_length == 4


# -- costs ----------------------------------------------------------------------------------------------------
def _steps(config: PrivateConfig, count: int) -> list[tuple[int, dict[str, int]]]:
    """Bytes over all links, and rounds by link's sender, of single-token steps after a prompt of five."""
    made = []
    with patch(tiny.build("llama"), config) as private, torch.no_grad():
        cache = private(**BATCH, use_cache=True).past_key_values
        for step in range(count):
            mask = torch.cat([MASK, torch.ones(2, step + 1, dtype=torch.int64)], 1)
            private.cost(reset=True)
            private(torch.tensor([[3], [4]]), attention_mask=mask, past_key_values=cache)
            cost = private.cost()
            made.append((cost.bytes_total, cost.rounds))
    return made


@pytest.mark.full
@pytest.mark.parametrize("protocol", ["trio", "dealer"])
def test_late_steps_cost_the_same_to_the_byte(protocol: str) -> None:
    """The padding of the first row is evicted with the first steps; then every step sees as much as the last."""
    config = PrivateConfig(protocol=protocol, timeout_s=60)
    steps = _steps(replace(config, kv_cache=WINDOW), 6)
    assert len(set(steps[2:])) == 1
    growing = [sent for sent, _ in _steps(config, 6)]
    assert sorted(set(growing)) == growing
    assert steps[-1][0] < growing[1]


@pytest.mark.full
def test_an_estimate_knows_the_policy() -> None:
    """Bytes are those of the run; the memory of the cache is that of the window."""
    model = tiny.build("llama")
    asked = {"max_new_tokens": 7, "do_sample": False, "eos_token_id": None}
    ids = PADDED[1:]
    with patch(model, CONFIGS["trio"]) as private:
        private.cost(reset=True)
        private.generate(ids, attention_mask=torch.ones_like(ids), **asked)
        ran = private.cost()
        made = estimate(type(model), model.config, CONFIGS["trio"], PROMPT, 7, ranges=private.parties.ranges)
    assert (made.costs.bytes_total, made.costs.rounds) == (ran.bytes_total, ran.rounds)
    whole = estimate(type(model), model.config, TRIO, PROMPT, 7)
    assert made.cache_bytes * (PROMPT + 6) == whole.cache_bytes * 4


def test_preprocessed_calls_evict_too() -> None:
    asked = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    with patch(tiny.build("llama"), CONFIGS["trio"]) as private:
        private.preprocess(GeneratePlan(prompt=PROMPT, new_tokens=4, batch=2, attention_mask=MASK))
        assert torch.equal(private.generate(**BATCH, **asked), windowed(tiny.build("llama")).generate(**BATCH, **asked))


@pytest.mark.full
def test_parallel_sessions_evict_for_themselves() -> None:
    asked = {"max_new_tokens": 4, "do_sample": False}
    with patch(tiny.build("llama"), replace(CONFIGS["trio"], parallel_sessions=2)) as private:
        assert torch.equal(private.generate(**BATCH, **asked), windowed(tiny.build("llama")).generate(**BATCH, **asked))


# -- other policies ---------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Watching(CachePolicy):
    """Asks for mass and keeps four: the newest of key head 0; in key head 1 an older one, and not the last but one."""

    name = "watching"
    queries: int = 2

    def entries(self, held: int, position: int, queries: int) -> int:
        return min(held, 4)

    @property
    def newest(self) -> int:
        return 1

    def mass_queries(self, queries: int) -> int:
        return self.queries

    def after_prefill(self, facts: CacheFacts, mass: Tensor | None) -> Tensor | None:
        SEEN.append(("prefill", facts, mass))
        return self._kept(facts)

    def after_step(self, facts: CacheFacts, mass: Tensor | None) -> Tensor | None:
        SEEN.append(("step", facts, mass))
        return self._kept(facts)

    def _kept(self, facts: CacheFacts) -> Tensor | None:
        held = facts.positions.shape[-1]
        if held <= 4:
            return None
        heads = torch.tensor([[-4, -3, -2, -1], [-5, -4, -3, -1]]) + held
        return heads.unsqueeze(0)


SEEN: list[tuple[str, CacheFacts, Tensor | None]] = []


def test_a_policy_gets_public_facts_and_the_mass_it_asked_for() -> None:
    """Entries by key head; masses against the plaintext model's attention weights."""
    SEEN.clear()
    text = torch.tensor([[9, 8, 7, 6, 5, 11, 12]])
    plain = tiny.build("llama")
    plain.set_attn_implementation("eager")
    with patch(tiny.build("llama"), replace(PLAIN, kv_cache=Watching())) as private, torch.no_grad():
        cache = private(text[:, :5], use_cache=True).past_key_values
        for step in (5, 6):
            got = private(text[:, step : step + 1], past_key_values=cache).logits
            assert cache.kv_length == 4
    assert [what for what, _, _ in SEEN] == ["prefill"] * 2 + ["step"] * 4
    assert [facts.layer for _, facts, _ in SEEN] == [0, 1] * 3
    assert [facts.position for _, facts, _ in SEEN] == [5, 5, 6, 6, 7, 7]
    assert SEEN[2][1].positions[0].tolist() == [[1, 2, 3, 4, 5], [0, 1, 2, 4, 5]]
    assert SEEN[4][1].positions[0].tolist() == [[2, 3, 4, 5, 6], [0, 1, 2, 5, 6]]
    ban = torch.ones(7, 7, dtype=torch.bool).tril().expand(1, 4, 7, 7).clone()
    for query in (5, 6):
        for head in range(4):
            ban[0, head, query] = False
            ban[0, head, query, SEEN[2 * (query - 4)][1].positions[0, head // 2]] = True
    additive = torch.zeros(ban.shape).masked_fill_(~ban, torch.finfo(torch.float32).min)
    with torch.no_grad():
        out = plain(text, attention_mask=additive, output_attentions=True)
    assert worst(got, out.logits[:, 6:]) < LOGIT_ERROR
    for what, facts, mass in SEEN:
        queries = slice(3, 5) if what == "prefill" else slice(facts.position - 1, facts.position)
        columns = out.attentions[facts.layer][:, :, queries].reshape(1, 2, -1, 7).sum(2)
        assert mass is not None
        want = columns.gather(-1, facts.positions.expand(1, 2, -1))
        assert (opened(mass) - want).abs().max() < LOGIT_ERROR


@dataclass(frozen=True)
class Lying(Watching):
    """Says three and keeps four."""

    def entries(self, held: int, position: int, queries: int) -> int:
        return 3


def test_a_policy_must_keep_as_many_as_it_says() -> None:
    with (
        patch(tiny.build("llama"), replace(PLAIN, kv_cache=Lying())) as private,
        pytest.raises(UnsupportedOp, match="watching kept 4 entries; it had said 3"),
    ):
        private(PADDED[1:], use_cache=True)


# -- settings and refusals ----------------------------------------------------------------------------------------
def test_a_policy_survives_json_and_parties_must_agree_upon_it() -> None:
    config = CONFIGS["trio"]
    assert config.to_dict()["kv_cache"] == {"name": "sliding-window", "recent": 3, "first": 1}
    assert PrivateConfig.from_dict(config.to_dict()) == config
    assert PrivateConfig.from_dict(TRIO.to_dict()).kv_cache == KEEP_ALL
    agreements = {c.agreement() for c in (TRIO, config, replace(TRIO, kv_cache=SlidingWindow(4, 1)))}
    assert len(agreements) == 3
    assert len({replace(TRIO, kv_cache=MPCacheConfig(alpha=alpha)).agreement() for alpha in (1, 1.0)}) == 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "newest"}, "got 'newest'; want one of 'keep-all', 'no-cache', 'sliding-window', 'mpcache'"),
        ({}, "got None; want one of"),
        ({"name": "sliding-window", "last": 3}, "kv_cache: unknown key"),
        ({"name": "sliding-window", "recent": 0}, "recent: got 0; want a whole number, at least 1"),
        ({"name": "sliding-window", "first": -1}, "first: got -1"),
        ({"name": "sliding-window", "first": True}, "first: got True"),
        ({"name": "keep-all", "first": 1}, "kv_cache: unknown key"),
        ("keep-all", "got 'keep-all'; want a policy"),
    ],
)
def test_unknown_policies_and_settings_are_refused(values: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PrivateConfig.from_dict({"kv_cache": values})


def test_nodes_of_a_sharding_plan_keep_all() -> None:
    with pytest.raises(ConfigError, match="nodes of a sharding plan keep all"):
        PrivateConfig(protocol="cascade", kv_cache=WINDOW)


@pytest.mark.parametrize("name", ["bloom", "falcon", "t5", "bert"])
def test_models_whose_attention_cannot_follow_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"kv_cache 'sliding-window' needs a decoder.*'{name}' is not"):
        patch(tiny.build(name), CONFIGS["plain"])


def test_caches_of_latents_are_refused() -> None:
    """Attention gets keys made of what the cache holds, and could not say which entries they are of."""
    model = miniature(tr.MiniCPM3ForCausalLM, tr.MiniCPM3Config())
    with pytest.raises(ConfigError, match="keys and values of its cache, which 'minicpm3' is not"):
        patch(model, CONFIGS["plain"])


def test_attention_that_does_not_ask_for_its_entries_ends_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A family that moves keys between cache and attention would attend under the wrong mask."""
    from private_llm_hf.kv_cache import cache

    with patch(tiny.build("llama"), CONFIGS["plain"]) as private:
        held = private(PADDED[1:], use_cache=True).past_key_values
        monkeypatch.setattr(cache.SecretCacheLayer, "attended", lambda self, mass: None)
        with pytest.raises((UnsupportedOp, PartyFailed), match="attends in a way of its own"):
            private(torch.tensor([[3]]), past_key_values=held)
