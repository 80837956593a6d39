"""Pictures of `demo --plot`: bytes by layer or node, and when who computed, sent or waited."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError
from private_llm.net.ledger import CONTROL
from private_llm.net.local import LocalMesh, LocalTransport
from private_llm.net.roles import called, named
from private_llm.net.transport import CLIENT
from private_llm.token_sharding import ShardingPlan

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from private_llm_hf.client.costs import Costs
    from private_llm_hf.tools.estimate import LayerCost


# -- What pictures are drawn from: a mesh that notes when whom waited for a frame of whom -----------------------------
@dataclass(frozen=True)
class TimeSpan:
    """One endpoint's wait for a frame of a peer, or a frame on its way to it (seconds of time.perf_counter)."""

    endpoint: int
    peer: int
    tag: str
    start: float
    end: float
    parallel_session: int = 0


class RecordingMesh(LocalMesh):
    """Keeps every wait in `waits`, every frame in `sent`."""

    lends = False

    def __init__(self, parties: int, timeout: float) -> None:
        self.waits: list[TimeSpan] = []
        self.sent: list[TimeSpan] = []
        super().__init__(parties, timeout)

    def transport(self, me: int) -> TimelineTransport:
        """The transport of endpoint `me`."""
        return TimelineTransport(self, me)


