"""What one forward over a text sends between nodes of token sharding, by formula."""

from __future__ import annotations

from collections.abc import Sequence

from private_llm.token_sharding import AttentionCall, ShardingPlan, number_type
from private_llm.token_sharding.nodes.floats import partial_bytes


def layer_bytes(plan: ShardingPlan, calls: Sequence[AttentionCall], batch: int, length: int) -> int:
    """Bytes of one forward over `length` tokens between the nodes, all layers.

    beta N (F row + 8 (value_dim + 1) heads) a layer, F = 4 or 2 bytes a number; with open partial results
    beta N (F row + (F value_dim + 4) heads). The paper's equation (1) is beta F N (row + (value_dim + 2) heads): a
    maximum and a sum where an open log-sum-exp of 32 bits goes here, so for F = 2 both are equal. Shards without
    tokens, in a text shorter than delta, send nothing back if partial results are open.
    """
    filled = sum(1 for shard in range(plan.beta) if plan.first_of_shard(shard) < length)
    answers = plan.beta if plan.masked else filled
    row = plan.beta * number_type(plan).itemsize
    return sum(batch * length * (row * call.row + answers * partial_bytes(plan, call)) for call in calls)
