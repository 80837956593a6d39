"""A prefix is read once, and texts that go on from it are those of a whole prompt."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from private_llm_hf import patch

from private_llm.errors import DomainError, UnsupportedOp
from private_llm.kv_cache.policies.policy import NoCache
from tests.hf import tiny
from tests.hf.conftest import PLAIN, TRIO
from tests.hf.test_assisted import assisted

PREFIX = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12]])
TEXTS = torch.cat([PREFIX.expand(2, -1), torch.tensor([[20, 21], [30, 31]])], 1)
HOW = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}


def goes_on(plain: Any, private: Any) -> None:
    want = plain.generate(TEXTS, **HOW)
    start = private.prefix(PREFIX)
    for _ in range(2):  # a text leaves the prefix as it was
        assert torch.equal(private.generate(TEXTS[:1], past_key_values=start.before(TEXTS[:1]), **HOW), want[:1])
    assert torch.equal(private.generate(TEXTS, past_key_values=start.before(TEXTS), **HOW), want)
    with torch.no_grad():
        after = private(TEXTS[:, 8:], past_key_values=start.before(TEXTS)).logits
        assert torch.allclose(after, plain(TEXTS).logits[:, 8:], atol=0.02)


def test_texts_after_a_prefix_are_those_of_whole_prompts() -> None:
    plain = tiny.build("llama")
    with patch(plain, TRIO) as private:
        goes_on(plain, private)
    with assisted("gpt2") as (plain, private):
        goes_on(plain, private)


def test_a_prefix_costs_once_what_it_costs() -> None:
    with patch(tiny.build("llama"), TRIO) as private:
        private(PREFIX)
        read = private.cost(reset=True).bytes_total
        start = private.prefix(PREFIX)
        assert private.cost(reset=True).bytes_total == read
        text = TEXTS[:1, :9]
        cache = start.before(text)
        assert private.cost(reset=True).bytes_total == 0
        private(text[:, 8:], past_key_values=cache)
        assert 0 < private.cost(reset=True).bytes_total < read / 3


def test_other_texts_and_models_are_refused() -> None:
    with patch(tiny.build("llama"), PLAIN) as private:
        for ids in (PREFIX[0], TEXTS, PREFIX[:, :0], [[1, 2]]):
            with pytest.raises(DomainError, match=r"prefix: got .*; want the token ids of one text, \[1, length\]"):
                private.prefix(ids)
        start = private.prefix(PREFIX)
        for text in (PREFIX, TEXTS.flip(1), TEXTS[0], torch.cat([torch.zeros_like(PREFIX), PREFIX], 1)):
            with pytest.raises(DomainError, match="does not go on after the prefix's 8 tokens"):
                start.before(text)
    for name, config in (("bert", PLAIN), ("t5", PLAIN), ("llama", replace(PLAIN, kv_cache=NoCache()))):
        with patch(tiny.build(name), config) as private, pytest.raises(UnsupportedOp, match="keeps nothing of what"):
            private.prefix(PREFIX)
