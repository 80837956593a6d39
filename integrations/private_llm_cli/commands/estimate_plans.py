"""What an estimate is of (work, links and processors), and what it says of token sharding: the busiest node, plans."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, DomainError
from private_llm.net.transport import CLIENT
from private_llm.token_sharding import (
    Card,
    ShardingPlan,
    Stage,
    cards,
    comp_sizes,
    number_type,
    paper_bytes,
    paper_seconds,
    seconds_of,
    shard_sizes,
)
from private_llm_cli.commands.doctor import float_speed, matmul_speed
from private_llm_cli.commands.models import shape_of
from private_llm_cli.commands.output import duration, emit_json, emit_table, progress_bar, size

if TYPE_CHECKING:
    from private_llm_hf.tools.estimate import Estimate, LayerCost
    from private_llm_hf.tools.estimate_nodes import Sharded
    from private_llm_hf.tools.estimate_products import ProductSpeed

USUAL = ((3, 4, 1), (4, 8, 1), (4, 8, 2), (8, 8, 1), (8, 8, 2), (16, 8, 1))
"""alpha, c, m of plans from few nodes to many, which the audit finds sound for rho = 3."""


@dataclasses.dataclass(frozen=True)
class LinkSpeed:
    """Bandwidth of each direction in megabit per second, one-way latency in milliseconds."""

    bandwidth_mbit: float
    latency_ms: float

    def __post_init__(self) -> None:
        if not self.bandwidth_mbit > 0 or not 0 <= self.latency_ms < float("inf"):
            raise ConfigError(
                f"link: got {self.bandwidth_mbit:g} Mbit/s and {self.latency_ms:g} ms; want a positive bandwidth and "
                "a latency of at least 0"
            )

    def __str__(self) -> str:
        return f"{self.bandwidth_mbit:g} Mbit/s, {self.latency_ms:g} ms one way"

    def seconds(self, count: int) -> float:
        """Time that `count` bytes occupy one direction."""
        return count * 8 / (self.bandwidth_mbit * 1e6)

    @property
    def latency(self) -> float:
        """One-way latency in seconds."""
        return self.latency_ms / 1e3


@dataclasses.dataclass(frozen=True)
class Hardware:
    """Links and processors. ring, floats: billion multiply-adds a second of a party (in its ring) and of a node.
    products: under 'assisted', of which ring is a server's speed with one row.
    """

    link: LinkSpeed
    ring: float
    floats: float
    products: ProductSpeed | None = None

    @classmethod
    def of(
        cls, bandwidth: float, latency: float, gmacs: float | None, sharded: bool,
        weight_bits: Literal[16, 8] | None = None,
    ) -> Hardware:  # fmt: skip
        """gmacs None: measured here; under 'assisted' (weight_bits) the client is. Raises ConfigError."""
        link = LinkSpeed(bandwidth, latency)
        if gmacs is not None and not gmacs > 0:
            raise ConfigError(f"gmacs: got {gmacs:g}; want a positive number")
        if weight_bits is not None:
            from private_llm_hf.tools.estimate_products import ProductSpeed

            products = ProductSpeed.measured(gmacs, weight_bits)
            return cls(link, products.one_row, 0.0, products)
        if gmacs is None:
            return cls(link, matmul_speed(), float_speed() if sharded else 0.0)
        return cls(link, gmacs, gmacs)

    def gmacs(self, layer: LayerCost) -> float:
        """The speed that counts in this layer."""
        return self.floats if layer.stages else self.ring

    def speeds(self, config: PrivateConfig) -> list[str]:
        """The speeds that count in a session, in words."""
        if self.products is not None:
            return [str(self.products)]
        parties = [] if config.protocol == "cascade" else [f"{self.ring:.1f} GMAC/s per party"]
        return parties + ([] if config.plan is None else [f"{self.floats:.1f} GMAC/s per node"])

    def seconds(self, layer: LayerCost) -> float:
        """Time of one layer."""
        if self.products is not None:
            link = self.link
            return sum(each.seconds(link.bandwidth_mbit, link.latency_ms, self.products) for each in layer.exchanges)
        return layer.seconds(self.link.bandwidth_mbit, self.link.latency_ms, self.gmacs(layer))

    def stages(self, stages: Sequence[Stage]) -> float:
        """Time of stages one after the other."""
        return seconds_of(stages, self.link.bandwidth_mbit, self.link.latency_ms, self.floats)


@dataclasses.dataclass(frozen=True)
class Workload:
    """What is estimated: one forward of `sequence` tokens (0: images), or `new` tokens after them. sparsity: what
    predictors leave out, as it was given. replaced: the activation that ReLU took the place of.
    """

    model: str
    sequence: int
    new: int
    batch: int
    sparsity: str = ""
    replaced: str | None = None

    def __str__(self) -> str:
        forward = f"one forward of {self.sequence} tokens" if self.sequence else "images"
        done = f"{self.new} tokens after {self.sequence}" if self.new else forward
        sparse = f", sparse: {self.sparsity}" if self.sparsity else ""
        relu = f", ReLU in place of {self.replaced}" if self.replaced else ""
        return f"{self.model}: {done}, batch {self.batch}{sparse}{relu}"


# -- the nodes of a plan ---------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Busiest:
    """The node that computes and sends or receives longest."""

    node: int
    card: Card
    macs: int
    seconds: float


def busiest(stages: Iterable[Stage], hardware: Hardware) -> Busiest:
    """Of all nodes; the client is none."""
    sent: Counter[tuple[int, int]] = Counter()
    macs: Counter[int] = Counter()
    for stage in stages:
        sent.update(stage.sent)
        macs.update(stage.macs)
    nodes = (
        Busiest(n, card, macs[n], hardware.link.seconds(card.most) + macs[n] / hardware.floats / 1e9)
        for n, card in cards(sent).items() if n != CLIENT
    )  # fmt: skip
    return max(nodes, key=lambda one: one.seconds)


def _per_token(sharded: Sharded, hardware: Hardware) -> float | None:
    """Mean time of a decode step."""
    steps = sharded.forwards[1:]
    return sum(hardware.stages(stages) for stages in steps) / len(steps) if steps else None


def sharding_facts(work: Workload, found: Estimate, config: PrivateConfig, hardware: Hardware) -> dict[str, Any]:
    """Figures of a sharded run for JSON. Equations (1) and (2) are the paper's own, for all layers of the prompt."""
    plan, sharded = config.plan, found.sharded
    if plan is None or sharded is None:
        raise ConfigError("plans: want --protocol cascade, or --split; other protocols have no nodes")
    first = config.endpoints - plan.nodes
    stages = [*itertools.chain(*sharded.forwards)]
    most = busiest(stages, hardware)
    between = sum(n for stage in stages for link, n in stage.sent.items() if CLIENT not in link)
    size_of = number_type(plan).itemsize
    shapes = [(plan.beta, size_of, call.dim, call.heads, call.groups) for call in sharded.calls]
    rows, queries = (work.batch * max(sizes(plan, 0, work.sequence)) for sizes in (comp_sizes, shard_sizes))
    rate = hardware.link.bandwidth_mbit * 1e6 / 8
    return {
        "plan": dataclasses.asdict(plan), "nodes": plan.nodes,
        "rounds": sum(layer.rounds for layer in found.layers()),
        "bytes_between_nodes": between,
        "seconds_prompt": hardware.stages(sharded.forwards[0]), "seconds_per_token": _per_token(sharded, hardware),
        "memory_per_node": {"weights": sharded.weight_bytes, "cache": sharded.cache_bytes},
        "equation_1_bytes": sum(paper_bytes(*shape, work.batch * work.sequence) for shape in shapes),
        "equation_2_seconds": sum(paper_seconds(*s, rows, queries, rate, hardware.link.latency) for s in shapes),
        "busiest": {
            "node": plan.describe(most.node - first), "bytes_out": most.card.out, "bytes_in": most.card.into,
            "macs": most.macs, "seconds": most.seconds,
        },
    }  # fmt: skip


