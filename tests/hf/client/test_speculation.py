"""Speculative decoding: the text is the plaintext model's, and what the parties see is what is declared."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import torch
import transformers as tr
from private_llm_hf import FixedCounts, KeepAll, NoCache, PrivateConfig, SpeculationConfig, patch
from private_llm_hf.client import speculative_loop
from private_llm_hf.client.session_client import PrivateCache
from private_llm_hf.client.speculation import DEFAULT_COUNTS, DraftLength
from private_llm_hf.client.speculative_loop import decoding, look_ups_pay
from private_llm_hf.wire.commands import Call, CallOrEdit, CropCache, SelectRows
from transformers import PreTrainedModel

from private_llm.errors import ConfigError, DomainError, UnsupportedOp
from private_llm.kv_cache.policies.papers import H2O, TOVA, HeadMerging, InfLLM, LongCache, MPCacheConfig, SnapKV
from private_llm.kv_cache.policies.policy import CachePolicy, Level, SlidingWindow
from tests.hf import tiny
from tests.hf.compare import BATCH, PADDED
from tests.hf.conftest import PLAIN, TRIO

Pair = tuple[PreTrainedModel, PreTrainedModel]
IDS = PADDED[1:]
OTHER = torch.tensor([[9, 8, 7, 9, 8]])
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture(scope="module", params=["opt", "gemma3_text"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    model = tiny.build(request.param)
    with patch(model, PLAIN) as private:
        yield model, private


@pytest.fixture(scope="module")
def llama() -> Iterator[Pair]:
    model = tiny.build("llama")
    with patch(model, PLAIN) as private:
        yield model, private


def requests(private: Any, monkeypatch: pytest.MonkeyPatch) -> list[CallOrEdit]:
    """What the parties are asked from now on."""
    seen: list[CallOrEdit] = []
    forward, command = private.parties.forward, private.parties.command
    parties = private.parties
    monkeypatch.setattr(parties, "forward", lambda call, secrets: (seen.append(call), forward(call, secrets))[1])
    monkeypatch.setattr(parties, "command", lambda edit: (seen.append(edit), command(edit))[1])
    return seen


def shapes(seen: list[CallOrEdit]) -> list[tuple[object, ...]]:
    """Everything in requests but the number of the cache."""
    told = list[tuple[object, ...]]()
    for each in seen:
        if isinstance(each, Call):
            public = {name: value for name, value in each.public.items() if not isinstance(value, torch.Tensor)}
            assert public == each.public
            told.append(("call", each.secret, tuple(sorted(public.items())), each.outputs))
        elif isinstance(each, SelectRows):
            told.append(("select", tuple(each.index.tolist())))
        else:
            assert isinstance(each, CropCache)
            told.append(("crop", each.count))
    return told


@pytest.mark.sampled(3)
@pytest.mark.parametrize("paths", [1, 3])
def test_greedy_text_is_the_plaintext_models(pair: Pair, paths: int) -> None:
    model, private = pair
    want = model.generate(IDS, **GREEDY)
    for draft in ("lookup", tiny.build("llama", seed=5), model):
        config = SpeculationConfig(draft=draft, paths=paths)
        assert torch.equal(private.generate(IDS, **GREEDY, speculation=config), want)


def test_a_perfect_draft_takes_few_passes(llama: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    model, private = llama
    seen = requests(private, monkeypatch)
    private.generate(IDS, **GREEDY, speculation=SpeculationConfig(draft=model, look_up=False, length=3))
    assert sum(isinstance(each, Call) for each in seen) == 3  # four tokens each
    seen.clear()
    private.generate(IDS, **GREEDY, speculation=SpeculationConfig(draft=model, look_up=False, length=3, paths=2))
    assert [each.rows for each in seen if isinstance(each, Call)] == [1, 2, 2]
    assert [tuple(each.index.tolist()) for each in seen if isinstance(each, SelectRows)] == [(0, 0), (0,)] * 2


def test_sampled_text_is_that_of_the_same_loop_over_the_plaintext_model(llama: Pair) -> None:
    model, private = llama
    draft = tiny.build("llama", seed=5)
    how = {"max_new_tokens": 8, "do_sample": True, "temperature": 0.7, "top_k": 20, "repetition_penalty": 1.2}
    for seed, (source, paths) in enumerate([("lookup", 2), (draft, 1), (draft, 3)]):
        config = SpeculationConfig(draft=source, paths=paths, length=3)
        torch.manual_seed(seed)
        made = private.generate(IDS, **how, speculation=config)
        torch.manual_seed(seed)
        assert torch.equal(made, model.generate(IDS, **how, custom_generate=decoding(config, None)))


@pytest.mark.full
def test_sampled_tokens_of_the_private_model_have_its_distribution() -> None:
    """The second new token, whose chances given the first are the model's own: chi-squared over a vocabulary of 8."""
    model = tiny.build("llama", vocab_size=8, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    draft = tiny.build("llama", seed=5, vocab_size=8)
    ids, draws = torch.tensor([[3, 5, 1]]), 100
    with torch.no_grad():
        first = model(ids).logits[0, -1].softmax(-1)
        rows = torch.cat([ids.expand(8, -1), torch.arange(8)[:, None]], 1)
        want = first @ model(rows).logits[:, -1].softmax(-1)
    torch.manual_seed(1)
    config = SpeculationConfig(draft=draft, paths=2, length=1, look_up=False)
    made = torch.zeros(8)
    with patch(model, PLAIN) as private:
        for _ in range(draws):
            made[private.generate(ids, max_new_tokens=2, do_sample=True, top_k=0, speculation=config)[0, -1]] += 1
    assert float(((made - draws * want).square() / (draws * want)).sum()) < 35.0  # 7 degrees of freedom: 1 in 10^5


def test_stopping_scores_streamer_and_a_conversation(llama: Pair) -> None:
    model, private = llama
    want = model.generate(IDS, **GREEDY)
    end = int(want[0, 9])
    config = SpeculationConfig(draft=model, length=3)
    stopped = {**GREEDY, "eos_token_id": end, "return_dict_in_generate": True, "output_scores": True}
    told, out = model.generate(IDS, **stopped), private.generate(IDS, **stopped, speculation=config)
    assert torch.equal(out.sequences, told.sequences)
    assert len(out.scores) == len(told.scores)
    assert isinstance(out.past_key_values, PrivateCache)
    assert out.past_key_values.get_seq_length() == out.sequences.shape[1] - 1
    longer = torch.cat([out.sequences, OTHER], 1)
    assert torch.equal(
        private.generate(longer, **GREEDY, past_key_values=out.past_key_values, speculation=config),
        model.generate(longer, **GREEDY),
    )

    class Collect(tr.generation.BaseStreamer):
        def __init__(self) -> None:
            self.tokens: list[int] = []
            self.ended = 0

        def put(self, value: torch.Tensor) -> None:
            self.tokens += value.reshape(-1).tolist()

        def end(self) -> None:
            self.ended += 1

    streamer = Collect()
    private.generate(IDS, **GREEDY, streamer=streamer, speculation=SpeculationConfig())
    assert streamer.tokens == want[0].tolist()
    assert streamer.ended == 1


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "config",
    [
        TRIO, PrivateConfig(protocol="plain", insecure=True, timeout_s=60, reveal="token"),
        PrivateConfig(timeout_s=60, adder="keys"), PrivateConfig(timeout_s=60, protocol="dealer"),
        PrivateConfig(timeout_s=60, protocol="quad"),
    ],
    ids=["trio", "reveal-token", "keys", "dealer", "quad"],
)  # fmt: skip
def test_every_protocol(config: PrivateConfig) -> None:
    model = tiny.build("llama")
    want = model.generate(IDS, max_new_tokens=6, do_sample=False)
    with patch(model, config) as private:
        for counts in (None, FixedCounts(advance=2, window=5, reserve=1)):
            how = SpeculationConfig(draft=model, paths=2, fixed_counts=counts)
            assert torch.equal(private.generate(IDS, max_new_tokens=6, do_sample=False, speculation=how), want)


