"""A transformers model as an attacker uses it: states after some layers for many candidates, and layer 0's rows.

Token sharding assumes that everybody has the weights, so every node can run this.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from private_llm.errors import DomainError
from private_llm_hf.cascade_attention import cascade_config, listen, register


class StatesAfter:
    """`vocab_matching.States`: hidden states after `layer` layers of a causal model, with the prefix's cache kept."""

    def __init__(self, model: PreTrainedModel, layer: int) -> None:
        layers = model.config.get_text_config().num_hidden_layers
        if not 1 <= layer <= layers:
            raise DomainError(f"layer: got {layer}; want 1 to {layers}")
        # One layer more than needed, because the last one's states come normed; the rest would be computed in vain.
        config = copy.deepcopy(model.config)
        config.num_hidden_layers = min(layer + 1, layers)
        short = type(model)(config).eval()
        short.load_state_dict(model.state_dict(), strict=False)
        self._model = short.base_model
        self._layer = layer
        self._prefix: tuple[int, ...] | None = None
        self._cache: DynamicCache | None = None

    def __call__(self, known: Sequence[int], tails: Tensor) -> Tensor:
        """States at the last position of each tail [K, g] behind `known`: [K, d]."""
        with torch.no_grad():
            cache = self._behind(tuple(known))
            if cache is not None:
                cache.batch_repeat_interleave(len(tails))
            return self._states(tails, cache)[:, -1]

    def of(self, ids: Tensor) -> Tensor:
        """States of one whole text [n]: what all nodes together see, [n, d]."""
        with torch.no_grad():
            return self._states(ids.unsqueeze(0), None)[0]

    def _behind(self, known: tuple[int, ...]) -> DynamicCache | None:
        if not known:
            return None
        if known != self._prefix:
            self._cache = DynamicCache()
            self._model(input_ids=torch.tensor([known]), past_key_values=self._cache, use_cache=True)
            self._prefix = known
        return copy.deepcopy(self._cache)

    def _states(self, ids: Tensor, cache: DynamicCache | None) -> Tensor:
        result = self._model(
            input_ids=ids, past_key_values=cache, use_cache=cache is not None, output_hidden_states=True
        )
        states: Tensor = result.hidden_states[self._layer]
        return states


class _FirstCall(Exception):
    """Carries the first attention call's rows out of a forward."""

    def __init__(self, rows: tuple[Tensor, Tensor, Tensor]) -> None:
        super().__init__()
        self.rows = rows


class _Stop:
    def attend(
        self, module: nn.Module, rows: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, facts: dict[str, Any]
    ) -> Tensor:
        raise _FirstCall(rows)


class FirstRows:
    """Queries, keys and values of layer 0, each a function of one token and its position."""

    def __init__(self, model: PreTrainedModel) -> None:
        register()
        self._model = type(model)(cascade_config(model.config)).eval()
        self._model.load_state_dict(model.state_dict())
        listen(self._model, _Stop())

    def __call__(self, ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """ids and positions [K, n] to queries [K, H, n, D], keys [K, G, n, D] and values [K, G, n, E]."""
        try:
            with torch.no_grad():
                self._model(input_ids=ids, position_ids=positions, attention_mask=torch.ones_like(ids), use_cache=False)
        except _FirstCall as call:
            return call.rows
        raise DomainError(f"{type(self._model).__name__} made no attention call")

    def keys_values(self, position: int, ids: Tensor) -> tuple[Tensor, Tensor]:
        """`partial_results.KeysValues`."""
        _, k, v = self(ids.unsqueeze(1), torch.full((len(ids), 1), position))
        return k[:, :, 0].transpose(0, 1), v[:, :, 0].transpose(0, 1)
