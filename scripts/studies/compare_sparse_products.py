"""Bytes of products that skip what is known to be zero: SOMM and SIMM beside GEMM and SpGEMM (Comet, Figure 18).

    python scripts/studies/compare_sparse_products.py  # the tables of docs/studies/sparse-products.md
    python scripts/studies/compare_sparse_products.py --plot picture.png  # and a picture
    python scripts/studies/compare_sparse_products.py --json              # rows
    python scripts/studies/compare_sparse_products.py --tiny              # three levels, one layer of the bundled model

FC1 and FC2 of OPT-6.7B at 512 positions and at one, ten levels of sparsity, by the formulas of the protocols
(tests/system/test_compare_sparse_products.py holds them against real runs). Activity is that of

    shared   neurons that are active at all positions or at none
    bundled  the bundled model: its neurons with the largest values before the activation, at 512 positions of a text
    random   every neuron and position by itself

SpGEMM masks the operands of every product anew: of every wanted output (FC1), of every entry that is not zero (FC2,
where products are summed before the one exchange that each output needs).
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from link_orders import before_activation, bundled
from private_llm_cli.commands.output import emit_json
from private_llm_cli.commands.plot import load_pyplot
from torch import Tensor

from private_llm.net.ledger import Cost
from private_llm.protocols.prices import Prices
from private_llm.protocols.registry import dealer_prices as dealer
from private_llm.protocols.registry import trio_prices as trio
from private_llm.ring.ring import RING64

FRAC = 18
LEVELS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.99)
POSITIONS = 512
WIDTH, NEURONS = 4096, 16384
"""Of OPT-6.7B."""
SETTINGS: dict[str, tuple[Prices, bool]] = {
    "dealer, remask": (dealer, True),
    "dealer": (dealer, False),
    "trio": (trio, False),
}
"""Prices, and whether both operands are masked anew for each product."""
SHOWN = ("dealer, remask", "trio")
"""Dealer's bytes are trio's where it does not mask operands again."""


@dataclass(frozen=True)
class Activity:
    """Which of positions x neurons are active, as counts: all, positions with any, neurons with any."""

    positions: int
    neurons: int
    active: int
    rows: int
    columns: int


@dataclass(frozen=True)
class Row:
    """Bytes over all links of one layer. ratio: bytes of GEMM over these."""

    setting: str
    pattern: str
    positions: int
    sparsity: float
    layer: str
    method: str
    bytes: int
    ratio: float


def counted(active: Tensor) -> Activity:
    """Of a pattern, bool [positions, neurons]."""
    rows, columns = int(active.any(1).sum()), int(active.any(0).sum())
    return Activity(*active.shape, int(active.sum()), rows, columns)


def total(prices: Prices, remask: bool, outputs: int, *operands: int) -> int:
    """A product with so many outputs, with operands of so many elements."""
    masks = dealer.remask(RING64, *operands) if remask else Cost()
    return (masks + prices.product(RING64, outputs, FRAC)).total if outputs else 0


def methods_fc1(prices: Prices, remask: bool, a: Activity, width: int) -> dict[str, int]:
    """x [positions, width] times [width, neurons], active outputs wanted."""
    return {
        "GEMM": total(prices, remask, a.positions * a.neurons, a.positions * width, width * a.neurons),
        "SOMM": total(prices, remask, a.active, a.rows * width, width * a.columns),
        "SpGEMM": total(prices, remask, a.active, a.active * width, a.active * width),
    }


def methods_fc2(prices: Prices, remask: bool, a: Activity, width: int) -> dict[str, int]:
    """x [positions, neurons], zero where not active, times [neurons, width]."""
    outputs = a.rows * width
    return {
        "GEMM": total(prices, remask, a.positions * width, a.positions * a.neurons, a.neurons * width),
        "SIMM": total(prices, remask, outputs, a.active, a.columns * width),
        "SpGEMM": total(prices, remask, outputs, a.active, a.active * width),
    }


def patterns(level: float, values: Sequence[Tensor], chance: np.random.Generator) -> dict[str, list[Activity]]:
    """Activity at a sparsity, by name; of the bundled model one for each layer, scaled to the neurons of OPT-6.7B."""
    random = counted(torch.from_numpy(chance.random((POSITIONS, NEURONS)) >= level))
    share = round((1 - level) * NEURONS)
    found = {"shared": [Activity(POSITIONS, NEURONS, POSITIONS * share, POSITIONS, share)], "random": [random]}
    found["bundled"] = [scaled(counted(most_active(layer, level)), NEURONS) for layer in values]
    found["one position"] = [Activity(1, NEURONS, share, 1, share)]
    return found


def most_active(values: Tensor, level: float) -> Tensor:
    """The largest of these values, as many as a sparsity leaves: bool, in their shape."""
    flat = values.reshape(-1)
    chosen = flat.topk(round((1 - level) * flat.numel())).indices
    return torch.zeros_like(flat, dtype=torch.bool).index_fill_(0, chosen, True).view(values.shape)


def scaled(a: Activity, neurons: int) -> Activity:
    """The same shares of more neurons."""
    return Activity(a.positions, neurons, a.active * neurons // a.neurons, a.rows, a.columns * neurons // a.neurons)


def recorded(layers: int | None) -> list[Tensor]:
    """What the activation of each layer of the bundled model receives at 512 positions of a text: [512, 1024]."""
    model, sites, _, unknown = bundled()
    values = before_activation(model, sites[:layers], unknown[: POSITIONS // 64])
    return [values[site.layer][:POSITIONS] for site in sites[:layers]]


def rows_of(level: float, values: Sequence[Tensor]) -> list[Row]:
    """All methods on all patterns in all settings, the mean over layers of the bundled model."""
    found = []
    kinds = patterns(level, values, np.random.default_rng(0))
    for setting, (prices, remask) in SETTINGS.items():
        for pattern, activities in kinds.items():
            for layer, methods in (("FC1", methods_fc1), ("FC2", methods_fc2)):
                each = [methods(prices, remask, activity, WIDTH) for activity in activities]
                mean = {name: round(sum(one[name] for one in each) / len(each)) for name in each[0]}
                found += [
                    Row(setting, pattern, activities[0].positions, level, layer, name, size, mean["GEMM"] / size)
                    for name, size in mean.items()
                ]
    return found


def size(count: float) -> str:
    """Megabytes, or gigabytes from a thousand on."""
    return f"{count / 1e6:.3g} MB" if count < 999.5e6 else f"{count / 1e9:,.3g} GB"


def table(rows: Sequence[Row], setting: str, positions: int) -> str:
    """Markdown: a line for each level."""
    mine = [row for row in rows if row.setting == setting and row.positions == positions]
    columns = list(dict.fromkeys((row.layer, row.method, row.pattern) for row in mine if row.method != "GEMM"))
    # what a method costs at patterns that it does not tell apart is one column
    columns = sorted(key for key in columns if key[1] != "SpGEMM" or key[2] in ("shared", "one position"))
    dense = {row.layer: row.bytes for row in mine if row.method == "GEMM"}
    heads = [f"{layer} {method}" + ("" if method == "SpGEMM" else f", {pattern}") for layer, method, pattern in columns]
    title = f"{setting}, {positions} positions; GEMM: " + ", ".join(f"{k} {size(v)}" for k, v in dense.items())
    lines = [title, "", f"| sparsity | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for level in sorted({row.sparsity for row in mine}):
        at = {(row.layer, row.method, row.pattern): row for row in mine if row.sparsity == level}
        cells = [f"{size(at[key].bytes)}, {times(at[key].ratio)}" for key in columns]
        lines.append(f"| {100 * level:.0f} % | {' | '.join(cells)} |")
    return "\n".join(lines)


def times(ratio: float) -> str:
    """How many times fewer bytes than GEMM, or more."""
    if ratio < 0.95:
        return f"1/{1 / ratio:.3g}"
    return f"{ratio:.2g}x" if ratio < 9.95 else f"{ratio:.0f}x"


def plot(rows: Sequence[Row], path: Path) -> None:
    """Bytes against sparsity: both layers where operands are masked again, and FC1 under trio."""
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(1, 3, figsize=(12, 4), layout="constrained", sharey=True)
    panels = (("dealer, remask", "FC1"), ("dealer, remask", "FC2"), ("trio", "FC1"))
    for axis, (setting, layer) in zip(axes, panels, strict=True):
        mine = [row for row in rows if (row.setting, row.layer, row.positions) == (setting, layer, POSITIONS)]
        for method in dict.fromkeys(row.method for row in mine):
            each = ("shared",) if method in ("GEMM", "SpGEMM") else ("shared", "bundled", "random")
            for number, pattern in enumerate(each):
                points = [row for row in mine if (row.method, row.pattern) == (method, pattern)]
                label = method if len(each) == 1 else f"{method}, {pattern}"
                line: dict[str, Any] = {"linestyle": ("-", "--", ":")[number], "marker": "o", "markersize": 3}
                axis.plot([100 * p.sparsity for p in points], [p.bytes / 1e9 for p in points], label=label, **line)
        axis.set(xlabel="sparsity, %", yscale="log", title=f"{layer}, {setting}")
        axis.legend(fontsize=8)
    axes[0].set_ylabel("GB over all links, 512 positions")
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, help="write a picture here")
    parser.add_argument("--json", action="store_true", help="rows as JSON instead of tables")
    parser.add_argument("--tiny", action="store_true", help="three levels, one layer of the bundled model")
    options = parser.parse_args()
    torch.set_num_threads(1)
    values = recorded(1 if options.tiny else None)
    rows = [row for level in (LEVELS[::4] if options.tiny else LEVELS) for row in rows_of(level, values)]
    if options.json:
        for row in rows:
            emit_json(asdict(row))
    else:
        print("\n\n".join(table(rows, setting, positions) for setting in SHOWN for positions in (POSITIONS, 1)))
    if options.plot is not None:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()
