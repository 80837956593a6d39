"""Selection and eviction of a KV cache as loops over float64 numbers: what the tests of `nn/` compare with."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from private_llm.kv_cache.policies.policy import ClusterShape, Selection

GAP = 2.0**-6
"""Ranked numbers that decide lie further apart than shares tell them apart (2^-8, and errors of products)."""


def best(values: list[float], count: int, exact: bool = False, gap: float = GAP) -> list[int]:
    """Indices of the largest, ascending; of equal ones the first. Raises ValueError for a near tie unless `exact`."""
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    if not exact and 0 < count < len(values) and values[order[count - 1]] - values[order[count]] < gap:
        raise ValueError("a near tie; take another seed")
    return sorted(order[:count])


def cluster(keys: Tensor, selection: Selection, mass: Tensor | None) -> Tensor:
    """What stands for the keys [s, D] of one cluster: [D]."""
    match selection.represent:
        case "extremes":
            columns = [keys[:, d].tolist() for d in range(keys.shape[1])]
            made = [selection.alpha * max(c) + (1 - selection.alpha) * min(c) for c in columns]
            return torch.tensor(made, dtype=torch.float64)
        case "mean":
            return keys.sum(0) / len(keys)
        case "unit":
            total = keys.sum(0)
            return total / math.sqrt(float((total * total).sum()))
        case "heavy":
            weights = [0.0] * len(keys) if mass is None else mass.tolist()
            return keys[best(weights, min(selection.heavy, len(keys)), exact=True)].sum(0)


def clusters(keys: Tensor, selection: Selection, size: int, mass: Tensor | None) -> Tensor:
    """Of all clusters of `size` neighbours of keys [B, G, n, D]: [B, G, n / size, D]."""
    batch, groups, count, depth = keys.shape
    made = torch.zeros(batch, groups, count // size, depth, dtype=torch.float64)
    for b in range(batch):
        for g in range(groups):
            for c in range(count // size):
                part = slice(c * size, (c + 1) * size)
                made[b, g, c] = cluster(keys[b, g, part], selection, None if mass is None else mass[b, g, part])
    return made


def entries(
    query: Tensor, levels: list[Tensor], shape: ClusterShape, exact: bool = False, real: list[list[bool]] | None = None
) -> list[int]:
    """What one query [D] (summed over its heads) attends to, of one key head with `levels` [n, D] each.

    real: of each level which clusters are no padding.
    """
    left = list(range(shape.there[0]))
    for place, (made, kept) in enumerate(zip(levels, shape.kept, strict=True)):
        if place:
            ratio = shape.sizes[place - 1] // shape.sizes[place]
            left = [c * ratio + inner for c in left for inner in range(ratio)]
        likeness = [float(query @ made[c]) if real is None or real[place][c] else -math.inf for c in left]
        sure = exact or kept >= len(left) or sorted(likeness)[-kept] == -math.inf  # of padding the first
        left = [left[i] for i in best(likeness, kept, sure)]
    size = shape.sizes[-1]
    inside = [shape.first + c * size + i for c in left for i in range(size)]
    end = shape.first + shape.clustered
    return [*range(shape.first), *inside, *range(end, end + shape.tail)]


def attention(
    query: Tensor, keys: Tensor, values: Tensor, wanted: list[int], scale: float, cap: float | None, sink: float | None
) -> tuple[Tensor, Tensor]:
    """One query [D] to the entries `wanted` of keys [n, D] and values [n, Dv]: output [Dv], probabilities [n]."""
    scores = [float(query @ keys[i]) * scale for i in wanted]
    scores = scores if cap is None else [cap * math.tanh(s / cap) for s in scores]
    parts = [math.exp(s) for s in scores]
    total = sum(parts) + (0.0 if sink is None else math.exp(sink))
    weights = torch.zeros(len(keys), dtype=torch.float64)
    for i, part in zip(wanted, parts, strict=True):
        weights[i] = part / total
    return weights @ values, weights
