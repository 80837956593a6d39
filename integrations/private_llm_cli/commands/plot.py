"""Pictures of `private-llm demo --plot` and `bench --plot`: bytes per layer, and when each party computed or waited."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from private_llm.config import PrivateConfig
from private_llm.net.roles import named
from private_llm_cli.bench.record import Waiting

if TYPE_CHECKING:
    from private_llm_hf.tools.estimate import LayerCost
import os
from collections.abc import Iterator
from typing import Any

from private_llm.errors import ConfigError
from private_llm_cli.bench.record import RecordingMesh

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


# -- The picture of `private-llm bench --plot`: what each party did in one run ----------------------------------------
_COMPUTES, _SENDS, _WAITS = "#4c72b0", "#dd8452", "#e6e6e6"
_ENDINGS = (".png", ".svg", ".pdf")

Span = tuple[float, float]


def check_name(path: Path) -> None:
    """Before any work: raises ConfigError for a name of no picture, a place that takes no file, or no matplotlib."""
    if path.suffix not in _ENDINGS:
        raise ConfigError(f"plot: got {path.name!r}; want a name that ends in {', '.join(_ENDINGS)}")
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(f"plot: cannot write {str(path)!r}; want a new or old file in a folder that you may write to")
    load_pyplot()


def plot_timeline(mesh: RecordingMesh, config: PrivateConfig, title: str, span: Span, path: Path) -> None:
    """One band for each parallel session of each party: computing or waiting; below it what was on the party's
    wires."""
    pyplot = load_pyplot()
    parallel_sessions = config.parallel_sessions
    figure, axes = pyplot.subplots(
        figsize=(11, 1.5 + config.parties * (0.5 + 0.3 * parallel_sessions)), layout="constrained"
    )
    height = 0.7 / parallel_sessions
    for party in range(config.parties):
        for parallel_session in range(parallel_sessions):
            place = (party + 0.02 + height * parallel_session, 0.9 * height)
            waits = [
                (w.start, w.end) for w in mesh.waits if (w.endpoint, w.parallel_session) == (party, parallel_session)
            ]
            axes.broken_barh([(0.0, _ms(span[1] - span[0]))], place, color=_COMPUTES, linewidth=0)
            axes.broken_barh(list(_within(waits, span)), place, color=_WAITS, linewidth=0)
        sent = [(s.start, s.end) for s in mesh.sent if s.endpoint == party]
        axes.broken_barh(list(_within(sent, span)), (party + 0.76, 0.14), color=_SENDS, linewidth=0)
    names = [named(config, f"party {party}") for party in range(config.parties)]
    axes.set_yticks([party + 0.4 for party in range(config.parties)], names)
    axes.set_xlim(0, _ms(span[1] - span[0]))
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.set_title(title)
    marks = [pyplot.Rectangle((0, 0), 1, 1, color=colour) for colour in (_COMPUTES, _WAITS, _SENDS)]
    figure.legend(marks, ["computes", "waits", "its wires are busy"], loc="outside lower right", ncols=3)
    _save(figure, path)


def _within(spans: Sequence[Span], bounds: Span) -> Iterator[tuple[float, float]]:
    """(start, length) in ms after the start of `bounds`, of what lies inside."""
    for start, end in spans:
        low, high = max(start, bounds[0]), min(end, bounds[1])
        if high > low:
            yield _ms(low - bounds[0]), _ms(high - low)


def _ms(seconds: float) -> float:
    return seconds * 1e3


def _save(figure: Any, path: Path) -> None:  # noqa: ANN401 - matplotlib is not typed
    figure.savefig(path, dpi=120)
    load_pyplot().close(figure)


# -- Where every picture gets matplotlib from: an extra, imported only when something is drawn ------------------------
def load_pyplot() -> Any:  # noqa: ANN401 - matplotlib is not typed
    """matplotlib.pyplot, drawing into files. Raises ConfigError if matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("pictures need matplotlib: pip install 'private-llm[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
