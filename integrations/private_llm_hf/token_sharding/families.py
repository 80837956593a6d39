"""Falcon and Bloom, whose own attention bypasses transformers' attention interface: here it goes through it.

Both fuse queries, keys and values. ALiBi leaves as `slopes`, one a head, for whoever computes the scores: Bloom adds
slope x position to scaled scores, Falcon (`coarse`) rounds that product to bfloat16 and scales it with the scores.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.bloom import modeling_bloom as bloom
from transformers.models.falcon import modeling_falcon as falcon


def register_falcon(name: str) -> None:
    """Let Falcon take the attention implementation `name`."""
    falcon.FALCON_ATTENTION_CLASSES[name] = InterfaceFalconAttention


def through_interface(model: PreTrainedModel) -> None:
    """Make Bloom's attention layers call the attention implementation of the model's configuration."""
    for module in model.modules():
        if type(module) is bloom.BloomAttention:
            module.__class__ = InterfaceBloomAttention
            module.config = model.config


class InterfaceFalconAttention(falcon.FalconAttention):  # type: ignore[misc]
    """Falcon's attention: rotary or ALiBi; one key and value head, one a group, or one a query head."""

    def forward(
        self,
        hidden_states: Tensor,
        alibi: Tensor | None,
        attention_mask: Tensor | None,
        position_embeddings: tuple[Tensor, Tensor],
        **_: object,
    ) -> tuple[Tensor, None]:
        """States [B, n, hidden] to attention [B, n, hidden]."""
        q, k, v = (rows.transpose(1, 2) for rows in self._split_heads(self.query_key_value(hidden_states)))
        if self.new_decoder_architecture:  # it repeats each group's keys and values for all queries of the group
            share = self.num_heads // self.num_kv_heads
            k, v = k[:, ::share], v[:, ::share]
        facts = {}
        if alibi is None:
            q, k = falcon.apply_rotary_pos_emb(q, k, *position_embeddings)
        else:
            facts = {"slopes": slopes(falcon.build_alibi_tensor, self.num_heads), "coarse": True}
        return self.dense(_attention(self, (q, k, v), attention_mask, facts)), None


class InterfaceBloomAttention(bloom.BloomAttention):  # type: ignore[misc]
    """Bloom's attention: ALiBi, and the residual is added within."""

    def forward(
        self, hidden_states: Tensor, residual: Tensor, alibi: Tensor, attention_mask: Tensor | None, **_: object
    ) -> tuple[Tensor, None]:
        """States and residual [B, n, hidden] to their sum after attention."""
        rows = self._reshape(self.query_key_value(hidden_states))
        facts = {"slopes": slopes(bloom.build_alibi_tensor, self.num_heads)}
        return residual + self.dense(_attention(self, rows, attention_mask, facts)), None


@functools.cache
def slopes(build_alibi_tensor: Callable[[Tensor, int, torch.dtype], Tensor], heads: int) -> tuple[float, ...]:
    """ALiBi's slope of each head: what a family's own function adds at the second of two positions."""
    return tuple(build_alibi_tensor(torch.ones(1, 2, dtype=torch.int64), heads, torch.float32)[:, 0, 1].tolist())


class _Layer(Protocol):
    """What both attentions have."""

    config: PretrainedConfig
    inv_norm_factor: float


def _attention(
    module: _Layer, rows: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, facts: dict[str, Any]
) -> Tensor:
    """Queries, keys, values [B, heads, n, D] to attention [B, n, heads x D]."""
    attend = ALL_ATTENTION_FUNCTIONS[module.config._attn_implementation]
    out: Tensor = attend(module, *rows, mask, scaling=module.inv_norm_factor, **facts)[0]
    return out.flatten(2)
