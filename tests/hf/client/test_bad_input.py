"""Wrong inputs and settings: each gets an error that says what came and what is wanted, before anything is sent."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tr
from private_llm_hf import (
    PrivateConfig,
    SpeculationConfig,
    patch,
)
from private_llm_hf.transformers_versions import CACHE
from transformers import DynamicCache, PreTrainedModel

from private_llm.errors import ConfigError, DomainError, PatchMismatch, PlaintextLeak, UnsupportedOp
from tests.hf import tiny
from tests.hf.conftest import PLAIN

IDS = torch.tensor([[5, 6, 7]])


@pytest.fixture(scope="module")
def opt() -> Iterator[PreTrainedModel]:
    with patch(tiny.build("opt"), PLAIN) as model:
        yield model


@pytest.fixture(scope="module")
def vit() -> Iterator[PreTrainedModel]:
    with patch(tiny.build("vit"), PLAIN) as model:
        yield model


@pytest.fixture(autouse=True)
def nothing_was_sent(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test does with these models, no input may reach a party."""
    used = [request.getfixturevalue(name) for name in ("opt", "vit") if name in request.fixturenames]
    for model in used:
        model.cost(reset=True)
    yield
    for model in used:
        assert model.cost().bytes_total == 0


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[1, 2]], r"got list; want integer token ids \[batch, length\]"),
        (torch.tensor([[1.0, 2.0]]), r"got torch.float32, shape \(1, 2\); want integer token ids"),
        (torch.tensor([1, 2]), r"shape \(2,\); want .*\[batch, length\]"),
        (torch.zeros(1, 0, dtype=torch.int64), r"shape \(1, 0\); want .*at least one a row"),
        (torch.zeros(0, 3, dtype=torch.int64), r"shape \(0, 3\); want .*at least one a row"),
        (torch.tensor([[1, 128]]), "outside the vocabulary; want 0 to 127"),
        (torch.tensor([[-1, 5]]), "outside the vocabulary; want 0 to 127"),
    ],
)
def test_token_ids(opt: PreTrainedModel, ids: object, message: str) -> None:
    with pytest.raises(DomainError, match=message):
        opt(input_ids=ids)


def test_prompt_longer_than_the_positions(opt: PreTrainedModel) -> None:
    with pytest.raises(DomainError, match="got 65 positions; the model has 64"):
        opt(input_ids=torch.ones(1, 65, dtype=torch.int64))


def test_generate_with_an_empty_prompt(opt: PreTrainedModel) -> None:
    with pytest.raises((DomainError, ValueError), match=r"empty|cannot reshape|`inputs`|shape"):
        opt.generate(input_ids=torch.zeros(1, 0, dtype=torch.int64), max_new_tokens=2)


