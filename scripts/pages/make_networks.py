"""Measure rows of bench_wan.py into docs/networks.jsonl, and write tables and picture of docs/networks.md from them.

python scripts/pages/make_networks.py --measure                 everything (an hour), then tables and picture
python scripts/pages/make_networks.py --measure --models gpt2   rows of these models again; the others stay
python scripts/pages/make_networks.py --measure --how modelled  rows that need no whole model (ten minutes)
python scripts/pages/make_networks.py --measure --assisted      rows of protocol "assisted" (a minute)
python scripts/pages/make_networks.py --measure --how modelled --count   the same, but their seconds of computing stay
python scripts/pages/make_networks.py                           tables and picture from the rows that are there
python scripts/pages/make_networks.py --check                   are the tables those of the rows?
python scripts/pages/make_networks.py --tiny                    smallest rows, written nowhere: does everything run?

Figures of other systems stand in docs/networks-published.json, each with its source and what it differs in.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from generated import counted, taken
from make_benchmarks import keep, put, read_rows
from private_llm_cli.commands.plot import load_pyplot

from private_llm.protocol_facts import ASSISTED

sys.path.append(str(Path(__file__).resolve().parent.parent / "studies"))  # its rows are a study's
from wan_models import wan_model
from wan_rows import LATENCIES, Case, assisted_cases, cases, networks
from wan_run import Place

ROOT = Path(__file__).resolve().parents[2]
PAGE, ROWS = ROOT / "docs" / "networks.md", ROOT / "docs" / "networks.jsonl"
PUBLISHED, PICTURE = ROOT / "docs" / "networks-published.json", ROOT / "docs" / "networks.png"
Rows = Sequence[dict[str, Any]]


def seconds(value: float) -> str:
    """Three figures."""
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def size(count: float) -> str:
    """Bytes in MB, three figures."""
    return seconds(count / 1e6)


def network(row: dict[str, Any]) -> str:
    """Latency and bandwidth."""
    if not row["latency_ms"]:
        return "loopback"
    rate = row["bandwidth_mbit"]
    return f"{row['latency_ms']:g} ms, {f'{rate / 1000:g} Gbit/s' if rate >= 1000 else f'{rate:g} Mbit/s'}"


def measured_table(rows: Rows) -> str:
    """Whole models that ran, one table for each machine and kind of network."""
    kinds = dict.fromkeys(map(_kind, (row for row in rows if row["how"] == "measured")))
    return "\n\n".join(_measured_table([row for row in rows if _kind(row) == kind]) for kind in kinds)


def _kind(row: dict[str, Any]) -> tuple[object, ...]:
    return row["how"], row["protocol"], row["network"] if row["protocol"] != ASSISTED else "", row["machine"]


def _measured_table(rows: Rows) -> str:
    lines = [
        "| model | network | drafts | first token, s | its MB | rounds | a token (min to max), s | MB | rounds | error "
        "| text | load |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        drafts = f"{row['tokens_per_pass']:.2f} tokens a pass" if row["way"] == "drafts" else "-"
        spread = f"{seconds(row['seconds']['min'])} to {seconds(row['seconds']['max'])}"
        lines.append(
            f"| {wan_model(row['model']).words} | {network(row)} | {drafts} | {seconds(row['seconds_first_token'])} "
            f"| {size(row['bytes_first_token'])} | {row['rounds_first_token']} "
            f"| {seconds(row['seconds_per_token'])} ({spread}) | {size(row['bytes_total'])} | {row['rounds']} "
            f"| {row['error_max']:.1e} | {'equal' if row['equal'] else 'differs'} | {row['load']:.1f} |"
        )
    first, places = rows[0], dict.fromkeys(f"{row['network']}, parties as {row['party_mode']}" for row in rows)
    lines.append(
        f"\n{' (loopback); '.join(places)}; {first['protocol']}, prompt of {first['shape'][1]} tokens; {taken(rows)}."
    )
    return "\n".join(lines)


def modelled_table(rows: Rows) -> str:
    """What the formula says, and what of it is computing, waiting and sending."""
    lines = [
        "| model | network | first token, s | of it computing, waiting, sending | its MB | rounds "
        "| a token, s | of it computing, waiting, sending | MB | rounds |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    chosen = [row for row in rows if row["how"] == "modelled"]
    for row in chosen:
        parts = [
            ", ".join(seconds(row[name][part]) for part in ("compute", "latency", "wire"))
            for name in ("parts_first_token", "parts")
        ]
        lines.append(
            f"| {wan_model(row['model']).words} | {network(row)} | {seconds(row['seconds_first_token'])} | {parts[0]} "
            f"| {size(row['bytes_first_token'])} | {row['rounds_first_token']} | {seconds(row['seconds_per_token'])} "
            f"| {parts[1]} | {size(row['bytes_total'])} | {row['rounds']} |"
        )
    if chosen:
        lines.append(
            f"\nA formula, not a measurement; {chosen[0]['protocol']}, prompt of {chosen[0]['shape'][1]} tokens; "
            f"layers timed on {taken(chosen)}."
        )
    return "\n".join(lines)


def published_table(published: Rows, rows: Rows) -> str:
    """Other systems, which of our models to compare with, and what they differ in; below it ours at 1 Gbit/s."""
    delays = " / ".join(f"{latency:g}" for latency in LATENCIES)
    lines = [
        "| system | model, what | figure | setting | machine | network | source | ours | differs in |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in published:
        prompt = f", prompt of {row['prompt']}" if row["prompt"] else ""
        lines.append(
            f"| {row['system']}, {row['year']} | {row['model']}: {row['what']}{prompt} | {row['said']} "
            f"| {row['setting']} | {row['machine']} | {row['network']} | {row['source']} | {row['beside'] or '-'} "
            f"| {row['differs']} |"
        )
    lines += ["", f"Ours at {delays} ms, seconds for the first token; for a further one:", ""]
    models = [model for model in dict.fromkeys(row["beside"] for row in published) if model]
    lines += [f"- {ours(model, rows)}" for model in models]
    lines += [f"- {told} ({ASSISTED})" for model in models if (told := ours(model, rows, ASSISTED)) != "-"]
    return "\n".join(lines)


def ours(model: str | None, rows: Rows, protocol: str = "trio") -> str:
    """Our seconds with one model at each latency, measured where there are such rows, or a dash."""
    found = [row for row in rows if row["model"] == model and row["way"] == "plain"]
    found = [row for row in found if row.get("protocol", "trio") == protocol]
    found = [row for row in found if row["bandwidth_mbit"] == USUAL_BANDWIDTH]
    chosen = [row for row in found if row["how"] == "measured"] or found
    if not chosen:
        return "-"
    by_latency = {row["latency_ms"]: row for row in chosen}
    parts = [
        " / ".join(seconds(by_latency[ms][name]) if ms in by_latency else "-" for ms in LATENCIES)
        for name in ("seconds_first_token", "seconds_per_token")
    ]
    return f"{model}, {chosen[0]['how']}: {parts[0]}; {parts[1]}"


def tables() -> dict[str, str]:
    """What stands between the markers of the page."""
    rows, published = read_rows(ROWS), json.loads(PUBLISHED.read_text("utf-8"))
    return {
        "measured": measured_table(rows), "modelled": modelled_table(rows),
        "published": published_table(published, rows),
    }  # fmt: skip


def write() -> None:
    """All tables, and the picture."""
    for mark, text in tables().items():
        put(PAGE, mark, text)
    plot_wan(read_rows(ROWS), json.loads(PUBLISHED.read_text("utf-8")), PICTURE)


def is_current() -> bool:
    """Whether the page shows the rows that are there."""
    page = PAGE.read_text("utf-8")
    return all(f"<!-- {mark} -->\n{text}\n<!-- /{mark} -->" in page for mark, text in tables().items())


def key(row: dict[str, Any]) -> tuple[object, ...]:
    """What one row is of."""
    return tuple(row[name] for name in ("model", "how", "way", "protocol", "latency_ms", "bandwidth_mbit"))


def measure(options: argparse.Namespace) -> None:
    """Run all cases that are asked for; keep each row as soon as it is there."""
    asked = networks(options.latency, options.bandwidth)
    todo = [case for case in cases(asked, models=options.models) if options.how in ("", case.how)]
    if options.assisted:
        todo = assisted_cases()
    order = [_key_of(case) for case in (*cases(networks(), installed=lambda name: True), *assisted_cases())]
    for case in todo:
        row, known = json.loads(json.dumps(case.run(options.repeat))), {key(each): each for each in read_rows(ROWS)}
        if options.count and key(row) in known:
            row = counted_model(known[key(row)], row)
        print(json.dumps(row), flush=True)
        known[key(row)] = row
        keep(ROWS, [known[each] for each in order if each in known])


def counted_model(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """`before` with what `now` sends and waits for; the seconds of its computing stay. Modelled rows."""
    made = counted(before, now)
    for parts, whole in (("parts", "seconds_per_token"), ("parts_first_token", "seconds_first_token")):
        made[parts] = {**now[parts], "compute": before[parts]["compute"]}
        made[whole] = sum(made[parts].values())
    return {**made, "seconds": dict.fromkeys(made["seconds"], made["seconds_per_token"])}


def _key_of(case: Case) -> tuple[object, ...]:
    return case.model, case.how, case.way, case.protocol, case.network.latency_ms, case.network.bandwidth_mbit


def try_tiny() -> None:
    """Rows of the bundled model behind simulated links, their tables and their picture."""
    rows = []
    for case in cases(networks(0.2, 1000.0), tiny=True):
        rows.append(case.run(1, Place("simulated")))
        print(json.dumps(rows[-1]), flush=True)
    rows += [case.run(1) for case in assisted_cases(tiny=True)]
    published = json.loads(PUBLISHED.read_text("utf-8"))
    print(measured_table(rows), modelled_table(rows), published_table(published, rows), sep="\n\n")
    with tempfile.TemporaryDirectory() as place:
        plot_wan(rows, published, Path(place) / "networks.png")


def main() -> int:
    """Parse, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag in ("--measure", "--check", "--tiny", "--assisted", "--count"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--models", nargs="+", default=[], help="only these")
    parser.add_argument("--how", default="", choices=["", "measured", "modelled"])
    parser.add_argument("--latency", type=float, help="ms, one way: only this")
    parser.add_argument("--bandwidth", type=float, help="Mbit/s: only this")
    parser.add_argument("--repeat", type=int, default=3, help="further tokens that are timed")
    options = parser.parse_args()
    if options.tiny:
        try_tiny()
        return 0
    if options.check:
        current = is_current()
        print(f"{PAGE.name} is {'current' if current else 'not that of the rows: run scripts/pages/make_networks.py'}")
        return 0 if current else 1
    if options.measure:
        measure(options)
    write()
    return 0


USUAL_BANDWIDTH = 1000.0
"""Mbit/s that lines are drawn for."""
_COLOURS = {"gpt2": "#4c72b0", "smollm2": "#55a868", "llama-7b": "#dd8452", "llama-13b": "#c44e52"}
_OTHER = "#6b6b6b"
_WAYS = {"drafts": ", drafts from the prompt", ASSISTED: ", public weights (assisted)"}
_LEFT, _EDGE, _LAST, _RIGHT = 0.05, 0.15, 23.0, 90.0
"""Latencies at which the picture begins, known ones begin, ours end, and the picture ends."""


def plot_wan(rows: Sequence[Mapping[str, Any]], published: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Lines: ours (measured solid, modelled dashed, with drafts dotted). Points: published, at their latency.

    Published seconds of unknown networks stand at the left edge; those of systems that send one message a token are
    a thin line, since latency hardly matters to them. Ratios and passes over prompts are left out.
    """
    pyplot = load_pyplot()
    figure, panel = pyplot.subplots(figsize=(11, 6.5), layout="constrained")
    lines: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["bandwidth_mbit"] == USUAL_BANDWIDTH:
            way = row["protocol"] if row.get("protocol") == ASSISTED else row["way"]
            lines.setdefault((row["model"], row["how"], way), []).append(row)
    for (model, how, way), group in lines.items():
        group.sort(key=lambda row: row["latency_ms"])
        style = ":" if way == "drafts" else "-." if way == ASSISTED else "-" if how == "measured" else "--"
        panel.plot(
            [row["latency_ms"] for row in group], [row["seconds_per_token"] for row in group], style,
            color=_COLOURS.get(model, "black"), marker="o" if how == "measured" else "x",
            label=f"{wan_model(model).words}: {how}{_WAYS.get(way, '')}",
        )  # fmt: skip
    for row in published:
        if row["unit"] in ("token", "forward") and row["seconds"] is not None:
            _point(panel, row)
    panel.set(xscale="log", yscale="log", xlim=(_LEFT, _RIGHT), xlabel="latency between parties, ms one way",
              ylabel="seconds for a further token")  # fmt: skip
    panel.set_xticks([0.2, 1, 5, 20], ["0.2", "1", "5", "20"])
    panel.axvspan(_LEFT, _EDGE, color="#f2f2f2", zorder=0)
    note = {"fontsize": 7, "color": _OTHER, "va": "top", "transform": panel.get_xaxis_transform()}
    panel.text(_LEFT * 1.04, 0.99, "network not stated, or none", **note)
    panel.text(_LAST, 0.99, "FHE: one message each way", **note)
    panel.set_title(
        "Ours at 1 Gbit/s, prompt of 128 tokens; others as published: other machines and settings (see the table)",
        fontsize=9,
    )
    panel.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, 1.0))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _point(panel: Any, row: Mapping[str, Any]) -> None:  # noqa: ANN401 - matplotlib is not typed
    """One published figure with its name; hollow for a whole forward, which makes a token, too, and no cache."""
    name = f"{row['system']}, {row['model']}{', forward' if row['unit'] == 'forward' else ''}"
    if row["latency_ms"] == 0 and row["unit"] == "token":
        panel.plot([_EDGE, _RIGHT], [row["seconds"]] * 2, color=_OTHER, linewidth=0.7, linestyle=(0, (1, 3)))
        panel.text(_LAST, row["seconds"], name, fontsize=7, color=_OTHER, va="bottom")
        return
    place = row["latency_ms"] or _LEFT * 1.15
    panel.plot([place], [row["seconds"]], "o", color=_OTHER, mfc="none" if row["unit"] == "forward" else _OTHER)
    panel.text(place * 1.08, row["seconds"], name, fontsize=7, color=_OTHER, va="center")


if __name__ == "__main__":
    sys.exit(main())
