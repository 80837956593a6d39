"""Where predicted sparsity pays: dense runs beside Comet's, for the models of its paper (docs/studies/comet.md).

    python scripts/studies/comet_tables.py  # tables and pictures of docs/studies/comet.md, a quarter of an hour
    python scripts/studies/comet_tables.py --only summary blocks  # these tables alone
    python scripts/studies/comet_tables.py --tiny                  # small shapes, printed

No weights and no predictors: the ordinary code runs on meta tensors, with the paper's shares of neurons and heads left
out at each position. Times are the estimator's: one latency a round, the busiest link's bytes, the busiest party's
multiply-adds, one after the other.
"""

import argparse
import functools
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from comet_runs import BLOCK, SETTINGS, SPARSITY, Counter, Sizes, planned, sizes, ways
from private_llm_cli.commands.output import progress_bar
from private_llm_cli.commands.plot import load_pyplot
from private_llm_hf.client.costs import Costs
from private_llm_hf.sparsity.price import PlannedSparsity
from private_llm_hf.tools.estimate import Estimate, LayerCost

STUDIES = Path(__file__).resolve().parents[2] / "docs" / "studies"
PAGE = STUDIES / "comet.md"
MBIT, LATENCY_MS, GMACS = 1000.0, 1.0, 40.0
"""A link, one way, and billion multiply-adds a second of a party (two cores of a Zen 5 EPYC)."""
BANDWIDTHS = (100, 500, 1000, 5000)
FUNCTIONS = {"ours": "ours", "PUMA": "puma", "MPCFormer": "mpcformer", "SecFormer": "secformer"}
"""Softmax and activations of other systems, under trio."""
TWO = ("dealer, remask", "trio")
"""The paper's protocol and ours, where two are enough."""


# -- figures ---------------------------------------------------------------------------------------------------------
def seconds(found: Estimate, mbit: float = MBIT) -> float:
    """Of a whole run."""
    return sum(layer.seconds(mbit, LATENCY_MS, GMACS) for layer in found.layers())


def row_of(scope: str, op: str) -> str:
    """The paper's row (Table 2) for what a module books; up and gate count as FC1, down as FC2."""
    if "_predictor" in scope:
        return "Predictor"
    inside, last = scope.split("."), scope.rpartition(".")[2]
    if last.startswith(("q_proj", "k_proj", "v_proj")):
        return "QKV"
    if last in ("out_proj", "o_proj"):
        return "Output"
    if last.startswith(("fc1", "gate_proj", "up_proj")):
        return "FC1"
    if last in ("fc2", "down_proj"):
        return "FC2"
    if last in ("activation_fn", "act_fn"):
        return "ReLU"
    if "self_attn" in inside:
        return "MatMul" if op == "matmul" else "Softmax"
    return "Others"


ROWS = ("QKV", "MatMul", "Softmax", "Output", "FC1", "ReLU", "FC2", "Others", "Predictor")


def by_row(costs: Costs) -> dict[str, LayerCost]:
    """A run's costs by the paper's rows; the products of attention count as MatMul's."""
    sent: dict[str, dict[tuple[int, int], int]] = defaultdict(lambda: defaultdict(int))
    rounds: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    macs: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for ledger in costs.ledgers:
        for (scope, op, to), count in ledger.sent.items():
            sent[row_of(scope, op)][(ledger.party, to)] += count
        for (scope, op), count in ledger.rounds.items():
            rounds[row_of(scope, op)][ledger.party] += count
        for scope, count in ledger.macs.items():
            macs[row_of(scope, "matmul")][ledger.party] += count
    return {row: LayerCost(row, dict(sent[row]), max(rounds[row].values(), default=0), dict(macs[row])) for row in ROWS}


