"""Attention of an ordinary plaintext model over the entries that a cache policy leaves, known to transformers by name.

    with policy_attention(model):
        model.generate(**inputs, past_key_values=PolicyCache(MPCacheConfig(gamma=0.25), model))

Inside the context the model attends through `NAME`, to whatever cache it is given (none, or any other: as always);
after it, as before. What stays and what is attended to is decided by the cache (`plain_cache.py`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from private_llm.errors import ConfigError, UnsupportedOp
from private_llm.kv_cache.buffer import columns_at
from private_llm.kv_cache.merged_heads import can_merge
from private_llm.kv_cache.policies.policy import ClusterShape, Eviction, Selection

if TYPE_CHECKING:
    from long_context.plain_cache import PolicyLayer

NAME = "private_llm_policy"
"""What `config._attn_implementation` is while the policy attends."""

_CHUNK = 256
"""Queries whose scores are in memory at a time."""


@dataclass(frozen=True, eq=False)
class Scoring:
    """How a call makes scores: their `scale`, `softcap` (None: none), `sinks` [H] (None: none), how many neighbouring
    heads are `merged`, and whether a query sees its own and earlier positions only although no mask says so (`causal`,
    a first call alone).
    """

    scale: float
    softcap: float | None
    sinks: Tensor | None
    merged: int
    causal: bool

    @property
    def plain(self) -> bool:
        """Nothing but a scale, which torch's own attention knows."""
        return self.softcap is None and self.sinks is None and self.merged == 1


class PlainKeys(Tensor):
    """Keys that know the layer of the cache that holds them. Operations on them give ordinary tensors."""

    layer: "PolicyLayer"
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


