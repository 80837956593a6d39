"""The patch plan: every module of a model, what runs in its place, what of it stays public.

Made from the configuration alone, on the meta device, before anything is sent. A module without a handler runs its own
forward on shares; whether it can, is tried (trial.py). Nodes of token sharding run every module's own forward in the
clear, and the table says what they see.
"""

import re
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from torch import nn
from transformers import PreTrainedModel

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError
from private_llm.ranges import QUANTITIES, UNKNOWN, Ranges, layer_of
from private_llm_hf.kv_cache.model_checks import check_cache_policy, check_prompt_chunk
from private_llm_hf.models.experts import check_capacity
from private_llm_hf.models.handlers import handler_of
from private_llm_hf.models.norms import FoldedNorm
from private_llm_hf.token_sharding.attention_calls import run_without_values
from private_llm_hf.token_sharding.cut import Cut


@dataclass(frozen=True)
class PatchRow:
    """One module. public: what everybody may know of it, or, where nodes run it, what they see."""

    name: str
    kind: str
    becomes: str
    public: str
    parameters: int


@dataclass(frozen=True)
class PatchPlan:
    """All modules of a model in order; prints as a table in which equal layers share a line."""

    title: str
    rows: tuple[PatchRow, ...]
    weights: str
    total: int
    embedding: int
    heading: str = "public"
    ranges: Ranges = UNKNOWN

    def __repr__(self) -> str:
        return f"PatchPlan({self.title!r}, {len(self.rows)} modules, {self.total:,} parameters)"

    def parameters(self, exclude_embeddings: bool = False) -> int:
        """Number of weights, tied ones once."""
        return self.total - self.embedding if exclude_embeddings else self.total

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table(title=self.title, caption=f"{self.total:,} parameters, {self.weights}")
        for heading in ("module", "class", "becomes", self.heading):
            table.add_column(heading, overflow="fold", no_wrap=heading == "class")
        table.add_column("parameters", justify="right")
        for row in _merge(self.rows):
            table.add_row(row.name, row.kind, row.becomes, row.public, f"{row.parameters:,}" if row.parameters else "")
        yield table
        if self.ranges.modules:
            yield ranges_table(self.ranges)

    def __str__(self) -> str:
        console = Console(width=160, record=False, file=None, no_color=True)
        with console.capture() as captured:
            console.print(self)
        return captured.get()


def make_patch_plan(model: PreTrainedModel, config: PrivateConfig) -> PatchPlan:
    """The plan of a module tree (on any device). Raises PatchMismatch for an architecture that is not run, ConfigError
    for a cache policy that the model's attention cannot follow, for chunks of prompts that would change results, and
    for a capacity of experts that there are not.
    """
    check_cache_policy(model, config)
    check_prompt_chunk(type(model), model.config, config)
    check_capacity(model, config)
    nodes = _at_nodes(model, config)
    rows: list[PatchRow] = []
    listed: set[int] = set()
    for name, module in model.named_modules():
        own = 0  # a tied weight counts where it is met first
        for value in module.parameters(recurse=False):
            own += 0 if id(value) in listed else value.numel()
            listed.add(id(value))
        kind = type(module).__name__
        handler = handler_of(module)
        if name in nodes and config.plan is not None:
            becomes, states = "its own forward at CompNodes", "tokens, states" if config.split is None else "states"
            seen = f"{states} of 1 in {config.plan.alpha} rows"
            if "Attention" in kind:
                becomes = f"attention at {config.plan.attn_nodes} AttnNodes"
                seen = f"q, k, v of at most 2 in {config.plan.beta} shards"
            if not _is_list(module):
                rows.append(PatchRow(name or "(model)", kind, becomes, seen, own))
        elif handler is not None:
            rows.append(PatchRow(name, kind, handler.becomes, handler.public, own))
        elif not _is_list(module):
            further = any(not name or other.startswith(f"{name}.") for other in nodes)
            becomes = "its own forward on shares" + (", then at CompNodes" if further else "")
            rows.append(PatchRow(name or "(model)", kind, becomes, "", own))
    unique = {id(value): value.numel() for value in model.parameters()}
    total = sum(unique.values()) + sum(part.taken for part in model.modules() if isinstance(part, FoldedNorm))
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    embedding = {id(table.weight): table.weight.numel() for table in tables}
    secret, heading = "secret-shared" if config.weights == "secret" else "public", "public"
    if config.facts is not None and not config.facts.hides:
        secret = f"NOT protected (protocol '{config.protocol}')"
    if config.plan is not None:
        before = "" if config.split is None else f"'{config.protocol}' up to layer {config.split - 1}, then "
        secret = f"public; {before}statistical protection only, {config.plan.nodes} nodes"
        heading = "each node sees" if config.split is None else "public, or each node sees"
    return PatchPlan(type(model).__name__, tuple(rows), secret, total, sum(embedding.values()), heading)


