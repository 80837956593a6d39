"""An AttnNode: the attention of two query shards on each other (Cascade, Algorithm 4), with its part of the KV cache.

It sees queries, keys and values of its two shards and nothing else; it has no weights. Of a step it computes what
the step's new rows need: with one new token only the beta AttnNodes of that token's shard do anything.

Sends for each layer, to the owner of query shard j, the attention of the new rows of j over the keys of shard k:
(value_dim + 1) x heads x rows x 8 bytes, masked (`token_sharding.nodes.floats`), or if partials are open, log-sum-exps
and results, (value_dim + 1) x heads x rows x 4 bytes (wire="float16": (value_dim + 2) x heads x rows x 2). So for k.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from private_llm.errors import TransportError
from private_llm.net.transport import Transport
from private_llm.token_sharding.nodes import floats
from private_llm.token_sharding.nodes.facts import AttentionCall, ForwardStep, allowed, attend, key_bias
from private_llm.token_sharding.plans import ShardingPlan

Kept = dict[tuple[int, int], tuple[Tensor, Tensor]]  # keys and values by (layer, shard)

_Rules = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Which keys each query sees, what is added to the scores of each key, and what to a row's score on itself."""


class AttnNode:
    """One endpoint's attention."""

    def __init__(self, plan: ShardingPlan, transport: Transport, calls: Sequence[AttentionCall]) -> None:
        self._plan, self._transport, self._calls = plan, transport, calls
        self.shards = plan.attn_shards(transport.me)
        self._kept: dict[int, Kept] = {}
        rings = sorted(set(self.shards)) if plan.masked else []
        self._zeros = {shard: floats.ZeroShares(plan, transport, shard) for shard in rings}

    def join(self) -> None:
        """Receive the seeds of masks, when all AttnNodes have been made."""
        for zeros in self._zeros.values():
            zeros.join()

    def run(self, step: ForwardStep) -> None:
        """All layers of one forward. Raises TransportError for a step that does not continue what is kept."""
        kept: Kept = {} if step.handle is None else self._kept.setdefault(step.handle, {})
        keys = {shard: self._plan.rows_of_shard(shard, 0, step.total) for shard in sorted(set(self.shards))}
        new = {shard: [p for p in rows if p >= step.past] for shard, rows in keys.items()}
        rules: dict[tuple[AttentionCall, int], _Rules] = {}  # most layers make the same call
        for layer, call in enumerate(self._calls):
            received = {
                shard: self._receive(kept, layer, shard, call, step, len(rows)) for shard, rows in new.items() if rows
            }
            j, k = self.shards
            for shard, other in ((j, k), (k, j)) if j != k else ((j, k),):
                if shard not in received:
                    continue
                q, own = received[shard]
                if (call, shard) not in rules:
                    rules[call, shard] = _rules(call, step, new[shard], keys[other], q.device)
                held = kept.get((layer, other), _nothing(call, own))
                if held[0].shape[2] != len(keys[other]):
                    raise TransportError(f"a step at position {step.past} does not continue the cache of this node")
                if keys[other] or self._plan.masked:
                    self._answer(layer, shard, q, own, held, rules[call, shard])

    def _receive(
        self, kept: Kept, layer: int, shard: int, call: AttentionCall, step: ForwardStep, rows: int
    ) -> tuple[Tensor, Tensor]:
        """The new rows of one shard: keys and values go to the cache, queries come back, with their own keys."""
        heads = ((call.heads, call.dim), (call.groups, call.dim), (call.groups, call.value_dim))
        expected = [((step.batch, count, rows, size), floats.number_type(self._plan)) for count, size in heads]
        q, own, v = (t.float() for t in floats.recv_floats(self._transport, self._plan.owner(shard), "rows", expected))
        before = kept.get((layer, shard))
        kept[layer, shard] = (own, v)
        if before is not None:
            kept[layer, shard] = torch.cat([before[0], own], 2), torch.cat([before[1], v], 2)
        return q, own

    def _answer(
        self, layer: int, shard: int, q: Tensor, own: Tensor, held: tuple[Tensor, Tensor], rules: _Rules
    ) -> None:
        """Attention of the new rows of `shard` over the keys held of the other one, to their owner."""
        call, (seen, bias, own_bias) = self._calls[layer], rules
        out, lse = attend(q, *held, seen, call.scale, call.softcap, bias)
        if self._plan.masked:
            reference = floats.own_scores(call, q, own, own_bias)
            numbers = floats.encode((out, lse), reference, self._plan.beta, f"attention call {layer + 1}")
            self._transport.send(self._plan.owner(shard), "partial", self._zeros[shard].add_to(numbers))
        else:
            rows = [lse, out.to(floats.number_type(self._plan))]
            floats.send_floats(self._transport, self._plan.owner(shard), "partial", rows)

    # -- the cache ------------------------------------------------------------------------------------------
    def free(self, handle: int) -> None:
        """Forget a cache."""
        self._kept.pop(handle, None)

    def copy(self, handle: int, to: int) -> None:
        """A second cache that starts where the first one is."""
        self._kept[to] = dict(self._kept.get(handle, {}))

    def select(self, handle: int, rows: Tensor) -> None:
        """Keep these rows of the batch, in this order."""
        kept = self._kept.get(handle, {})
        for place, (k, v) in kept.items():
            kept[place] = k[rows], v[rows]

    def crop(self, handle: int, length: int) -> None:
        """Forget positions from `length` on."""
        kept = self._kept.get(handle, {})
        for layer, shard in list(kept):
            rows = len(self._plan.rows_of_shard(shard, 0, length))
            k, v = kept.pop((layer, shard))
            if rows:
                kept[layer, shard] = k[:, :, :rows], v[:, :, :rows]


def _rules(call: AttentionCall, step: ForwardStep, rows: list[int], keys: list[int], device: torch.device) -> _Rules:
    made = allowed(call, step, rows, keys), key_bias(call, step, keys), key_bias(call, step, rows)
    seen, bias, own_bias = (None if each is None else each.to(device) for each in made)
    return seen, bias, own_bias


def _nothing(call: AttentionCall, like: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of a shard without tokens."""
    batch, groups = like.shape[:2]
    return like.new_empty(batch, groups, 0, call.dim), like.new_empty(batch, groups, 0, call.value_dim)
