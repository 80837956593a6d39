"""The picture of bench_cascade.py: the busiest CompNode's time for each plan, and time against parameters."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from private_llm_cli.commands.plot import load_pyplot

_COMPUTES, _SENDS, _WAITS = "#4c72b0", "#dd8452", "#e6e6e6"
_OURS, _REFERENCE = "#4c72b0", "#b0b0b0"


def plot_cascade(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Left: the busiest CompNode's time for each plan. Right: time against parameters (rows of cascade_rows.py)."""
    pyplot = load_pyplot()
    nodes = [row for row in rows if row["split"] is not None]
    sizes = [row for row in rows if row["name"] == "cascade-size"]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 2 + 0.4 * max(4, len(nodes))), layout="constrained")
    starts = [0.0] * len(nodes)
    for name, colour in (("computing", _COMPUTES), ("serialising", _SENDS), ("waiting", _WAITS)):
        widths = [1e3 * row["split"]["comp"][name] for row in nodes]
        left.barh(range(len(nodes)), widths, left=starts, color=colour, label=name)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    plaintext = [1e3 * row["vanilla_seconds"]["median"] for row in nodes]
    left.plot(plaintext, range(len(nodes)), "k|", markersize=14, label="plaintext forward")
    left.set_yticks(range(len(nodes)), [row["label"] for row in nodes])
    left.invert_yaxis()
    left.set_xlabel("ms of a forward at the busiest CompNode")
    left.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4)
    for name, column in (("sharded over two CompNodes", "seconds"), ("plaintext", "vanilla_seconds")):
        spots = [row["parameters"] for row in sizes], [row[column]["median"] for row in sizes]
        right.loglog(*spots, "o-", color=_OURS if column == "seconds" else _REFERENCE, label=name)
    right.set_xlabel("parameters")
    right.set_ylabel("seconds")
    right.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
