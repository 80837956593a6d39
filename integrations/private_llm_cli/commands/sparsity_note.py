"""A line about what predictors save or cost, before a run begins."""

from __future__ import annotations

from typing import Any

from private_llm.errors import PrivateLLMError
from private_llm_cli.commands.output import NOTES, size

TURN = (64, 32)
"""Tokens of the prompt and of the answer that a chat is priced for."""


def note_sparsity(model: Any, sequence: int, new_tokens: int, batch: int = 1) -> None:  # noqa: ANN401 - a private model
    """Say on stderr what this run will send with predictors and without, and what helps if they do not pay.

    Nothing for a model without predictors, and for what cannot be estimated: the run itself says why.
    """
    if model.parties.config.sparsity is None:
        return
    from private_llm_hf.sparsity.price import sparsity_price

    try:
        price = sparsity_price(model, sequence, new_tokens, batch)
    except PrivateLLMError:
        return
    what = f"{new_tokens} tokens after {sequence}" if new_tokens else "this run"
    most = "at most " if price.most else ""
    text = f"sparsity: {what} will send {most}{size(price.sparse_bytes)}; without it {size(price.dense_bytes)}"
    if not price.pays:
        text += (
            ". It saves nothing here: leave --sparsity out, or train predictors of blocks (`private-llm predictors "
            "train --block 16`) and open less (--neuron-budget), in kept orders if you accept what these tell"
        )
    NOTES.print(text, style="" if price.pays else "yellow", markup=False, highlight=False, soft_wrap=True)