# -- what the parties see ------------------------------------------------------------------------------------------
def test_open_counts_show_how_many_drafts_were_accepted(llama: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    model, private = llama
    seen, told = requests(private, monkeypatch), []
    for draft in (model, tiny.build("llama", seed=5)):
        seen.clear()
        private.generate(IDS, **GREEDY, speculation=SpeculationConfig(draft=draft, look_up=False, length=3))
        told.append(shapes(seen))
    assert told[0] != told[1]
    assert sum(row[0] == "crop" for row in told[0]) == 0
    assert [row[1] for row in told[1] if row[0] == "crop"][:3] == [3, 3, 3]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("paths", [1, 3])
def test_fixed_counts_show_the_same_whatever_was_accepted(
    llama: Pair, paths: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A perfect draft, a bad one that falls behind, a text that ends early, and another prompt: one transcript."""
    model, private = llama
    counts = FixedCounts(advance=2, window=6, reserve=2)
    seen, told, costs, texts = requests(private, monkeypatch), [], [], []
    bad, want = tiny.build("llama", seed=5), model.generate(IDS, **GREEDY)
    end = {"eos_token_id": int(want[0, 8])}
    for ids, draft, more in ((IDS, model, {}), (IDS, bad, {}), (IDS, model, end), (OTHER, "lookup", {})):
        seen.clear()
        private.cost(reset=True)
        config = SpeculationConfig(draft=draft, paths=paths, fixed_counts=counts)
        with caplog.at_level(logging.WARNING):
            texts.append(private.generate(ids, **GREEDY, **more, speculation=config))
        told.append(shapes(seen))
        costs.append(private.cost().cost)
    assert told[0] == told[1] == told[2] == told[3]
    assert costs[0] == costs[1] == costs[2] == costs[3]
    calls = [row for row in told[0] if row[0] == "call"]
    assert len(calls) == 1 + counts.passes(12) == 7
    assert torch.equal(texts[0], want)
    assert texts[1].shape[1] < want.shape[1]
    assert torch.equal(texts[1], want[:, : texts[1].shape[1]])  # short, never wrong
    assert "fell behind" in caplog.text
    assert texts[2].shape[1] == 9


def test_by_default_passes_are_alike_and_the_text_is_exact(llama: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts that are all right, and others: the same window in every pass, the last of which end where the text must;
    what differs is how many passes there are, and which go on by nothing."""
    model, private = llama
    seen, want, waits = requests(private, monkeypatch), model.generate(IDS, **GREEDY), []
    for draft in (model, tiny.build("llama", seed=5)):
        seen.clear()
        assert torch.equal(private.generate(IDS, **GREEDY, speculation=SpeculationConfig(draft=draft)), want)
        at, waited = IDS.shape[1], 0
        for row, following in zip(shapes(seen)[1:], [*shapes(seen)[2:], ("call",)], strict=True):
            if row[0] == "crop":
                continue
            window = min(DEFAULT_COUNTS.window, want.shape[1] - 1 - at)
            assert row[1][0].shape == (1, window)
            gone = window - (following[1] if following[0] == "crop" else 0)
            assert gone in (0, DEFAULT_COUNTS.advance)
            at, waited = at + gone, waited + (not gone)
        waits.append(waited)
    assert waits[0] <= 1 < waits[1]


def test_a_text_ends_at_the_last_position_by_default(llama: Pair) -> None:
    model, private = llama
    ids = torch.cat([IDS] * 9, 1)[:, :50]
    how = {**GREEDY, "max_new_tokens": 64 - ids.shape[1] + 1, "eos_token_id": None}
    config = SpeculationConfig(paths=2)
    assert torch.equal(private.generate(ids, **how, speculation=config), model.generate(ids, **how))


def test_advancing_by_one_never_falls_behind(llama: Pair) -> None:
    model, private = llama
    config = SpeculationConfig(draft=tiny.build("llama", seed=5), fixed_counts=FixedCounts(1, 4, 0))
    assert torch.equal(private.generate(IDS, **GREEDY, speculation=config), model.generate(IDS, **GREEDY))


def test_a_conversation_goes_on_under_fixed_counts(llama: Pair) -> None:
    model, private = llama
    config = SpeculationConfig(draft=model, fixed_counts=FixedCounts(2, 6, 2))
    out = private.generate(IDS, **GREEDY, return_dict_in_generate=True, speculation=config)
    assert out.past_key_values.get_seq_length() == IDS.shape[1] - 2
    longer = torch.cat([out.sequences, OTHER], 1)
    again = private.generate(longer, **GREEDY, past_key_values=out.past_key_values, speculation=config)
    assert torch.equal(again, model.generate(longer, **GREEDY))


# -- how much to draft ---------------------------------------------------------------------------------------------
def test_lengths_follow_acceptance_and_the_cost_of_a_token() -> None:
    def chosen(accepted: int, base: float, slope: float) -> int:
        lengths = DraftLength(paths=1, longest=16)
        tried = []
        for _ in range(30):
            tried.append(lengths.choose())
            lengths.ran(tried[-1], min(accepted, tried[-1]), tried[-1] + 1, base + slope * (tried[-1] + 1))
        assert tried[:2] == [4, 6]
        best = max(range(1, 17), key=lambda k: lengths.expected(k) / (base + slope * (k + 1)))
        assert tried[-1] == best
        return tried[-1]

    assert chosen(0, 1.0, 0.05) == 1
    assert 1 < chosen(2, 1.0, 0.2) < chosen(2, 1.0, 0.02) < chosen(16, 1.0, 0.02) == 16
    lengths = DraftLength(paths=2, longest=16)
    lengths.ran(4, 1, 10, 3.0)
    lengths.ran(6, 1, 14, 2.0)  # noise: fewer tokens took longer
    assert lengths.choose() == 16
    assert lengths.acceptance == 3 / 6


@pytest.mark.parametrize(
    ("waiting", "token", "pays"), [(0.3, 0.001, True), (0.03, 0.03, False), (30.0, 0.5, True), (30.0, 3.0, False)]
)
def test_look_ups_pay_where_waiting_takes_most_of_a_pass(
    waiting: float, token: float, pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes take so long and so much more for each token; the first ones record and compile, too."""
    clock, passes = [0.0], list[int]()

    def run(input_ids: torch.Tensor, **_: Any) -> Any:
        passes.append(input_ids.shape[1])
        clock[0] += waiting + token * passes[-1] + (5.0 if len(passes) < 7 and waiting < 1 else 0.0)
        return MagicMock(logits=torch.zeros(1, passes[-1], 2), **{"__getitem__.return_value": cache})

    cache, model = Mock(layers=[]), Mock(side_effect=run, **{"cost.return_value.rounds": 10})
    model.parties.config.corrections = ""
    monkeypatch.setattr(speculative_loop, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    found, why = look_ups_pay(model, IDS[0].tolist())
    assert (found, passes[1:]) == (pays, [1, 8] * (2 if waiting > 1 else 6))
    assert [each.args for each in cache.crop.call_args_list] == [(-size,) for size in passes[1:]]
    assert f"(10 rounds, {(waiting + token) * 100:.3g} ms each)" in why


# -- what is refused -----------------------------------------------------------------------------------------------
def test_what_speculation_does_not_do_is_refused_before_anything_is_sent(
    llama: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, private = llama
    seen, config = requests(private, monkeypatch), SpeculationConfig()
    with pytest.raises(ConfigError, match="one prompt"):
        private.generate(**BATCH, **GREEDY, speculation=config)
    with pytest.raises(ConfigError, match="beams"):
        private.generate(IDS, max_new_tokens=4, num_beams=2, speculation=config)
    with pytest.raises(DomainError, match="padded"):
        private.generate(PADDED[:1], attention_mask=BATCH["attention_mask"][:1], **GREEDY, speculation=config)
    with pytest.raises(ConfigError, match="cache"):
        private.generate(IDS, **GREEDY, use_cache=False, speculation=config)
    with pytest.raises(ConfigError, match=r"of 8 tokens; want 128"):
        private.generate(IDS, **GREEDY, speculation=SpeculationConfig(draft=tiny.build("llama", vocab_size=8)))
    far = SpeculationConfig(fixed_counts=FixedCounts(2, 60, 2))
    with pytest.raises(DomainError, match="positions"):
        private.generate(IDS, **GREEDY, speculation=far)
    assert seen == []
    with (
        patch(tiny.build("t5"), PLAIN) as other,
        pytest.raises(UnsupportedOp, match="decoder-only"),
    ):
        other.generate(IDS, **GREEDY, speculation=config)


@pytest.mark.parametrize(
    "wrong",
    [
        {"paths": 0},
        {"paths": 65},
        {"length": 0},
        {"longest": 0},
        {"length": 2, "fixed_counts": FixedCounts()},
        {"open_counts": True, "fixed_counts": FixedCounts()},
    ],
)
def test_settings_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="SpeculationConfig"):
        SpeculationConfig(**wrong)


def test_a_draft_that_cannot_be_loaded_is_named(llama: Pair, tmp_path: Path) -> None:
    for source in ("no/such-model", str(tmp_path)):
        with pytest.raises(ConfigError, match=f"draft: got '{source}', which cannot be loaded"):
            llama[1].generate(IDS, **GREEDY, speculation=SpeculationConfig(draft=source))


@pytest.mark.parametrize("wrong", [(0, 4, 0), (2, 4, 3), (1, 4, -1)])
def test_fixed_counts_are_checked(wrong: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match="FixedCounts"):
        FixedCounts(*wrong)


def test_without_a_cache_there_is_nothing_to_go_on_from() -> None:
    config = PrivateConfig(protocol="plain", insecure=True, timeout_s=60, kv_cache=NoCache())
    assert PLAIN.kv_cache == KeepAll()
    with patch(tiny.build("llama"), config) as private, pytest.raises(ConfigError, match="cache"):
        private.generate(IDS, **GREEDY, speculation=SpeculationConfig())


WAYS: dict[str, dict[str, Any]] = {
    "speculation": {"speculation": SpeculationConfig()},
    "open counts": {"speculation": SpeculationConfig(open_counts=True, length=3)},
    "read again": {"speculation": SpeculationConfig(fixed_counts=FixedCounts(1, 4, 2))},
    "assistant": {"assistant_model": tiny.build("llama", seed=5)},
    "lookup": {"prompt_lookup_num_tokens": 3},
}
REPEATED = torch.tensor([[9, 8, 7, 6] * 6])


@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    ("policy", "work"),
    [
        (HeadMerging(), list(WAYS)), (SlidingWindow(recent=40), list(WAYS)), (TOVA(least=40), list(WAYS)),
        (LongCache(recent=40), list(WAYS)), (MPCacheConfig(least=16, recent=8), ["speculation"]),
        (SnapKV(least=16, recent=8), ["speculation"]), (MPCacheConfig(least=16, recent=7), []),
        (MPCacheConfig(least=16, recent=8, every=4), []), (MPCacheConfig(recent=8, levels=(Level(2, 0.5),)), []),
        (SlidingWindow(recent=20), []), (TOVA(least=16), []), (H2O(least=16), []), (LongCache(), []),
        (InfLLM(block=4, heavy=2, kept=0.5, recent=0), []),
    ],
)  # fmt: skip
def test_policies_keep_the_text_or_are_refused(
    policy: CachePolicy, work: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with patch(tiny.build("llama"), replace(PLAIN, kv_cache=policy)) as private:
        want = private.generate(REPEATED, **GREEDY)
        for way, drafts in WAYS.items():
            if way in work:
                assert torch.equal(private.generate(REPEATED, **GREEDY, **drafts), want), way
                continue
            seen = requests(private, monkeypatch)
            with pytest.raises(ConfigError, match=f"drafts: kv_cache '{policy.name}' .* work with KeepAll"):
                private.generate(REPEATED, **GREEDY, **drafts)
            assert not seen
