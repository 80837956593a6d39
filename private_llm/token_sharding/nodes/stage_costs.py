"""What token sharding costs, from a plan and shapes alone: bytes by link, multiply-adds, memory and time.

A forward is a list of stages. In a stage all nodes compute at the same time, then send at the same time, and the next
one starts when the last frame has arrived (Cascade, Appendix D). A layer has two: CompNodes send rows to AttnNodes,
AttnNodes send partial results back (masked ones for shards without tokens, too). A stage takes the largest computation,
one latency, and the bytes of the busiest network card, which sends and receives at the same time.

This differs from the paper's equation (2) in three ways. Merged AttnNodes send for both of their shards. Masked
numbers of 64 bits go back, or one log-sum-exp where the paper has a maximum and a sum. And the paper counts what leaves
a node: what returns to a CompNode comes from beta AttnNodes for each of its rows, through one card, and that is more.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from private_llm.token_sharding.nodes.facts import AttentionCall, ForwardStep
from private_llm.token_sharding.nodes.floats import number_type, partial_bytes
from private_llm.token_sharding.plans import ShardingPlan

Sent = Mapping[tuple[int, int], int]  # bytes by link (sender, receiver)

HELD = 4  # bytes of a number in the memory of a node: float32, however it travels


@dataclass(frozen=True)
class Card:
    """Bytes through one node's network card in each direction."""

    out: int = 0
    into: int = 0

    @property
    def most(self) -> int:
        """Of both directions, which work at the same time."""
        return max(self.out, self.into)


def cards(sent: Sent) -> dict[int, Card]:
    """What goes through each node's network card."""
    out: dict[int, int] = defaultdict(int)
    into: dict[int, int] = defaultdict(int)
    for (frm, to), count in sent.items():
        out[frm] += count
        into[to] += count
    return {node: Card(out[node], into[node]) for node in sorted({*out, *into})}


@dataclass(frozen=True)
class Stage:
    """What all nodes compute, and then send. layer: where it belongs; what: the tag of its messages."""

    layer: str
    what: str
    sent: Sent = field(default_factory=dict)
    macs: Mapping[int, int] = field(default_factory=dict)

    def seconds(self, bandwidth: float, latency: float, speed: float) -> float:
        """bandwidth: bytes a second in each direction; latency: seconds; speed: multiply-adds a second."""
        wire = max((card.most for card in cards(self.sent).values()), default=0) / bandwidth
        return (latency if self.sent else 0.0) + wire + max(self.macs.values(), default=0) / speed


def seconds_of(stages: Iterable[Stage], bandwidth_mbit: float, latency_ms: float, gmacs: float) -> float:
    """Stages one after the other, in the units that people name."""
    return sum(stage.seconds(bandwidth_mbit * 1e6 / 8, latency_ms / 1e3, gmacs * 1e9) for stage in stages)


def attention_stages(plan: ShardingPlan, call: AttentionCall, step: ForwardStep) -> tuple[Stage, Stage]:
    """One attention of a forward: rows out, partial results back. Bytes are exactly those of a run.

    Multiply-adds of an AttnNode: heads x rows x keys x (dim + value_dim) for each order of its shards; pairs that the
    model's mask hides count, because they are computed, a row's score on itself (`nodes.floats`) does not.
    """
    size = number_type(plan).itemsize
    new = shard_sizes(plan, step.past, step.total)
    keys = shard_sizes(plan, 0, step.total)
    rows: dict[tuple[int, int], int] = defaultdict(int)
    partial: dict[tuple[int, int], int] = defaultdict(int)
    macs: dict[int, int] = defaultdict(int)
    for shard, count in enumerate(new):
        if not count:
            continue
        comp = plan.owner(shard)
        for other in range(plan.beta):
            attn = plan.attn_endpoint(shard, other)
            rows[comp, attn] += step.batch * count * call.row * size
            if keys[other] or plan.masked:
                partial[attn, comp] += step.batch * count * partial_bytes(plan, call)
                macs[attn] += step.batch * call.heads * count * keys[other] * (call.dim + call.value_dim)
    return Stage("", "rows", dict(rows)), Stage("", "partial", dict(partial), dict(macs))


def shard_sizes(plan: ShardingPlan, start: int, stop: int) -> list[int]:
    """Positions of each query shard in start .. stop - 1."""
    return [len(plan.rows_of_shard(shard, start, stop)) for shard in range(plan.beta)]


def comp_sizes(plan: ShardingPlan, start: int, stop: int) -> list[int]:
    """Positions of each CompNode in start .. stop - 1."""
    return [len(plan.rows_of_comp(comp, start, stop)) for comp in range(plan.alpha)]


def cache_bytes(plan: ShardingPlan, calls: Sequence[AttentionCall], batch: int, length: int) -> dict[int, int]:
    """Memory of each AttnNode's keys and values after `length` positions."""
    sizes = shard_sizes(plan, 0, length)
    row = sum(call.groups * (call.dim + call.value_dim) for call in calls) * batch * HELD
    nodes = range(plan.alpha, plan.nodes)
    return {node: row * sum(sizes[shard] for shard in {*plan.attn_shards(node)}) for node in nodes}


# -- the paper's own formulas ----------------------------------------------------------------------------------
def paper_bytes(beta: int, element: int, dim: int, heads: int, groups: int, tokens: int) -> int:
    """Equation (1): bytes of one layer, `element` bytes a number: beta F (2 d H + 2 d H_KV + 2 H) N."""
    return beta * element * (2 * dim * heads + 2 * dim * groups + 2 * heads) * tokens


def paper_seconds(
    beta: int, element: int, dim: int, heads: int, groups: int, most_rows: int, most_queries: int, bandwidth: float,
    latency: float,
) -> float:  # fmt: skip
    """Equation (2): seconds of one layer's messages, B bytes a second, most_rows = max |R_i|, most_queries = max |S_j|.

    2 tau + beta F d (H + 2 H_KV) / B max |R_i| + F (d + 2) H / B max |S_j|.
    """
    out = beta * element * dim * (heads + 2 * groups) / bandwidth * most_rows
    back = element * (dim + 2) * heads / bandwidth * most_queries
    return 2 * latency + out + back
