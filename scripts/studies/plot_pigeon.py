"""The picture of bench_pigeon.py: seconds and megabytes of each row, with the aim and the C++ reference."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from private_llm_cli.commands.plot import load_pyplot

_OURS, _AIM, _REFERENCE = "#4c72b0", "#55a868", "#b0b0b0"


def plot_pigeon(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Seconds and megabytes of each row, with aim and C++ reference (rows as `pigeon_rows.Job.to_dict` makes them)."""
    pyplot = load_pyplot()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 1.5 + 0.55 * len(rows)), layout="constrained")
    labels = [f"{row['label']}, {row['ring']} bits, {row['protocol']}" for row in rows]
    columns = {
        "here": ([row["seconds"]["median"] for row in rows], [row["bytes_total"] for row in rows], _OURS),
        "aim": ([row["aim_seconds"] for row in rows], [row["aim_bytes"] for row in rows], _AIM),
        f"C++ reference, {rows[0]['reference_machine']}": (
            [row["reference_seconds"] for row in rows], [row["reference_bytes"] for row in rows], _REFERENCE,
        ),
    }  # fmt: skip
    for place, (name, (seconds, sizes, colour)) in enumerate(columns.items()):
        if seconds[0] is None:
            continue  # other shapes than the reference's
        spots = [index + 0.27 * (place - 1) for index in range(len(rows))]
        left.barh(spots, [value or 0 for value in seconds], height=0.25, color=colour, label=name)
        right.barh(spots, [0 if size is None else size / 1e6 for size in sizes], height=0.25, color=colour)
    lowest = [row["seconds"]["min"] for row in rows]
    spread = [[m - low for m, low in zip(columns["here"][0], lowest, strict=True)],
              [row["seconds"]["max"] - row["seconds"]["median"] for row in rows]]  # fmt: skip
    left.errorbar(columns["here"][0], [i - 0.27 for i in range(len(rows))], xerr=spread, fmt="none", ecolor="black")
    for axes, unit in ((left, "seconds"), (right, "MB over all links")):
        axes.set_xscale("log")
        axes.set_xlabel(unit)
        axes.set_yticks(range(len(rows)), labels if axes is left else [""] * len(rows))
        axes.invert_yaxis()
    figure.legend(loc="outside lower right", ncols=3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
