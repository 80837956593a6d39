"""The picture of bench_wan.py's rows: seconds for a further token over latency, other systems' figures beside."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from private_llm_cli.commands.plot import load_pyplot
from wan_models import wan_model

from private_llm.protocol_facts import ASSISTED

USUAL_BANDWIDTH = 1000.0
"""Mbit/s that lines are drawn for."""
_COLOURS = {"gpt2": "#4c72b0", "smollm2": "#55a868", "llama-7b": "#dd8452", "llama-13b": "#c44e52"}
_OTHER = "#6b6b6b"
_WAYS = {"drafts": ", drafts from the prompt", ASSISTED: ", public weights (assisted)"}
_LEFT, _EDGE, _LAST, _RIGHT = 0.05, 0.15, 23.0, 90.0
"""Latencies at which the picture begins, known ones begin, ours end, and the picture ends."""


def plot_wan(rows: Sequence[Mapping[str, Any]], published: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Lines: ours (measured solid, modelled dashed, with drafts dotted). Points: published, at their latency.

    Published seconds of unknown networks stand at the left edge; those of systems that send one message a token are
    a thin line, since latency hardly matters to them. Ratios and passes over prompts are left out.
    """
    pyplot = load_pyplot()
    figure, panel = pyplot.subplots(figsize=(11, 6.5), layout="constrained")
    lines: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["bandwidth_mbit"] == USUAL_BANDWIDTH:
            way = row["protocol"] if row.get("protocol") == ASSISTED else row["way"]
            lines.setdefault((row["model"], row["how"], way), []).append(row)
    for (model, how, way), group in lines.items():
        group.sort(key=lambda row: row["latency_ms"])
        style = ":" if way == "drafts" else "-." if way == ASSISTED else "-" if how == "measured" else "--"
        panel.plot(
            [row["latency_ms"] for row in group], [row["seconds_per_token"] for row in group], style,
            color=_COLOURS.get(model, "black"), marker="o" if how == "measured" else "x",
            label=f"{wan_model(model).words}: {how}{_WAYS.get(way, '')}",
        )  # fmt: skip
    for row in published:
        if row["unit"] in ("token", "forward") and row["seconds"] is not None:
            _point(panel, row)
    panel.set(xscale="log", yscale="log", xlim=(_LEFT, _RIGHT), xlabel="latency between parties, ms one way",
              ylabel="seconds for a further token")  # fmt: skip
    panel.set_xticks([0.2, 1, 5, 20], ["0.2", "1", "5", "20"])
    panel.axvspan(_LEFT, _EDGE, color="#f2f2f2", zorder=0)
    note = {"fontsize": 7, "color": _OTHER, "va": "top", "transform": panel.get_xaxis_transform()}
    panel.text(_LEFT * 1.04, 0.99, "network not stated, or none", **note)
    panel.text(_LAST, 0.99, "FHE: one message each way", **note)
    panel.set_title(
        "Ours at 1 Gbit/s, prompt of 128 tokens; others as published: other machines and settings (see the table)",
        fontsize=9,
    )
    panel.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, 1.0))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _point(panel: Any, row: Mapping[str, Any]) -> None:  # noqa: ANN401 - matplotlib is not typed
    """One published figure with its name; hollow for a whole forward, which makes a token, too, and no cache."""
    name = f"{row['system']}, {row['model']}{', forward' if row['unit'] == 'forward' else ''}"
    if row["latency_ms"] == 0 and row["unit"] == "token":
        panel.plot([_EDGE, _RIGHT], [row["seconds"]] * 2, color=_OTHER, linewidth=0.7, linestyle=(0, (1, 3)))
        panel.text(_LAST, row["seconds"], name, fontsize=7, color=_OTHER, va="bottom")
        return
    place = row["latency_ms"] or _LEFT * 1.15
    panel.plot([place], [row["seconds"]], "o", color=_OTHER, mfc="none" if row["unit"] == "forward" else _OTHER)
    panel.text(place * 1.08, row["seconds"], name, fontsize=7, color=_OTHER, va="center")
