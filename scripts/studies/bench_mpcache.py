"""Decode steps under policies of the KV cache beside a full one (MPCache's figures and tables).

python scripts/studies/bench_mpcache.py                                  all rows under trio, dealer and quad
python scripts/studies/bench_mpcache.py --protocol trio --plot rows.png  one protocol, with a picture
python scripts/studies/bench_mpcache.py --json --bandwidth 1000 --latency 0.1  behind emulated links
python scripts/studies/bench_mpcache.py --tiny                           smallest rows: does everything run?
"""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import scripts_folder  # noqa: F401 - finds `bench`
import typer
from bench.link import link_speed
from bench.rows import machine
from bench.table_options import Bandwidth, Latency, Plot, Repeat, Tiny, new_app, run_app
from mpcache_rows import PROTOCOLS, cases
from plot_mpcache import plot_mpcache
from private_llm_cli.commands.output import duration, emit_json, emit_table, progress_bar, size
from private_llm_cli.options import Json

from private_llm.errors import ConfigError

app = new_app()


@app.command()
def main(
    as_json: Json = False,
    protocol: Annotated[str | None, typer.Option(help="trio, dealer or quad (default: each of them).")] = None,
    repeat: Repeat = 5,
    bandwidth: Bandwidth = None,
    latency: Latency = None,
    plot: Plot = None,
    tiny: Tiny = False,
) -> None:
    """All rows of one protocol, or of trio, dealer and quad; links as fast as memory unless a speed is given."""
    if protocol is not None and protocol not in PROTOCOLS:
        raise ConfigError(f"protocol: got {protocol!r}; want one of {', '.join(PROTOCOLS)}")
    speed = link_speed(bandwidth, latency)
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


if __name__ == "__main__":
    run_app(app)
