"""Language models whose parties are far apart: seconds to the first token and for each further one.

python scripts/studies/bench_wan.py                               all rows; measured ones need root for real links
python scripts/studies/bench_wan.py --latency 20 --bandwidth 100  one network
python scripts/studies/bench_wan.py --tiny                        the bundled model: does everything run?
"""

from typing import Annotated, Any

import scripts_folder  # noqa: F401 - finds `bench`
import typer
from bench.rows import machine
from bench.table_options import Bandwidth, Latency, Repeat, Tiny, new_app, run_app
from private_llm_cli.commands.output import NOTES, duration, emit_json, emit_table, progress_bar, size
from private_llm_cli.options import Json
from wan_models import wan_model
from wan_rows import PROTOCOLS, cases, networks

from private_llm.errors import ConfigError

app = new_app()


@app.command()
def main(
    as_json: Json = False,
    protocol: Annotated[str, typer.Option(help="trio, quad or dealer.")] = "trio",
    repeat: Repeat = 5,
    bandwidth: Bandwidth = None,
    latency: Latency = None,
    tiny: Tiny = False,
) -> None:
    """All rows, or those of one latency (ms, one way) or bandwidth (Mbit/s); --repeat: further tokens of each text."""
    if protocol not in PROTOCOLS:
        raise ConfigError(f"protocol: got {protocol!r}; want one of {', '.join(PROTOCOLS)}")
    asked = networks(latency, bandwidth)
    todo = list(cases(asked[:1] if tiny else asked, protocol, tiny))
    for lacking in filter(None, (wan_model(name).missing() for name in ("smollm2",) if not tiny)):
        NOTES.print(f"smollm2 is left out: {lacking}")
    rows = []
    with progress_bar(len(todo), quiet=as_json) as step:
        for case in todo:
            step(case.label, 0)
            rows.append(case.run(repeat))
            step(case.label)
            if as_json:
                emit_json(rows[-1])
    if not as_json:
        headings = ("model", "how", "network", "prompt", "first token", "a token", "bytes a token", "rounds")
        emit_table("tokens over a distance", headings, [_cells(row) for row in rows], caption=machine())


def _cells(row: dict[str, Any]) -> tuple[object, ...]:
    how = f"{row['how']}, {row['network']}" if row["how"] == "measured" else row["how"]
    if row["way"] == "drafts":
        how = f"{how}; drafts, {row['tokens_per_pass']:.2f} tokens a pass"
    return (
        row["model"], how, f"{row['latency_ms']:g} ms, {row['bandwidth_mbit']:g} Mbit/s", row["shape"][1],
        duration(row["seconds_first_token"]), duration(row["seconds_per_token"]), size(row["bytes_total"]),
        row["rounds"],
    )  # fmt: skip


if __name__ == "__main__":
    run_app(app)
