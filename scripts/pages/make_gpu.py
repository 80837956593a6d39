"""The tables and the picture of docs/studies/gpu-figures.md, from rows of scripts/studies/bench_gpu.py.

python scripts/pages/make_gpu.py              from docs/studies/gpu-before.jsonl and gpu.jsonl
python scripts/pages/make_gpu.py --take FILE  put a run's rows into gpu.jsonl first, in the place of older ones
python scripts/pages/make_gpu.py --check      are the tables those of the rows?
python scripts/pages/make_gpu.py --tiny       the same into no file: does everything run?
"""

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from make_benchmarks import keep, put, read_rows
from private_llm_cli.commands.plot import load_pyplot

sys.path.append(str(Path(__file__).resolve().parent.parent / "studies"))
from gpu_compared import PARTS, of_what

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("gpu-figures.md", "gpu.jsonl", "gpu-before.jsonl", "gpu-token.png")
PAGE, ROWS, BEFORE, PICTURE = (ROOT / "docs" / "studies" / name for name in NAMES)
Row = dict[str, Any]
Rows = Sequence[Row]
NONE = "not measured"
LAYER = "llama-7b-1-layer"
TIMES: tuple[tuple[str, str, dict[str, object], str, float, str], ...] = (
    ("LLaMA-7B layer, a token", "token", {"model": LAYER}, "seconds_median", 1e3, "ms"),
    ("of which the GPU is busy", "token-work", {"model": LAYER}, "busy_ms", 1.0, "ms"),
    ("launches of kernels a party", "token-work", {"model": LAYER}, "launches_per_party", 1.0, ""),
    *(
        (f"LLaMA-7B layer, prompt of {size:,}", "prompt", {"model": LAYER, "prompt": size}, "seconds", 1.0, "s")
        for size in (128, 512, 2048)
    ),
    ("of which the GPU is busy, 512", "prompt-work", {"model": LAYER, "prompt": 512}, "busy_ms", 1e-3, "s"),
    ("GPT-2 small, a token", "token", {"model": "gpt2", "parties_as": None}, "seconds_median", 1e3, "ms"),
    ("GPT-2 small, prompt of 128", "prompt", {"model": "gpt2", "parties_as": None}, "seconds", 1.0, "s"),
    (
        "LLaMA-7B layer, 32,000 words, prompt of 512",
        "prompt",
        {"model": "llama-7b-1-layers-32000-words", "prompt": 512},
        "seconds",
        1.0,
        "s",
    ),
    ("LLaMA-7B whole, a token, from 1 and 6 layers", "whole-token", {}, "seconds_32_layers", 1.0, "s"),
    ("LLaMA-7B whole, prompt of 512, likewise", "whole-prompt", {}, "seconds_32_layers", 1.0, "s"),
    ("VGG-16, 16 images of 32 x 32, 32 bits", "images", {"parties_on": "cuda"}, "seconds", 1e3, "ms"),
    ("the same on 16 cores", "images", {"parties_on": "cpu"}, "seconds", 1e3, "ms"),
)
"""Words, a row's name, what else it says, the column, its factor and unit."""


def fitting(rows: Rows, name: str, has: dict[str, object], column: str) -> Row | None:
    """The first row that says this much and has the column."""
    fit = (r for r in rows if r["name"] == name and all(r.get(k) == v for k, v in has.items()) and r.get(column))
    return next(fit, None)


def value(rows: Rows, name: str, has: dict[str, object], column: str) -> float | None:
    """The column of that row."""
    row = fitting(rows, name, has, column)
    return None if row is None else float(row[column])


def number(x: float) -> str:
    """Three figures."""
    return f"{x:,.0f}" if x >= 1000 else f"{x:.3g}"


def source(rows: Rows) -> str:
    """Machines and commits of rows."""
    if not rows:
        return NONE
    return f"{rows[0]['machine']}, commit {', '.join(sorted({str(row['commit']) for row in rows}))}"


