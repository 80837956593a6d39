"""How hidden states become the vector of a text: what files of sentence-transformers beside a model say of it.

    modules.json                       Transformer, Pooling and, where vectors have length 1, Normalize
    1_Pooling/config.json              the first token, the mean, the last token ...; several stand side by side
    config_sentence_transformers.json  a prompt that stands before every text, entries that are kept of a vector
    sentence_bert_config.json          the longest text, lower case

What is not computed here is refused: layers of their own after the pooling (Dense has weights that are the owner's),
words that are left out of the pooling, settings that are not known.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.utils import cached_file

from private_llm.errors import ConfigError, refuse_unknown

_MODULES, _SETTINGS = "modules.json", "config_sentence_transformers.json"
_TRANSFORMER = tuple(
    f"sentence_{name}_config.json" for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta")
)
"""Names of one file, by the model that it was first written for."""
_FLAGS = {
    "pooling_mode_cls_token": "cls", "pooling_mode_max_tokens": "max", "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens", "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}  # fmt: skip
"""Older names of ways of pooling, in the order in which their results stand."""
_USUAL: dict[str, object] = {
    "transformer_task": "feature-extraction",
    "module_output_name": "token_embeddings",
    "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
    "unpad_inputs": None,
}
"""Settings of the transformer that change nothing if they are these."""


@dataclass(frozen=True)
class SentenceVectors:
    """Which vector a text has.

    pooling: ways, whose results stand side by side. unit: whether vectors have length 1. prompt: what stands before
    every text. lower: whether texts become lower case. longest: tokens of a text at most, those around it included.
    kept: the first entries that are kept of a vector, or all.
    """

    pooling: tuple[str, ...] = ("mean",)
    unit: bool = True
    prompt: str = ""
    lower: bool = False
    longest: int | None = None
    kept: int | None = None

    def text(self, text: str) -> str:
        """What is tokenised of a text."""
        whole = self.prompt + text
        return whole.lower() if self.lower else whole

    def size(self, hidden: int) -> int:
        """Entries of a vector, of hidden states [..., hidden]."""
        return min(len(self.pooling) * hidden, self.kept or len(self.pooling) * hidden)

    def of(self, states: Tensor, mask: Tensor) -> Tensor:
        """Vectors [B, size] of hidden states [B, S, hidden]; mask [B, S]: 1 for tokens, 0 for padding after them."""
        made = torch.cat([_WAYS[way](states, mask.to(states.dtype)[..., None]) for way in self.pooling], -1)
        return (F.normalize(made, dim=-1) if self.unit else made)[:, : self.kept]


_WAYS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cls": lambda states, mask: states[:, 0],
    "max": lambda states, mask: states.masked_fill(mask == 0, float("-inf")).amax(1),
    "mean": lambda states, mask: (states * mask).sum(1) / mask.sum(1),
    "mean_sqrt_len_tokens": lambda states, mask: (states * mask).sum(1) / mask.sum(1).sqrt(),
    "weightedmean": lambda states, mask: _WAYS["mean"](
        states, mask * torch.arange(1, mask.shape[1] + 1).to(mask)[:, None]
    ),
    "lasttoken": lambda states, mask: states[torch.arange(len(states)), mask[..., 0].sum(1).long() - 1],
}


# -- the files ---------------------------------------------------------------------------------------------------
def sentence_vectors(source: str | Path, **download: Any) -> SentenceVectors:  # noqa: ANN401 - as transformers
    """As files of a folder or hub id say (none: the mean of all tokens, length 1). Raises ConfigError for others."""
    modules = _json(source, _MODULES, download)
    if modules is None:
        return SentenceVectors()
    if not isinstance(modules, list) or not all(isinstance(each, Mapping) for each in modules):
        raise ConfigError(f"{source}: {_MODULES}: want a list of modules, as sentence-transformers writes it")
    kinds = [str(each.get("type", "")).rpartition(".")[2] for each in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]) or modules[0].get("path"):
        raise ConfigError(
            f"{source}: {_MODULES}: got {', '.join(kinds)}; want Transformer in the folder itself, Pooling and perhaps "
            "Normalize. For other layers run the model with AutoPrivateModel and compute them of its hidden states"
        )
    pooling = _settings(source, f"{modules[1].get('path')}/config.json", download)
    whole = _settings(source, _SETTINGS, download)
    prompt = _prompt(source, whole)
    if prompt and not pooling.get("include_prompt", True):
        raise ConfigError(
            f"{source}: include_prompt is false, so tokens of the prompt {prompt!r} would have to be left out of the "
            "pooling, which is not done here; serve the model without its default prompt"
        )
    reads = next(filter(None, (_settings(source, name, download) for name in _TRANSFORMER)), {})
    for name, value in reads.items():
        if name not in ("max_seq_length", "do_lower_case") and value not in (None, False, {}, _USUAL.get(name)):
            raise ConfigError(f"{source}: the transformer's setting {name!r} is {value!r}, which is not followed here")
    return SentenceVectors(
        _pooling(source, pooling), len(kinds) == 3, prompt, bool(reads.get("do_lower_case")),
        _count(source, reads, "max_seq_length"), _count(source, whole, "truncate_dim"),
    )  # fmt: skip


def copy_sentence_files(source: str | Path, folder: Path, **download: Any) -> None:  # noqa: ANN401 - as transformers
    """Copy those of these files that are there, none with weights. Raises ConfigError for a file that is not JSON."""
    modules = _json(source, _MODULES, download)
    paths = [each.get("path") for each in modules if isinstance(each, Mapping)] if isinstance(modules, list) else []
    inside = [f"{path}/config.json" for path in paths if isinstance(path, str) and path and Path(path).name == path]
    for name in (_MODULES, _SETTINGS, *_TRANSFORMER, *inside):
        found = _found(source, name, download)
        if found is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(found, folder / name)


def _pooling(source: str | Path, settings: Mapping[str, Any]) -> tuple[str, ...]:
    known = {"word_embedding_dimension", "embedding_dimension", "pooling_mode", "include_prompt", *_FLAGS}
    refuse_unknown(settings, known, f"{source}: pooling: ")
    wanted = settings.get("pooling_mode") or [way for flag, way in _FLAGS.items() if settings.get(flag)] or "mean"
    ways = (wanted,) if isinstance(wanted, str) else tuple(wanted)
    refuse_unknown(ways, _WAYS, f"{source}: pooling_mode: ")
    return ways


def _prompt(source: str | Path, settings: Mapping[str, Any]) -> str:
    name, prompts = settings.get("default_prompt_name"), settings.get("prompts") or {}
    if name is None:
        return ""
    if not isinstance(prompts.get(name), str):
        raise ConfigError(f"{source}: {_SETTINGS}: default_prompt_name is {name!r}; want one of {sorted(prompts)}")
    return str(prompts[name])


def _count(source: str | Path, settings: Mapping[str, Any], name: str) -> int | None:
    found = settings.get(name)
    if found is not None and (not isinstance(found, int) or found < 1):
        raise ConfigError(f"{source}: {name}: got {found!r}; want a number from 1 on, or null")
    return found


def _settings(source: str | Path, name: str, download: dict[str, Any]) -> Mapping[str, Any]:
    found = _json(source, name, download)
    if found is not None and not isinstance(found, Mapping):
        raise ConfigError(f"{source}: {name}: got {type(found).__name__}; want an object of settings")
    return found or {}


def _json(source: str | Path, name: str, download: dict[str, Any]) -> object:
    found = _found(source, name, download)
    try:
        return None if found is None else json.loads(Path(found).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{source}: {name}: cannot be read as JSON ({error}); copy it again") from None


def _found(source: str | Path, name: str, download: dict[str, Any]) -> str | None:
    asked = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    try:
        found: str | None = cached_file(str(source), name, **asked, **download)
    except (OSError, ValueError):  # neither a folder nor a name of the hub, such as a built-in model's
        return None
    return found
