"""What recorded attention shows: how much of it the chosen clusters hold, and which keys neighbouring layers share.

No model runs: everything is made from a prompt's keys and queries. The last `queries` queries stand for decode steps.
"""

import math
import sys
from pathlib import Path

import torch
from torch import Tensor

from private_llm.kv_cache.policies.policy import Selection

sys.path.append(str(Path(__file__).resolve().parents[1]))
from long_context.budget import Prefill, RecordedAttention
from long_context.plain_attention import largest, probabilities, representatives


def attention_of(call: RecordedAttention, queries: int) -> Tensor:
    """Probabilities of the last queries, summed over the heads of a group: [B, G, queries, S]."""
    parts = probabilities(call.query, call.keys, call.allowed, call.scoring, call.query.shape[2] - queries)
    weights = torch.cat(list(parts), dim=2)
    made: Tensor = weights.unflatten(1, (call.keys.shape[1], -1)).sum(2)
    return made


def similarities(call: RecordedAttention, queries: int, size: int, alphas: tuple[float, ...]) -> dict[str, Tensor]:
    """[B, G, queries, clusters] by kind: "maximum" (of the products, equation 2), "bound" (equation 4), "mean" and
    "alpha=..." (equation 5). Clusters of `size` from the first key on; those that are not whole are left out.
    """
    batch, heads, _, width = call.query.shape
    groups = call.keys.shape[1]
    clusters = call.keys.shape[2] // size
    keys = call.keys[:, :, : clusters * size].float()
    query = call.query[:, :, -queries:].float().view(batch, groups, heads // groups, queries, width).sum(2)
    made = {"maximum": (query @ keys.transpose(2, 3)).unflatten(-1, (clusters, size)).amax(-1)}
    parts = keys.unflatten(2, (clusters, size))
    high, low = parts.amax(3), parts.amin(3)
    made["bound"] = query.clamp(min=0) @ high.transpose(2, 3) + query.clamp(max=0) @ low.transpose(2, 3)
    choices = {"mean": Selection((), "mean")}
    choices.update({f"alpha={alpha:g}": Selection((), "extremes", alpha) for alpha in alphas})
    for name, selection in choices.items():
        made[name] = query @ representatives(keys, None, size, selection).transpose(2, 3)
    return made


def coverage(
    call: RecordedAttention, queries: int, size: int, kept: float, alphas: tuple[float, ...]
) -> dict[str, float]:
    """By similarity, the share of attention in the best `kept` of clusters. "oracle": ranked by that attention."""
    weights = attention_of(call, queries)
    clusters = weights.shape[-1] // size
    inside = weights[..., : clusters * size].unflatten(-1, (clusters, size)).sum(-1)
    count = math.ceil(kept * clusters)
    ranked = {**similarities(call, queries, size, alphas), "oracle": inside}
    total = inside.sum(-1)
    return {
        name: float((inside.gather(-1, largest(rank, count)).sum(-1) / total).mean()) for name, rank in ranked.items()
    }


def commonality(prefill: Prefill, queries: int, kept: float, neighbours: int) -> Tensor:
    """[layers - neighbours, G]: equation 1 for m = `neighbours`, not yet averaged over the layers.

    The share of the keys of most attention, `kept` of all, that layers l to l + m have in common, by key head; the mean
    over rows and queries.
    """
    sets = []
    for call in prefill.calls:
        weights = attention_of(call, queries)
        top = largest(weights, math.ceil(kept * weights.shape[-1]))
        sets.append(torch.zeros_like(weights, dtype=torch.bool).scatter(-1, top, True))
    made = []
    for layer in range(len(sets) - neighbours):
        common = torch.stack(sets[layer : layer + neighbours + 1]).all(0)
        made.append((common.sum(-1) / sets[layer].sum(-1)).mean((0, 2)))
    return torch.stack(made)