def times_table(before: Rows, now: Rows) -> str:
    """Models before and now; of what the last run did not measure, the commit is named."""
    lines = ["| three parties of `trio` on one GPU, no network | before | now |", "|---|---|---|"]
    newest = fitting(now, *TIMES[0][1:4])
    for words, name, has, column, factor, unit in TIMES:
        cells = [fitting(rows, name, has, column) for rows in (before, now)]
        shown = [NONE if cell is None else f"{number(factor * cell[column])} {unit}".strip() for cell in cells]
        if newest and cells[1] and cells[1]["commit"] != newest["commit"]:
            shown[1] += f" ({cells[1]['commit']})"
        if any(cell is not None for cell in cells):
            lines.append(f"| {words} | {' | '.join(shown)} |")
    return "\n".join([*lines, f"\nBefore: {source(before)}. Now: {source([newest] if newest else [])}."])


def parts_of(rows: Rows) -> Row | None:
    """Milliseconds of the layer's token by part, and what the GPU does meanwhile."""
    parts = [row for row in rows if row["name"] == "token-parts" and row["model"] == LAYER and row["parts_ms"]]
    if not parts:
        return None
    busy = value(rows, "token-work", {"model": LAYER}, "busy_ms")
    return {"parts": parts[-1]["parts_ms"], "busy": busy, "source": source(parts[-1:])}


def parts_table(before: Rows, now: Rows) -> str:
    """Where a party's thread stands during a token."""
    found = [parts_of(rows) for rows in (before, now)]
    lines = ["| a party's thread, ms of a token | before | now |", "|---|---|---|"]
    for part in PARTS:
        shown = [NONE if each is None else f"{each['parts'].get(part, 0.0):.1f}" for each in found]
        lines.append(f"| {part} | {' | '.join(shown)} |")
    return "\n".join(lines)


def products_table(rows: Rows) -> str:
    """Ring products of 64 bits."""
    whole = {tuple(r["shape"]): r for r in rows if r["name"] == "ring-matmul" and r["ring"] == 64}
    apart = {tuple(r["shape"]): r for r in rows if r["name"] == "ring-matmul-planes" and r["ring"] == 64}
    lines = [
        "| product | of digit planes | with taking both apart | of 16-bit limbs in float64 | of int64 multiplications "
        "| `torch._int_mm` / 36 |",
        "|---|---|---|---|---|---|",
    ]
    shapes = [(4096,) * 3, (1024,) * 3, (128, 768, 3072), (512, 4096, 4096), (128, 4096, 11008), (128, 4096, 4096)]
    used = []
    for shape in shapes:
        row, planes = whole.get(shape, {}), apart.get(shape, {})
        used += [each for each in (row, planes) if each]
        if row:
            both = f"{row['tmac_per_s']:.2g}" if row["tmac_per_s"] < 10 else f"{row['tmac_per_s']:.1f}"
        else:
            taken = planes["seconds"] + planes["seconds_take_apart_x"] + planes["seconds_take_apart_y"]
            both = f"{shape[0] * shape[1] * shape[2] / taken / 1e12:.1f} (sum)"
        others = [
            "" if row.get(name) is None else f"{row[name]:.2g}"
            for name in ("float64_limbs_tmac_per_s", "int64_tmac_per_s")
        ]
        peak = row.get("int8_peak_tmac_per_s", planes.get("int8_peak_tmac_per_s"))
        best = row.get("tmac_per_s_planes") if shape == (4096,) * 3 or not planes else planes["tmac_per_s"]
        lines.append(f"| {' x '.join(map(str, shape))} | {best:.1f} | {both} | {' | '.join(others)} | {peak:.1f} |")
    return "\n".join([*lines, f"\n{source(used)}."])


def few_rows_table(rows: Rows) -> str:
    """A token's products, whose time is that of reading the weight."""
    lines = ["| product of rows (tokens) with a weight, turned as models have it | time | reads |", "|---|---|---|"]
    used = [row for row in rows if row["name"] == "ring-matmul-few-rows" and row["y"] == "turned"]
    for row in used:
        m, k, n = row["shape"]
        lines.append(f"| {m} x {k} x {n} | {1e6 * row['seconds']:.0f} µs | {row['tb_per_s']:.1f} TB/s |")
    lines += [
        f"| beside it: {words} |  | {found[-1]['tb_per_s']:.2f} TB/s |"
        for words, name in (("a copy", "device-copy"), ("ChaCha20, bytes made", "chacha20"))
        if (found := [row for row in rows if row["name"] == name])
    ]
    return "\n".join([*lines, f"\n{source(used)}."])


