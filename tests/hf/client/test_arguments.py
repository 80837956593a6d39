"""Every argument of forward() and every setting of generate(): the plaintext model's answer, or an error that names it.

Arguments and settings are read from transformers, so a version that brings new ones is tested with them. What the
plaintext model itself refuses may be refused in the same way.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tr
from private_llm_hf import patch
from private_llm_hf.checkpoint.miniature import miniature
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from private_llm.errors import PrivateLLMError
from tests.hf import tiny
from tests.hf.conftest import PLAIN

IDS = torch.tensor([[5, 6, 7]])
ONE = torch.ones(1, 3, dtype=torch.int64)
ERROR = 0.02


def outcome(run: Callable[[], Any]) -> Any:
    try:
        return run()
    except Exception as error:
        return error


def agree(name: str, want: Any, got: Any, same: Callable[[Any, Any], bool]) -> bool:
    if isinstance(got, Exception):
        named = name in str(got) or isinstance(want, Exception)  # else transformers' words, which may not name it
        return (isinstance(got, PrivateLLMError) and named) or type(got) is type(want)
    return isinstance(want, Exception) or same(want, got)


# -- generate() ---------------------------------------------------------------------------------------------------
SETTINGS: dict[str, list[Any]] = {
    "max_length": [6], "min_length": [5], "min_new_tokens": [2], "max_time": [100.0], "stop_strings": ["a"],
    "num_beams": [2], "cache_implementation": ["static", "offloaded", "quantized", "dynamic"], "max_cache_len": [4],
    "cache_config": [{"backend": "quanto"}], "temperature": [0.5], "top_k": [3], "top_p": [0.5], "min_p": [0.2],
    "top_h": [0.5], "typical_p": [0.5], "epsilon_cutoff": [0.01], "eta_cutoff": [0.01], "repetition_penalty": [1.5],
    "encoder_repetition_penalty": [1.5], "length_penalty": [0.5], "no_repeat_ngram_size": [2], "bad_words_ids": [[[5]]],
    "forced_bos_token_id": [7], "forced_eos_token_id": [9], "exponential_decay_length_penalty": [(1, 1.5)],
    "suppress_tokens": [[5]], "begin_suppress_tokens": [[5]], "sequence_bias": [[[[5], -5.0]]], "guidance_scale": [1.5],
    "watermarking_config": [{"bias": 2.5}], "num_return_sequences": [1], "pad_token_id": [3], "bos_token_id": [3],
    "eos_token_id": [5], "encoder_no_repeat_ngram_size": [2], "decoder_start_token_id": [4],
    "num_assistant_tokens": [3],
    "num_assistant_tokens_schedule": ["constant"], "assistant_confidence_threshold": [0.3], "target_lookbehind": [3],
    "prompt_lookup_num_tokens": [2], "max_matching_ngram_size": [2], "assistant_early_exit": [1],
    "assistant_lookbehind": [3], "assistant_ensemble_weight": [0.5], "speculation_type": ["mtp"],
    "compile_config": [tr.CompileConfig()], "continuous_batching_config": [None], "penalty_alpha": [0.5],
    "dola_layers": ["high"], "diversity_penalty": [0.5], "num_beam_groups": [2], "constraints": [[]],
    "force_words_ids": [[[5]]], "prefill_chunk_size": [2],
}  # fmt: skip
"""Values that are not true or false."""
SAMPLED = ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
OWN = ("max_new_tokens", "transformers_version", "_from_model_config")


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["llama", "t5"])
def test_settings_of_generate(family: str) -> None:
    model = tiny.build(family)
    names = [name for name in GenerationConfig().to_dict() if name not in OWN]
    if family == "t5":  # those that only two stacks know
        names = [name for name in names if name.startswith(("encoder", "decoder", "forced", "use_", "assistant_early"))]
    wrong = []
    with patch(model, PLAIN) as private:
        for name in names:
            for value in SETTINGS.get(name, [True]):
                settings = {"max_new_tokens": 2, "do_sample": name in SAMPLED, name: value}
                if name == "max_length":
                    del settings["max_new_tokens"]

                def tokens(model: PreTrainedModel, settings: dict[str, Any] = settings) -> Tensor:
                    torch.manual_seed(0)
                    made = model.generate(IDS, **settings)
                    return made if isinstance(made, Tensor) else made.sequences

                want, got = outcome(lambda: tokens(model)), outcome(lambda: tokens(private))
                if not agree(name, want, got, torch.equal):
                    wrong.append((name, value, want, got))
    assert not wrong


# -- forward() ----------------------------------------------------------------------------------------------------
FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    **{name: lambda name=name: tiny.build(name) for name in ("opt", "llama", "gemma2", "bert", "vit", "t5")},
    "texts": lambda: tiny.build("bert", tr.BertForSequenceClassification),
    "answers": lambda: tiny.build("bert", tr.BertForQuestionAnswering),
    "bart": lambda: miniature(tr.BartForConditionalGeneration, tr.BartConfig()),
}


def values(name: str, width: int) -> list[Any]:
    states = torch.randn(1, 3, width, generator=torch.Generator().manual_seed(1))
    keep = [1, torch.tensor([0, 2])]
    known: dict[str, list[Any]] = {
        "input_ids": [IDS.int(), IDS[0], IDS.float()], "inputs_embeds": [states], "decoder_inputs_embeds": [states],
        "attention_mask": [torch.tensor([[1, 1, 0]]), ONE.bool(), ONE.float(), torch.ones(1, 1, 3, 3)],
        "token_type_ids": [ONE], "position_ids": [torch.tensor([[1, 2, 4]]), torch.arange(3)], "use_cache": [False],
        "labels": [IDS, torch.tensor([1])], "logits_to_keep": keep, "past_key_values": [DynamicCache()],
        "cache": [DynamicCache()], "decoder_input_ids": [torch.tensor([[0]])], "return_dict": [True],
        "decoder_attention_mask": [torch.tensor([[1, 1, 0]])], "decoder_position_ids": [ONE],
        "encoder_outputs": [BaseModelOutput(last_hidden_state=states), (states,)], "encoder_hidden_states": [states],
        "start_positions": [torch.tensor([1])], "bool_masked_pos": [torch.ones(1, 4, dtype=torch.bool)],
        "pixel_values": [torch.ones(1, 3, 16, 16)],
    }  # fmt: skip
    return known.get(name, [torch.ones(1, 3), True])


def first(made: Any) -> Tensor:
    return next(made[name] for name in ("logits", "start_logits", "last_hidden_state") if name in made)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", list(FAMILIES))
def test_arguments_of_forward(family: str) -> None:
    model = FAMILIES[family]().eval()
    vision, two = model.main_input_name == "pixel_values", model.config.is_encoder_decoder
    usual = {"pixel_values": torch.ones(1, 3, 16, 16)} if vision else {"input_ids": IDS}
    if two:
        usual["decoder_input_ids"] = torch.tensor([[0, 4, 5]])
    instead = {
        "inputs_embeds": "input_ids", "encoder_outputs": "input_ids", "decoder_inputs_embeds": "decoder_input_ids",
        "labels": "decoder_input_ids",
    }  # fmt: skip
    names = [name for name in inspect.signature(type(model).forward).parameters if name not in ("self", "kwargs")]
    more = (
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "head_mask",
        "cache_position",
        "nonsense",
    )
    wrong = []
    with patch(model, PLAIN) as private, torch.no_grad():
        for name in dict.fromkeys([*names, *more]):
            for value in values(name, getattr(model.config, "hidden_size", 0) or model.config.d_model):
                given = {key: each for key, each in usual.items() if key != instead.get(name)} | {name: value}

                def run(model: PreTrainedModel, given: dict[str, Any] = given) -> list[Tensor]:
                    made = model(**given)
                    return [first(made), *([made.loss] if "labels" in given else [])]

                def same(want: list[Tensor], got: list[Tensor]) -> bool:
                    return all(
                        a.shape == b.shape and float((a - b).abs().max()) <= ERROR * (1 + float(a.abs().max()))
                        for a, b in zip(want, got, strict=True)
                    )

                want, got = outcome(lambda: run(model)), outcome(lambda: run(private))
                if not agree(name, want, got, same):
                    wrong.append((name, value, want, got))
    assert not wrong
