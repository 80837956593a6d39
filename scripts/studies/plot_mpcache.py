"""Pictures of bench_mpcache.py: a token's bytes and seconds by policy, as MPCache's Figures 10, 11 and 13."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from private_llm_cli.commands.plot import load_pyplot


def plot_mpcache(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """A panel by kind, model and protocol: bars of bytes, a full cache's first; beside it milliseconds, if any."""
    pyplot = load_pyplot()
    panels: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["kind"] not in ("layer", "alone"):
            panels.setdefault((row["kind"], row["model"], row["protocol"]), []).append(row)
    columns = 1 + any("seconds" in row for group in panels.values() for row in group)
    figure, axes = pyplot.subplots(
        len(panels), columns, figsize=(6.5 * columns, 2.5 + 2.8 * len(panels)), squeeze=False, layout="constrained"
    )
    for (name, group), beside in zip(panels.items(), axes, strict=True):
        labels, sizes, times = _bars(group)
        drawn = (
            ([value / 1e6 for value in sizes], "#4c72b0", "MB of a token, attention part"),
            ([value * 1e3 for value in times], "#dd8452", "ms, 0: not measured"),
        )
        for panel, (values, color, unit) in zip(beside, drawn, strict=False):
            panel.barh(labels, values, color=color)
            panel.invert_yaxis()
            panel.set_xlabel(unit)
            panel.set_title(", ".join(name))
            panel.tick_params(axis="y", labelsize=7)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _bars(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[float], list[float]]:
    """Names, bytes and seconds: at each length the full cache first."""
    labels: list[str] = []
    sizes: list[float] = []
    times: list[float] = []
    for row in sorted(rows, key=lambda each: each["tokens"]):
        seen = f"{row['tokens']}: full"
        if seen not in labels:
            labels.append(seen)
            sizes.append(row["full_bytes"])
            times.append(row.get("full_seconds", {}).get("median", 0.0))
        labels.append(f"{row['tokens']}: {row['label']}")
        sizes.append(row["bytes"])
        times.append(row.get("seconds", {}).get("median", 0.0))
    return labels, sizes, times
