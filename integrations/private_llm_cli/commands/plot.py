"""The picture of `private-llm demo --plot`: bytes per layer, and when each party computed or waited."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from private_llm.config import PrivateConfig
from private_llm.net.roles import named
from private_llm_cli.bench.record import Waiting
from private_llm_cli.commands.pyplot import load_pyplot

if TYPE_CHECKING:
    from private_llm_hf.tools.estimate import LayerCost

_COLOURS = ("#4c72b0", "#dd8452", "#55a868")


def plot_costs(
    layers: Sequence[LayerCost], waits: Sequence[Waiting], config: PrivateConfig, span: tuple[float, float], path: Path
) -> None:
    """Bars of each layer's bytes by sender; below, the parties' work in `span` (seconds of time.perf_counter)."""
    pyplot = load_pyplot()
    figure, (top, bottom) = pyplot.subplots(
        2, 1, figsize=(10, 3 + 0.25 * len(layers)), height_ratios=(max(3, len(layers)), 3), layout="constrained"
    )
    names = [layer.name for layer in layers]
    parties = [named(config, f"party {number}") for number in range(config.parties)]
    left = [0.0] * len(layers)
    for party, who in enumerate(parties):
        sent = [sum(n for (frm, _), n in layer.sent.items() if frm == party) / 1e6 for layer in layers]
        top.barh(names, sent, left=left, color=_COLOURS[party % len(_COLOURS)], label=f"{who} sends")
        left = [a + b for a, b in zip(left, sent, strict=True)]
    for row, layer in enumerate(layers):
        top.text(left[row], row, f" {layer.rounds} rounds", va="center", fontsize=8)
    top.invert_yaxis()
    top.margins(x=0.15)
    top.set_xlabel("MB over all tokens")
    top.legend()
    start, end = span
    for party in range(config.parties):
        bottom.broken_barh([(0, (end - start) * 1e3)], (party - 0.4, 0.8), color=_COLOURS[party % len(_COLOURS)])
        idle = [
            ((max(w.start, start) - start) * 1e3, (min(w.end, end) - max(w.start, start)) * 1e3)
            for w in waits
            if w.endpoint == party and w.end > start and w.start < end
        ]
        bottom.broken_barh(idle, (party - 0.4, 0.8), color="#e6e6e6", linewidth=0)
    bottom.set_yticks(range(config.parties), parties)
    bottom.set_xlabel("ms within the last token; grey: waiting")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
