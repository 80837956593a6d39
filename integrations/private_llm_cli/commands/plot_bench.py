"""The picture of `private-llm bench --plot`: what each party did in one run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError
from private_llm.net.roles import named
from private_llm_cli.bench.record import RecordingMesh
from private_llm_cli.commands.pyplot import load_pyplot

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
