"""A long prompt read in chunks: the same results as in one piece, exact accounts, memory bounded by the chunk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as tr
from private_llm_hf import ForwardPlan, GeneratePlan, PrivateConfig, patch
from private_llm_hf.kv_cache.model_checks import chunk_of
from private_llm_hf.tools.estimate import estimate
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from private_llm.errors import ConfigError
from private_llm.kv_cache.policies.papers import MPCacheConfig
from private_llm.kv_cache.policies.policy import NoCache, SlidingWindow
from tests.hf import tiny
from tests.hf.compare import GREEDY, LOGIT_ERROR, worst
from tests.hf.conftest import PLAIN, TRIO

CHUNK = 4
IDS = torch.arange(2 * 11).view(2, 11) * 37 % 97 + 3
MASK = torch.ones_like(IDS)
MASK[1, :6] = 0  # its first chunk, and half of the second, are padding
BATCH = {"input_ids": IDS, "attention_mask": MASK}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", list(tiny.DECODERS))
def test_every_decoder_gives_the_logits_of_one_piece(name: str) -> None:
    """Padding on the left, windows shorter than the prompt, positions by numbers, rotation and slopes."""
    model = tiny.build(name)
    with patch(model, replace(PLAIN, prompt_chunk=CHUNK)) as private, torch.no_grad():
        want = model(**BATCH).logits
        for settings in ({}, {"use_cache": True}):
            assert worst(private(**BATCH, **settings).logits, want, MASK) < LOGIT_ERROR
        assert torch.equal(private.generate(**BATCH, **GREEDY), model.generate(**BATCH, **GREEDY))


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[PreTrainedModel, PreTrainedModel]]:
    model = tiny.build("llama")
    with patch(model, replace(PLAIN, prompt_chunk=CHUNK)) as private:
        yield model, private


@pytest.mark.parametrize(
    "settings",
    [
        {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}, {"use_cache": False},
        {"prefill_chunk_size": 7}, {"input_ids": IDS[:1], "attention_mask": MASK[:1], "prompt_lookup_num_tokens": 3},
    ],
    ids=lambda settings: next(reversed(settings)),
)  # fmt: skip
def test_generate_works_as_ever(pair: tuple[PreTrainedModel, PreTrainedModel], settings: dict[str, Any]) -> None:
    results = []
    for model in pair:
        torch.manual_seed(3)
        results.append(model.generate(**{**BATCH, **GREEDY, **settings}))
    assert torch.equal(*results)


def test_an_assistant_and_a_conversation(pair: tuple[PreTrainedModel, PreTrainedModel]) -> None:
    draft, (model, private) = tiny.build("llama", seed=5), pair
    results = [each.generate(IDS[:1], assistant_model=draft, **GREEDY) for each in pair]
    assert torch.equal(*results)
    with torch.no_grad():
        first = private(IDS[:1, :5], use_cache=True)
        second = private(IDS[:1, 5:], past_key_values=first.past_key_values)
        assert second.past_key_values.get_seq_length() == IDS.shape[1]
        assert worst(second.logits, model(IDS[:1]).logits[:, 5:]) < LOGIT_ERROR


def test_outputs_of_all_kinds(pair: tuple[PreTrainedModel, PreTrainedModel]) -> None:
    model, private = pair
    with torch.no_grad():
        want = model(**BATCH, labels=IDS)
        for keep in (1, 5, 20):
            kept = private(**BATCH, logits_to_keep=keep).logits
            assert worst(kept, want.logits[:, -keep:], MASK[:, -keep:]) < LOGIT_ERROR
        made = private(**BATCH, labels=IDS, use_cache=False)
        assert made.past_key_values is None
        assert worst(made.loss, want.loss) < LOGIT_ERROR
        embeds = model.get_input_embeddings()(IDS)
        assert worst(private(inputs_embeds=embeds[:1]).logits, model(IDS[:1]).logits) < LOGIT_ERROR


@pytest.mark.parametrize("cls", [tr.LlamaModel, tr.LlamaForSequenceClassification, tr.LlamaForQuestionAnswering])
def test_other_heads(cls: type[PreTrainedModel]) -> None:
    model = tiny.build("llama", cls)
    with patch(model, replace(PLAIN, prompt_chunk=CHUNK)) as private, torch.no_grad():
        want, made = model(**BATCH), private(**BATCH)
        for name in ("last_hidden_state", "start_logits", "end_logits", "logits"):
            if name in want:
                mask = MASK if name != "logits" else None
                assert worst(made[name], want[name], mask) < LOGIT_ERROR


def test_progress_by_chunk_and_who_raises_ends_the_prompt(pair: tuple[PreTrainedModel, PreTrainedModel]) -> None:
    private, said = pair[1], list[tuple[int, int]]()
    private.on_chunk = lambda read, length: said.append((read, length))
    private.generate(**BATCH, **GREEDY)
    assert said == [(3, 11), (7, 11), (11, 11)]  # what is left over comes first; tokens of a step are no prompt
    private.on_chunk = lambda read, length: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        private.generate(**BATCH, **GREEDY)
    private.on_chunk = None
    assert private.generate(**BATCH, **GREEDY).shape == (2, 15)


@pytest.mark.parametrize("settings", [{}, {"parallel_sessions": 2, "reveal": "token"}], ids=str)
def test_on_shares(settings: dict[str, Any]) -> None:
    """Under trio, where a plan of the calls serves their chunks."""
    model = tiny.build("opt", num_hidden_layers=1)
    with patch(model, replace(TRIO, prompt_chunk=CHUNK, **settings)) as private:
        want = model.generate(**BATCH, **GREEDY)
        assert torch.equal(private.generate(**BATCH, **GREEDY), want)
        done = private.preprocess(GeneratePlan(11, 4, 2, attention_mask=MASK), ForwardPlan({"input_ids": (1, 6)}))
        assert done.calls == 3 + 3 + 2  # three chunks and three tokens; two chunks
        assert torch.equal(private.generate(**BATCH, **GREEDY), want)
        private(input_ids=IDS[:1, :6])


@pytest.mark.full
def test_the_demo_model_writes_the_same_text() -> None:
    from private_llm_cli.commands.models import demo_model

    folder = demo_model()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer("To be, or not to be, that is the question: whether it is nobler", return_tensors="pt")
    texts = []
    for chunk in (None, 8):
        with patch(model, replace(TRIO, prompt_chunk=chunk, calibrate=False)) as private:
            texts.append(private.generate(**inputs, max_new_tokens=6, do_sample=False))
    assert torch.equal(*texts)


@pytest.mark.full
def test_an_estimate_says_what_a_run_costs() -> None:
    model = tiny.build("llama")
    config = replace(TRIO, prompt_chunk=CHUNK, calibrate=False)
    found = estimate(tr.LlamaForCausalLM, model.config, config, sequence=11, new_tokens=2).costs
    with patch(model, config) as private:
        private.generate(IDS[:1], attention_mask=MASK[:1], max_new_tokens=2, do_sample=False)
        ran = private.cost()
    assert (found.bytes_total, found.rounds) == (ran.bytes_total, ran.rounds)


class _Largest(TorchDispatchMode):
    """Elements of the largest tensor that anything makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.elements = max(self.elements, made.numel() if isinstance(made, torch.Tensor) else 0)
        return made


