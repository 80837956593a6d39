"""Token sharding beside the plaintext forward, and where the time goes (Cascade's figures and tables).

python scripts/studies/bench_cascade.py                             the whole table; 14 GB of memory for all of its rows
python scripts/studies/bench_cascade.py --bandwidth 1000 --latency 1  its rows behind a link, beside secret sharing
python scripts/studies/bench_cascade.py --plot table.svg            with a picture
python scripts/studies/bench_cascade.py --tiny                      smallest models: does everything run?
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import scripts_folder  # noqa: F401 - finds `bench`
from bench.link import link_speed
from bench.rows import machine
from bench.table_options import Bandwidth, Latency, Plot, Repeat, Tiny, new_app, run_app
from cascade_rows import cases, memory_needed
from private_llm_cli.commands.output import NOTES, duration, emit_json, emit_table, progress_bar, size
from private_llm_cli.commands.plot import load_pyplot
from private_llm_cli.options import Json

from private_llm.errors import ConfigError

app = new_app()

_TITLES = {
    "alone": "what all nodes compute in one thread, without links, against the plaintext forward",
    "overhead": "one CompNode and one AttnNode as threads, against the plaintext forward",
    "nodes": "every node a process of this machine",
    "size": "models of other sizes, nodes as threads",
    "bytes": "numbers of two bytes between the nodes",
    "link": "nodes as threads behind an emulated link",
    "trio": "the same model under three-party secret sharing, parties as threads",
}


@app.command()
def main(
    as_json: Json = False,
    repeat: Repeat = 5,
    bandwidth: Bandwidth = None,
    latency: Latency = None,
    plot: Plot = None,
    tiny: Tiny = False,
) -> None:
    """The whole table, or its rows behind a link; names what does not fit into memory and leaves it out."""
    speed = link_speed(bandwidth, latency)
    if plot is not None and speed is not None:
        raise ConfigError("--plot draws the table without a link: leave out --bandwidth and --latency")
    todo = []
    for case in cases(tiny, speed):
        if memory_needed(case) <= _free_bytes():
            todo.append(case)
        else:
            NOTES.print(f"left out, for want of memory: {case.part}, {case.label}")
    rows = []
    with progress_bar(sum(case.runs(repeat) for case in todo), quiet=as_json) as step:
        for case in todo:
            rows.append(case.run(repeat, partial(step, f"{case.part} {case.label}")))
            if as_json:
                emit_json(rows[-1])
    if plot is not None:
        plot_cascade(rows, plot)
    if not as_json:
        for part, title in _TITLES.items():
            named = title if speed is None else f"{title}, {speed.bandwidth_mbit:g} Mbit/s, {speed.latency_ms:g} ms"
            _table(part, named, [row for row in rows if row["name"] == f"cascade-{part}"])


def _free_bytes() -> int:
    """Memory that can be had now, as far as this system tells."""
    info = Path("/proc/meminfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) << 10
    return 1 << 62


def _table(part: str, title: str, rows: list[dict[str, Any]]) -> None:
    if not rows:
        return
    cells = []
    for row in rows:
        split = row["split"]
        paper = [
            "-" if row[name] is None else f"{row[name]:.2f}" for name in ("paper_seconds", "paper_vanilla_seconds")
        ]
        cells.append((
            row["label"], *(duration(row[name]["median"]) for name in ("seconds", "vanilla_seconds")),
            "{median:.2f} ({min:.2f}-{max:.2f})".format(**row["ratio"]),
            *(" + ".join(f"{1e3 * value:.0f}" for value in split[who].values()) for who in ("comp", "attn") if split),
            size(row["bytes_nodes"]), f"{row['error_max']:.0e}", " / ".join(paper),
        ))  # fmt: skip
    told = ("CompNode *", "AttnNode *") if part == "nodes" else ()
    headings = ("model, plan", "median", "plaintext", "ratio", *told, "sent", "error", "paper, s")
    legend = "* ms computing + waiting + serialising; " if told else ""
    emit_table(title, headings, cells, caption=legend + machine())


_COMPUTES, _SENDS, _WAITS = "#4c72b0", "#dd8452", "#e6e6e6"
_OURS, _REFERENCE = "#4c72b0", "#b0b0b0"


def plot_cascade(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Left: the busiest CompNode's time for each plan. Right: time against parameters (rows of cascade_rows.py)."""
    pyplot = load_pyplot()
    nodes = [row for row in rows if row["split"] is not None]
    sizes = [row for row in rows if row["name"] == "cascade-size"]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 2 + 0.4 * max(4, len(nodes))), layout="constrained")
    starts = [0.0] * len(nodes)
    for name, colour in (("computing", _COMPUTES), ("serialising", _SENDS), ("waiting", _WAITS)):
        widths = [1e3 * row["split"]["comp"][name] for row in nodes]
        left.barh(range(len(nodes)), widths, left=starts, color=colour, label=name)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    plaintext = [1e3 * row["vanilla_seconds"]["median"] for row in nodes]
    left.plot(plaintext, range(len(nodes)), "k|", markersize=14, label="plaintext forward")
    left.set_yticks(range(len(nodes)), [row["label"] for row in nodes])
    left.invert_yaxis()
    left.set_xlabel("ms of a forward at the busiest CompNode")
    left.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4)
    for name, column in (("sharded over two CompNodes", "seconds"), ("plaintext", "vanilla_seconds")):
        spots = [row["parameters"] for row in sizes], [row[column]["median"] for row in sizes]
        right.loglog(*spots, "o-", color=_OURS if column == "seconds" else _REFERENCE, label=name)
    right.set_xlabel("parameters")
    right.set_ylabel("seconds")
    right.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    run_app(app)
