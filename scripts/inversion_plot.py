"""The picture of what `train_inversion.py --out` collected: recovered text over c, alpha, layer and m."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from private_llm_cli.commands.pyplot import load_pyplot

Rows = Sequence[dict[str, Any]]

COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52")
SCORES = (("rouge_l", "ROUGE-L, whole text"), ("unheld_exact", "exact tokens where not held"))


def plot(rows: Rows, path: Path) -> None:
    """Four columns: c and alpha at layer 0 and layer 1, layers, AttnNodes by m. Dashed: the guess without learning."""
    pyplot = load_pyplot()
    # The picture is of attackers that were trained on several plans at once; a note marks rows of another kind.
    rows = [row for row in rows if row["name"] == "inversion" and not row["note"]]
    comp = [row for row in rows if row["node"] == "any CompNode"]
    panels: list[tuple[str, Rows, Callable[[Any], Any], Callable[[Any], str], str]] = [
        (f"CompNode, layer {layer}", [r for r in comp if r["layers"] == [layer]], _of("alpha"), _named("c"), "alpha")
        for layer in (0, 1)
    ]
    # The paper's Table 9 has plans with c = alpha.
    square = sorted(
        (r for r in comp if r["plan"]["c"] == r["plan"]["alpha"]), key=lambda r: (len(r["layers"]), r["layers"])
    )
    panels.append(("CompNode, by layer", square, _layers, _named("alpha", "c"), "layer"))
    attn = [r for r in rows if r["node"] == "any AttnNode"]
    panels.append(("AttnNode, by m", attn, _of("m"), _named("alpha", "c"), "m"))
    figure, axes = pyplot.subplots(2, 4, figsize=(13, 6), sharey="row", layout="constrained", squeeze=False)
    for line, (score, label) in enumerate(SCORES):
        for place, (title, chosen, across, name, unit) in zip(axes[line], panels, strict=True):
            _panel(place, chosen, across, name, score)
            place.set_title(title if line == 0 else "")
            place.set_xlabel(unit)
            place.set_ylim(bottom=0)
        axes[line][0].set_ylabel(label)
    figure.supxlabel("points: the learned attack; dashed: held tokens, elsewhere the commonest token", fontsize=9)
    figure.savefig(path, dpi=75)
    pyplot.close(figure)


def _panel(axes: Any, rows: Rows, across: Callable[[Any], Any], name: Callable[[Any], str], score: str) -> None:  # noqa: ANN401 - matplotlib is not typed
    for colour, line in zip(COLOURS, sorted({name(row) for row in rows}), strict=False):
        chosen = [row for row in rows if name(row) == line]
        if not isinstance(across(chosen[0]), str):
            chosen.sort(key=across)
        places = [across(row) for row in chosen]
        axes.plot(places, [row["attack"][score] for row in chosen], "o-", color=colour, label=line)
        axes.plot(places, [row["floor"][score] for row in chosen], "--", color=colour, linewidth=1)
    if rows:
        axes.set_xticks(list(dict.fromkeys(across(row) for row in rows)))
        axes.legend(fontsize=8)


def _of(key: str) -> Callable[[Any], Any]:
    return lambda row: row["plan"][key]


def _layers(row: Any) -> str:  # noqa: ANN401 - a row of JSON
    return "+".join(str(layer) for layer in row["layers"])


def _named(*keys: str) -> Callable[[Any], str]:
    return lambda row: ", ".join(f"{key} = {row['plan'][key]}" for key in keys)
