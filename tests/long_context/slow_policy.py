"""Any cache policy, entry by entry in plain Python loops: the reference of the plaintext executor.

Nothing is gathered or dropped: transformers' own cache keeps all keys and values, and each query's scores are made for
the positions on a list alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from private_llm.kv_cache.policies.policy import CachePolicy, Selection

NAME = "slow_policy"


@dataclass
class HeadState:
    """One key head of one row in one layer: positions that count, what they got, and the last choices."""

    live: list[int] = field(default_factory=list)
    gone: set[int] = field(default_factory=set)
    mass: dict[int, float] = field(default_factory=dict)
    stayed: list[int] = field(default_factory=list)
    chosen: list[int] = field(default_factory=list)
    heavy: dict[tuple[int, ...], list[int]] = field(default_factory=dict)


class SlowPolicy:
    """State of a whole model. windows: layers whose attention is the model's own."""

    def __init__(self, policy: CachePolicy, windows: list[bool]) -> None:
        self.policy, self.windows = policy, windows
        self.heads: dict[tuple[int, int, int], HeadState] = {}
        self.position = [0] * len(windows)

    def leader(self, layer: int) -> int:
        """Its own number where it would follow a windowed layer."""
        first = self.policy.sharing.leader(layer)
        return layer if self.windows[first] else first

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, cap: float | None
    ) -> Tensor:
        policy, (batch, heads, queries, _), groups = self.policy, q.shape, k.shape[1]
        each, before = heads // groups, self.position[layer]
        self.position[layer] = total = before + queries
        out = torch.zeros(batch, heads, queries, v.shape[-1], dtype=v.dtype)
        everybody = 0 if self.windows[layer] else policy.mass_queries(queries)
        for row in range(batch):
            for group in range(groups):
                state = self.heads.setdefault((layer, row, group), HeadState())
                state.live += range(before, total)
                state.mass |= dict.fromkeys(range(before, total), 0.0)
        for row in range(batch):
            got: dict[int, dict[int, float]] = {g: {} for g in range(groups)}
            there = [i for i in range(queries) if mask[row, 0, i, before + i]]
            counted = there[-(policy.mass_queries(len(there)) or everybody) :] if everybody else []
            for group in range(groups):
                own = q[row, group * each : (group + 1) * each]
                self.choose(layer, row, group, own, k[row, group], mask[row, 0, -1])
            for query in range(queries):
                scores = []
                for head in range(heads):
                    state = self.heads[layer, row, head // each]
                    seen = [p for p in state.chosen if mask[row, 0, query, p] and p not in state.gone]
                    scores.append({p: float(q[row, head, query] @ k[row, head // each, p]) * scale for p in seen})
                for head in range(heads):
                    start = head - head % policy.merged_heads
                    pair = scores[start : start + policy.merged_heads]
                    mixed = {p: sum(one[p] for one in pair) / len(pair) for p in scores[head]}
                    mixed = {p: x if cap is None else cap * math.tanh(x / cap) for p, x in mixed.items()}
                    if not mixed:
                        continue
                    top = max(mixed.values())
                    weights = {p: math.exp(x - top) for p, x in mixed.items()}
                    norm = sum(weights.values())
                    for p, weight in weights.items():
                        out[row, head, query] += weight / norm * v[row, head // each, p]
                        if query in counted:
                            mine = got[head // each]
                            mine[p] = mine.get(p, 0.0) + weight / norm
            if not self.windows[layer]:
                for group in range(groups):
                    self.evict(layer, row, group, got[group], queries, total, mask[row, 0, -1])
        return out

    # -- selection ----------------------------------------------------------------------------------------------
    def choose(self, layer: int, row: int, group: int, q: Tensor, k: Tensor, tokens: Tensor) -> None:
        """q [heads of the group, queries, D], k [T, D], tokens bool [T]."""
        state, selection = self.heads[layer, row, group], self.policy.selection
        state.chosen = list(state.live)
        if selection is None or q.shape[1] != 1 or self.windows[layer]:
            return
        width = selection.levels[0].size
        shape = selection.shape(len(state.live))
        if shape is None:
            return
        there = [p for p in state.live if tokens[p]]
        nobody = [p for p in state.live if not tokens[p]]
        whole = len(nobody) // width * width
        live = [*there[: shape.first], *nobody[:whole], *there[shape.first :], *nobody[whole:]]
        if self.leader(layer) != layer:
            theirs = self.heads[self.leader(layer), row, group]
            state.chosen = list(theirs.chosen)
            return
        count = max(0, len(live) - shape.first - selection.recent - len(nobody) % width) // width
        end = shape.first + count * width
        query, left = q[:, 0].sum(0), [(shape.first, end)]
        for size, kept in zip(shape.sizes, shape.kept, strict=True):
            clusters = [(a, a + size) for begin, end in left for a in range(begin, end, size)]
            likeness = []
            for a, b in clusters:
                like = float(query @ stands_for(selection, state, k, live[a:b]))
                likeness.append(like if any(tokens[p] for p in live[a:b]) else -math.inf)
            order = sorted(range(len(clusters)), key=lambda i, x=likeness: (-x[i], i))[:kept]
            left = [clusters[i] for i in sorted(order)]
        places = [*range(shape.first), *(p for a, b in left for p in range(a, b))]
        places += range(end, len(state.live))
        state.chosen = [live[p] for p in places]

    # -- eviction -----------------------------------------------------------------------------------------------
    def evict(
        self, layer: int, row: int, group: int, got: dict[int, float], queries: int, total: int, tokens: Tensor
    ) -> None:
        state, eviction = self.heads[layer, row, group], self.policy.eviction
        heavy = self.policy.selection is not None and self.policy.selection.represent == "heavy"
        if eviction is None and not heavy:
            return
        for position, value in got.items():
            state.mass[position] += value
        if eviction is None:
            return
        alive = [p for p in state.live if p not in state.gone]
        want = self.policy.ranked(len(alive), total, queries)
        if want >= len(alive):
            return
        if self.leader(layer) != layer:
            stay = self.heads[self.leader(layer), row, group].stayed
        else:
            mass = {p: got.get(p, 0.0) for p in alive} if eviction.memory == "call" else state.mass
            half = eviction.pool // 2
            smooth = {}
            for i, p in enumerate(alive):
                near = [mass[alive[j]] for j in range(max(0, i - half), min(len(alive), i + half + 1))]
                smooth[p] = sum(near) / eviction.pool if bool(tokens[p]) else -1.0
            there = [p for p in alive if tokens[p]]
            older = max(0, len(there) - eviction.newest(want))
            fixed = set(there[: min(eviction.first, older)]) | set(there[older:])
            rest = sorted((p for p in alive if p not in fixed), key=lambda p: (-smooth[p], p))
            stay = sorted(fixed | set(rest[: want - len(fixed)]))
        state.stayed = list(stay)
        if eviction.drop:
            state.live = list(stay)
        else:
            state.gone |= set(alive) - set(stay)
        if eviction.memory == "since":
            state.mass = dict.fromkeys(state.live, 0.0)


def stands_for(selection: Selection, state: HeadState, k: Tensor, cluster: list[int]) -> Tensor:
    """Heavy keys are those of the first query that met the whole cluster."""
    keys = [k[p] for p in cluster]
    if selection.represent == "extremes":
        most = torch.stack([max(column) for column in zip(*keys, strict=True)])
        least = torch.stack([min(column) for column in zip(*keys, strict=True)])
        return selection.alpha * most + (1 - selection.alpha) * least
    if selection.represent == "heavy":
        best = sorted(cluster, key=lambda p: (-state.mass[p], p))[: selection.heavy]
        return sum((k[p] for p in state.heavy.setdefault(tuple(cluster), best)), torch.zeros_like(keys[0]))
    total = sum(keys, torch.zeros_like(keys[0]))
    return total / len(keys) if selection.represent == "mean" else total / float((total * total).sum()) ** 0.5


@contextmanager
def slow_policy(model: PreTrainedModel, policy: CachePolicy, windows: list[bool]) -> Iterator[SlowPolicy]:
    """The model attends by the reference, over transformers' own DynamicCache()."""
    state = SlowPolicy(policy, windows)

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scaling: float,
        softcap: float | None = None, **_: object,
    ) -> tuple[Tensor, None]:  # fmt: skip
        out = state.attend(module.layer_idx, query, key, value, attention_mask, scaling, softcap)
        return out.transpose(1, 2), None

    def mask(*args: object, **kwargs: object) -> Tensor:
        kwargs.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
        return sdpa_mask(*args, **kwargs)

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    yield state
    model.set_attn_implementation(before)