class TimelineTransport(LocalTransport):
    """One endpoint of a `RecordingMesh`."""

    def __init__(self, mesh: RecordingMesh, me: int) -> None:
        super().__init__(mesh, me)
        self._waits, self._sent, self._parallel_session = mesh.waits, mesh.sent, mesh.number

    def _send(self, to: int, tag: str, payload: Tensor) -> None:
        now = time.perf_counter()
        self._sent.append(TimeSpan(self.me, to, tag, now, now, self._parallel_session))
        super()._send(to, tag, payload)

    def _recv(self, frm: int, tag: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        with self._waiting(frm, tag):
            return super()._recv(frm, tag, shape, dtype)

    def _recv_bytes(self, frm: int, tag: str, most: int) -> bytes:
        with self._waiting(frm, tag):
            return super()._recv_bytes(frm, tag, most)

    def wait(self, frm: int) -> None:
        """Between two calls."""
        with self._waiting(frm, "next call"):
            super().wait(frm)

    @contextmanager
    def _waiting(self, frm: int, tag: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._waits.append(TimeSpan(self.me, frm, tag, started, time.perf_counter(), self._parallel_session))


# -- The picture of costs ----------------------------------------------------------------------------------------------
_COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#8172b3", "#c44e52", "#937860")


def plot_costs(
    layers: Sequence[LayerCost], waits: Sequence[TimeSpan], config: PrivateConfig, span: tuple[float, float], path: Path
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
    for party in range(config.parties):
        bottom.broken_barh([(0, in_ms(span[1] - span[0]))], (party - 0.4, 0.8), color=_COLOURS[party % len(_COLOURS)])
        idle = within([(w.start, w.end) for w in waits if w.endpoint == party], span)
        bottom.broken_barh(list(idle), (party - 0.4, 0.8), color="#e6e6e6", linewidth=0)
    bottom.set_yticks(range(config.parties), parties)
    bottom.set_xlabel("ms within the last token; grey: waiting")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


_ENDINGS = (".png", ".svg", ".pdf")


def check_name(path: Path) -> None:
    """Before any work: raises ConfigError for a name of no picture, a place that takes no file, or no matplotlib."""
    if path.suffix not in _ENDINGS:
        raise ConfigError(f"plot: got {path.name!r}; want a name that ends in {', '.join(_ENDINGS)}")
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(f"plot: cannot write {str(path)!r}; want a new or old file in a folder that you may write to")
    load_pyplot()


def within(spans: Sequence[tuple[float, float]], bounds: tuple[float, float]) -> Iterator[tuple[float, float]]:
    """(start, length) in ms after the start of `bounds`, of what lies inside."""
    for start, end in spans:
        low, high = max(start, bounds[0]), min(end, bounds[1])
        if high > low:
            yield in_ms(low - bounds[0]), in_ms(high - low)


def in_ms(seconds: float) -> float:
    """Seconds as milliseconds."""
    return seconds * 1e3


# -- the picture of `private-llm demo --plot` under token sharding: what each node sent, who worked for which token ---
MOST_ROWS = 28
"""Endpoints in one picture; of more, all but AttnNodes and those AttnNodes that send most."""

_KINDS = {"party": "#937860", "CompNode": "#4c72b0", "AttnNode": "#dd8452"}


def plot_nodes(
    costs: Costs, frames: Sequence[TimeSpan], config: PrivateConfig, arrived: Sequence[float], path: Path
) -> None:
    """Bars of each node's bytes by what they are; below, who sent anything between one token and the next. arrived:
    when the prompt was handed over and when each token came (seconds of time.perf_counter). frames: everything sent in
    this time; without any (nodes in processes of their own) there is no second part.
    """
    pyplot = load_pyplot()
    sent = _sent(costs, config)
    shown, title = chosen(config, {node: sum(parts.values()) for node, parts in sent.items()})
    names = [called(config, node).partition(" (party")[0] for node in shown]
    height = 1.5 + 0.22 * len(shown)
    figure, panels = pyplot.subplots(
        1 + bool(frames), 1, figsize=(10, height * (1 + bool(frames))), layout="constrained", squeeze=False
    )
    top = panels[0][0]
    left = [0.0] * len(shown)
    kinds = {what for parts in sent.values() for what in parts}
    totals = {what: sum(parts.get(what, 0) for parts in sent.values()) for what in kinds}
    for index, what in enumerate(sorted(kinds, key=lambda what: (-totals[what], what))):
        size = [sent.get(node, {}).get(what, 0) / 1e6 for node in shown]
        top.barh(names, size, left=left, color=_COLOURS[index % len(_COLOURS)], label=what)
        left = [a + b for a, b in zip(left, size, strict=True)]
    top.invert_yaxis()
    top.set_xlabel("MB sent over all tokens")
    top.set_title(title)
    top.legend()
    if frames:
        _steps(panels[1][0], worked(frames, arrived), shown, names, config)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def chosen(config: PrivateConfig, sent: dict[int, int]) -> tuple[list[int], str]:
    """Which endpoints a picture shows, in order, and a title that says so."""
    plan = config.plan or ShardingPlan()
    before = config.endpoints - plan.nodes
    title = f"alpha={plan.alpha}, c={plan.c}, m={plan.m}: {plan.alpha} CompNodes and {plan.attn_nodes} AttnNodes"
    if before:
        title = f"split={config.split}, {title} after {before} parties"
    first = before + plan.alpha
    attn = range(first, config.endpoints)
    room = max(MOST_ROWS - first, 4)
    if len(attn) <= room:
        return list(range(config.endpoints)), title
    most = sorted(attn, key=lambda node: (-sent.get(node, 0), node))[:room]
    return [*range(first), *sorted(most)], f"{title} ({room} AttnNodes that send most)"


def worked(frames: Sequence[TimeSpan], arrived: Sequence[float]) -> list[set[int]]:
    """For each token, the endpoints besides the client that sent a frame until it came."""
    made: list[set[int]] = []
    for start, end in itertools.pairwise(arrived):
        inside = [frame for frame in frames if start <= frame.end < end and frame.tag != CONTROL]
        made.append({frame.endpoint for frame in inside if frame.endpoint != CLIENT})
    return made


def _sent(costs: Costs, config: PrivateConfig) -> dict[int, dict[str, int]]:
    """Bytes by endpoint and by what they are; what the parties of a split send is of two kinds only."""
    parties = config.endpoints - (config.plan or ShardingPlan()).nodes
    found: dict[int, dict[str, int]] = {}
    for ledger in costs.ledgers:
        for (_, what, to), count in ledger.sent.items():
            if ledger.party == CLIENT:
                continue
            if ledger.party < parties:
                what = "secret sharing" if to < parties or to == CLIENT else "states to the nodes"
            mine = found.setdefault(ledger.party, {})
            mine[what] = mine.get(what, 0) + count
    return found


def _steps(axes: Axes, active: list[set[int]], shown: list[int], names: list[str], config: PrivateConfig) -> None:
    """One column for each token."""
    for row, (node, name) in enumerate(zip(shown, names, strict=True)):
        columns = [index for index, nodes in enumerate(active) if node in nodes]
        colour = next((c for kind, c in _KINDS.items() if name.startswith(kind)), _KINDS["party"])
        axes.barh(
            [row] * len(columns), [0.9] * len(columns), left=[c + 0.05 for c in columns], height=0.8, color=colour
        )
    axes.set_yticks(range(len(shown)), names)
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.set_xlim(0, len(active))
    places = range(len(active)) if len(active) <= 32 else range(0, len(active), len(active) // 16)
    axes.set_xticks([place + 0.5 for place in places], ["P" if place == 0 else str(place) for place in places])
    awake = sorted({len(nodes) for nodes in active[1:]})
    text = f"{awake[0]} to {awake[-1]}" if len(awake) > 1 else "".join(map(str, awake))
    axes.set_xlabel(f"P: prompt; further tokens; filled: worked for it ({text or 'no'} of {config.endpoints} a token)")


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
