"""Count the rows of docs/studies/mpcache.jsonl again, and write tables and picture of docs/studies/mpcache.md.

python scripts/pages/make_cache_tables.py          tables and picture from the rows that are there
python scripts/pages/make_cache_tables.py --count  count bytes and rounds again (ten minutes), then tables and picture
python scripts/pages/make_cache_tables.py --check  are the tables those of the rows?
python scripts/pages/make_cache_tables.py --tiny   smallest rows, written nowhere: does everything run?

`--count` times nothing. A row that this version counts as before stays as it is; any other loses its seconds, which are
of another version. `python scripts/studies/bench_mpcache.py --json --bandwidth 1000 --latency 0.1` prints rows with
seconds.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from generated import counted, taken
from make_benchmarks import keep, put, read_rows

sys.path.append(str(Path(__file__).resolve().parent.parent / "studies"))  # its rows are a study's
import scripts_folder  # noqa: F401 - finds `bench`
from bench.rows import provenance
from mpcache_rows import GATHERS, Case, cases
from plot_mpcache import plot_mpcache

ROOT = Path(__file__).resolve().parents[2]
PAGE, ROWS, PICTURE = (ROOT / "docs" / "studies" / f"mpcache.{kind}" for kind in ("md", "jsonl", "png"))
Row = dict[str, Any]
Rows = Sequence[Row]
TIMED = ("seconds", "full_seconds", "ratio_seconds", "seconds_first", "full_seconds_first", "repeat", "threads")
"""Columns of a row that a run measures, besides `evicting_seconds` and the links', which counted rows never have."""
WORDS = {
    "MPCache, the paper's": "MPCache, the paper's settings", "MPCache": "MPCache, default",
    "SnapKV": "SnapKV, gamma 0.25", "H2O": "H2O, gamma 0.25", "InfLLM": "InfLLM, a tenth",
    "LongCache": "LongCache, a twentieth", "head merging": "head merging, 2",
}  # fmt: skip
WAYS = ("keys and values by one-hot rows (the paper)", "scores by one-hot rows", "scores by shuffles")  # GATHERS
MODEL_WORDS = {"llama-2": "LLaMA-2", "gpt2": "GPT-2"}


def text(header: str, lines: Sequence[str], rows: Rows) -> str:
    """A table, and below it what made its rows: the machine matters where there are seconds."""
    rule, (machine, _, version) = "|---" * (header.count("|") - 1) + "|", taken(rows).partition("; ")
    timed = any("seconds" in row for row in rows)
    return "\n".join([header, rule, *lines, f"\n{f'{machine}; ' if timed else 'Counted; '}{version}."])


def mb(count: float) -> str:
    """Bytes in MB."""
    return f"{count / 1e6:.2f}" if count < 1e8 else f"{count / 1e6:.0f}"


def times(row: Row) -> tuple[str, str, str, str]:
    """Links, milliseconds with a full cache and with the policy, and their ratio, or dashes."""
    if "seconds" not in row:
        return "-", "-", "-", "-"
    full, kept = (
        "{median:.0f} ({min:.0f}-{max:.0f})".format(**{name: 1e3 * value for name, value in row[which].items()})
        for which in ("full_seconds", "seconds")
    )
    rate = row["bandwidth_mbit"]
    links = f"{rate / 1000:g} Gbit/s, {row['latency_ms']:g} ms" if rate else "none"
    return links, full, kept, f"{row['ratio_seconds']:.2f}x"


TIMES = ("links", "ms full", "ms kept", "")
"""Columns of `times`."""


def timed(rows: Rows, cells: Sequence[str]) -> str:
    """The end of a line: these cells, unless no row of the table has seconds."""
    return f" {' | '.join(cells)} |" if any("seconds" in row for row in rows) else ""


def steps_table(rows: Rows) -> str:
    """The attention part of a token, beside a full cache."""
    lines = [
        f"| {MODEL_WORDS[row['model']]}, {row['tokens']}, {row['protocol']} | {WORDS[row['label']]} "
        f"| {mb(row['full_bytes'])}, {mb(row['bytes'])} | {row['ratio_bytes']:.2f}x "
        f"| {row['full_rounds']:.0f}, {row['rounds']:.0f} |{timed(rows, times(row))}"
        for row in rows
    ]
    return text(f"| setting | policy | MB full, kept |  | rounds |{timed(rows, TIMES)}", lines, rows)


def layers_table(rows: Rows) -> str:
    """A prompt and a token of a whole layer."""
    lines = [
        f"| {MODEL_WORDS[row['model']]}, {row['tokens']} | {WORDS[row['label']]} | {mb(row['full_prompt_bytes'])} "
        f"| {row['prefill_overhead']:+.1%} | {row['prompt_rounds'] - row['full_prompt_rounds']:+.0f} "
        f"| {mb(row['full_bytes'])}, {mb(row['bytes'])} | {row['ratio_bytes']:.2f}x "
        f"| {row['full_rounds']:.0f}, {row['rounds']:.0f} |"
        for row in rows
    ]
    return text("| model, tokens | policy | prompt, MB | bytes | rounds | token, MB |  | rounds |", lines, rows)


