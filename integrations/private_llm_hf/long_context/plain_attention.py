"""Attention of an ordinary plaintext model over the entries that a cache policy leaves, known to transformers by name.

    with policy_attention(model):
        model.generate(**inputs, past_key_values=PolicyCache(MPCacheConfig(gamma=0.25), model))

Inside the context the model attends through `NAME`, to whatever cache it is given (none, or any other: as always);
after it, as before. What stays and what is attended to is decided by the cache (`plain_cache.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from private_llm.errors import ConfigError, DomainError, UnsupportedOp

NAME = "private_llm_policy"
"""What `config._attn_implementation` is while the policy attends."""

_CHUNK = 256
"""Queries whose scores are in memory at a time."""


class Layer(Protocol):
    """What attention asks of a cache's layer."""

    merged_heads: int

    def counted(self, queries: int) -> int:
        """How many of a call's last queries' attention is wanted."""

    def columns(self, allowed: Tensor, heads: int) -> Tensor:
        """Of a mask over all positions the columns of the entries held."""

    def choose(self, query: Tensor) -> Tensor | None:
        """The entries that a call attends to; None: all held."""

    def attended(self, query: Tensor, mass: Tensor | None, allowed: Tensor | None, call: Scoring) -> None:
        """A call is done."""


class HeldKeys(Tensor):
    """Keys that know the layer of the cache that holds them. Operations on them give ordinary tensors."""

    layer: Layer
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


class Scoring:
    """How a module makes scores: `scale`, `softcap` (None: none), `sinks` [H] (None: none), `merged` heads."""

    def __init__(self, scale: float, softcap: float | None, sinks: Tensor | None, merged: int) -> None:
        self.scale, self.softcap, self.sinks, self.merged = scale, softcap, sinks, merged

    @property
    def plain(self) -> bool:
        """Nothing but a scale, which torch's own attention knows."""
        return self.softcap is None and self.sinks is None and self.merged == 1


@contextmanager
def policy_attention(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """While inside, the model attends through `NAME`, which cache policies need.

    Raises UnsupportedOp if its attention does not go through transformers' AttentionInterface.
    """
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)
    configs = _configs(model)
    before = [config._attn_implementation for config in configs]
    model.set_attn_implementation(NAME)
    if model.config.get_text_config(decoder=True)._attn_implementation != NAME:
        raise UnsupportedOp(
            f"{type(model).__name__} has an attention of its own, which no cache policy can take part in"
        )
    try:
        yield model
    finally:
        for config, implementation in zip(configs, before, strict=True):
            config._attn_implementation_internal = implementation


def _configs(model: PreTrainedModel) -> list[Any]:
    """All configurations in a model, each once."""
    found = {id(model.config): model.config}
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation"):
            found[id(config)] = config
    return list(found.values())


def mask(*args: object, **kwargs: object) -> Tensor:
    """Boolean mask [B, 1, q, position], True where attention is allowed."""
    kwargs.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    made: Tensor = sdpa_mask(*args, **kwargs)
    return made


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """q [B, H, q, D], k and v [B, G, kv, D] to ([B, q, H, D], no attention weights); the layer of `key` decides.

    s_aux: a sink for each head [H]. Raises UnsupportedOp for a position bias, an additive mask and dropout.
    """
    if position_bias is not None or dropout:
        what = "dropout" if dropout else "a position bias"
        raise UnsupportedOp(f"{type(module).__name__}: {what} is not supported under {NAME}")
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        raise UnsupportedOp(f"{type(module).__name__}: got an additive mask; want boolean, or [B, S] of a tokenizer")
    if attention_mask is None and query.shape[2] > 1 and getattr(module, "is_causal", False):
        raise DomainError(f"{type(module).__name__} is causal but got no mask; switch the model by policy_attention()")
    layer: Layer | None = key.layer if isinstance(key, HeldKeys) else None
    key = key.as_subclass(Tensor) if isinstance(key, HeldKeys) else key
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    call = Scoring(scale, softcap, s_aux, 1 if layer is None else layer.merged_heads)
    if layer is None:
        return weigh(query, key, value, attention_mask, call, 0)[0].transpose(1, 2), None
    counted, pick, held = layer.counted(query.shape[2]), layer.choose(query), key.shape[2]
    allowed = None if attention_mask is None else layer.columns(attention_mask, query.shape[1])
    if pick is None:
        out, mass = weigh(query, key, value, allowed, call, counted)
    else:
        wide = pick.unsqueeze(-1)
        key, value = (part.gather(2, wide.expand(*pick.shape, part.shape[-1])) for part in (key, value))
        seen = None if allowed is None else columns_at(allowed, pick, query.shape[1])
        out, mass = weigh(query, key, value, seen, call, counted)
        mass = None if mass is None else mass.new_zeros(*pick.shape[:2], held).scatter(-1, pick, mass)
    layer.attended(query, mass, attention_mask, call)
    return out.transpose(1, 2), None


