"""What users give generate(), looked at before anything is sent: transformers finds much of it late, or in errors that
name no argument, and would ignore settings that contradict drafts.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList

from private_llm.errors import ConfigError, DomainError, PrivateLLMError
from private_llm_hf.client.speculation import SpeculationConfig
from private_llm_hf.models.inputs import check_values

_WHOLE = {
    "max_new_tokens": 1, "max_length": 1, "min_length": 0, "min_new_tokens": 0, "num_beams": 1, "top_k": 0,
    "num_return_sequences": 1, "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0, "prefill_chunk_size": 1,
    "prompt_lookup_num_tokens": 1, "max_matching_ngram_size": 1, "num_assistant_tokens": 1,
}  # fmt: skip
"""Whole numbers, and the least of each."""

_REAL = {
    "temperature": math.inf, "repetition_penalty": math.inf, "length_penalty": math.inf, "max_time": math.inf,
    "guidance_scale": math.inf, "diversity_penalty": math.inf, "top_p": 1, "min_p": 1, "typical_p": 1, "top_h": 1,
    "epsilon_cutoff": 1, "eta_cutoff": 1, "assistant_confidence_threshold": 1,
}  # fmt: skip
"""Numbers, and the most of each; those with a limit are shares, and not below 0."""

_INPUTS = {
    "inputs": "token ids", "input_ids": "token ids", "inputs_embeds": "embeddings", "attention_mask": "0 and 1",
    "position_ids": "positions", "token_type_ids": "segment numbers", "decoder_input_ids": "token ids",
    "negative_prompt_ids": "token ids", "negative_prompt_attention_mask": "0 and 1",
}  # fmt: skip
"""Inputs, and what they are tensors of."""

_FLAGS = ("do_sample", "use_cache", "return_dict_in_generate", "output_scores", "output_logits", "renormalize_logits")

_TOKENS = ("bad_words_ids", "sequence_bias", "forced_bos_token_id", "forced_eos_token_id")  # looked up in the logits

_BESIDE_DRAFTS = {
    "assistant_model": "drafts, too", "prompt_lookup_num_tokens": "drafts, too", "assistant_early_exit": "drafts, too",
    "custom_generate": "is a loop of its own", "penalty_alpha": "is a loop of its own",
    "dola_layers": "is a loop of its own", "watermarking_config": "counts tokens, also those that are rejected",
    "negative_prompt_ids": "is read once for every token", "output_attentions": "would want attention weights",
    "output_hidden_states": "would want hidden states", "synced_gpus": "is for several clients",
}  # fmt: skip
"""What `speculation` would leave out, and what it does."""

_FOREIGN = (ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError)
"""What Python, torch and transformers raise of settings that they cannot use."""


def check_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any], vocabulary: int, speculation: object) -> None:
    """Raise ConfigError for what generate() cannot use, and beside drafts, DomainError for inputs that are no batch.
    vocabulary: how many tokens there are. Settings of a `generation_config` count as those given one by one.
    """
    names = list(inspect.signature(GenerationMixin.generate).parameters)[1:]
    found = {**dict(zip(names, args, strict=False)), **kwargs}
    config = found.get("generation_config")
    if not isinstance(config, GenerationConfig | None):
        raise ConfigError(
            f"generation_config: got {type(config).__name__}; want a GenerationConfig of transformers, or its settings "
            "one by one: generate(..., max_new_tokens=20)"
        )
    given = {**({} if config is None else config.to_diff_dict()), **found}
    for name in set(given) & set(_INPUTS):
        value = given[name]
        if value is None:
            continue
        if not isinstance(value, Tensor):
            raise DomainError(
                f"generate: got {type(value).__name__} as {name}; want a tensor of {_INPUTS[name]}: "
                "generate(**tokenizer(text, return_tensors='pt'))"
            )
        check_values(name, value)
        if value.ndim < 2:
            raise DomainError(f"{name}: got shape {tuple(value.shape)}; want [batch, length]")
    _check_settings(given, vocabulary)
    if speculation is not None:
        _check_beside_drafts(given, speculation)


def _check_settings(given: Mapping[str, Any], vocabulary: int) -> None:
    for name in set(given) & set(_WHOLE):
        _want(name, given[name], _whole(given[name], _WHOLE[name]), f"a whole number of at least {_WHOLE[name]}")
    for name in set(given) & set(_REAL):
        share = math.isfinite(_REAL[name])
        _want(name, given[name], _real(given[name], share), f"a {'number from 0 to 1' if share else 'finite number'}")
    for name in set(given) & set(_FLAGS):
        _want(name, given[name], given[name] in (True, False), "True or False")
    streamer, rule = given.get("streamer"), given.get("prefix_allowed_tokens_fn")
    _want("streamer", streamer, hasattr(streamer, "put") and hasattr(streamer, "end"), "an object with put() and end()")
    _want("prefix_allowed_tokens_fn", rule, callable(rule), "a function")
    custom = given.get("custom_generate")
    _want("custom_generate", custom, callable(custom) or isinstance(custom, str), "a function, or a folder or hub id")
    for name in ("logits_processor", "stopping_criteria"):
        listed = isinstance(given.get(name), list | tuple)
        _want(name, given.get(name), listed and all(map(callable, given[name])), "a list of functions")
    for name in set(given) & set(_TOKENS):
        outside = [token for token in _tokens(given[name]) if token >= vocabulary]
        _want(name, given[name], not outside, f"token ids from 0 to {vocabulary - 1}")
    for name in ("eos_token_id", "pad_token_id", "bos_token_id"):
        value = given.get(name)
        tokens = value if isinstance(value, list | tuple) else [value]
        whole = isinstance(value, Tensor) or all(_whole(token, -1) for token in tokens)
        _want(name, value, whole, "a token id, or a list of them")
    if given.get("assistant_model") is not None and given.get("prompt_lookup_num_tokens") is not None:
        raise ConfigError("assistant_model, prompt_lookup_num_tokens: got both, and each drafts; leave one out")
    if given.get("synced_gpus"):
        raise ConfigError("synced_gpus: got True; a private model has one client, so leave it out")


def _check_beside_drafts(given: Mapping[str, Any], speculation: object) -> None:
    if not isinstance(speculation, SpeculationConfig):
        hint = f"SpeculationConfig(draft={speculation!r})" if isinstance(speculation, str) else "a SpeculationConfig"
        raise ConfigError(f"speculation: got {speculation!r}; want {hint}, or None")
    found = [name for name in _BESIDE_DRAFTS if given.get(name) is not None and given[name] is not False]
    if given.get("guidance_scale") not in (None, 1, 1.0):
        raise ConfigError("guidance_scale: got it beside speculation, and it calls the model for every single token")
    if found:
        raise ConfigError(
            f"{found[0]}: got it beside speculation; it {_BESIDE_DRAFTS[found[0]]}, so leave one of the two out"
        )


def check_token_alone(generation: GenerationConfig, processors: LogitsProcessorList) -> None:
    """Raise ConfigError under reveal="token", which opens only the arg max, for what looks at other logits."""
    refused = [type(processor).__name__ for processor in processors]
    if generation.do_sample:
        refused.append("do_sample")
    if (generation.num_beams or 1) > 1:
        refused.append("num_beams")
    refused += [name for name in ("output_scores", "output_logits") if getattr(generation, name)]
    if refused:
        raise ConfigError(
            f"reveal='token' opens only the most likely token, which {', '.join(refused)} cannot work with; "
            "use greedy decoding, or PrivateConfig(reveal='logits')"
        )


@contextmanager
def as_config_errors(asked: Callable[[], int]) -> Iterator[None]:
    """What transformers raises of its arguments becomes ConfigError until the model was `asked` once more."""
    before = asked()
    try:
        yield
    except PrivateLLMError:
        raise
    except _FOREIGN as error:
        if asked() != before:
            raise
        raise ConfigError(
            f"generate: transformers refuses these arguments ({type(error).__name__}: {error})"
        ) from error


def _want(name: str, value: object, fits: bool, wanted: str) -> None:
    if value is not None and not fits:
        raise ConfigError(f"{name}: got {value!r}; want {wanted}")


def _whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _real(value: object, share: bool) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return number and (not share or 0 <= float(value) <= 1)  # type: ignore[arg-type]


def _tokens(value: object) -> list[int]:
    """The whole numbers anywhere in a setting; of a mapping in its keys."""
    if isinstance(value, list | tuple | Mapping):
        return [token for item in value for token in _tokens(item)]
    return [value] if isinstance(value, int) else []
