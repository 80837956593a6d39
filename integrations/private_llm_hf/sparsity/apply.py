"""A plaintext model that computes only what its predictors mark as active: the reference for a run that skips the rest.

Neurons that are not predicted active count as zero before the layer that reads them, heads before the output
projection. Keys and values of all heads are kept, as if none had been skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from private_llm_hf.sparsity.predictor_set import PredictorSet, SitePredictor


@contextmanager
def predicted_only(model: PreTrainedModel, predictors: PredictorSet, seed: int = 0) -> Iterator[None]:
    """While it lasts, `model` leaves out what `predictors` say is inactive, and keeps to their budgets as runs do.

    seed: of what budgets leave out and fill up. Raises ConfigError for another model's.
    """
    predictors.check(model)
    chance = torch.Generator().manual_seed(seed)
    with ExitStack() as stack:
        for member in predictors:
            _listen(model, member, chance, stack)
        yield


def _listen(model: PreTrainedModel, member: SitePredictor, chance: torch.Generator, stack: ExitStack) -> None:
    first, last = model.get_submodule(member.site.readers[0]), model.get_submodule(member.site.writer)
    predictor = member.predictor.to(next(model.parameters()).device)
    kept: list[Tensor] = []

    def predict(_: nn.Module, received: tuple[Any, ...]) -> None:
        with torch.no_grad():
            kept.append(predictor.expand(predictor.predict(received[0], chance)))

    def leave_out(_: nn.Module, received: tuple[Any, ...]) -> tuple[Any, ...]:
        whole, mask = received[0], kept.pop()
        size = whole.shape[-1] // mask.shape[-1]  # entries of a head's output; 1 for neurons
        mask = mask.repeat_interleave(size, dim=-1)
        return (whole * mask.view(whole.shape), *received[1:])

    stack.callback(first.register_forward_pre_hook(predict).remove)
    stack.callback(last.register_forward_pre_hook(leave_out).remove)
