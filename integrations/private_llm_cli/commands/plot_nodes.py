"""The picture of `private-llm demo --plot` under token sharding: what each node sent, who worked for which token."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from private_llm.config import PrivateConfig
from private_llm.net.ledger import CONTROL
from private_llm.net.roles import called
from private_llm.net.transport import CLIENT
from private_llm.token_sharding import ShardingPlan
from private_llm_cli.bench.record import Sending
from private_llm_cli.commands.plot import load_pyplot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from private_llm_hf.client.costs import Costs

MOST_ROWS = 28
"""Endpoints in one picture; of more, all but AttnNodes and those AttnNodes that send most."""

_COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#8172b3", "#c44e52", "#937860")
_KINDS = {"party": "#937860", "CompNode": "#4c72b0", "AttnNode": "#dd8452"}


def plot_nodes(
    costs: Costs, frames: Sequence[Sending], config: PrivateConfig, arrived: Sequence[float], path: Path
) -> None:
    """Bars of each node's bytes by what they are; below, who sent anything between one token and the next.

    arrived: when the prompt was handed over and when each token came (seconds of time.perf_counter). frames: everything
    sent in this time; without any (nodes in processes of their own) there is no second part.
    """
    pyplot = load_pyplot()
    sent = _sent(costs, config)
    shown, title = chosen(config, {node: sum(parts.values()) for node, parts in sent.items()})
    names = [_name(config, node) for node in shown]
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


def worked(frames: Sequence[Sending], arrived: Sequence[float]) -> list[set[int]]:
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


def _name(config: PrivateConfig, endpoint: int) -> str:
    return called(config, endpoint).partition(" (party")[0]


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
