"""`private-llm bench`: run named works, one row each; kernels are a table of their own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError
from private_llm_cli.bench.apart import measure_apart
from private_llm_cli.bench.catalogue import INSTALLED_APART, LARGE, NAMES, make
from private_llm_cli.bench.kernels import count as kernel_count
from private_llm_cli.bench.kernels import measure_kernels
from private_llm_cli.bench.link import LinkSpeed
from private_llm_cli.bench.measure import measure
from private_llm_cli.bench.record import RecordingMesh
from private_llm_cli.bench.rows import Row, machine
from private_llm_cli.bench.work import Work, parse_shape
from private_llm_cli.commands.output import duration, emit_json, emit_table, progress_bar, size
from private_llm_cli.commands.plot import check_name, plot_timeline

KERNELS = "kernels"
_THREADS = ("auto", "threads")


def bench(
    names: Sequence[str], config: PrivateConfig, as_json: bool, repeat: int, shape: str | None, count: int | None,
    bandwidth: float | None, latency: float | None, tiny: bool, plot: Path | None = None,
    preprocess: bool = False,
) -> None:  # fmt: skip
    """Measure each name and print its row as soon as it is there (JSON) or all in a table.

    plot: a picture of what each party did in the last run of the only work that is named. preprocess: time
    preprocessing and online phase apart.
    """
    if repeat < 1:
        raise ConfigError(f"repeat: got {repeat}; want at least 1")
    if shape is not None and count is not None:
        raise ConfigError("give --shape or --n, not both")
    speed = link_speed(bandwidth, latency)
    if speed is not None and config.party_mode == "processes":
        raise ConfigError("--bandwidth and --latency shape the links of --party-mode threads only")
    if plot is not None:
        check_name(plot)
        if preprocess:
            raise ConfigError("--plot shows runs in one go: leave out --preprocess")
        if len(names) != 1 or config.party_mode not in _THREADS:
            raise ConfigError("--plot shows one work, with --party-mode threads: name one")
    chosen = list(names) or [name for name in NAMES if name not in (*INSTALLED_APART, *LARGE)]
    sizes = parse_shape(shape) if shape else None
    works = [make(name, sizes, count, tiny) for name in chosen]
    shared = [work.name for work in works if isinstance(work, Work)]
    if config.protocol == "cascade" and shared:
        raise ConfigError(
            f"'cascade' has no shares, which {shared[0]!r} computes on; want a whole model, such as gpt2-forward"
        )
    recorder = (
        None if plot is None else RecordingMesh(config.parties, config.timeout_s, *(() if speed is None else (speed,)))
    )
    rows, clock = [], _Clock()
    with progress_bar(len(works) * (repeat + 1), quiet=as_json) as step:
        for work in works:
            then = clock.then(step, work.name)
            if preprocess:
                rows.append(measure_apart(work, config, repeat, speed, then))
            else:
                rows.append(measure(work, config, repeat, speed, then, recorder))
            if as_json:
                emit_json(rows[-1].to_dict())
    if recorder is not None and plot is not None:
        plot_timeline(recorder, config, _title(rows[0]), clock.last, plot)
    if not as_json:
        _table(rows)


def link_speed(bandwidth: float | None, latency: float | None) -> LinkSpeed | None:
    """The emulated link of --bandwidth and --latency; one alone leaves the other unlimited."""
    if bandwidth is None and latency is None:
        return None
    return LinkSpeed(1e6 if bandwidth is None else bandwidth, latency or 0.0)


def bench_kernels(as_json: bool, repeat: int, tiny: bool) -> None:
    """Local kernels on one core of this machine, both rings."""
    if repeat < 1:
        raise ConfigError(f"repeat: got {repeat}; want at least 1")
    rows = []
    with progress_bar(kernel_count(tiny), quiet=as_json) as step:
        for row in measure_kernels(repeat, tiny, step):
            rows.append(row)
            if as_json:
                emit_json(row.to_dict())
    if not as_json:
        cells = [
            (
                f"{row.name}, {row.note}" if row.note else row.name, row.ring, "x".join(map(str, row.shape)),
                duration(row.seconds["median"]), duration(row.seconds["min"]), f"{row.rate:.2f} {row.unit}"
                + ("" if row.speedup is None else f", {row.speedup:.2f} x one thread")
                + ("" if row.over_dense is None else f", {row.over_dense:.2f} x dense"),
            )
            for row in rows
        ]  # fmt: skip
        headings = ("kernel", "ring", "shape", "median", "min", "rate")
        emit_table("local kernels, one thread", headings, cells, caption=machine())


class _Clock:
    """When runs ended."""

    def __init__(self) -> None:
        self._ends = [time.perf_counter()]

    def then(self, step: Callable[[str], Any], name: str) -> Callable[[], None]:
        """What to call after each run."""

        def ended() -> None:
            self._ends.append(time.perf_counter())
            step(name)

        return ended

    @property
    def last(self) -> tuple[float, float]:
        """Start and end of the last run."""
        return self._ends[-2], self._ends[-1]


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
