"""The attack of Theorem 6.2: foreign tokens from the partial attention results that a CompNode receives at layer 0.

Row r of a CompNode gets, for every query shard k, the attention of its query over the keys of shard k up to r. At
layer 0 keys and values are functions of single tokens, so between two of its rows only the new tokens of shard k
are unknown: V^g candidates for g of them, shard by shard, whatever the other shards hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from private_llm.attacks.vocab_matching import candidates
from private_llm.sharded.attention import Piece, attend
from private_llm.sharding import ShardingPlan

KeysValues = Callable[[int, Tensor], tuple[Tensor, Tensor]]
"""(position, token ids [K]) to layer 0's keys and values of these tokens there: [G, K, D] and [G, K, E]."""


@dataclass(frozen=True)
class View:
    """What one CompNode sees of layer 0: its tokens, its queries [H, D] and, by shard, (out [H, E], lse [H])."""

    tokens: Mapping[int, int]
    queries: Mapping[int, Tensor]
    results: Mapping[tuple[int, int], Piece]


def match_results(
    plan: ShardingPlan, view: View, keys_values: KeysValues, scale: float, vocabulary: Tensor, budget: int
) -> dict[int, int]:
    """Tokens by position, the CompNode's own and those it finds: at most `budget` candidates for each gap of a shard.

    A shard whose next gap is beyond the budget is given up.
    """
    found = dict(view.tokens)
    rows = sorted(view.tokens)
    for shard in range(plan.beta):
        for row in rows:
            positions = plan.rows_of_shard(shard, 0, row + 1)
            unknown = [p for p in positions if p not in found]
            if unknown:
                if len(vocabulary) ** len(unknown) > budget:
                    break
                found.update(_best(view, row, shard, positions, unknown, found, keys_values, scale, vocabulary))
    return found


def _best(
    view: View, row: int, shard: int, positions: Sequence[int], unknown: Sequence[int], found: Mapping[int, int],
    keys_values: KeysValues, scale: float, vocabulary: Tensor,
) -> dict[int, int]:  # fmt: skip
    """The tails of `unknown` positions whose attention comes nearest to what the row received."""
    query = view.queries[row]
    out, lse = view.results[row, shard]
    best, smallest = {}, float("inf")
    for tails in candidates(vocabulary, len(unknown)):
        keys, values = [], []
        for position in positions:
            known = found.get(position)
            ids = tails[:, unknown.index(position)] if known is None else torch.full((len(tails),), known)
            k, v = keys_values(position, ids)
            keys.append(k.transpose(0, 1))
            values.append(v.transpose(0, 1))
        many = query.expand(len(tails), *query.shape).unsqueeze(2)
        made, sums = attend(many, torch.stack(keys, 2), torch.stack(values, 2), None, scale)
        distance = (made[:, :, 0] - out).abs().sum((1, 2)) + (sums[:, :, 0] - lse).abs().sum(1)
        index = int(distance.argmin())
        if float(distance[index]) < smallest:
            smallest = float(distance[index])
            best = {position: int(token) for position, token in zip(unknown, tails[index], strict=True)}
    return best
