"""All nodes of a plan in one place: what sharded attention computes, without links (the paper's runs "without Ray").

For measuring what sharding itself costs (Cascade, appendix C); it protects nobody, as one process sees everything.
"""

from collections.abc import Sequence

from torch import Tensor

from private_llm.token_sharding import AttentionCall, ForwardStep, ShardingPlan, allowed, attend, combine, key_bias


class Undistributed:
    """One forward over a whole text, call after call."""

    def __init__(self, plan: ShardingPlan, calls: Sequence[AttentionCall]) -> None:
        self._plan, self._calls = plan, calls
        self._next = 0
        self._rules: dict[tuple[AttentionCall, int, int], tuple[Tensor | None, Tensor | None]] = {}

    def begin(self, step: ForwardStep) -> None:
        """A forward starts."""
        self._step, self._next = step, 0
        self._rules.clear()  # most layers make the same call
        rows = (self._plan.rows_of_shard(shard, 0, step.total) for shard in range(self._plan.beta))
        self._shards = [shard for shard in rows if shard]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, H, n, D], k [B, G, n, D], v [B, G, n, E] of all tokens: their attention [B, H, n, E]."""
        call = self._calls[self._next]
        self._next += 1
        if len(self._shards) == 1:
            return self._piece(call, q, k, v, self._shards[0], self._shards[0])[0]
        out = q.new_empty(*q.shape[:3], v.shape[3])
        for mine in self._shards:
            pieces = [
                self._piece(call, q[:, :, mine], k[:, :, other], v[:, :, other], mine, other) for other in self._shards
            ]
            out[:, :, mine] = combine(pieces)
        return out

    def _piece(
        self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, rows: list[int], keys: list[int]
    ) -> tuple[Tensor, Tensor]:
        where = call, rows[0], keys[0]
        if where not in self._rules:
            self._rules[where] = allowed(call, self._step, rows, keys), key_bias(call, self._step, keys)
        seen, bias = self._rules[where]
        return attend(q, k, v, seen, call.scale, call.softcap, bias)