@pytest.mark.full
def test_the_largest_tensor_grows_with_the_prompt_not_with_its_square() -> None:
    config = tiny.build("llama", max_position_embeddings=4096, num_hidden_layers=1).config
    found = {}
    for chunk, length in ((None, 128), (None, 256), (32, 128), (32, 256), (16, 256)):
        with _Largest() as largest:
            estimate(tr.LlamaForCausalLM, config, replace(TRIO, prompt_chunk=chunk), length)
        found[chunk, length] = largest.elements
    assert found[None, 256] / found[None, 128] == pytest.approx(4, rel=0.1)
    assert found[32, 256] / found[32, 128] == pytest.approx(2, rel=0.1)
    assert found[32, 256] / found[16, 256] == pytest.approx(2, rel=0.1)
    # 8 chunks, but the half of the square that nobody sees is not made in one piece either
    assert found[None, 256] / found[32, 256] == pytest.approx(4, rel=0.1)


def test_prompts_that_must_be_read_whole() -> None:
    """A number is an error that says why; "auto" reads in one piece."""
    llama = tiny.build("llama").config
    dynamic = tiny.build("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    for model, settings, reason in (
        (tiny.build("llama"), {"kv_cache": SlidingWindow(recent=4)}, "chooses what stays"),
        (tiny.build("llama"), {"kv_cache": MPCacheConfig()}, "chooses what stays"),
        (tiny.build("llama"), {"kv_cache": NoCache()}, "chooses what stays"),
        (dynamic, {}, "rotary frequencies"),
        (tiny.build("t5"), {}, "chunks need a decoder with a KV cache"),
        (tiny.build("bert"), {}, "chunks need a decoder with a KV cache"),
    ):
        with pytest.raises(ConfigError, match=f"prompt_chunk: got 4, but .*{reason}"):
            patch(model, replace(PLAIN, prompt_chunk=4, **settings))
        config = replace(PLAIN, **settings)
        assert chunk_of(type(model), model.config, config, 1, 4096, 4096) == 4096
    for wrong in (0, -1, True, 2.5, "all"):
        with pytest.raises(ConfigError, match="prompt_chunk"):
            PrivateConfig(prompt_chunk=wrong)  # type: ignore[arg-type]
    found = {n: chunk_of(tr.LlamaForCausalLM, llama, PLAIN, 1, n, n) for n in (128, 512, 2048, 65536)}
    assert found == {128: 128, 512: 512, 2048: 512, 65536: 128}
    assert chunk_of(tr.LlamaForCausalLM, llama, replace(PLAIN, prompt_chunk=None), 1, 65536, 65536) == 65536
