"""Windows of text, and the loss of what follows a prompt: as one forward over all of it, with any cache and step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from private_llm_hf.long_context.perplexity import (
    TextWindow,
    bundled_text,
    continuation_loss,
    perplexity,
    text_windows,
    token_ids,
)
from private_llm_hf.transformers_versions import CACHE
from torch import Tensor
from transformers import DynamicCache

from private_llm.errors import ConfigError
from tests.hf import tiny
from tests.long_context.tokenizers_of_kinds import bare, demo

WINDOW = TextWindow((1, *range(40, 70)), (5, 90, 17, 33, 64, 8, 21))


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.build("llama").eval()


class Recorded(torch.nn.Module):
    """A model, and the arguments of its calls."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        self.calls: list[dict[str, Any]] = []

    def forward(self, **kwargs: Any) -> Any:
        self.calls.append(kwargs)
        return self.model(**kwargs)


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


@pytest.mark.parametrize("step", [1, 3, 6, 100])
@pytest.mark.parametrize("cached", [False, True])
def test_the_loss_is_that_of_one_forward(model: Any, step: int, cached: bool) -> None:
    ids = torch.tensor([WINDOW.prompt + WINDOW.continuation])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0]
    expected = F.cross_entropy(logits[30:-1], ids[0, 31:])
    cache = DynamicCache() if cached else None
    assert continuation_loss(model, WINDOW, cache, step) == pytest.approx(float(expected), rel=1e-5)


def test_the_cache_sees_the_prompt_at_once_and_then_steps(model: Any) -> None:
    recorded = Recorded(model)
    cache = DynamicCache()
    continuation_loss(recorded, WINDOW, cache, step=4)
    assert [call["input_ids"].shape[1] for call in recorded.calls] == [31, 4, 2]
    assert [call["logits_to_keep"] for call in recorded.calls] == [1, 4, 2]
    assert torch.equal(torch.cat([call["position_ids"][0] for call in recorded.calls]), torch.arange(37))
    assert all(call[CACHE] is cache for call in recorded.calls)


def test_perplexity_of_a_model_that_knows_nothing(model: Any) -> None:
    zeros: Tensor = torch.zeros_like(model.lm_head.weight)
    caches: list[DynamicCache] = []

    def new_cache() -> DynamicCache:
        caches.append(DynamicCache())
        return caches[-1]

    blank = tiny.build("llama").eval()
    blank.lm_head.weight = torch.nn.Parameter(zeros)
    assert perplexity(blank, [WINDOW, WINDOW], new_cache) == pytest.approx(128, rel=1e-5)
    assert [cache.get_seq_length() for cache in caches] == [37, 37]
    losses = [continuation_loss(model, window) for window in (WINDOW, TextWindow((1, 9), (8, 7)))]
    assert perplexity(model, [WINDOW, TextWindow((1, 9), (8, 7))]) == pytest.approx(math.exp(sum(losses) / 2))


def test_bad_input_is_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match="text: 4 tokens; want 12 or more"):
        text_windows(bare(), prompt=8, continuation=4, text="four")
    with pytest.raises(ConfigError, match="got 1 of 8 and 0 tokens"):
        text_windows(bare(), prompt=8, continuation=0, count=1)
    with pytest.raises(ConfigError, match="step: got 0"):
        continuation_loss(model, WINDOW, step=0)
    with pytest.raises(ConfigError, match="windows: got none"):
        perplexity(model, [])
