"""`private-llm bench comet`: a decode step with foretold neurons beside the dense one."""

from __future__ import annotations

from functools import partial

from private_llm.errors import ConfigError
from private_llm_cli.bench.comet import cases
from private_llm_cli.bench.rows import machine
from private_llm_cli.commands.output import duration, emit_json, emit_table, progress_bar, size


def bench_comet(as_json: bool, repeat: int, tiny: bool) -> None:
    """Every protocol, each with its dense and sparse steps in turns."""
    if repeat < 1:
        raise ConfigError(f"repeat: got {repeat}; want at least 1")
    todo = list(cases(tiny))
    rows = []
    with progress_bar(len(todo) * (repeat + 1), quiet=as_json) as step:
        for case in todo:
            rows.append(case.run(repeat, partial(step, f"{case.label}, {case.way}")))
            if as_json:
                emit_json(rows[-1])
    if as_json:
        return
    cells = [
        (
            row["setting"], row["way"], duration(row["dense_seconds"]["median"]), duration(row["seconds"]["median"]),
            f"{duration(row['dense_seconds_first'])}, {duration(row['seconds_first'])}",
            f"{row['ratio']:.2f}", f"{size(row['dense_bytes'])}, {size(row['bytes_total'])}",
            f"{row['dense_rounds']}, {row['rounds']}", f"{row['error_max']:.0e}",
        )
        for row in rows
    ]  # fmt: skip
    headings = ("protocol", "foretold", "dense", "sparse", "first runs", "ratio", "bytes", "rounds", "error")
    shape = "x".join(map(str, rows[0]["shape"]))
    title = f"a decode step of one ReLU layer, 90 % of the neurons left out, {shape}; aim: {rows[0]['aim_ratio']}"
    emit_table(title, headings, cells, caption=f"medians; bytes and rounds: dense, sparse; {machine()}")