def columns_at(table: Tensor, index: Tensor, heads: int) -> Tensor:
    """Of a table [B or 1, H or 1, q, n] the columns `index`, int64 [B or 1, G or 1, kept]: [B, H or 1, q, kept]."""
    index = index.repeat_interleave(heads // index.shape[1], dim=1) if index.shape[1] > 1 else index
    outer = torch.broadcast_shapes(table.shape[:2], index.shape[:2])
    return table.expand(*outer, -1, -1).gather(-1, index.unsqueeze(2).expand(*outer, table.shape[2], -1))


def weigh(
    query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None, call: Scoring, counted: int
) -> tuple[Tensor, Tensor | None]:
    """Outputs [B, H, q, Dv], and the attention [B, G, kv] that entries got from the last `counted` queries (0: None).

    allowed: bool, broadcastable to [B, H, q, kv]; a query that sees nothing gives and gets nothing.
    """
    if not call.plain:
        return _slowly(query, key, value, allowed, call, counted)
    seen = None if allowed is None else allowed.expand(query.shape[0], -1, -1, -1)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=call.scale, enable_gqa=True)
    return out, mass_of(query, key, allowed, call, counted) if counted else None


def mass_of(query: Tensor, key: Tensor, allowed: Tensor | None, call: Scoring, counted: int) -> Tensor:
    """[B, G, kv], float32: probabilities, summed over the last `counted` queries and the heads of a group."""
    total = torch.zeros(key.shape[:3], device=key.device)
    for part, seen in _chunks(query, allowed, query.shape[2] - counted):
        total += _grouped(probabilities(part, key, seen, call), key.shape[1])
    return total


def _slowly(
    query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None, call: Scoring, counted: int
) -> tuple[Tensor, Tensor | None]:
    """As `weigh`, for scores that are more than products."""
    start, out = query.shape[2] - counted, []
    total = torch.zeros(key.shape[:3], device=key.device) if counted else None
    values = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    for number, (part, seen) in enumerate(_chunks(query, allowed, 0)):
        weights = probabilities(part, key, seen, call)
        out.append(weights.to(value.dtype) @ values)
        if total is not None:
            total += _grouped(weights[:, :, max(0, start - number * _CHUNK) :], key.shape[1])
    return torch.cat(out, dim=2), total


def probabilities(query: Tensor, key: Tensor, allowed: Tensor | None, call: Scoring) -> Tensor:
    """float32 [B, H, q, kv]; rows that see nothing are zeros. Raises ConfigError if heads cannot be merged so."""
    batch, heads, queries, size = query.shape
    groups = key.shape[1]
    rows = query.reshape(batch, groups, -1, size) * call.scale
    scores = (rows @ key.transpose(2, 3)).float().view(batch, heads, queries, -1)
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if call.merged > 1:
        among = heads if heads == groups else heads // groups
        if among % call.merged:
            raise ConfigError(
                f"kv_cache: merged: got {call.merged}; want a divisor of {among}, the heads that "
                + ("there are" if heads == groups else "share a key head")
            )
        pairs = scores.unflatten(1, (-1, call.merged))
        scores = pairs.mean(2, keepdim=True).expand_as(pairs).flatten(1, 2)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    if call.sinks is not None:
        sink = call.sinks.float().view(1, -1, 1, 1).expand(batch, heads, queries, 1)
        return torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    made = scores.softmax(-1)
    return made if allowed is None else made.nan_to_num(0.0)


def _chunks(query: Tensor, allowed: Tensor | None, start: int) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Some queries at a time, from number `start` on, with their rows of the mask."""
    for begin in range(start, query.shape[2], _CHUNK):
        end = begin + _CHUNK
        yield query[:, :, begin:end], None if allowed is None else allowed[:, :, begin:end]


def _grouped(weights: Tensor, groups: int) -> Tensor:
    """[B, H, q, kv] summed over queries and the heads of a group: [B, G, kv]."""
    made: Tensor = weights.sum(2).unflatten(1, (groups, -1)).sum(2)
    return made