def sharding_rows(
    work: Workload, found: Estimate, config: PrivateConfig, hardware: Hardware
) -> list[tuple[str, object]]:
    """The same for people."""
    facts = sharding_facts(work, found, config, hardware)
    most = facts["busiest"]
    rows: list[tuple[str, object]] = [
        ("nodes", f"{facts['nodes']}: {ShardingPlan(**facts['plan']).kinds}"),
        ("bytes over all links", size(found.costs.bytes_total)),
        ("of these between the nodes", size(facts["bytes_between_nodes"])),
        ("the prompt's, by the paper's equation (1)", size(facts["equation_1_bytes"])),
        ("rounds (two latencies each on the nodes)", facts["rounds"]),
        ("memory of a CompNode, weights", size(facts["memory_per_node"]["weights"])),
        ("memory of the fullest AttnNode, cache", size(facts["memory_per_node"]["cache"])),
        (
            "busiest node",
            f"{most['node']}: {size(most['bytes_out'])} out, {size(most['bytes_in'])} in, "
            f"{most['macs'] / 1e9:.2f} G multiply-adds",
        ),
        ("messages of the prompt, by the paper's equation (2)", duration(facts["equation_2_seconds"])),
        ("time of the prompt on the nodes", duration(facts["seconds_prompt"])),
    ]
    if config.split is not None:
        rows.append(("memory per party, weights", size(found.weight_bytes)))
        rows.append(("memory per party, cache", size(found.cache_bytes)))
    if facts["seconds_per_token"] is not None:
        rows.append(("time of each further token on the nodes", duration(facts["seconds_per_token"])))
    return rows


