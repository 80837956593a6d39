"""A CompNode: the model's own forward on some rows with their true positions, attention by way of the AttnNodes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from private_llm.errors import PatchMismatch
from private_llm.sharded.exchange import Exchange
from private_llm.sharded.facts import Step
from private_llm_hf.cascade_attention import cascade_config, listen, register
from private_llm_hf.layout import model_class
from private_llm_hf.wire import OPENED, Message


class CompNode:
    """The model's own forward on this node's rows."""

    def __init__(self, description: Message, exchange: Exchange, weights: dict[str, Tensor]) -> None:
        self._exchange = exchange
        register()
        values = dict(description["config"])
        config = cascade_config(AutoConfig.for_model(values.pop("model_type"), **values))
        self._model = _with_weights(model_class(description["class"])(config), weights)
        self._keeps = "logits_to_keep" in description["accepts"]
        listen(self._model, self)

    def attend(
        self, module: nn.Module, rows: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, facts: dict[str, Any]
    ) -> Tensor:
        """An attention call of the model."""
        return self._exchange.attend(*rows)

    def run(self, step: Step, ids: Tensor, message: Message) -> tuple[str, dict[str, Tensor]]:
        """One forward: name of its output class, and its outputs for the wanted rows, float32."""
        rows = self._exchange.begin(step)
        extra = {name: message[name] for name in ("token_type_ids",) if message.get(name) is not None}
        if self._keeps:
            extra["logits_to_keep"] = torch.tensor([rows.index(p) for p in message["wanted"]], dtype=torch.int64)
        result = self._model(
            input_ids=ids,
            position_ids=message["positions"],
            attention_mask=torch.ones_like(ids),  # the AttnNodes mask; without this, gaps would look like packed texts
            use_cache=False,
            return_dict=True,
            **extra,
        )
        self._exchange.end()
        found = {name: result.get(name) for name in OPENED}
        outputs = {n: value.to(torch.float32).contiguous() for n, value in found.items() if value is not None}
        return type(result).__name__, outputs


def _with_weights(model: PreTrainedModel, weights: dict[str, Tensor]) -> PreTrainedModel:
    missing, surplus = model.load_state_dict(weights, strict=False, assign=True)
    tied = set(model.get_expanded_tied_weights_keys(all_submodels=True))
    buffers = {name for name, _ in model.named_buffers()}
    lost = sorted(set(missing) - tied - buffers)
    if lost or surplus:
        raise PatchMismatch(f"weights: missing {lost[:5] or 'none'}, surplus {sorted(surplus)[:5] or 'none'}")
    model.tie_weights()
    return model.eval()
