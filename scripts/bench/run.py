"""Run named works with all parties on this machine, one row each: operations, layers and models.

python scripts/bench/run.py                            all but large ones
python scripts/bench/run.py relu opt-layer --json      some, as JSON with every figure
python scripts/bench/run.py relu --plot run.svg        what each party did in one run
python scripts/bench/run.py lenet --bandwidth 1000 --latency 1    behind emulated links
python scripts/bench/run.py --tiny                     smallest shapes: does everything run?
"""

import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from private_llm_cli import options
from private_llm_cli.commands.output import duration, emit_json, emit_table, progress_bar, size
from private_llm_cli.commands.plot import check_name
from private_llm_cli.help_pages import Command

from private_llm.approximations import OURS
from private_llm.config import import_plugins
from private_llm.errors import ConfigError

sys.path.append(str(Path(__file__).resolve().parents[1]))
from bench.catalogue import INSTALLED_APART, LARGE, NAMES, make
from bench.link import RecordingMesh, link_speed
from bench.measure import measure
from bench.rows import Row, machine
from bench.table_options import Bandwidth, Latency, Repeat, Tiny, new_app, run_app
from bench.timeline import plot_timeline
from bench.work import Work

_THREADS = ("auto", "threads")
app = new_app()


def _import_plugins(names: list[str] | None) -> None:
    import_plugins(tuple(names or ()))
    options.PLUGINS.set(tuple(names or ()))


_PLUGIN = typer.Option(
    "--plugin", help="A Python module to import first, which registers protocols or functions.", is_eager=True,
    callback=_import_plugins,
)  # fmt: skip


@app.command(cls=Command)
def bench(
    names: Annotated[list[str] | None, typer.Argument(help="Works (default: all but large ones).")] = None,
    as_json: options.Json = False,
    protocol: options.ProtocolOption = "trio",
    ring: options.RingBits = 64,
    n: Annotated[int | None, typer.Option("--n", help="How many elements, rows, tokens or images.")] = None,
    repeat: Repeat = 5,
    shape: Annotated[str | None, typer.Option(help="Sizes joined by 'x', for instance 128x768x3072.")] = None,
    party_mode: Annotated[
        options.PartyMode, typer.Option("--party-mode", help="auto: threads.")
    ] = options.PartyMode.AUTO,
    parallel_sessions: options.ParallelSessionsOption = 1,
    rotate_roles: options.RotateRoles = False,
    bandwidth: Bandwidth = None,
    latency: Latency = None,
    plot: Annotated[
        Path | None, typer.Option(help="Picture (.png, .svg): what each party did in the last run.")
    ] = None,
    tiny: Tiny = False,
    preprocess: Annotated[bool, typer.Option("--preprocess", help="Preprocessing first, timed apart.")] = False,
    matmul: options.MatmulOption = "masked",
    adder: options.AdderOption = None,
    relu_bits: options.ReluBits = None,
    relu_low: options.ReluLow = 0,
    approximations: options.ApproximationsOption = OURS,
    plugin: Annotated[list[str] | None, _PLUGIN] = None,
) -> None:
    """Measure operations, layers and models: time, bytes, rounds and error against float64."""
    more: dict[str, Any] = {}
    if adder is not None:
        more = {"adder": adder.value, "bandwidth_mbit": bandwidth, "latency_ms": latency or 0.0}
    config = options.config_of(
        protocol, ring, party_mode, parallel_sessions=parallel_sessions, rotate_roles=rotate_roles, matmul=matmul,
        relu_bits=relu_bits, relu_low=relu_low, approximations=approximations, **more,
    )  # fmt: skip
    if shape is not None and n is not None:
        raise ConfigError("give --shape or --n, not both")
    speed = link_speed(bandwidth, latency)
    if speed is not None and config.party_mode == "processes":
        raise ConfigError("--bandwidth and --latency shape the links of --party-mode threads only")
    if plot is not None:
        check_name(plot)
        if preprocess:
            raise ConfigError("--plot shows runs in one go: leave out --preprocess")
        if len(names or ()) != 1 or config.party_mode not in _THREADS:
            raise ConfigError("--plot shows one work, with --party-mode threads: name one")
    chosen = names or [name for name in NAMES if name not in (*INSTALLED_APART, *LARGE)]
    sizes = options.parse_shape(shape) if shape else None
    works = [make(name, sizes, n, tiny) for name in chosen]
    shared = [work.name for work in works if isinstance(work, Work)]
    if config.protocol == "cascade" and shared:
        raise ConfigError(
            f"'cascade' has no shares, which {shared[0]!r} computes on; want a whole model, such as gpt2-forward"
        )
    recorder = None if plot is None else RecordingMesh(config.parties, config.timeout_s, speed)
    rows, ends = [], [time.perf_counter()]
    with progress_bar(len(works) * (repeat + 1), quiet=as_json) as step:

        def ended(name: str) -> None:
            ends.append(time.perf_counter())
            step(name)

        for work in works:
            rows.append(measure(work, config, repeat, speed, partial(ended, work.name), recorder, apart=preprocess))
            if as_json:
                emit_json(rows[-1].to_dict())
    if recorder is not None and plot is not None:
        plot_timeline(recorder, config, _title(rows[0]), (ends[-2], ends[-1]), plot)
    if not as_json:
        _table(rows)