@pytest.mark.parametrize("given", [{"inputs": "hello"}, {"input_ids": [[1, 2]]}])
def test_generate_wants_tokens(opt: PreTrainedModel, given: dict[str, object]) -> None:
    with pytest.raises(
        DomainError, match=r"generate: got (str|list) as .*; want a tensor of token ids: generate\(\*\*tokenizer"
    ):
        opt.generate(**given, max_new_tokens=2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"attention_mask": [1, 1, 1]}, "got list as attention_mask; want a tensor"),
        ({"input_ids": IDS[0]}, r"input_ids: got shape \(3,\); want \[batch, length\]"),
        ({"input_ids": IDS.to("meta")}, "input_ids: got a tensor on device meta"),
        ({"input_ids": None, "inputs_embeds": torch.zeros(1, 3, 63)}, r"inputs_embeds: .*want .*\[batch, length, 64\]"),
        ({"cache": 3}, "got int; want the handle"),
        ({"past_key_values": "x"}, "got str; want the handle"),
        ({"max_new_tokens": "3"}, "max_new_tokens: got '3'; want a whole number of at least 1"),
        ({"num_beams": 0}, "num_beams: got 0; want a whole number"),
        ({"max_time": float("nan")}, "max_time: got nan; want a finite number"),
        ({"guidance_scale": "x"}, "guidance_scale: got 'x'; want a finite number"),
        ({"top_p": 2}, "top_p: got 2; want a number from 0 to 1"),
        ({"do_sample": "yes"}, "do_sample: got 'yes'; want True or False"),
        ({"eos_token_id": 2.5}, "eos_token_id: got 2.5; want a token id"),
        ({"bad_words_ids": [[999]]}, r"bad_words_ids: got \[\[999\]\]; want token ids from 0 to 127"),
        ({"sequence_bias": {(999,): 1.0}}, "want token ids from 0 to 127"),
        ({"streamer": 3}, r"streamer: got 3; want an object with put\(\)"),
        ({"stopping_criteria": [3]}, r"stopping_criteria: got \[3\]; want a list of functions"),
        ({"generation_config": {"max_new_tokens": 2}}, "generation_config: got dict; want a GenerationConfig"),
        ({"generation_config": tr.GenerationConfig(num_beams=0)}, "num_beams: got 0"),
        ({"custom_generate": 3}, "custom_generate: got 3; want a function"),
        ({"assistant_model": 3}, "transformers refuses these arguments .*'int' object"),
        ({"stop_strings": ["a"]}, "transformers refuses these arguments .*tokenizer"),
        ({"foo": 1}, r"transformers refuses these arguments .*\['foo'\]"),
        ({"speculation": "lookup"}, r"speculation: got 'lookup'; want SpeculationConfig\(draft='lookup'\)"),
        ({"speculation": True}, "speculation: got True; want a SpeculationConfig"),
        *(
            ({"speculation": SpeculationConfig(), **beside}, f"{next(iter(beside))}: got it beside speculation")
            for beside in (
                {"assistant_model": object()}, {"prompt_lookup_num_tokens": 2}, {"custom_generate": print},
                {"guidance_scale": 2.0}, {"output_attentions": True}, {"negative_prompt_ids": IDS},
            )
        ),
    ],
)  # fmt: skip
def test_what_generate_cannot_use_is_refused_before_anything_is_sent(
    opt: PreTrainedModel, given: dict[str, Any], message: str
) -> None:
    with pytest.raises((ConfigError, DomainError), match=message):
        opt.generate(**{"input_ids": IDS, "max_new_tokens": 2, **given})


def test_errors_of_a_users_own_function_stay_what_they_are() -> None:
    def fails(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise KeyError("mine")

    with patch(tiny.build("opt"), PLAIN) as model, pytest.raises(KeyError, match="mine"):
        model.generate(input_ids=IDS, max_new_tokens=2, logits_processor=[fails])


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(1, 2), r"shape \(1, 2\); want shape \(1, 3\)"),
        (torch.ones(1, 1, 3, 3), r"shape \(1, 1, 3, 3\); want shape \(1, 3\)"),
        (torch.tensor([[0.5, 1.0, 1.0]]), "values other than 0 and 1"),
        (torch.tensor([[2, 1, 1]]), "values other than 0 and 1"),
    ],
)
def test_attention_masks(opt: PreTrainedModel, mask: torch.Tensor, message: str) -> None:
    with pytest.raises(DomainError, match=f"attention_mask: .*{message}"):
        opt(input_ids=IDS, attention_mask=mask)


def test_a_row_of_padding() -> None:
    with patch(tiny.build("bert"), PLAIN) as bert, pytest.raises(DomainError, match=r"row\(s\) \[1\] mask every"):
        bert(input_ids=IDS.repeat(2, 1), attention_mask=torch.tensor([[1, 1, 0], [0, 0, 0]]))


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        (torch.tensor([[0.0, 1.0, 2.0]]), "want an integer tensor"),
        (torch.tensor([[0, 1]]), r"shape \(1, 2\); want an integer tensor \(1, 3\)"),
        (torch.tensor([[0, 1, 64]]), "got 0 to 64; want 0 to 63"),
    ],
)
def test_positions(opt: PreTrainedModel, positions: torch.Tensor, message: str) -> None:
    with pytest.raises(DomainError, match=f"position_ids: .*{message}"):
        opt(input_ids=IDS, position_ids=positions)


