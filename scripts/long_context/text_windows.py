"""Windows of one text: a prompt, and what follows it."""

from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

from private_llm_hf.tools.texts import token_ids

from private_llm.errors import ConfigError

_TEXT = "the text of the user"


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
    start = start_tokens(tokenizer)
    ids = token_ids(tokenizer, bundled_text() if text is None else text)
    length = prompt + continuation - len(start)
    if len(ids) < length:
        raise ConfigError(f"text: {len(ids)} tokens; want {length} or more, or shorter windows")
    step = (len(ids) - length) / max(count - 1, 1)
    rows = [start + ids[at : at + length] for at in (round(index * step) for index in range(count))]
    return [TextWindow(row[:prompt], row[prompt:]) for row in rows]


def start_tokens(tokenizer: Any) -> tuple[int, ...]:  # noqa: ANN401 - transformers is not typed
    """What a tokenizer puts before a text; what it would end one with is left out."""
    bare, whole = token_ids(tokenizer, _TEXT), tuple(tokenizer(_TEXT).input_ids)
    return whole[: next((at for at in range(len(whole)) if whole[at : at + len(bare)] == bare), 0)]


@lru_cache(maxsize=8)
def bundled_text(name: str = "shakespeare.txt") -> str:
    """A text that comes with the package. Raises ConfigError if there is none of that name."""
    place = resources.files("private_llm_hf").joinpath("data", name)
    if not place.is_file():
        raise ConfigError(f"text: {name!r} is not bundled; want shakespeare.txt or heldout.txt")
    return place.read_text(encoding="utf-8")
