"""Tokens around a user's text: what the tokenizer puts in front, or the turns of its chat template."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

from private_llm.errors import ConfigError

_TEXT = "the text of the user"
"""Stands for the user's text while a chat template is laid out."""


@dataclass(frozen=True)
class Frame:
    """Tokens before and after a text."""

    before: tuple[int, ...]
    after: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.before) + len(self.after)


def token_ids(tokenizer: Any, text: str) -> tuple[int, ...]:  # noqa: ANN401 - transformers is not typed
    """The tokens of a text of any length, without special tokens."""
    return tuple(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


def frame_of(tokenizer: Any, chat: bool) -> Frame:  # noqa: ANN401 - transformers is not typed
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
        return Frame(token_ids(tokenizer, before), token_ids(tokenizer, after))
    bare = token_ids(tokenizer, _TEXT)
    whole = tuple(tokenizer(_TEXT).input_ids)
    start = next((at for at in range(len(whole)) if whole[at : at + len(bare)] == bare), 0)
    return Frame(whole[:start], ())


@lru_cache(maxsize=8)
def bundled_text(name: str = "shakespeare.txt") -> str:
    """A text that comes with the package. Raises ConfigError if there is none of that name."""
    place = resources.files("private_llm_hf").joinpath("data", name)
    if not place.is_file():
        raise ConfigError(f"text: {name!r} is not bundled; want shakespeare.txt or heldout.txt")
    return place.read_text(encoding="utf-8")