def test_inputs_missing_or_double(opt: PreTrainedModel) -> None:
    with pytest.raises(DomainError, match="got none; want exactly one of input_ids, inputs_embeds"):
        opt()
    with pytest.raises(DomainError, match="want exactly one of"):
        opt(input_ids=IDS, inputs_embeds=torch.zeros(1, 3, 64))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e18])
def test_values_the_ring_cannot_hold(opt: PreTrainedModel, vit: PreTrainedModel, bad: float) -> None:
    embeds, pixels = torch.zeros(1, 3, 64), torch.zeros(1, 3, 16, 16)
    embeds[0, 1, 2] = pixels[0, 1, 2, 3] = bad
    with pytest.raises(DomainError, match=r"inputs_embeds: .*(NaN or infinite|exceeds the ring)"):
        opt(inputs_embeds=embeds)
    with pytest.raises(DomainError, match=r"pixel_values: .*(NaN or infinite|exceeds the ring)"):
        vit(pixel_values=pixels)


@pytest.mark.parametrize(
    ("pixels", "message"),
    [
        (torch.zeros(1, 3, 16, 16, dtype=torch.uint8), "got torch.uint8, .*; want a floating-point tensor"),
        (torch.zeros(1, 3, 32, 32), r"shape \(1, 3, 32, 32\); want .*\[batch, 3, 16, 16\]"),
        (torch.zeros(3, 16, 16), r"want .*\[batch, 3, 16, 16\]"),
    ],
)
def test_images(vit: PreTrainedModel, pixels: torch.Tensor, message: str) -> None:
    with pytest.raises(DomainError, match=f"pixel_values: .*{message}"):
        vit(pixel_values=pixels)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"output_attentions": True}, "output_attentions: attention weights stay"),
        ({"output_hidden_states": True}, "output_hidden_states: hidden states stay"),
        ({"cross_attn": IDS}, r"forward argument\(s\) cross_attn"),
    ],
)
def test_forward_arguments_without_a_rule(opt: PreTrainedModel, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedOp, match=message):
        opt(input_ids=IDS, **arguments)


def test_a_cache_that_is_not_the_parties(opt: PreTrainedModel) -> None:
    with pytest.raises(DomainError, match=f"{CACHE}: got DynamicCache; want the handle"):
        opt(input_ids=IDS, past_key_values=DynamicCache())


def test_a_cache_implementation(opt: PreTrainedModel) -> None:
    with pytest.raises(ConfigError, match="cache_implementation: got 'static'"):
        opt.generate(input_ids=IDS, max_new_tokens=2, cache_implementation="static")


def test_a_model_that_is_private_already(opt: PreTrainedModel) -> None:
    with pytest.raises(PatchMismatch, match="PrivateOPTForCausalLM, which is private already"):
        patch(opt, PLAIN)


def test_a_model_without_values() -> None:
    with torch.device("meta"):
        model = tiny.build("opt")
    with pytest.raises(PatchMismatch, match="have no values, such as"):
        patch(model, PrivateConfig())


def test_the_weights_do_not_come_out(opt: PreTrainedModel, tmp_path: Path) -> None:
    copies = (opt.state_dict, lambda: pickle.dumps(opt), lambda: copy.deepcopy(opt), lambda: copy.copy(opt))
    for leave in (lambda: opt.save_pretrained(tmp_path), lambda: opt.push_to_hub("x"), *copies):
        with pytest.raises(PlaintextLeak, match="only as shares"):
            leave()
    for refused in (opt.get_input_embeddings, opt.get_output_embeddings, opt.resize_token_embeddings, opt.train):
        with pytest.raises(UnsupportedOp):
            refused()
    assert list(tmp_path.iterdir()) == []
    assert sum(value.numel() for value in opt.parameters()) == 0


def test_what_a_private_model_shows_of_itself(opt: PreTrainedModel) -> None:
    assert repr(opt) == "PrivateOPTForCausalLM(protocol='plain', weights with the parties: see explain())"
    assert len(repr(opt.patch_plan)) < 120