def _title(row: Row) -> str:
    beside = f", {row.parallel_sessions} parallel sessions" if row.parallel_sessions > 1 else ""
    link = f", {row.bandwidth_mbit:g} Mbit/s, {row.latency_ms:g} ms" if row.bandwidth_mbit is not None else ""
    return f"{row.name} {'x'.join(map(str, row.shape))}, {row.protocol}, {row.ring} bits{beside}{circuit_of(row)}{link}"


def circuit_of(row: Row) -> str:
    """What a row's comparisons run, where somebody chose it."""
    adder = f", {row.adder} adder" if row.adder != "auto" else ""
    bits = row.ring if row.relu_bits is None else row.relu_bits
    return f"{adder}, ReLU on bits {row.relu_low} to {bits - 1}" if row.relu_bits or row.relu_low else adder


def _table(rows: Sequence[Row]) -> None:
    cells = [
        (
            row.name, "x".join(map(str, row.shape)), duration(row.seconds["median"]), duration(row.seconds["min"]),
            _first(row.seconds_first), size(row.bytes_total), row.rounds, f"{row.error_max:.1e}",
        )
        for row in rows
    ]  # fmt: skip
    first = rows[0]
    title = f"{first.protocol}, {first.ring}-bit ring, {first.parties} parties ({first.party_mode}){circuit_of(first)}"
    if first.approximations != "ours":
        title += f", functions of {first.approximations}"
    headings = ("work", "shape", "median", "min", "first run", "bytes, all links", "rounds", "largest error")
    if first.seconds_preprocessing is None:
        cells += [
            (
                f"{row.name}, a further token", "", duration(row.after["seconds"]["median"]),
                duration(row.after["seconds"]["min"]), _first(row.after["seconds_first"]),
                size(row.after["bytes_total"]),
                row.after["rounds"], "",
            )
            for row in rows if row.after is not None
        ]  # fmt: skip
        emit_table(title, headings, cells, caption=machine())
        for row in rows:
            kind_table(row.name, row)
        return
    times = [row.seconds_preprocessing or row.seconds for row in rows]
    before = [(duration(each["median"]), size(row.bytes_preprocessing)) for each, row in zip(times, rows, strict=True)]
    emit_table(
        f"{title}; median and min of the online phase", (*headings, "preprocessing, median", "its bytes"),
        [(*cell, *more) for cell, more in zip(cells, before, strict=True)], caption=machine(),
    )  # fmt: skip


def _first(seconds: float | None) -> str:
    """The run that compiled kernels and began to record steps."""
    return "-" if seconds is None else duration(seconds)


def kind_table(label: str, row: Row) -> None:
    """Where a whole model's time goes, as PIGEON's Table 5 tells it."""
    if row.by_kind is None:
        return
    cells = [
        (name, duration(part["seconds"]), size(part["bytes_total"]), int(part["rounds"]), f"{part['gbit_per_s']:.3f}")
        for name, part in row.by_kind.items()
    ]
    headings = ("kind of module", "median", "bytes, all links", "rounds", "Gbit/s")
    caption = "seconds of the slowest party, waiting included; Gbit/s of the party that sends most"
    emit_table(f"{label}, {row.protocol}, by kind", headings, cells, caption=caption)


if __name__ == "__main__":
    run_app(app)
