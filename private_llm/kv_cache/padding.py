"""Padding under a policy that chooses by secrets: which entries are padding is public, so it is set aside first.

Entries are put into another, public order before clusters are formed or entries ranked. No choice then depends on what
padding holds, the first and the newest entries are tokens, and a row's clusters begin where they would without padding:

    first tokens | whole clusters of padding | clusters of tokens | none | the newest tokens, rest of padding | none

Queries at padding count for nothing, and a row's share of the queries is one of its tokens.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from private_llm.kv_cache.policies.policy import CachePolicy, ClusterShape, Selection


def padding_last(tokens: Tensor, first: int, size: int = 1, newest: int = 0) -> Tensor:
    """The first tokens, whole clusters of padding, the other tokens, the rest of padding: int64 [..., held]. Public.

    tokens: bool [..., held], False at padding. first: so many tokens come first, but none of the `newest` last ones.
    size: entries of a cluster; with 1, all padding comes before the other tokens.
    """
    number, padding = tokens.cumsum(-1), (~tokens).cumsum(-1)
    ahead = (number[..., -1:] - newest).clamp(max=first)
    rank = torch.where(number <= ahead, 0, 2)
    beside = torch.where(padding <= padding[..., -1:] // size * size, 1, 3)
    return torch.where(tokens, rank, beside).argsort(dim=-1, stable=True)


@dataclass(frozen=True, eq=False)
class Arranged:
    """Clusters among entries in that order.

    order: int64 [..., slots], which entry lies where; their number: none does. tokens: bool [..., slots], whether it is
    a token. clusters: int64 [2, ...], of how many entries of padding, and clusters, a row consists.
    """

    shape: ClusterShape
    order: Tensor
    tokens: Tensor
    clusters: Tensor

    def of_tokens(self, size: int) -> Tensor:
        """bool [..., clusters]: which clusters of `size` hold a token."""
        clustered = self.tokens[..., self.shape.first : self.shape.first + self.shape.clustered]
        made: Tensor = clustered.unflatten(-1, (-1, size)).any(-1)
        return made

    def in_place(self, held: int) -> Tensor:
        """int64 [..., held]: where each entry lies."""
        return self.order.argsort(dim=-1, stable=True)[..., :held]

    def ready(self, before: Tensor | None, made: int) -> tuple[int, Tensor]:
        """From which cluster of the first level on some row's are new, and how many of each row are what they were.

        before: `clusters` when the first `made` were made. All rows may get new ones, but keep what they had.
        """
        own = self.clusters[1]
        if before is None or before.shape != self.clusters.shape or not torch.equal(before[0], self.clusters[0]):
            return 0, torch.zeros_like(own)
        kept = torch.minimum(before[1], own).clamp(max=made)
        return made if torch.equal(before, self.clusters) else int(kept.min()), kept


def arranged(selection: Selection, tokens: Tensor) -> Arranged | None:
    """Clusters of entries of which bool `tokens` [..., held] says which are padding; None where nothing is left out."""
    held, size = tokens.shape[-1], selection.levels[0].size
    shape = selection.shape(held)
    if shape is None:
        return None
    padding = (~tokens).sum(-1)
    own = ((held - shape.first - selection.recent - padding % size).clamp(min=0) // size).unsqueeze(-1)
    tail = held - shape.first - int(own.min()) * size
    stop, end = shape.first + shape.clustered, shape.first + own * size
    slots = torch.arange(stop + tail, device=tokens.device).expand(*tokens.shape[:-1], -1)
    slots = torch.where(slots < end, slots, torch.where(slots < stop, held, slots - stop + end)).clamp(max=held)
    none = torch.full_like(own, held)
    order = torch.cat([padding_last(tokens, shape.first, size), none], -1).gather(-1, slots)
    there = torch.cat([tokens, none < 0], -1).gather(-1, order)
    return Arranged(replace(shape, tail=tail), order, there, torch.stack([padding, own.squeeze(-1)]))


def queries_that_count(policy: CachePolicy, queries: int, tokens: Tensor | None) -> tuple[int, Tensor | None]:
    """How many last queries count, and which: bool [B, as many] from tokens [B, entries]; None: without padding."""
    counted = policy.mass_queries(queries)
    own = None if tokens is None else tokens[:, -queries:]
    if own is None or not counted or bool(own.all()):
        return counted, None
    wanted = torch.tensor([policy.mass_queries(int(n)) or counted for n in own.sum(1)], device=own.device)
    among = own & (own.flip(1).cumsum(1).flip(1) <= wanted.unsqueeze(1))
    counted = max(counted, queries - int(among.any(0).int().argmax()))
    return counted, among[:, -counted:]