def gigabytes(count: float) -> str:
    """Three digits."""
    value = count / 1e9
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def table(headings: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Markdown."""
    head = list(headings)
    lines = [head, ["---"] * len(head), *[[str(cell) for cell in row] for row in rows]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def price(found: Estimate) -> str:
    """Gigabytes and minutes."""
    return f"{gigabytes(found.costs.bytes_total)}, {seconds(found) / 60:.1f}"


# -- tables ----------------------------------------------------------------------------------------------------------
def overall(count: Counter) -> str:
    """Every model under every protocol."""
    rows = []
    for label in count.size.models:
        for setting in SETTINGS:
            dense = count.run(label, setting, None)
            cells: list[object] = [label, setting]
            for way, plan in ways(label, count.size).items():
                found = count.run(label, setting, plan)
                share, faster = dense.costs.bytes_total / found.costs.bytes_total, seconds(dense) / seconds(found)
                more = "" if way == "dense" else f" ({share:.2f}x, {faster:.2f}x)"
                cells.append(f"{price(found)}{more}")
            rows.append(cells)
    return table(["model", "protocol", *(f"{way}: GB, min" for way in ways(count.size.main, count.size))], rows)


def rows_table(count: Counter, setting: str) -> str:
    """The paper's Table 2."""
    rows: dict[str, list[object]] = {name: [name] for name in ROWS}
    labels = list(count.size.models)[-2:]
    for label in labels:
        dense, comet = (by_row(count.run(label, setting, way).costs) for way in (None, planned(label, count.size)))
        for name, cells in rows.items():
            one, other = dense[name], comet[name]
            time = [each.seconds(MBIT, LATENCY_MS, GMACS) for each in (one, other)]
            size = [each.bytes_total for each in (one, other)]
            cells.append(f"{time[0]:.1f}, {time[1]:.1f}{_times(*time)}")
            cells.append(f"{gigabytes(size[0])}, {gigabytes(size[1])}{_times(*size)}")
    headings = [f"{label}: dense, Comet, {unit}" for label in labels for unit in ("s", "GB")]
    return table(["layer", *headings], rows.values())


def _times(one: float, other: float) -> str:
    return f" ({one / other:.2f}x)" if one and other else ""


def bandwidths(count: Counter) -> str:
    """The paper's Table 1: one token after the prompt."""
    rows = []
    for label in list(count.size.models)[-2:]:
        for setting in SETTINGS:
            by_name = ways(label, count.size)
            plans = (by_name[name] for name in ("dense", "Comet", f"blocks of {BLOCK}, budgets"))
            found = [run for plan in plans if (run := count.run(label, setting, plan).prompt) is not None]
            minutes = (", ".join(f"{seconds(run, mbit) / 60:.1f}" for run in found) for mbit in BANDWIDTHS)
            rows.append([label, setting, *minutes])
    return table(["model", "protocol", *(f"{mbit} Mbit/s" for mbit in BANDWIDTHS)], rows)


def lengths(count: Counter, settings: Iterable[str]) -> dict[str, dict[int, tuple[Estimate, Estimate]]]:
    """Dense and Comet for each number of tokens, the paper's Figure 12."""
    label = count.size.main
    return {
        setting: {
            new: (count.run(label, setting, None, new), count.run(label, setting, planned(label, count.size), new))
            for new in count.size.lengths
        }
        for setting in settings
    }


def variants(count: Counter) -> dict[str, tuple[PlannedSparsity | None, bool]]:
    """The parts that are taken away (Figure 15), and whether FC2 is dense."""
    label, size = count.size.main, count.size
    return {
        "dense": (None, False),
        "Comet, open levels": (planned(label, size), False),
        "without heads": (planned(label, size, heads=None), False),
        "without neurons": (planned(label, size, neurons=None), False),
        "FC2 dense": (planned(label, size), True),
        "budgets": (planned(label, size, levels="budget"), False),
    }


def ablation(count: Counter) -> dict[str, dict[str, Estimate]]:
    """Each variant under the paper's protocol and ours."""
    made: dict[str, dict[str, Estimate]] = {}
    for name, (plan, whole_fc2) in variants(count).items():
        for setting in TWO:
            found = count.run(count.size.main, setting, plan, whole_fc2=whole_fc2)
            made.setdefault(name, {})[setting] = found
    return made


def ablation_table(count: Counter) -> str:
    """In numbers."""
    rows = [[name, *map(price, by_setting.values())] for name, by_setting in ablation(count).items()]
    return table([f"{count.size.main}: GB, min", *TWO], rows)


def blocks_table(count: Counter) -> str:
    """Blocks by their size and the share of blocks that is active, under trio."""
    label, size = count.size.main, count.size
    active = 1 - SPARSITY[label][0]
    rows = []
    for block in (1, 16, 32, 64):
        cells: list[object] = [block]
        for levels in ("open", "budget"):
            for share in (active, 2 * active, 3 * active):
                if block == 1 and share != active:
                    cells.append("")
                    continue
                way = planned(label, size, block=block, neurons=max(0.0, 1 - share), levels=levels)
                found = count.run(label, "trio", way)
                cells.append(price(found))
        rows.append(cells)
    shares = [f"{share * active:.0%}" for share in (1, 2, 3)]
    return table(
        ["neurons a block: GB, min", *(f"{levels}, {share}" for levels in ("open", "budget") for share in shares)], rows
    )


def functions_table(count: Counter) -> str:
    """Other systems' functions on this engine, and Comet beside them: the paper's Figures 12 and 14."""
    sparse = {name: way for name, way in list(ways(count.size.main, count.size).items())[1:] if "with" not in name}
    rows = []
    for label in count.size.models:
        if label == "OPT-2.7B":
            continue
        found = [count.run(label, "trio", None, functions=name) for name in FUNCTIONS.values()]
        found += [count.run(label, "trio", ways(label, count.size)[name]) for name in sparse]
        rows.append([label, *map(price, found)])
    return table(["trio: GB, min", *FUNCTIONS, *sparse], rows)


def summary(count: Counter) -> str:
    """What the tables come to, in the paper's setting and ours."""
    lines = []
    for label in list(count.size.models)[-2:]:
        for setting in TWO:
            dense = count.run(label, setting, None)
            cells = []
            for way in ("Comet", f"blocks of {BLOCK}, budgets"):
                found = count.run(label, setting, ways(label, count.size)[way])
                share, faster = dense.costs.bytes_total / found.costs.bytes_total, seconds(dense) / seconds(found)
                cells.append(f"{gigabytes(found.costs.bytes_total)} ({share:.1f}x, in time {faster:.1f}x)")
            lines.append([label, setting, gigabytes(dense.costs.bytes_total), *cells])
    return table(["GB", "protocol", "dense", "Comet", f"blocks of {BLOCK}, budgets"], lines)


TABLES: dict[str, Callable[[Counter], str]] = {
    "summary": summary,
    "overall": overall,
    "rows-remask": functools.partial(rows_table, setting="dealer, remask"),
    "rows-trio": functools.partial(rows_table, setting="trio"),
    "bandwidths": bandwidths,
    "ablation": ablation_table,
    "functions": functions_table,
    "blocks": blocks_table,
}  # fmt: skip


_BREAK = ",\n"


# -- pictures --------------------------------------------------------------------------------------------------------
def pictures(count: Counter, folder: Path) -> None:
    """comet-lengths.png, comet-breakdown.png and comet-ablation.png."""
    pyplot = load_pyplot()
    for draw in (draw_lengths, draw_breakdown, draw_ablation):
        draw(count, folder, pyplot)
    pyplot.close("all")


def draw_lengths(count: Counter, folder: Path, pyplot: Any) -> None:  # noqa: ANN401 - matplotlib is not typed
    """Minutes by tokens made."""
    found = lengths(count, TWO)
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for axis, (setting, by_length) in zip(axes, found.items(), strict=True):
        for place, way in enumerate(("dense", "Comet")):
            times = [seconds(pair[place]) / 60 for pair in by_length.values()]
            axis.plot(list(map(str, by_length)), times, marker="o", label=way)
        axis.set(title=f"{count.size.main}, {setting}", xlabel="tokens made", ylabel="minutes", ylim=(0, None))
        axis.legend()
    figure.savefig(folder / "comet-lengths.png", dpi=80)


def draw_breakdown(count: Counter, folder: Path, pyplot: Any) -> None:  # noqa: ANN401
    """Shares of the bytes by the paper's rows."""
    figure, axis = pyplot.subplots(figsize=(9, 3.6), layout="constrained")
    pairs = {
        f"{setting.replace(', ', _BREAK)}\n{way}": by_row(count.run(count.size.main, setting, plan).costs)
        for setting in SETTINGS
        for way, plan in (("dense", None), ("Comet", planned(count.size.main, count.size)))
    }
    bottom = [0.0] * len(pairs)
    for name in ROWS:
        shares = [
            100 * costs[name].bytes_total / sum(each.bytes_total for each in costs.values())
            for costs in pairs.values()
        ]  # fmt: skip
        axis.bar(list(pairs), shares, bottom=bottom, label=name)
        bottom = [low + share for low, share in zip(bottom, shares, strict=True)]
    axis.set(title=f"{count.size.main}: where the bytes are", ylabel="% of the bytes")
    axis.tick_params(axis="x", labelsize=8)
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(folder / "comet-breakdown.png", dpi=80)


def draw_ablation(count: Counter, folder: Path, pyplot: Any) -> None:  # noqa: ANN401
    """Minutes without each part."""
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.2), layout="constrained", sharey=True)
    made = ablation(count)
    for axis, setting in zip(axes, TWO, strict=True):
        axis.barh(list(made), [seconds(by_setting[setting]) / 60 for by_setting in made.values()])
        axis.set(title=f"{count.size.main}, {setting}", xlabel="minutes")
    axes[0].invert_yaxis()
    figure.savefig(folder / "comet-ablation.png", dpi=80)


def main() -> None:
    """Count, and write the page's tables or print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small shapes; print instead of writing")
    parser.add_argument("--only", nargs="+", choices=list(TABLES), help="make these tables and no picture")
    options = parser.parse_args()
    size = sizes(options.tiny)
    with progress_bar(None if options.only else _runs(size)) as step:
        count = Counter(size, lambda what: step(what))
        for name in options.only or TABLES:
            text = TABLES[name](count)
            if options.tiny:
                print(f"{name}\n{text}\n")
            else:
                write(name, text)
        if not options.tiny and not options.only:
            pictures(count, STUDIES)


def write(name: str, text: str) -> None:
    """Put a table in its place in the page."""
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(start)
    PAGE.write_text(f"{before}{start}\n{text}\n{end}{rest.partition(end)[2]}", encoding="utf-8")
    print(f"wrote {name} of {PAGE}", flush=True)


def _runs(size: Sizes) -> int:
    """Estimates that are made: models, protocols and ways; lengths; variants; blocks; other functions."""
    return len(size.models) * 16 + 4 * (len(size.lengths) - 1) + 8 + 18 + 12


if __name__ == "__main__":
    main()
