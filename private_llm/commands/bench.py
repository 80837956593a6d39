"""`private-llm bench`: run named works and print one row each."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from private_llm.bench.catalogue import NAMES, make
from private_llm.bench.link import LinkSpeed
from private_llm.bench.measure import measure
from private_llm.bench.rows import Row, machine
from private_llm.bench.work import parse_shape
from private_llm.commands.output import duration, emit_json, emit_table, progress_bar, size
from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError


def bench(
    names: Sequence[str], config: PrivateConfig, as_json: bool, repeat: int, shape: str | None, count: int | None,
    bandwidth: float | None, latency: float | None, tiny: bool,
) -> None:  # fmt: skip
    """Measure each name and print its row as soon as it is there (JSON) or all in a table."""
    if repeat < 1:
        raise ConfigError(f"repeat: got {repeat}; want at least 1")
    if shape is not None and count is not None:
        raise ConfigError("give --shape or --n, not both")
    speed = None
    if bandwidth is not None or latency is not None:
        if config.party_mode == "processes":
            raise ConfigError("--bandwidth and --latency shape the links of --party-mode threads only")
        speed = LinkSpeed(1e6 if bandwidth is None else bandwidth, latency or 0.0)
    chosen = list(names) or list(NAMES)
    sizes = parse_shape(shape) if shape else None
    works = [make(name, sizes, count, tiny) for name in chosen]
    rows = []
    with progress_bar(len(works) * (repeat + 1), quiet=as_json) as step:
        for work in works:
            rows.append(measure(work, config, repeat, speed, partial(step, work.name)))
            if as_json:
                emit_json(rows[-1].to_dict())
    if not as_json:
        _table(rows)


def _table(rows: Sequence[Row]) -> None:
    cells = [
        (
            row.name, "x".join(map(str, row.shape)), duration(row.seconds["median"]), duration(row.seconds["min"]),
            size(row.bytes_total), row.rounds, f"{row.error_max:.1e}",
        )
        for row in rows
    ]  # fmt: skip
    first = rows[0]
    title = f"{first.protocol}, {first.ring}-bit ring, {first.parties} parties ({first.party_mode})"
    headings = ("work", "shape", "median", "min", "bytes, all links", "rounds", "largest error")
    emit_table(title, headings, cells, caption=machine())
