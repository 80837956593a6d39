"""Tiny models with the habit of real ones: a few entries of the residual stream thousands of times the others."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from tests.hf import tiny


def massive(family: str, size: float, token: int = 7) -> PreTrainedModel:
    """A tiny model whose first layer adds `size` to one channel wherever `token` stands, and its last takes it away."""
    model = tiny.build(family)
    channel = 5
    with torch.no_grad():
        table = model.get_input_embeddings().weight
        table.mul_(3.0)
        table[:, channel] = 0.0
        table[token, channel] = size
    return model
