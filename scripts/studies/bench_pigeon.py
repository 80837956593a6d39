"""PIGEON's functions and networks of images, beside the figures of its C++ engine.

python scripts/studies/bench_pigeon.py             the whole table under trio and quad
python scripts/studies/bench_pigeon.py --imagenet  ResNet-50 and VGG-16 on ImageNet images, too
python scripts/studies/bench_pigeon.py --json      one row each; --plot table.svg draws them
python scripts/studies/bench_pigeon.py --tiny      smallest shapes: does everything run?
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import scripts_folder  # noqa: F401 - finds `bench`
import typer
from bench.rows import Row, machine
from bench.run import circuit_of, kind_table
from bench.table_options import Plot, Repeat, Tiny, new_app, run_app
from pigeon_rows import PROTOCOLS, REFERENCE_MACHINE, Job, jobs
from private_llm_cli import options
from private_llm_cli.commands.output import emit_json, emit_table, progress_bar
from private_llm_cli.commands.plot import load_pyplot

from private_llm.errors import ConfigError

app = new_app()


@app.command()
def main(
    as_json: options.Json = False,
    protocol: Annotated[str | None, typer.Option(help="trio or quad (default: both).")] = None,
    repeat: Repeat = 5,
    party_mode: Annotated[
        options.PartyMode, typer.Option("--party-mode", help="auto: the faster of threads and processes.")
    ] = options.PartyMode.AUTO,
    parallel_sessions: options.ParallelSessionsOption = 1,
    rotate_roles: options.RotateRoles = False,
    adder: options.AdderOption = None,
    relu_bits: options.ReluBits = None,
    relu_low: options.ReluLow = 0,
    imagenet: Annotated[bool, typer.Option("--imagenet", help="ResNet-50 and VGG-16 on ImageNet images, too.")] = False,
    plot: Plot = None,
    tiny: Tiny = False,
) -> None:
    """Each work under each protocol, beside the aims and the figures of PIGEON's C++ engine."""
    if protocol not in (None, *PROTOCOLS):
        raise ConfigError(f"protocol: got {protocol!r}; want one of {', '.join(PROTOCOLS)}")
    if adder is not None and adder.value == "keys":
        raise ConfigError("adder: the table compares circuits; want prefix or ripple")
    how = {"parallel_sessions": parallel_sessions, "rotate_roles": rotate_roles}
    circuit = {"relu_bits": relu_bits, "relu_low": relu_low, **({} if adder is None else {"adder": adder.value})}
    config = options.config_of("trio", 64, party_mode, **how, **circuit)
    todo = list(jobs(config, [name for name in PROTOCOLS if protocol in (None, name)], tiny, imagenet))
    rows = []
    with progress_bar(sum(len(job.modes) for job in todo) * (repeat + 1), quiet=as_json) as step:
        for job in todo:
            row = job.run(repeat, partial(step, f"{job.protocol} {job.line.label}"))
            rows.append((job, row))
            if as_json:
                emit_json(job.to_dict(row))
    if plot is not None:
        plot_pigeon([job.to_dict(row) for job, row in rows], plot)
    if not as_json:
        print_table(rows)


def print_table(rows: Sequence[tuple[Job, Row]]) -> None:
    """For people."""
    cells = []
    for job, row in rows:
        facts = job.to_dict(row)
        times = " ".join(f"{row.seconds[which]:.3f}" for which in ("min", "median", "max"))
        compared = [_or_dash(facts[name], 1.0, 3) for name in ("aim_seconds", "reference_seconds")]
        sizes = [_or_dash(facts[name], 1e-6, 1) for name in ("bytes_total", "aim_bytes", "reference_bytes")]
        work = f"{facts['label']}, {row.ring} bits"
        cells.append((
            work, row.protocol, row.party_mode, times, *compared, *sizes, row.rounds, f"{row.error_max:.0e}",
        ))  # fmt: skip
    headings = ("work", "protocol", "parties", "s: min med max", "aim", "C++", "MB", "aim", "C++", "rounds", "error")
    title, caption = "PIGEON's works", f"here: {machine()}; C++: on {REFERENCE_MACHINE}"
    if not all(job.comparable for job, _ in rows):
        title = f"{title} at shapes or with comparisons that nothing is known to compare with{circuit_of(rows[0][1])}"
        caption = machine()
    emit_table(title, headings, cells, caption=caption)
    for job, row in rows:
        kind_table(f"{job.to_dict(row)['label']}, {row.ring} bits", row)


def _or_dash(value: float | None, factor: float, digits: int) -> str:
    return "-" if value is None else f"{value * factor:.{digits}f}"


_OURS, _AIM, _REFERENCE = "#4c72b0", "#55a868", "#b0b0b0"


def plot_pigeon(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Seconds and megabytes of each row, with aim and C++ reference (rows as `pigeon_rows.Job.to_dict` makes them)."""
    pyplot = load_pyplot()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 1.5 + 0.55 * len(rows)), layout="constrained")
    labels = [f"{row['label']}, {row['ring']} bits, {row['protocol']}" for row in rows]
    columns = {
        "here": ([row["seconds"]["median"] for row in rows], [row["bytes_total"] for row in rows], _OURS),
        "aim": ([row["aim_seconds"] for row in rows], [row["aim_bytes"] for row in rows], _AIM),
        f"C++ reference, {rows[0]['reference_machine']}": (
            [row["reference_seconds"] for row in rows], [row["reference_bytes"] for row in rows], _REFERENCE,
        ),
    }  # fmt: skip
    for place, (name, (seconds, sizes, colour)) in enumerate(columns.items()):
        if seconds[0] is None:
            continue  # other shapes than the reference's
        spots = [index + 0.27 * (place - 1) for index in range(len(rows))]
        left.barh(spots, [value or 0 for value in seconds], height=0.25, color=colour, label=name)
        right.barh(spots, [0 if size is None else size / 1e6 for size in sizes], height=0.25, color=colour)
    lowest = [row["seconds"]["min"] for row in rows]
    spread = [[m - low for m, low in zip(columns["here"][0], lowest, strict=True)],
              [row["seconds"]["max"] - row["seconds"]["median"] for row in rows]]  # fmt: skip
    left.errorbar(columns["here"][0], [i - 0.27 for i in range(len(rows))], xerr=spread, fmt="none", ecolor="black")
    for axes, unit in ((left, "seconds"), (right, "MB over all links")):
        axes.set_xscale("log")
        axes.set_xlabel(unit)
        axes.set_yticks(range(len(rows)), labels if axes is left else [""] * len(rows))
        axes.invert_yaxis()
    figure.legend(loc="outside lower right", ncols=3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    run_app(app)
