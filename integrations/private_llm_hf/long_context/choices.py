"""Which entries stay and which clusters a query attends to: what a policy declares, computed on plain tensors.

All ranks take the largest values, of equal ones the first, and answer in ascending order. B rows, G key heads.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from private_llm.kv_policies.policy import ClusterShape, Eviction, Selection


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
