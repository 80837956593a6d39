"""How well a model predicts text that follows a long prompt, when the cache holds what a policy left of the prompt."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from private_llm.errors import ConfigError
from private_llm_hf.transformers_versions import CACHE


@dataclass(frozen=True)
class TextWindow:
    """Consecutive tokens of a text. prompt: those read at once, [S]; continuation: those to predict, [N]."""

    prompt: tuple[int, ...]
    continuation: tuple[int, ...]


def text_windows(
    tokenizer: Any,  # noqa: ANN401 - transformers is not typed
    prompt: int = 1024,
    continuation: int = 128,
    count: int = 4,
    text: str | None = None,
) -> list[TextWindow]:
    """`count` windows, evenly spread over a text (default: the bundled play); they overlap only if they must.

    prompt: its tokens, with the start token that the tokenizer puts before a text, if any. Raises ConfigError for
    lengths or counts below 1 and for a text that is shorter than one window.
    """
    if min(prompt, continuation, count) < 1:
        raise ConfigError(f"windows: got {count} of {prompt} and {continuation} tokens; want 1 or more of each")
    start = frame_of(tokenizer, chat=False).before
    ids = token_ids(tokenizer, bundled_text() if text is None else text)
    length = prompt + continuation - len(start)
    if len(ids) < length:
        raise ConfigError(f"text: {len(ids)} tokens; want {length} or more, or shorter windows")
    step = (len(ids) - length) / max(count - 1, 1)
    rows = [start + ids[at : at + length] for at in (round(index * step) for index in range(count))]
    return [TextWindow(row[:prompt], row[prompt:]) for row in rows]


@torch.no_grad()
def continuation_loss(model: Any, window: TextWindow, cache: Any = None, step: int = 1) -> float:  # noqa: ANN401
    """Mean negative log-likelihood (nats) of the continuation's tokens.

    cache: an empty transformers `Cache`, default the model's own; it sees the prompt in one call, then `step` true
    tokens a call, as generate() would with 1. Positions are those of the text, whatever the cache has dropped. Raises
    ConfigError for a step below 1.
    """
    if step < 1:
        raise ConfigError(f"step: got {step}; want 1 or more tokens a call")
    device = next(model.parameters()).device
    ids = torch.tensor([window.prompt + window.continuation], device=device)
    first = len(window.prompt)
    cuts = [0, *range(first, ids.shape[1] - 1, step), ids.shape[1] - 1]
    losses: list[Tensor] = []
    for begin, end in pairwise(cuts):
        kept = 1 if begin == 0 else end - begin
        made = model(
            input_ids=ids[:, begin:end],
            position_ids=torch.arange(begin, end, device=device)[None],
            **{CACHE: cache},
            use_cache=True,
            logits_to_keep=kept,
        )
        cache = made[CACHE]
        losses.append(F.cross_entropy(made.logits[0].float(), ids[0, end - kept + 1 : end + 1], reduction="none"))
    return float(torch.cat(losses).mean())


def perplexity(
    model: Any,  # noqa: ANN401 - transformers is not typed
    windows: Sequence[TextWindow],
    new_cache: Callable[[], Any] = lambda: None,
    step: int = 1,
) -> float:
    """exp of the mean loss over windows of equal continuations; `new_cache` makes the cache of each. Errors as in
    `continuation_loss`, and ConfigError without windows."""
    if not windows:
        raise ConfigError("windows: got none; want at least one")
    losses = [continuation_loss(model, window, new_cache(), step) for window in windows]
    return math.exp(sum(losses) / len(losses))


# -- Tokens around a user's text: what the tokenizer puts in front, or the turns of its chat template -----------------
_TEXT = "the text of the user"
"""Stands for the user's text while a chat template is laid out."""


@dataclass(frozen=True)
class PromptFrame:
    """Tokens before and after a text."""

    before: tuple[int, ...]
    after: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.before) + len(self.after)


def token_ids(tokenizer: Any, text: str) -> tuple[int, ...]:  # noqa: ANN401 - transformers is not typed
    """The tokens of a text of any length, without special tokens."""
    return tuple(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


def frame_of(tokenizer: Any, chat: bool) -> PromptFrame:  # noqa: ANN401 - transformers is not typed
    """A user's turn and the opening of the answer if `chat` and there is a chat template, else the start token alone.

    A tokenizer that starts no text with a token gives an empty frame; what it would end a text with is left out.
    Raises ConfigError if the chat template leaves out what the user says.
    """
    if chat and tokenizer.chat_template is not None:
        turns = [{"role": "user", "content": _TEXT}]
        laid_out = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        before, found, after = laid_out.partition(_TEXT)
        if not found:
            raise ConfigError("the tokenizer's chat template leaves out what the user says; ask with chat=False")
        return PromptFrame(token_ids(tokenizer, before), token_ids(tokenizer, after))
    bare = token_ids(tokenizer, _TEXT)
    whole = tuple(tokenizer(_TEXT).input_ids)
    start = next((at for at in range(len(whole)) if whole[at : at + len(bare)] == bare), 0)
    return PromptFrame(whole[:start], ())


@lru_cache(maxsize=8)
def bundled_text(name: str = "shakespeare.txt") -> str:
    """A text that comes with the package. Raises ConfigError if there is none of that name."""
    place = resources.files("private_llm_hf").joinpath("data", name)
    if not place.is_file():
        raise ConfigError(f"text: {name!r} is not bundled; want shakespeare.txt or heldout.txt")
    return place.read_text(encoding="utf-8")
