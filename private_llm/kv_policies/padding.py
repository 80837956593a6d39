"""Padding under a policy that chooses by secrets: which entries are padding is public, so it is set aside first.

Entries are put into another, public order before clusters are formed or entries ranked. No choice then depends on what
padding holds, the first and the newest entries are tokens, and a padded row's clusters begin where they would without
padding:

    first tokens | whole clusters of padding | the other tokens | what is left of padding

Queries at padding count for nothing, and a row's share of the queries is one of its tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from private_llm.kv_policies.policy import CachePolicy


def padding_last(tokens: Tensor, first: int, size: int = 1, newest: int = 0) -> Tensor:
    """The order above: int64 [..., held], for bool tokens [..., held], False at padding. Public.

    first: so many tokens come first, but none of the `newest` last ones. size: entries of a cluster; with 1, all
    padding comes before the other tokens.
    """
    number, padding = tokens.cumsum(-1), (~tokens).cumsum(-1)
    ahead = (number[..., -1:] - newest).clamp(max=first)
    rank = torch.where(number <= ahead, 0, 2)
    beside = torch.where(padding <= padding[..., -1:] // size * size, 1, 3)
    return torch.where(tokens, rank, beside).argsort(dim=-1, stable=True)


def outside_clusters(tokens: Tensor, size: int) -> int:
    """The most entries of padding that a row has beyond whole clusters of `size`: these are attended to, by nobody."""
    return int(((~tokens).sum(-1) % size).max())


def clusters_of_tokens(tokens: Tensor, order: Tensor, start: int, stop: int, size: int) -> Tensor:
    """bool [..., clusters]: which clusters of `size` among the entries start .. stop of that order hold a token."""
    made: Tensor = tokens.gather(-1, order)[..., start:stop].unflatten(-1, (-1, size)).any(-1)
    return made


def alike(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two counts of padding are the same; None: there is none."""
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def queries_that_count(policy: CachePolicy, queries: int, tokens: Tensor | None) -> tuple[int, Tensor | None]:
    """So many of the last queries of a call, and which of them for each row: bool [B, that many]; None: all.

    tokens: bool [B, entries], those of the call last, False at padding; None: there is none.
    """
    counted = policy.mass_queries(queries)
    own = None if tokens is None else tokens[:, -queries:]
    if own is None or not counted or bool(own.all()):
        return counted, None
    wanted = torch.tensor([policy.mass_queries(int(n)) or counted for n in own.sum(1)], device=own.device)
    among = own & (own.flip(1).cumsum(1).flip(1) <= wanted.unsqueeze(1))
    counted = max(counted, queries - int(among.any(0).int().argmax()))
    return counted, among[:, -counted:]
