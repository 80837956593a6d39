"""What filling in left-out keys and values sends over 2048 steps: per head, merged, merged with prefetching.

    python scripts/studies/replay_cache.py                            # the table of docs/studies/kv-refill.md
    python scripts/studies/replay_cache.py --plot docs/studies/kv-refill.png  # and a picture, as the paper's Figure 19
    python scripts/studies/replay_cache.py --json                     # rows, with bytes by 128 steps
    python scripts/studies/replay_cache.py --tiny                     # a few seconds

Patterns of active heads come from two sources. `bundled`: the bundled model reads its text in windows of 511 tokens,
laid end to end; a head is active as `private_llm_hf/sparsity/predictor.py` says. `even` and `uneven`: 32 layers of
OPT-6.7B's shape (32 heads of 128), half of the heads active, as in the paper (section 7.3). A head is active at a share
p of the steps: 1/2 if even, drawn from 2 to 98 % for each head if uneven. It stays active for `stay` steps in the mean
and away for stay (1 - p) / p, both geometric: larger numbers are more temporal locality, `even, stays 2` is a fair
coin at every step. The paper does not say how its patterns behave in time.

Bytes are those of keys and values over all links, sums over the layers: of the refill (what comes on top of the active
heads' entries for the new token), and of both. `per entry` and `per head` differ in what a request is: one missing key
and value, or all that a head lacks. `prefetch` follows the paper's rule, `twice` asks for twice as many misses.
"""

import argparse
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import scripts_folder  # noqa: F401 - finds `bench`
import torch
from bench.rows import commit
from comet_cache.refill import RefillCost, RefillManager
from link_orders import DATA
from private_llm_cli.commands.models import demo_model, plaintext_model, tokenizer_of
from private_llm_cli.commands.output import emit_json, emit_table, progress_bar
from private_llm_cli.commands.plot import load_pyplot
from private_llm_hf.sparsity.recordings import record, recordings
from private_llm_hf.sparsity.sites import find_sites
from private_llm_hf.tools.texts import windows
from torch import Tensor

from private_llm.config import PrivateConfig

BIN = 128
"""Steps that make one number of a curve."""
STRATEGIES = ("per entry", "per head", "merged", "prefetch", "twice")


# -- patterns ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class Patterns:
    """Which heads are active: bool [layers, steps, heads], of heads of `size` in a hidden size of `width`."""

    name: str
    active: Tensor
    size: int
    width: int

    def away(self) -> float:
        """How many steps a head stays away in the mean, once it does."""
        leaves = self.active[:, :-1] & ~self.active[:, 1:]
        return int((~self.active[:, 1:]).sum()) / max(1, int(leaves.sum()) + int((~self.active[:, 0]).sum()))


