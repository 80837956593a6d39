"""Ranks with ties, as the parties make them."""

from __future__ import annotations

import torch
from long_context.plain_attention import entries_that_stay, largest

from private_llm.kv_cache.policies.policy import Eviction


def test_of_equal_values_the_first_are_taken() -> None:
    """Long enough that an unstable sort shuffles them."""
    values = torch.zeros(2, 300)
    values[1, 200] = 1.0
    assert largest(values, 3).tolist() == [[0, 1, 2], [0, 1, 200]]


def test_of_entries_without_attention_the_first_and_newest_stay() -> None:
    got = entries_that_stay(torch.zeros(1, 1, 300), 5, Eviction(first=1, recent=2), None, None)
    assert got.tolist() == [[[0, 1, 2, 298, 299]]]
