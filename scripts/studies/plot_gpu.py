"""The picture of one token's time on a GPU, before and now, from rows of bench_gpu.py."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpu_compared import PARTS
from private_llm_cli.commands.plot import load_pyplot

_COLOURS = ("#4c72b0", "#c44e52", "#55a868", "#b0b0b0", "#8172b3", "#dd8452")
_BUSY, _IDLE = "#2a9d8f", "#eeeeee"


def plot_gpu(before: Mapping[str, Any] | None, now: Mapping[str, Any] | None, path: Path) -> None:
    """Two bars each: a party's thread by part (the parties' mean), and how long the GPU is busy meanwhile.

    before, now: `parts` and `busy` in milliseconds and their `source`; None: not measured, and left out.
    """
    pyplot = load_pyplot()
    figure, panel = pyplot.subplots(figsize=(10, 3.2), layout="constrained")
    names: list[str] = []
    for words, row in (("before", before), ("now", now)):
        if row is None:
            continue
        start = 0.0
        for part, colour in zip(PARTS, _COLOURS, strict=True):
            width = row["parts"].get(part, 0.0)
            panel.barh(len(names), width, left=start, color=colour, label=part)
            start += width
        names.append(f"{words}: a party's thread")
        if row["busy"] is not None:
            panel.barh(len(names), row["busy"], color=_BUSY, label="the GPU is busy")
            panel.barh(
                len(names), max(0.0, start - row["busy"]), left=row["busy"], color=_IDLE, label="the GPU is idle"
            )
            names.append(f"{words}: the GPU")
    panel.set_yticks(range(len(names)), names)
    panel.invert_yaxis()
    panel.set_xlabel("ms of one token, one layer of LLaMA-7B's sizes, three parties on one GPU")
    handles, labels = panel.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    panel.legend(once.values(), once.keys(), loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
