"""The mask function gives transformers' mask, or None where it allows everything."""

from __future__ import annotations

import pytest
import torch
from private_llm_hf.kv_cache.attention_interface import private_mask
from transformers.masking_utils import causal_mask_function, sdpa_mask, sliding_window_causal_mask_function


@pytest.mark.parametrize("shown", [causal_mask_function, sliding_window_causal_mask_function(3)])
@pytest.mark.parametrize("padding", [None, torch.tensor([[False, True, True, True, True, True]])])
@pytest.mark.parametrize(("queries", "past", "width"), [(1, 5, 6), (1, 0, 1), (2, 4, 6), (1, 3, 6)])
def test_a_mask_that_allows_everything_is_none(shown, padding, queries, past, width):
    sizes = {"batch_size": 1, "q_length": queries, "kv_length": width, "q_offset": past, "kv_offset": 0}
    want = sdpa_mask(
        **sizes, mask_function=shown, attention_mask=padding, allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
    )  # fmt: skip
    made = private_mask(**sizes, mask_function=shown, attention_mask=padding, device="cpu")
    assert want is not None
    assert (made is None) == bool(want.all())
    assert made is None or torch.equal(made, want)
    again = private_mask(**sizes, mask_function=shown, attention_mask=padding, device="cpu")
    kept = shown is causal_mask_function and padding is None
    assert made is None or (again is made) == kept, "what is found out about it is kept with it"
