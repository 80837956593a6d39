"""What nodes of a sharding plan see of one layer, as their messages bring it to them (docs/cascade.md)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.row_matching import Row, Rows
from private_llm.token_sharding import (
    AttentionCall,
    ForwardStep,
    Piece,
    ShardingPlan,
    allowed,
    attend,
    key_bias,
    number_type,
)

ALL = -1
"""Stands for the query shard where results are of the whole text."""


def result_shards(plan: ShardingPlan) -> list[int]:
    """What the results of a plan are of: each query shard, or masked, all together."""
    return [ALL] if plan.masked else list(range(plan.beta))


@dataclass(frozen=True)
class View:
    """Nodes that put together what they see of a text of `length` tokens at one layer.

    tokens: those that CompNodes are given (layer 0 only). rows: queries, keys and values by position, of AttnNodes and
    of CompNodes, which make them. results: what CompNodes receive for (row, shard): out [H, E] and log-sum-exp [H];
    masked results are sums over all shards, shard `ALL`.
    """

    plan: ShardingPlan
    nodes: tuple[int, ...]
    layer: int
    call: AttentionCall
    length: int
    tokens: Mapping[int, int]
    rows: Mapping[int, Row]
    results: Mapping[tuple[int, int], Piece]

    @property
    def shards(self) -> list[int]:
        """What results are of."""
        return sorted({shard for _, shard in self.results})

    def visible(self, row: int, shard: int) -> list[int]:
        """Positions of a shard on which the result for a row depends."""
        keys = range(self.length) if shard == ALL else self.plan.rows_of_shard(shard, 0, self.length)
        return visible(self.call, keys, row)

    def bias(self, position: int) -> Tensor | None:
        """What ALiBi adds to the scores of a position, [H]."""
        made = key_bias(self.call, ForwardStep(None, 1, 0, self.length), [position])
        return None if made is None else made[0, :, 0]


def visible(call: AttentionCall, keys: Sequence[int], row: int) -> list[int]:
    """Which of `keys` (positions) a query at `row` sees."""
    back, ahead = call.back, call.ahead
    return [p for p in keys if (back is None or row - p <= back) and (ahead is None or p - row <= ahead)]


def view_of(plan: ShardingPlan, nodes: Sequence[int], call: AttentionCall, layer: int, ids: Tensor, rows: Rows) -> View:
    """The view of `nodes` (endpoints) on a text [n] whose rows at `layer` are given, each [n, heads, size].

    Numbers travel as `plan.wire` says; log-sum-exps always have 32 bits.
    """
    length, kind = len(ids), number_type(plan)
    sent = [part.to(kind).float() for part in rows]
    comps = [node for node in nodes if node < plan.alpha]
    own = sorted({p for node in comps for p in plan.rows_of_comp(node, 0, length)})
    held = {p for node in nodes for p in plan.held(node, length)}
    seen: dict[int, Row] = {p: (sent[0][p], sent[1][p], sent[2][p]) for p in sorted(held - set(own))}
    seen |= {p: (rows[0][p], rows[1][p], rows[2][p]) for p in own}
    results: dict[tuple[int, int], Piece] = {}
    q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in sent)
    step = ForwardStep(None, 1, 0, length)
    for shard in result_shards(plan):
        keys = list(range(length)) if shard == ALL else plan.rows_of_shard(shard, 0, length)
        if not keys or not own:
            continue
        mask, bias = allowed(call, step, own, keys), key_bias(call, step, keys)
        out, lse = attend(q[:, :, own], k[:, :, keys], v[:, :, keys], mask, call.scale, call.softcap, bias)
        out = out.double() if shard == ALL else out.to(kind).float()
        for index, row in enumerate(own):
            if visible(call, keys, row):
                results[row, shard] = out[0, :, index], lse[0, :, index]
    tokens = {p: int(ids[p]) for p in own} if layer == 0 else {}
    return View(plan, tuple(nodes), layer, call, length, tokens, dict(sorted(seen.items())), results)


def parts(view: View, row: int, shard: int, position: int, keys: Tensor, values: Tensor) -> Tensor:
    """What tokens at `position` add to the result for (row, shard): keys [K, G, D], values [K, G, E] to [K, H, E + 1].

    A result is the sum of its tokens' parts, exp(score - lse) x (value, 1), and the sum is (out, 1): attention over a
    shard without its softmax's quotient, which the log-sum-exp gives back.
    """
    call, query, lse = view.call, view.rows[row][0], view.results[row, shard][1]
    repeat = call.heads // call.groups
    keys, values = keys.repeat_interleave(repeat, 1), values.repeat_interleave(repeat, 1)
    scores = torch.einsum("hd,khd->kh", query.double(), keys.double()) * call.scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    bias = view.bias(position)
    if bias is not None:
        scores = scores + bias
    weights = torch.exp(scores - lse.double()).unsqueeze(-1)
    return torch.cat([weights * values.double(), weights], -1)


def added(view: View, row: int, shard: int, position: int, keys: Tensor, values: Tensor) -> Tensor:
    """As `parts`; zero for a row that does not see the position."""
    if position in view.visible(row, shard):
        return parts(view, row, shard, position, keys, values)
    return torch.zeros(len(keys), view.call.heads, values.shape[-1] + 1, dtype=torch.float64)


def rest(view: View, row: int, shard: int, known: Mapping[int, Row]) -> Tensor:
    """What the tokens of a shard that are not `known` (their rows, by position) add to a result, [H, E + 1]."""
    out = view.results[row, shard][0].double()
    left = torch.cat([out, torch.ones_like(out[:, :1])], 1)
    for position in view.visible(row, shard):
        if position in known:
            _, key, value = known[position]
            left = left - parts(view, row, shard, position, key.unsqueeze(0), value.unsqueeze(0))[0]
    return left