@contextmanager
def policy_attention(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """While inside, the model attends through `NAME`, which cache policies need; after it, as before.

    Raises UnsupportedOp if its attention does not go through transformers' AttentionInterface.
    """
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    configs = _configs(model)
    before = [config._attn_implementation for config in configs]
    try:
        model.set_attn_implementation(NAME)
        if model.config.get_text_config(decoder=True)._attn_implementation != NAME:
            raise UnsupportedOp(f"{type(model).__name__} has an attention of its own, which no cache policy can serve")
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
    is_causal: bool | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """q [B, H, q, D], k and v [B, G, kv, D] to ([B, q, H, D], no attention weights); the layer of `key` decides.

    s_aux: a sink for each head [H]. Raises UnsupportedOp for a position bias, an additive mask and dropout.
    """
    if position_bias is not None or dropout:
        what = "dropout" if dropout else "a position bias"
        raise UnsupportedOp(f"{type(module).__name__}: {what} is not supported under {NAME}")
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        raise UnsupportedOp(
            f"{type(module).__name__}: got an additive mask; want a boolean one, or a tokenizer's [B, S]"
        )
    layer: PolicyLayer | None = None
    if isinstance(key, PlainKeys):
        layer, key = key.layer, key.as_subclass(Tensor)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = attention_mask is None and query.shape[2] > 1 and causal
    call = Scoring(scale, softcap, s_aux, 1 if layer is None else layer.merged_heads, causal)
    if layer is None:
        return _weigh(module, query, key, value, attention_mask, call, 0)[0].transpose(1, 2), None
    pick, held = layer.choose(query, attention_mask), key.shape[2]
    counted, among = layer.counted(query.shape[2])
    allowed = layer.columns(attention_mask, query.shape[1])
    if pick is not None:
        wide = pick.unsqueeze(-1)
        key, value = (F.pad(part, (0, 0, 0, 1)) for part in (key, value))
        key, value = (part.gather(2, wide.expand(*pick.shape, part.shape[-1])) for part in (key, value))
        allowed = None if allowed is None else columns_at(F.pad(allowed, (0, 1)), pick, query.shape[1])
    out, mass = _weigh(module, query, key, value, allowed, call, counted, among)
    if pick is not None and mass is not None:
        mass = mass.new_zeros(*pick.shape[:2], held + 1).scatter(-1, pick, mass)[..., :held]
    layer.attended(query, mass, attention_mask, call)
    return out.transpose(1, 2), None


def _weigh(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None, call: Scoring, counted: int,
    among: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Outputs [B, H, q, Dv], and the attention [B, G, kv] that entries got from the last `counted` queries (0: None),
    of those that `among` says, bool [B, counted].

    allowed: bool, broadcastable to [B, H, q, kv]; a query that sees nothing gives and gets nothing.
    """
    if call.plain:
        mass = mass_of(query, key, allowed, call, counted, among) if counted else None
        out = sdpa_attention_forward(module, query, key, value, allowed, scaling=call.scale, is_causal=call.causal)[0]
        return out.transpose(1, 2), mass
    start, outputs = query.shape[2] - counted, []
    total = _zeros(key) if counted else None
    values = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    for number, weights in enumerate(probabilities(query, key, allowed, call, 0)):
        outputs.append(weights.to(value.dtype) @ values)
        if total is not None:
            skipped = max(0, start - number * _CHUNK)
            late = weights[:, :, skipped:]
            total += _grouped(_those(late, among, number * _CHUNK + skipped - start), key.shape[1])
    return torch.cat(outputs, dim=2), total


def mass_of(
    query: Tensor, key: Tensor, allowed: Tensor | None, call: Scoring, counted: int, among: Tensor | None = None
) -> Tensor:
    """[B, G, kv], at least float32: probabilities, summed over the last `counted` queries and the heads of a group.

    among: bool [B, counted], which of these queries count; None: all.
    """
    total = _zeros(key)
    for number, weights in enumerate(probabilities(query, key, allowed, call, query.shape[2] - counted)):
        total += _grouped(_those(weights, among, number * _CHUNK), key.shape[1])
    return total


def _those(weights: Tensor, among: Tensor | None, start: int) -> Tensor:
    """Probabilities [B, H, some q, kv], zeros where bool `among` [B, q] from `start` on leaves a query out."""
    return weights if among is None else weights * among[:, None, start : start + weights.shape[2], None]


def probabilities(query: Tensor, key: Tensor, allowed: Tensor | None, call: Scoring, start: int) -> Iterator[Tensor]:
    """[B, H, some q, kv], float32 or more, from query `start`; rows that see nothing are 0. Raises ConfigError."""
    batch, heads, queries, size = query.shape
    groups = key.shape[1]
    shared = heads // groups
    if not can_merge(heads, groups, call.merged):
        raise ConfigError(
            f"kv_cache: merged: got {call.merged}; want a divisor of the {shared} query heads of a key head, or a "
            f"multiple of them that divides all {heads}"
        )
    for begin in range(start, queries, _CHUNK):
        rows = query[:, :, begin : begin + _CHUNK]
        scores = (rows.reshape(batch, groups, -1, size) * call.scale) @ key.transpose(2, 3)
        scores = scores.view(batch, heads, rows.shape[2], -1)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        if call.merged > 1:
            pairs = scores.unflatten(1, (-1, call.merged))
            scores = pairs.mean(2, keepdim=True).expand_as(pairs).flatten(1, 2)
        if call.softcap is not None:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        if call.causal:
            numbers = torch.arange(begin, begin + rows.shape[2], device=key.device)
            later = torch.arange(key.shape[2], device=key.device) > numbers.unsqueeze(-1)
            scores = scores.masked_fill(later, -torch.inf)
        if allowed is not None:
            scores = scores.masked_fill(~allowed[:, :, begin : begin + _CHUNK], -torch.inf)
        if call.sinks is not None:
            sink = call.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(batch, heads, rows.shape[2], 1)
            yield torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
        elif allowed is not None:
            yield scores.softmax(-1).nan_to_num(0.0)
        else:
            yield scores.softmax(-1)


def _zeros(key: Tensor) -> Tensor:
    return torch.zeros(key.shape[:3], dtype=torch.promote_types(key.dtype, torch.float32), device=key.device)


def _grouped(weights: Tensor, groups: int) -> Tensor:
    """[B, H, q, kv] summed over queries and the heads of a group: [B, G, kv]."""
    made: Tensor = weights.sum(2).unflatten(1, (groups, -1)).sum(2)
    return made


# -- which entries stay and which clusters a query attends to: what a policy declares, computed on plain tensors ------
# All ranks take the largest values, of equal ones the first, and answer in ascending order. B rows, G key heads.
def largest(values: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest along the last dimension, int64 [..., count], ascending; of ties the first."""
    order = values.sort(dim=-1, descending=True, stable=True).indices
    return order[..., :count].sort(dim=-1).values


def entries_that_stay(
    mass: Tensor, kept: int, eviction: Eviction, padding: Tensor | None, hidden: Tensor | None
) -> Tensor:
    """int64 [B, G, kept]: the entries that stay, of those held.

    mass: [B, G, held]. padding: bool [B or 1, G or 1, held], True where an entry is a token. hidden: bool [B, G, held],
    True where an entry was evicted but left in memory; these never stay.
    """
    if eviction.pool > 1:
        mass = F.avg_pool1d(mass, eviction.pool, stride=1, padding=eviction.pool // 2)
    rank = mass if padding is None else mass.masked_fill(~padding, -1.0)
    alive = torch.ones_like(rank, dtype=torch.bool) if hidden is None else ~hidden
    alive = alive if padding is None else alive & padding
    number = alive.cumsum(-1)
    older = number[..., -1:] - eviction.newest(kept)
    rank = rank.masked_fill(alive & ((number <= older.clamp(max=eviction.first)) | (number > older)), torch.inf)
    return largest(rank if hidden is None else rank.masked_fill(hidden, -torch.inf), kept)


def representatives(keys: Tensor, mass: Tensor | None, size: int, selection: Selection) -> Tensor:
    """[B, G, n, D]: what stands for each cluster of `size` neighbours among keys [B, G, n size, D].

    mass: [B, G, n size], the attention that entries got; only "heavy" asks, for which None counts as equal attention.
    """
    clusters = keys.unflatten(2, (-1, size))
    made: Tensor
    match selection.represent:
        case "extremes":
            made = selection.alpha * clusters.amax(3) + (1 - selection.alpha) * clusters.amin(3)
        case "mean":
            made = clusters.mean(3)
        case "unit":
            total = clusters.sum(3)
            made = total / total.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(total.dtype).tiny)
        case "heavy":
            weight = torch.zeros_like(clusters[..., 0]) if mass is None else mass.unflatten(2, (-1, size))
            index = largest(weight, min(selection.heavy, size))
            made = clusters.gather(3, index.unsqueeze(-1).expand(*index.shape, keys.shape[-1])).sum(3)
    return made


def chosen_entries(query: Tensor, levels: list[Tensor], shape: ClusterShape, tokens: Tensor | None = None) -> Tensor:
    """int64 [B, G, first + chosen + tail]: the entries that a query attends to.

    query: [B, G, D], summed over the heads of a group. levels: each level's representatives [B, G, n, D], of all its
    clusters, whether or not the level before leaves them. tokens: bool [B, G, entries], False at padding, whose
    clusters rank last.
    """
    left: Tensor | None = None
    for place, (made, kept) in enumerate(zip(levels, shape.kept, strict=True)):
        likeness = (made @ query.unsqueeze(-1)).squeeze(-1)
        if tokens is not None:
            inside = tokens[..., shape.first : shape.first + shape.clustered].unflatten(-1, (-1, shape.sizes[place]))
            likeness = likeness.masked_fill(~inside.any(-1), -torch.inf)
        if left is None:
            left = largest(likeness, kept)
        else:
            ratio = shape.sizes[place - 1] // shape.sizes[place]
            candidates = (left.unsqueeze(-1) * ratio + torch.arange(ratio, device=left.device)).flatten(2)
            left = candidates.gather(-1, largest(likeness.gather(-1, candidates), kept))
    if left is None:
        raise ValueError("chosen_entries: got no levels; want the representatives of at least one")
    size, device = shape.sizes[-1], query.device
    entries = (left.unsqueeze(-1) * size + torch.arange(size, device=device)).flatten(2) + shape.first
    start = torch.arange(shape.first, device=device)
    end = shape.first + shape.clustered + torch.arange(shape.tail, device=device)
    outer = entries.shape[:2]
    return torch.cat([start.expand(*outer, -1), entries, end.expand(*outer, -1)], dim=-1)