# -- plans side by side ------------------------------------------------------------------------------------------
def compare_plans(
    work: Workload, config: PrivateConfig, given: Sequence[ShardingPlan], usual: bool, as_json: bool, hardware: Hardware
) -> None:
    """One row for each plan; a weak plan is shown, and called so. Raises ConfigError without token sharding."""
    if config.plan is None:
        raise ConfigError("plans: want --protocol cascade, or --split; other protocols have no nodes")
    plans = [*given, *(ShardingPlan(*shape) for shape in USUAL if usual)]
    with progress_bar(len(plans), quiet=as_json) as step:
        rows = []
        for plan in plans:
            rows.append(_row(work, config, plan, hardware))
            step("counting plans")
    if as_json:
        for row in rows:
            emit_json(row)
        return
    emit_table(
        f"{work}: plans",
        ("plan", "nodes", "CompNode sees", "AttnNode sees", "bytes", "prompt", "each token", "in all", "searches"),
        [
            (
                f"{row['alpha']},{row['c']},{row['m']}", row["nodes"], f"{row['comp_sees']:.0%}",
                f"{row['attn_sees']:.0%}", size(row["bytes_total"]), duration(row["seconds_prompt"]),
                "" if row["seconds_per_token"] is None else duration(row["seconds_per_token"]),
                duration(row["seconds"]), row["verdict"],
            )
            for row in rows
        ],
        f"{hardware.link} of each network card, {', '.join(hardware.speeds(config))}; plan: alpha,c,m; sees: the "
        "largest part of the text that one node of the kind holds; prompt, each token: time on the nodes; searches: "
        "what the audit says of them",
    )  # fmt: skip


def _tried(work: Workload, config: PrivateConfig, plan: ShardingPlan) -> tuple[Estimate, PrivateConfig, str]:
    """The estimate, its settings, and whether a session would take this plan for such a text without being told to."""
    from private_llm_hf.tools.estimate import estimate as run

    shape = shape_of(work.model)
    verdict = "sound"
    planned = dataclasses.replace(config, plan=dataclasses.replace(plan, accept_weak_plan=False))
    try:
        return run(*shape, planned, work.sequence, work.new, work.batch), planned, verdict
    except ConfigError:
        verdict = "WEAK"
    except DomainError:
        verdict = "text too short"
    # What is wrong with anything else than the plan is wrong again.
    planned = dataclasses.replace(config, plan=dataclasses.replace(plan, accept_weak_plan=True))
    return run(*shape, planned, work.sequence, work.new, work.batch), planned, verdict


def _row(work: Workload, config: PrivateConfig, plan: ShardingPlan, hardware: Hardware) -> dict[str, Any]:
    """Figures of one plan."""
    found, planned, verdict = _tried(work, config, plan)
    facts = sharding_facts(work, found, planned, hardware)
    held = [len(plan.held(node, work.sequence)) / work.sequence for node in range(plan.nodes)]
    return {
        "name": "plan", "model": work.model, "seq": work.sequence, "new": work.new, "batch": work.batch,
        **dataclasses.asdict(plan), "nodes": plan.nodes, "verdict": verdict,
        "comp_sees": max(held[: plan.alpha]), "attn_sees": max(held[plan.alpha :]),
        "bytes_total": found.costs.bytes_total, "bytes_between_nodes": facts["bytes_between_nodes"],
        "cache": facts["memory_per_node"]["cache"], "seconds": sum(hardware.seconds(layer) for layer in found.layers()),
        "seconds_prompt": facts["seconds_prompt"], "seconds_per_token": facts["seconds_per_token"],
    }  # fmt: skip