def tables() -> dict[str, str]:
    """What stands between the markers of the page."""
    before, rows = read_rows(BEFORE), read_rows(ROWS)
    return {
        "gpu-times": times_table(before, rows), "gpu-parts": parts_table(before, rows),
        "gpu-products": products_table(rows), "gpu-rows": few_rows_table(rows),
    }  # fmt: skip


def is_current() -> bool:
    """Whether the page shows the rows that are there."""
    page = PAGE.read_text("utf-8")
    return all(f"<!-- {mark} -->\n{made}\n<!-- /{mark} -->" in page for mark, made in tables().items())


def take(rows: Rows) -> list[Row]:
    """Rows of a run with its machine and commit, and those of before that it does not replace."""
    about = next(row for row in rows if row["name"] == "machine")
    machine = f"{about['gpu']} (PyTorch {about['torch']}, Triton {about['triton']}), {about['cores']} cores"
    left_out = ("machine", "part", "skipped", "start", "failed", "late", "warning", "tests", "small-calls", "copies")
    new = [{**row, "machine": machine, "commit": about["commit"]} for row in rows if row["name"] not in left_out]
    known = {of_what(row) for row in new}
    return [*(row for row in read_rows(ROWS) if of_what(row) not in known), *new]


def main() -> int:
    """Parse, take, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--take", type=Path, metavar="FILE")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if options.check:
        print(f"{PAGE.name} is {'current' if is_current() else f'not that of the rows: run {Path(__file__).name}'}")
        return 0 if is_current() else 1
    if options.take and not options.tiny:
        keep(ROWS, take([row for row in read_rows(options.take) if isinstance(row, dict)]))
    found = parts_of(read_rows(BEFORE)), parts_of(read_rows(ROWS))
    if options.tiny:
        print(*tables().values(), sep="\n\n")
        with tempfile.TemporaryDirectory() as folder:
            plot_gpu(*found, Path(folder) / PICTURE.name)
        return 0
    for mark, made in tables().items():
        put(PAGE, mark, made)
    plot_gpu(*found, PICTURE)
    return 0


_COLOURS = ("#4c72b0", "#c44e52", "#55a868", "#b0b0b0", "#8172b3", "#dd8452")
_BUSY, _IDLE = "#2a9d8f", "#eeeeee"


def plot_gpu(before: Mapping[str, Any] | None, now: Mapping[str, Any] | None, path: Path) -> None:
    """Two bars each: a party's thread by part (the parties' mean), and how long the GPU is busy meanwhile.

    before, now: `parts` and `busy` in milliseconds and their `source`; None: not measured, and left out.
    """
    pyplot = load_pyplot()
    figure, panel = pyplot.subplots(figsize=(10, 3.2), layout="constrained")
    names: list[str] = []
    for words, row in (("before", before), ("now", now)):
        if row is None:
            continue
        start = 0.0
        for part, colour in zip(PARTS, _COLOURS, strict=True):
            width = row["parts"].get(part, 0.0)
            panel.barh(len(names), width, left=start, color=colour, label=part)
            start += width
        names.append(f"{words}: a party's thread")
        if row["busy"] is not None:
            panel.barh(len(names), row["busy"], color=_BUSY, label="the GPU is busy")
            panel.barh(
                len(names), max(0.0, start - row["busy"]), left=row["busy"], color=_IDLE, label="the GPU is idle"
            )
            names.append(f"{words}: the GPU")
    panel.set_yticks(range(len(names)), names)
    panel.invert_yaxis()
    panel.set_xlabel("ms of one token, one layer of LLaMA-7B's sizes, three parties on one GPU")
    handles, labels = panel.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    panel.legend(once.values(), once.keys(), loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