def check_ring(model: PreTrainedModel, config: PrivateConfig) -> None:
    """Raise ConfigError, with the module's name, for what the 32-bit ring cannot compute (nodes need no ring)."""
    if config.ring >= 64 or config.plan is not None:
        return
    for name, module in model.named_modules():
        handler = handler_of(module)
        if isinstance(module, nn.RMSNorm) or (handler is not None and handler.wide):
            raise ConfigError(
                f"ring: got {config.ring} for {type(model).__name__}, whose '{name}' ({type(module).__name__}) has "
                "products beyond it; want ring=64. The 32-bit ring is for networks of convolutions and ReLU"
            )


def unknown_modules(model: PreTrainedModel) -> list[str]:
    """Modules without a handler that do something of their own: their forward runs on shares, if it can."""
    return [
        f"{name} ({type(module).__name__})"
        for name, module in model.named_modules()
        if not _is_list(module)
        and (any(True for _ in module.parameters(recurse=False)) or not any(True for _ in module.children()))
        and handler_of(module) is None
    ]


def ranges_table(ranges: Ranges) -> Table:
    """What all parties know of the sizes of values: powers of two, layers side by side."""
    table = Table(
        title="ranges (public)",
        caption="values, or norms of their rows, stay below 2^n; frac, weight: fractional bits of results, of weights",
    )
    table.add_column("module", overflow="fold")
    for quantity in QUANTITIES:
        table.add_column(quantity, justify="right")
    layers: dict[str, dict[str, list[int]]] = {}
    for name, known in ranges.modules.items():
        here = layers.setdefault(layer_of(name), {})
        for quantity, exponent in known.items():
            here.setdefault(quantity, []).append(exponent)
    for name, exponents in layers.items():
        met = [sorted({*exponents.get(quantity, ())}) for quantity in QUANTITIES]
        table.add_row(name, *(" to ".join(map(str, each[:1] + each[1:][-1:])) for each in met))
    return table


def _at_nodes(model: PreTrainedModel, config: PrivateConfig) -> frozenset[str]:
    if config.protocol == "cascade":
        return frozenset(name for name, _ in model.named_modules())
    if config.split is None or model.config.num_hidden_layers <= config.split:  # a party's model ends there
        return frozenset()
    cut = Cut.of(type(model), model.config, config.split)
    called: list[set[str]] = [set()]  # before the cut, and then after it

    def watch(traced: PreTrainedModel) -> None:
        for name, module in traced.named_modules():
            module.register_forward_pre_hook(lambda *_, name=name: called[-1].add(name))
        last = traced.get_submodule(f"{cut.path}.{cut.count - 1}")
        last.register_forward_hook(lambda *_: called.append(set()))

    run_without_values(type(model), model.config, watch)
    return frozenset(called[-1] - called[0])


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)


def _merge(rows: tuple[PatchRow, ...]) -> list[PatchRow]:
    """Rows that differ only in layer numbers, as one row with the range of numbers."""
    groups: dict[tuple[str, ...], list[PatchRow]] = {}
    for row in rows:
        groups.setdefault((re.sub(r"\b\d+\b", "#", row.name), row.kind, row.becomes), []).append(row)
    merged = []
    for (pattern, kind, becomes), members in groups.items():
        name = pattern if len(members) > 1 else members[0].name
        if len(members) > 1:
            numbers = [int(re.findall(r"\b\d+\b", member.name)[0]) for member in members]
            name = name.replace("#", f"{min(numbers)}-{max(numbers)}", 1)
        merged.append(PatchRow(name, kind, becomes, members[0].public, sum(m.parameters for m in members)))
    return merged
