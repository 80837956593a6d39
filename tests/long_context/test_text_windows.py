"""Windows of a text: where they begin, and what stands before them."""

from __future__ import annotations

import pytest
from long_context.text_windows import bundled_text, text_windows
from private_llm_hf.tools.texts import token_ids

from private_llm.errors import ConfigError
from tests.long_context.tokenizers_of_kinds import bare, demo


def test_windows_are_pieces_of_the_text() -> None:
    ids = token_ids(bare(), bundled_text())
    first, middle, last = text_windows(bare(), prompt=1000, continuation=50, count=3)
    assert [len(window.prompt) for window in (first, middle, last)] == [1000] * 3
    assert first.prompt + first.continuation == ids[:1050]
    start = (len(ids) - 1050) // 2
    assert middle.prompt + middle.continuation == ids[start : start + 1050]
    assert last.prompt + last.continuation == ids[-1050:]


def test_the_start_token_belongs_to_the_prompt() -> None:
    tokenizer = demo()
    (window,) = text_windows(tokenizer, prompt=8, continuation=4, count=1, text="word " * 30)
    assert window.prompt[0] == tokenizer.bos_token_id
    assert (len(window.prompt), len(window.continuation)) == (8, 4)
    assert window.prompt[1:] + window.continuation == token_ids(tokenizer, "word " * 30)[:11]


def test_bad_input_is_refused() -> None:
    with pytest.raises(ConfigError, match="text: 4 tokens; want 12 or more"):
        text_windows(bare(), prompt=8, continuation=4, text="four")
    with pytest.raises(ConfigError, match="got 1 of 8 and 0 tokens"):
        text_windows(bare(), prompt=8, continuation=0, count=1)