def memory_table(rows: Rows) -> str:
    """What a party holds of a layer, by the share that stays."""
    lines = [
        f"| {row['policy']['gamma']:g} | {row['entries']} | {mb(row['held_bytes'])} | {mb(row['bytes'])} "
        f"| {mb(max(0.0, row['evicting_bytes']))} |"
        for row in rows
    ]
    return text("| gamma | entries | a party holds, MB | a token, MB | after the prompt, MB |", lines, rows)


def ablation_table(rows: Rows) -> str:
    """From a full cache to MPCache."""
    lines = [
        f"| full cache | {mb(rows[0]['full_bytes'])} | {rows[0]['full_rounds']:.0f} |{timed(rows, ('',) * 4)}",
        *(f"| {row['label']} | {mb(row['bytes'])} | {row['rounds']:.0f} |{timed(rows, times(row))}" for row in rows),
    ]
    return text(f"|  | MB | rounds |{timed(rows, TIMES)}", lines, rows)


def levels_table(rows: Rows) -> str:
    """Sizes and shares of clusters."""
    lines = [f"| {row['label']} | {mb(row['bytes'])} | {row['rounds']:.0f} |" for row in rows]
    return text("| clusters, and the share that goes on | MB | rounds |", lines, rows)


def gather_table(rows: Rows) -> str:
    """How chosen entries come together."""
    by_label, lines = {row["label"]: row for row in rows}, []
    for gather, words in zip(GATHERS, WAYS, strict=True):
        found = [by_label[f"{what}, {gather}"] for what in ("tokens", "clusters of 16")]
        cells = [f"{mb(row['bytes'])} MB" + (f", {times(row)[2]} ms" if "seconds" in row else "") for row in found]
        lines.append(f"| {words} | {' | '.join(cells)} |")
    return text("| way | single tokens | clusters of 16 |", lines, rows)


def tables(rows: Rows) -> dict[str, str]:
    """What stands between the markers of the page."""
    makers = {
        "step": steps_table, "layer": layers_table, "memory": memory_table, "ablation": ablation_table,
        "hierarchy": levels_table, "gather": gather_table,
    }  # fmt: skip
    found = {kind: [row for row in rows if row["kind"] == kind] for kind in makers}
    return {f"cache-{kind}": make(found[kind]) for kind, make in makers.items() if found[kind]}


def is_current() -> bool:
    """Whether the page shows the rows that are there."""
    page = PAGE.read_text("utf-8")
    return all(f"<!-- {mark} -->\n{made}\n<!-- /{mark} -->" in page for mark, made in tables(read_rows(ROWS)).items())


def key(row: Row) -> tuple[object, ...]:
    """What a row is of, links aside."""
    return tuple(row[name] for name in ("kind", "label", "model", "protocol", "tokens"))


def untimed(case: Case) -> Row:
    """The row of a case as JSON, without seconds."""
    row: Row = json.loads(json.dumps(replace(case, measured=False).run(1)))
    return {name: value for name, value in row.items() if name not in TIMED}


def count() -> None:
    """Every case that has a row, and trio's layers; keep each as soon as it is there. Rows without a case go."""
    made_by = provenance()  # before this script changes a file of the checkout, which the commit would say
    old, done, seen = read_rows(ROWS), list[Row](), set[tuple[object, ...]]()
    known = {key(row) for row in old}
    for case in cases():
        of_case = (case.kind, case.label, case.model, case.protocol, case.tokens)
        if of_case not in known and (case.kind, case.protocol) != ("layer", "trio"):
            continue
        row = {**untimed(case), **made_by}
        timed_rows = [before for before in old if key(before) == of_case and "seconds" in before]
        made = [counted(before, row) for before in timed_rows] or [row]
        done += made
        seen.add(of_case)
        print(*of_case, "as before" if made == timed_rows else "counted anew", flush=True)
        keep(ROWS, [*done, *(before for before in old if key(before) not in seen)])
    keep(ROWS, done)


def main() -> int:
    """Parse, count, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag in ("--count", "--check", "--tiny"):
        parser.add_argument(flag, action="store_true")
    options = parser.parse_args()
    if options.tiny:
        rows = [untimed(case) for case in cases(("trio",), tiny=True)]
        print(json.dumps(rows), *tables(rows).values(), sep="\n\n")
        with tempfile.TemporaryDirectory() as place:
            plot_mpcache(rows, Path(place) / PICTURE.name)
        return 0
    if options.check:
        current = is_current()
        print(f"{PAGE.name} is {'current' if current else f'not that of the rows: run {Path(__file__).name}'}")
        return 0 if current else 1
    if options.count:
        count()
    rows = read_rows(ROWS)
    for mark, made in tables(rows).items():
        put(PAGE, mark, made)
    plot_mpcache(rows, PICTURE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
