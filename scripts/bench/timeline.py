"""The picture of `--plot`: what each party did in one run."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from private_llm_cli.commands.plot import load_pyplot

from bench.link import RecordingMesh
from private_llm.config import PrivateConfig
from private_llm.net.roles import named

_COMPUTES, _SENDS, _WAITS = "#4c72b0", "#dd8452", "#e6e6e6"


def plot_timeline(
    mesh: RecordingMesh, config: PrivateConfig, title: str, span: tuple[float, float], path: Path
) -> None:
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
            axes.broken_barh([(0.0, 1e3 * (span[1] - span[0]))], place, color=_COMPUTES, linewidth=0)
            axes.broken_barh(list(_within(waits, span)), place, color=_WAITS, linewidth=0)
        sent = [(s.start, s.end) for s in mesh.sent if s.endpoint == party]
        axes.broken_barh(list(_within(sent, span)), (party + 0.76, 0.14), color=_SENDS, linewidth=0)
    names = [named(config, f"party {party}") for party in range(config.parties)]
    axes.set_yticks([party + 0.4 for party in range(config.parties)], names)
    axes.set_xlim(0, 1e3 * (span[1] - span[0]))
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.set_title(title)
    marks = [pyplot.Rectangle((0, 0), 1, 1, color=colour) for colour in (_COMPUTES, _WAITS, _SENDS)]
    figure.legend(marks, ["computes", "waits", "its wires are busy"], loc="outside lower right", ncols=3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _within(spans: Sequence[tuple[float, float]], bounds: tuple[float, float]) -> Iterator[tuple[float, float]]:
    """(start, length) in ms after the start of `bounds`, of what lies inside."""
    for start, end in spans:
        low, high = max(start, bounds[0]), min(end, bounds[1])
        if high > low:
            yield 1e3 * (low - bounds[0]), 1e3 * (high - low)
