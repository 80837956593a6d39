"""Drafts under protocol "assisted": the text is the plaintext model's, and every check has the same number of rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from private_llm_cli.commands.models import smollm2_model
from private_llm_hf import FixedCounts, SpeculationConfig, patch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Lfm2Config,
    Lfm2ForCausalLM,
    PreTrainedModel,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)  # fmt: skip

from private_llm.errors import ConfigError, UnsupportedOp
from tests.hf import tiny
from tests.hf.compare import PADDED
from tests.hf.test_assisted import ASSISTED, assisted

IDS = PADDED[1:]
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}


def rows_seen(private: Any, monkeypatch: pytest.MonkeyPatch, layer: str) -> list[int]:
    """How many rows of a layer servers get, from now on."""
    seen: list[int] = []
    product = private.parties.product

    def spy(number: int, x: Tensor, where: str) -> Tensor:
        if layer in where:
            seen.append(len(x))
        return product(number, x, where)

    monkeypatch.setattr(private.parties, "product", spy)
    return seen


@pytest.fixture(scope="module")
def llama() -> Iterator[tuple[PreTrainedModel, PreTrainedModel]]:
    with assisted("llama") as pair:
        yield pair


@pytest.mark.parametrize(("draft", "paths"), [("itself", 1), ("bad", 1), ("bad", 3), ("lookup", 1)])
def test_every_check_has_the_same_rows(
    llama: tuple[Any, Any], draft: str, paths: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was accepted, and to the end of the text; how many checks there are is what differs."""
    plain, private = llama
    drafts = {"itself": plain, "bad": tiny.build("llama", seed=5)}
    seen = rows_seen(private, monkeypatch, "layers.0.mlp.down_proj")
    config = SpeculationConfig(draft=drafts.get(draft, draft), look_up=False, paths=paths)
    assert torch.equal(private.generate(IDS, **GREEDY, speculation=config), plain.generate(IDS, **GREEDY))
    prompt, *checks = seen
    assert prompt == IDS.shape[1] + 7
    assert {*checks} == {8 * paths}
    assert len(checks) == 1 if draft == "itself" else len(checks) > 4


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("named", ["assistant_model", "prompt_lookup_num_tokens"])
def test_drafts_of_transformers_are_filled_up(
    llama: tuple[Any, Any], named: str, sample: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the draft stops early, or finds nothing; transformers goes no further than the longest text."""
    plain, private = llama
    bad = tiny.build("llama", seed=5)
    bad.generation_config.num_assistant_tokens = 4
    seen = rows_seen(private, monkeypatch, "layers.0.mlp.down_proj")
    how = {**GREEDY, "do_sample": sample, named: bad if named == "assistant_model" else 4}
    made = private.generate(IDS, **how)
    assert sample or torch.equal(made, plain.generate(IDS, **GREEDY))
    assert made.shape[1] == IDS.shape[1] + 12
    prompt, *checks = seen
    assert prompt == IDS.shape[1] + 4
    assert checks == sorted(checks, reverse=True)
    assert checks[0] == 5
    assert {*checks[:-4]} <= {5}


def test_counts_may_be_open_or_fixed_for_good(llama: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    plain, private = llama
    seen, want = rows_seen(private, monkeypatch, "layers.0.mlp.down_proj"), plain.generate(IDS, **GREEDY)
    assert torch.equal(private.generate(IDS, **GREEDY, speculation=SpeculationConfig(open_counts=True)), want)
    counts, told = FixedCounts(advance=2, window=6, reserve=2), []
    for draft in (plain, tiny.build("llama", seed=5)):
        seen.clear()
        private.generate(IDS, **GREEDY, speculation=SpeculationConfig(draft=draft, fixed_counts=counts))
        told.append(list(seen))
    assert told[0] == told[1] == [IDS.shape[1], *[6] * counts.passes(12)]


def test_drafts_of_a_model_with_a_window_and_few_positions() -> None:
    """A cache that forgets takes drafts back; at a model's last position checks get shorter, and the text goes on."""
    with assisted("mistral") as (plain, private):
        room = plain.config.max_position_embeddings
        ids = torch.arange(room - 12)[None] % 60 + 3
        for draft in (plain, tiny.build("mistral", seed=5)):
            made = private.generate(ids, **GREEDY, speculation=SpeculationConfig(draft=draft))
            assert torch.equal(made, plain.generate(ids, **GREEDY))


@pytest.mark.parametrize(
    ("more", "error", "said"),
    [
        ({"num_beams": 2}, ConfigError, "one prompt"),
        ({"cache_implementation": "static"}, ConfigError, "static cache"),
        ({"prompt_lookup_num_tokens": 2}, ConfigError, "drafts, too"),
    ],
)
def test_what_drafts_do_not_do_is_refused_before_anything_is_sent(
    llama: tuple[Any, Any], more: dict[str, Any], error: type[Exception], said: str
) -> None:
    private = llama[1]
    before = private.parties.exchanges
    with pytest.raises(error, match=said):
        private.generate(IDS, **GREEDY, **more, speculation=SpeculationConfig())
    assert private.parties.exchanges == before


@pytest.mark.full
def test_drafts_with_real_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """SmolLM2 with a draft of some of its layers, one way and the other."""
    folder = smollm2_model()
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    draft = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    del draft.model.layers[24:26]
    draft.config.num_hidden_layers = len(draft.model.layers)
    for number, layer in enumerate(draft.model.layers):
        layer.self_attn.layer_idx = number
    draft.generation_config.num_assistant_tokens = 7
    given = AutoTokenizer.from_pretrained(folder)("1 2 3 4 5 6 7 8 1 2 3 4 5", return_tensors="pt")
    greedy = {**GREEDY, "max_new_tokens": 20}
    want = plain.generate(**given, **greedy)
    with patch(plain, ASSISTED) as private:
        seen = rows_seen(private, monkeypatch, "layers.0.mlp.down_proj")
        for how in (
            {"speculation": SpeculationConfig(draft=draft)},
            {"assistant_model": draft},
            {"prompt_lookup_num_tokens": 7},
        ):
            seen.clear()
            assert torch.equal(private.generate(**given, **greedy, **how), want)
            assert len(seen) < 18
            assert seen[1] == 8
            assert "speculation" not in how or {*seen[1:]} == {8}


def test_states_that_cannot_be_put_back_are_refused(llama: tuple[Any, Any]) -> None:
    """Of the model: its text was wrong in silence. Of a draft: it failed after some tokens."""
    sizes: dict[str, Any] = {
        "vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }  # fmt: skip
    linear: dict[str, Any] = {
        "head_dim": 8, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8, "num_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2,
        "shared_expert_intermediate_size": 16, "layer_types": ["linear_attention", "full_attention"],
    }  # fmt: skip
    recurrent = Qwen3NextForCausalLM(Qwen3NextConfig(**sizes, **linear)).eval().requires_grad_(False)
    with patch(recurrent, ASSISTED) as private, pytest.raises(UnsupportedOp, match="states that cannot be put back"):
        private.generate(IDS, **GREEDY, speculation=SpeculationConfig())
    short = Lfm2ForCausalLM(Lfm2Config(**sizes, layer_types=["conv", "full_attention"])).eval()
    for draft in (recurrent, short):
        with pytest.raises(UnsupportedOp, match=r"draft: got a .* whose state cannot"):
            llama[1].generate(IDS, **GREEDY, speculation=SpeculationConfig(draft))