def bundled(steps: int, tolerance: float) -> Patterns:
    """Of the bundled model reading the bundled text."""
    model, tokenizer = plaintext_model(demo_model()), tokenizer_of(demo_model())
    text = (DATA / "shakespeare.txt").read_text(encoding="utf-8")
    ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    longest = min(steps + 1, model.config.max_position_embeddings)
    rows = windows(ids, longest, tokenizer.bos_token_id)[: -(-steps // (longest - 1))]
    sites = find_sites(model, {"input_ids": rows[:1, :4]}, ("heads",))
    with tempfile.TemporaryDirectory() as folder:
        record(model, sites, ({"input_ids": row[None]} for row in rows), Path(folder), tolerance)
        found = [each.read(torch.arange(len(each)))[1] for each in recordings(Path(folder))]
    active = torch.stack(found).view(len(found), len(rows), longest, -1)[:, :, 1:].flatten(1, 2)[:, :steps]
    width = sites[0].width
    return Patterns(f"bundled, tolerance {tolerance:g}", active, width // active.shape[-1], width)


def generated(steps: int, stay: float, uneven: bool, layers: int, seed: int = 0) -> Patterns:
    """OPT-6.7B's 32 heads of 128, which stay active for `stay` steps in the mean; see above."""
    chance = np.random.default_rng(seed)
    share = chance.uniform(0.02, 0.98, (layers, 32)) if uneven else np.full((layers, 32), 0.5)
    comes, goes = np.minimum(share / ((1 - share) * stay), 1), 1 / stay
    state, found = chance.random(share.shape) < share, np.empty((layers, steps, 32), bool)
    for step in range(steps):
        drawn = chance.random(share.shape)
        state = np.where(state, drawn >= goes, drawn < comes)
        found[:, step] = state
    return Patterns(f"{'uneven' if uneven else 'even'}, stays {stay:g}", torch.from_numpy(found), 128, 4096)


# -- replay ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class Counts:
    """What each step does, summed over layers; int64 [steps]. Without the new token's own part, `own`.

    own: active heads. entries, heads, tokens: made and listed beside. heads_alone, tokens_alone: with a product for
    each head that lacks entries. rectangle: entries of one block for all that is listed, as SOMM's component has.
    """

    own: Tensor
    entries: Tensor
    heads: Tensor
    tokens: Tensor
    heads_alone: Tensor
    tokens_alone: Tensor
    rectangle: Tensor

    def refill(self, strategy: str, cost: RefillCost) -> Tensor:
        """Bytes beside the new token's own part, float64 [steps]."""
        heads, tokens = {
            "per entry": (self.entries, self.entries),
            "per head": (self.heads_alone, self.tokens_alone),
        }.get(strategy, (self.heads, self.tokens))
        return cost.weight * heads + cost.token * tokens + cost.entry * self.entries.double()

    def products(self, strategy: str, layers: int) -> float:
        """Products one after the other, a mean over steps and layers."""
        alone = {"per entry": self.entries, "per head": self.heads_alone}.get(strategy)
        return 1.0 if alone is None else 1.0 + float(alone.double().mean()) / layers


def replay(patterns: Patterns, prefetch: RefillCost | None, step: Callable[[str], None]) -> Counts:
    """Run the manager of each layer over its patterns."""
    layers, steps, heads = patterns.active.shape
    found = torch.zeros((7, steps), dtype=torch.int64)
    for layer in range(layers):
        manager = RefillManager(1, heads, prefetch)
        for number, active in enumerate(patterns.active[layer]):
            plan = manager.step(active[None])
            own = int(active.sum())
            lacking = (number - plan.start[0]).clamp(min=0) * active  # older entries, by active head
            tokens = max(plan.tokens - 1, 0)
            found[:, number] += torch.tensor([
                own, plan.entries - own, plan.heads - own, tokens, int((lacking > 0).sum()), int(lacking.sum()),
                (tokens + 1) * plan.heads,
            ])  # fmt: skip
        step(patterns.name)
    return Counts(*found)


@dataclass(frozen=True)
class Row:
    """One strategy under one cost. bytes: of the refill; total: with the new token's own part; dense: of all heads.

    curve: refill bytes a step, means of `BIN` steps. extra_products: local multiply-adds of one block for all that is
    listed, over those of what is wanted.
    """

    patterns: str
    layers: int
    steps: int
    active: float
    away: float
    cost: str
    strategy: str
    bytes: int
    total: int
    dense: int
    products: float
    extra_products: float
    curve: tuple[int, ...]


def costs(size: int, width: int) -> dict[str, RefillCost]:
    """The paper's count, and those of our protocols."""
    settings: Mapping[str, dict[str, str]] = {
        "dealer, remask": {"protocol": "dealer", "matmul": "remask"},
        **{name: {"protocol": name} for name in ("trio", "dealer", "quad")},
    }
    ours = {name: RefillCost.of(PrivateConfig.from_dict(given), width, size) for name, given in settings.items()}
    return {"paper": RefillCost(2 * size * width * 16, 2 * width * 16), **ours}


def rows_of(patterns: Patterns, step: Callable[[str], None]) -> list[Row]:
    """All strategies under all costs; `step` is called for each layer, five times."""
    layers, steps, heads = patterns.active.shape
    merged, rows = replay(patterns, None, step), []
    ahead: dict[tuple[str, str], Counts] = {}
    for name, cost in costs(patterns.size, patterns.width).items():
        if cost.token:  # where operands cost nothing, the rule never asks for anything
            ahead[name, "prefetch"] = replay(patterns, cost, step)
            ahead[name, "twice"] = replay(patterns, replace(cost, weight=2 * cost.weight), step)
        dense = layers * steps * (cost.weight * heads + cost.token + cost.entry * heads)
        used = patterns.active.any(2).sum(0)
        for strategy in STRATEGIES:
            counts = ahead.get((name, strategy), merged)
            refill = counts.refill(strategy, cost)
            own = (cost.weight + cost.entry) * counts.own + cost.token * used
            made = int((counts.entries + counts.own).sum())
            curve = tuple(round(float(part.mean())) for part in refill.split(BIN))
            rows.append(Row(
                patterns.name, layers, steps, float(patterns.active.double().mean()), patterns.away(), name, strategy,
                round(float(refill.sum())), round(float((refill + own).sum())), round(dense),
                counts.products(strategy, layers), int(counts.rectangle.sum()) / made, curve,
            ))  # fmt: skip
    return rows


# -- showing -----------------------------------------------------------------------------------------------------------
def times(more: float, less: float) -> str:
    """How many times as much, or a dash for nothing against nothing."""
    return f"{more / less:.2f}" if less else "-"


def megabytes(count: float) -> str:
    """Three digits or more."""
    value = count / 1e6
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def show(rows: Sequence[Row]) -> None:
    """A table for each source of patterns."""
    for name in dict.fromkeys(row.patterns for row in rows):
        mine = [row for row in rows if row.patterns == name]
        cells = []
        for cost in dict.fromkeys(row.cost for row in mine):
            each = [row for row in mine if row.cost == cost]
            _, head, merged, ahead, twice = each
            cells.append([
                cost, *(f"{megabytes(row.bytes)} ({megabytes(row.bytes / row.steps)})" for row in each),
                times(head.bytes, merged.bytes), times(merged.bytes, ahead.bytes), times(merged.bytes, twice.bytes),
                megabytes(merged.total), megabytes(merged.dense),
            ])  # fmt: skip
        entry, head = mine[:2]
        about = (
            f"{name}: {entry.layers} layers, {entry.steps} steps, {100 * entry.active:.0f} % active, away "
            f"{entry.away:.1f} steps; refill in MB, all (a step)"
        )
        heads = (
            "cost",
            *STRATEGIES,
            "head : merged",
            "merged : prefetch",
            "merged : twice",
            "merged, with own",
            "dense",
        )
        note = (
            f"products a step and layer: {entry.products:.1f} per entry, {head.products:.1f} per head, 1 merged; one "
            f"block for all that is listed: {entry.extra_products:.1f} times the multiply-adds"
        )
        emit_table(about, heads, cells, note)


def plot(rows: Sequence[Row], path: Path) -> None:
    """Refill bytes of each step, a panel for each source of patterns: the paper's cost, and trio's."""
    pyplot = load_pyplot()
    names = list(dict.fromkeys(row.patterns for row in rows))
    wide = min(3, len(names))
    high = -(-len(names) // wide)
    figure, panels = pyplot.subplots(high, wide, figsize=(3.6 * wide, 2.4 * high), layout="constrained", squeeze=False)
    lines = [("paper", strategy) for strategy in STRATEGIES[1:]] + [("trio", "merged")]
    for axes in panels.flat[len(names) :]:
        axes.set_axis_off()
    for name, axes in zip(names, panels.flat, strict=False):
        for number, (cost, strategy) in enumerate(lines):
            (row,) = (row for row in rows if (row.patterns, row.cost, row.strategy) == (name, cost, strategy))
            label = f"{cost}: {strategy}" if cost == "paper" else f"{cost}: all"
            at = [BIN * (i + 0.5) for i in range(len(row.curve))]
            line = ".-" if cost == "paper" else ".--"
            axes.plot(at, [value / 1e6 for value in row.curve], line, color=f"C{number}", markersize=4, label=label)
        axes.set(yscale="log")
        axes.set_title(name, fontsize=10)
    figure.supxlabel("step")
    figure.supylabel("refill, MB a step, all layers")
    figure.legend(*panels.flat[0].get_legend_handles_labels(), loc="outside upper center", ncols=len(lines), fontsize=9)
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def main() -> None:
    """Replay all sources of patterns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2048, help="steps of one token (default 2048)")
    parser.add_argument("--tolerance", type=float, default=0.3, help="of the bundled model's heads (default 0.3)")
    parser.add_argument("--stay", type=float, nargs="*", default=[2, 16, 64, 256], help="steps active (2 16 64 256)")
    parser.add_argument("--layers", type=int, default=32, help="generated layers (default 32)")
    parser.add_argument("--plot", type=Path, help="write a picture here")
    parser.add_argument("--json", action="store_true", help="rows as JSON instead of tables")
    parser.add_argument("--tiny", action="store_true", help="64 steps, two generated layers")
    options = parser.parse_args()
    if options.steps < 1 or options.layers < 1 or any(stay < 1 for stay in options.stay):
        raise SystemExit("--steps, --layers and --stay: want 1 or more")
    torch.set_num_threads(1)
    steps, layers = (64, 2) if options.tiny else (options.steps, options.layers)
    sources = [bundled(steps, options.tolerance)]
    sources += [generated(steps, stay, uneven, layers) for uneven in (False, True) for stay in options.stay]
    rows = []
    with progress_bar(5 * sum(len(source.active) for source in sources), quiet=options.json) as step:
        for source in sources:
            rows += rows_of(source, step)
    if options.json:
        for row in rows:
            emit_json({**asdict(row), "commit": commit()})
    else:
        show(rows)
    if options.plot is not None:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()
