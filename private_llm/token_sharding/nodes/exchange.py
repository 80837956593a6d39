"""A CompNode's side of attention: rows out to the AttnNodes, partial results back, combined (Algorithms 2 and 5).

Sends for each layer, to the beta AttnNodes of each of its query shards: queries, keys and values of its new rows,
(heads x dim + groups x (dim + value_dim)) x rows x 4 bytes each (2 with wire="float16").
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from private_llm.errors import DomainError
from private_llm.net.transport import Transport
from private_llm.token_sharding.nodes.facts import AttentionCall, ForwardStep, combine
from private_llm.token_sharding.nodes.floats import decode, number_type, recv_floats, send_floats
from private_llm.token_sharding.plans import ShardingPlan


class Exchange:
    """One CompNode's attention, call after call."""

    def __init__(self, plan: ShardingPlan, transport: Transport, calls: Sequence[AttentionCall]) -> None:
        self._plan, self._transport, self._calls = plan, transport, calls
        self._step: ForwardStep | None = None
        self._next = 0
        self._local: dict[int, Tensor | None] = {}  # by query shard: places of its rows among the node's (None: all)
        self._filled: list[int] = []

    def begin(self, step: ForwardStep) -> list[int]:
        """A forward starts: this node's new positions, ascending."""
        me = self._transport.me
        rows = self._plan.rows_of_comp(me, step.past, step.total)
        self._step, self._next = step, 0
        places: dict[int, list[int]] = {}
        for index, position in enumerate(rows):
            places.setdefault(self._plan.shard_of(position), []).append(index)
        alone = len(places) == 1
        self._local = {shard: None if alone else torch.tensor(index) for shard, index in places.items()}
        self._filled = [s for s in range(self._plan.beta) if self._plan.first_of_shard(s) < step.total]
        return rows

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """This node's rows' attention over all tokens, [B, H, n, E]. Raises DomainError for unplanned calls."""
        step, call = self._current(q, k, v)
        for shard, index in self._local.items():
            nodes = [self._plan.attn_endpoint(shard, other) for other in range(self._plan.beta)]
            rows = [x if index is None else x.index_select(2, index.to(x.device)) for x in (q, k, v)]
            send_floats(self._transport, nodes, "rows", rows, number_type(self._plan))
        self._transport.ledger.add_round("attention")
        out = q.new_empty(*q.shape[:3], call.value_dim)
        for shard, index in self._local.items():
            count = q.shape[2] if index is None else len(index)
            found = (self._summed if self._plan.masked else self._combined)(step, call, shard, count)
            if index is None:
                return found
            out.index_copy_(2, index.to(out.device), found)
        return out

    def _combined(self, step: ForwardStep, call: AttentionCall, shard: int, rows: int) -> Tensor:
        """The attention of one query shard's new rows, from the partial results of its AttnNodes."""
        shape = (step.batch, call.heads, rows)
        expected = [(shape, torch.float32), ((*shape, call.value_dim), number_type(self._plan))]
        pieces = []
        for other in self._filled:
            lse, out = recv_floats(self._transport, self._plan.attn_endpoint(shard, other), "partial", expected)
            pieces.append((out, lse))
        return combine(pieces)

    def _summed(self, step: ForwardStep, call: AttentionCall, shard: int, rows: int) -> Tensor:
        """The same from masked results, of which only the sum is known."""
        shape = (step.batch, call.heads, rows, call.value_dim + 1)
        nodes = [self._plan.attn_endpoint(shard, other) for other in range(self._plan.beta)]
        return decode(torch.stack([self._transport.recv(node, "partial", shape, torch.int64) for node in nodes]).sum(0))

    def end(self) -> None:
        """The forward is done. Raises DomainError if it made fewer attention calls than agreed upon."""
        if self._next != len(self._calls):
            raise DomainError(f"the model made {self._next} attention calls; want {len(self._calls)}")
        self._step = None

    def _current(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[ForwardStep, AttentionCall]:
        if self._step is None or self._next >= len(self._calls):
            raise DomainError("an attention call outside a forward that the nodes agreed upon")
        call = self._calls[self._next]
        self._next += 1
        found = (q.shape[1], k.shape[1], q.shape[3], v.shape[3])
        if found != (call.heads, call.groups, call.dim, call.value_dim):
            raise DomainError(f"attention call {self._next}: got heads, groups, sizes {found}; want those of {call}")
        return self._step, call
