"""What the owner's plaintext model is run on for calibration: text in its own tokens, and tokens of every kind."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import resources
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from private_llm.errors import ConfigError
from private_llm_hf.architectures import architecture

LENGTH = 128
"""Tokens of a row."""

ROWS = 2
"""Rows of text."""

_PRIME = 7919


def bundled_text() -> str:
    """The text that comes with the package: encyclopaedic sentences, prompts and verse."""
    folder = resources.files("private_llm_hf").joinpath("data")
    return "\n".join(folder.joinpath(name).read_text("utf-8") for name in ("sentences.txt", "heldout.txt"))


def batches(
    config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase | None, text: str | None = None
) -> list[Callable[[nn.Module], object]]:
    """Calls of the model, one for text (with a tokenizer), one for tokens spread over the vocabulary.

    Raises ConfigError for a text without a tokenizer to read it, or of less than two tokens.
    """
    if text is not None and tokenizer is None:
        raise ConfigError("calibration text: the checkpoint has no tokenizer to read it; leave the text out")
    facts = config.get_text_config()
    length = min(LENGTH, getattr(facts, "max_position_embeddings", None) or LENGTH)
    length -= min(length // 2, 4)  # some families number positions from 2, or add tokens of their own
    rows = [_spread(facts.vocab_size, length)]
    if tokenizer is not None:
        ids = tokenizer(bundled_text() if text is None else text, return_tensors="pt", verbose=False)["input_ids"][0]
        if len(ids) < 2 and text is not None:
            raise ConfigError(f"calibration text: got {len(ids)} token(s); want a text of some sentences")
        ids = ids[: ROWS * length]
        rows += [row.view(1, -1) for row in ids.split(length) if len(row) > 1]
    kind = architecture(config).kind
    return [functools.partial(_run, ids=row, kind=kind) for row in rows]


def _spread(vocabulary: int, length: int) -> Tensor:
    """Token ids from all over the vocabulary, the same every time."""
    return ((torch.arange(length) * _PRIME) % vocabulary).view(1, -1)


def _run(model: nn.Module, ids: Tensor, kind: str) -> object:
    ids = ids.to(next(model.parameters()).device)
    given: dict[str, Any] = {"input_ids": ids}
    if kind == "encoder-decoder":
        given["decoder_input_ids"] = ids
    if kind != "encoder":
        given["use_cache"] = False
    return model(**given)
