"""Measure the rows of docs/benchmarks.jsonl and write them as tables into README.md and docs/benchmarks.md.

python scripts/make_benchmarks.py              measure everything (a few minutes), write rows and tables
python scripts/make_benchmarks.py --only NAME  measure these again, keep the other rows
python scripts/make_benchmarks.py --tables     only write the tables from the rows that are there
python scripts/make_benchmarks.py --tiny       smallest shapes, written nowhere: does everything run?
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from private_llm.bench.catalogue import NAMES, make
from private_llm.bench.measure import measure
from private_llm.config import PrivateConfig

ROOT = Path(__file__).resolve().parent.parent
ROWS = ROOT / "docs" / "benchmarks.jsonl"
PAGES = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md")
BEGIN, END = "<!-- figures -->", "<!-- /figures -->"

RIVALS = {
    "relu": ("1.67 s, 464 MB", "1.94 s, 172 MB"),
    "matmul": ("0.29 s, 39.3 MB", "0.71 s, 20.4 MB"),
    "mul": ("0.20 s, 32 MB", "0.31 s, 52 MB"),
    "gelu": ("2.2 s, 308 MB", "3.4 s, 436 MB (tanh form)"),
    "silu": ("2.6 s, 308 MB", "4.4 s, 720 MB"),
    "softmax": ("2.6 s, 293 MB", "1.05 s, 133 MB"),
    "layernorm": ("0.10 s, 4.8 MB", "0.19 s, 15.5 MB"),
    "argmax": ("0.72 s, 58 MB", "0.70 s, 41 MB"),
    "opt-layer": ("4.2 s, 620 MB", "6.2 s, 330 MB"),
    "bert-layer": ("3.4 s, 765 MB", "8.7 s, 624 MB"),
    "opt-decode": ("1.13 s, 120 MB", "0.46 s, 2.6 MB"),
    "gpt2-forward": ("-", "162 s, 1568 MB (PUMA's functions)"),
}
"""CrypTen 0.4.1 (2 parties, dealer traffic not counted) and SPU 0.9.5 (ABY3, 3 parties), measured earlier on a machine
of this kind at the usual shapes; some of these times were taken while something else ran."""


def table(rows: list[dict[str, Any]]) -> str:
    """The Markdown table of some rows."""
    lines = [
        "| work | shape | median | min | bytes, all links | rounds | largest error | CrypTen | SPU ABY3 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        shape = "x".join(map(str, row["shape"]))
        usual = tuple(row["shape"]) == make(row["name"]).shape
        crypten, spu = RIVALS.get(row["name"], ("-", "-")) if usual else ("-", "-")
        lines.append(
            f"| {row['name']} | {shape} | {row['seconds']['median']:.3g} s | {row['seconds']['min']:.3g} s "
            f"| {row['bytes_total'] / 1e6:.3g} MB | {row['rounds']} | {row['error_max']:.1e} | {crypten} | {spu} |"
        )
    first = rows[0]
    lines.append(
        f"\n{first['protocol']}, {first['ring']}-bit ring, {first['parties']} parties as {first['party_mode']}, "
        f"{first['threads']} torch thread(s) each; {first['machine']}; torch {first['torch']}; "
        f"private-llm {first['version']}."
    )
    return "\n".join(lines)


def write_tables(rows: list[dict[str, Any]]) -> None:
    """Replace what stands between the markers of each page."""
    for page in PAGES:
        text = page.read_text()
        head, _, rest = text.partition(BEGIN)
        _, _, tail = rest.partition(END)
        page.write_text(f"{head}{BEGIN}\n{table(rows)}\n{END}{tail}")


def read_rows() -> list[dict[str, Any]]:
    """The rows that are there."""
    return [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else []


def main() -> int:
    """Parse, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--tables", action="store_true")
    parser.add_argument("--only", nargs="+", default=[], choices=NAMES)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    rows = {row["name"]: row for row in read_rows()}
    if not options.tables:
        for name in options.only or NAMES:
            row = measure(make(name, tiny=options.tiny), PrivateConfig(), 1 if options.tiny else options.repeat)
            rows[name] = json.loads(json.dumps(row.to_dict()))
            print(json.dumps(rows[name]), flush=True)
            if not options.tiny:
                ordered = [rows[known] for known in NAMES if known in rows]
                ROWS.write_text("".join(json.dumps(found) + "\n" for found in ordered))
    ordered = [rows[known] for known in NAMES if known in rows]
    if options.tiny:
        print(table(ordered))
    elif ordered:
        write_tables(ordered)
    return 0


if __name__ == "__main__":
    sys.exit(main())
