"""`private-llm bench mpcache`: decode steps under policies of the KV cache beside a full one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from private_llm.errors import ConfigError
from private_llm_cli.bench.link import LinkSpeed
from private_llm_cli.bench.mpcache import PROTOCOLS, cases
from private_llm_cli.bench.rows import machine
from private_llm_cli.commands.output import duration, emit_json, emit_table, progress_bar, size
from private_llm_cli.commands.plot_bench import check_name
from private_llm_cli.commands.plot_mpcache import plot_mpcache


def bench_mpcache(
    as_json: bool, repeat: int, tiny: bool, protocol: str | None, plot: Path | None, speed: LinkSpeed | None = None
) -> None:
    """All rows of one protocol, or of trio, dealer and quad. speed: of the links between parties (None: memory's)."""
    if repeat < 1:
        raise ConfigError(f"repeat: got {repeat}; want at least 1")
    if protocol is not None and protocol not in PROTOCOLS:
        raise ConfigError(f"protocol: got {protocol!r}; want one of {', '.join(PROTOCOLS)}")
    if plot is not None:
        check_name(plot)
    todo = list(cases(PROTOCOLS if protocol is None else (protocol,), tiny))
    rows = []
    with progress_bar(sum(1 if not case.measured else repeat + 1 for case in todo), quiet=as_json) as step:
        for case in todo:
            told: Callable[[], None] = partial(step, f"{case.kind}, {case.model}, {case.tokens}, {case.label}")
            rows.append(case.run(repeat, told, speed))
            if not case.measured:
                told()
            if as_json:
                emit_json(rows[-1])
    if plot is not None:
        plot_mpcache(rows, plot)
    if not as_json:
        emit_table(
            "a token under a policy of the KV cache, and with a full cache",
            ("what", "model", "protocol", "tokens", "policy", "bytes", "rounds", "time", "first run", "full by kept"),
            [_cells(row) for row in rows], caption=f"kept (full); medians; {machine()}",
        )  # fmt: skip


def _cells(row: dict[str, Any]) -> tuple[object, ...]:
    time = first = "-"
    ratio = f"{row['ratio_bytes']:.2f}x bytes"
    if "seconds" in row:
        time = f"{duration(row['seconds']['median'])} ({duration(row['full_seconds']['median'])})"
        first = f"{duration(row['seconds_first'])} ({duration(row['full_seconds_first'])})"
        ratio = f"{ratio}, {row['ratio_seconds']:.2f}x time"
    if "prefill_overhead" in row:
        ratio = f"{ratio}; prompt {row['prefill_overhead']:+.1%}"
    return (
        row["kind"], row["model"], row["protocol"], row["tokens"], row["label"],
        f"{size(row['bytes'])} ({size(row['full_bytes'])})", f"{row['rounds']:.0f} ({row['full_rounds']:.0f})", time,
        first, ratio,
    )  # fmt: skip
