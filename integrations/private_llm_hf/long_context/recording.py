"""A prompt read once, for caches of many policies: prefilling is most of a study's time, and the same for all.

    with policy_attention(model):
        prefill = record(model, input_ids=ids)
        for policy in policies:
            model(next_ids, past_key_values=prefill.cache(policy))

What is kept are the keys, values and queries of the prompt; the attention that a policy counts is made from these when
it is first asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from private_llm.errors import ConfigError
from private_llm.kv_policies.fixed import KEEP_ALL
from private_llm.kv_policies.policy import CachePolicy
from private_llm_hf.long_context.plain_attention import Scoring, mass_of
from private_llm_hf.long_context.plain_cache import PolicyCache, PolicyLayer
from private_llm_hf.transformers_versions import CACHE


@dataclass(frozen=True, eq=False)
class RecordedAttention:
    """What one layer's attention was given: q [B, H, S, D], k and v [B, G, S, D], and what a query may see."""

    query: Tensor
    keys: Tensor
    values: Tensor
    allowed: Tensor | None
    scoring: Scoring
    masses: dict[int, Tensor] = field(default_factory=dict)

    def mass(self, counted: int, among: Tensor | None) -> Tensor | None:
        """Of the last `counted` queries [B, G, S], or those of them `among` says; remembered if all. None for 0."""
        if counted and among is not None:
            return mass_of(self.query, self.keys, self.allowed, self.scoring, counted, among)
        if counted and counted not in self.masses:
            self.masses[counted] = mass_of(self.query, self.keys, self.allowed, self.scoring, counted)
        return self.masses.get(counted)


@dataclass(frozen=True, eq=False)
class Prefill:
    """A prompt's calls, layer by layer, and the logits after its last token [B, V]."""

    config: PreTrainedConfig
    calls: tuple[RecordedAttention, ...]
    logits: Tensor

    @property
    def length(self) -> int:
        """Tokens of the prompt, with padding."""
        return int(self.calls[0].keys.shape[2])

    def cache(self, policy: CachePolicy) -> PolicyCache:
        """A cache that has read the prompt under `policy`; keys and values are shared until entries are dropped.

        Raises ConfigError for policies that change how the prompt is read (merged heads).
        """
        if policy.merged_heads != 1:
            raise ConfigError(
                f"kv_cache: {policy.name} reads the prompt in another way; give it a PolicyCache of its own"
            )
        cache = PolicyCache(policy, self.config)
        for layer, call in zip(cache.layers, self.calls, strict=True):
            layer.update(call.keys, call.values)
            layer.choose(call.query, call.allowed)
            mass = call.mass(*layer.counted(self.length))
            layer.attended(call.query, mass, call.allowed, call.scoring)
        return cache


class _RecordingLayer(PolicyLayer):
    """Keeps everything, and what attention was given."""

    call: RecordedAttention

    def attended(self, query: Tensor, mass: Tensor | None, allowed: Tensor | None, call: Scoring) -> None:
        """Note it."""
        super().attended(query, mass, allowed, call)
        if self.keys is not None and self.values is not None:
            self.call = RecordedAttention(query, self.keys, self.values, allowed, call)


def record(model: PreTrainedModel, **inputs: Any) -> Prefill:  # noqa: ANN401 - what the model's forward takes
    """Read a prompt, inside `policy_attention(model)`, without gradients. inputs: as for the model's forward."""
    cache = PolicyCache(KEEP_ALL, model)
    cache.layers = [_RecordingLayer(KEEP_ALL, layer.number, layer.windowed, None) for layer in cache.layers]
    with torch.no_grad():
        logits = model(**inputs, **{CACHE: cache}, use_cache=True, logits_to_keep=1).logits[:, -1]
    return Prefill(model.config, tuple(layer.call for layer in cache.layers), logits)
