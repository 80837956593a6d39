"""Measure what one group of parties serves into docs/capacity.jsonl, and write docs/capacity.md's tables from the rows.

python scripts/pages/make_capacity.py --measure                  everything (half an hour), then the tables
python scripts/pages/make_capacity.py --measure --models demo    rows of these models again; the others stay
python scripts/pages/make_capacity.py --measure --how modelled   rows of the estimator (minutes)
python scripts/pages/make_capacity.py                            tables from the rows that are there
python scripts/pages/make_capacity.py --check                    are the tables those of the rows?
python scripts/pages/make_capacity.py --tiny                     smallest rows, written nowhere: does everything run?
"""

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from generated import taken
from make_benchmarks import keep, put, read_rows
from make_networks import seconds, size

sys.path.append(str(Path(__file__).resolve().parent.parent / "studies"))  # its rows are of studies
import bench_gateway
from bench.link import LinkSpeed
from bench.rows import provenance
from private_llm_cli.commands.estimate_plans import Hardware
from private_llm_cli.commands.models import demo_model, quiet, smollm2_model
from real_model import PROMPTS
from wan_models import wan_model
from wan_rows import counted_both, estimated

from private_llm.config import PrivateConfig
from private_llm.protocol_facts import ASSISTED

if TYPE_CHECKING:
    from private_llm_hf.tools.estimate import Estimate

ROOT = Path(__file__).resolve().parents[2]
PAGE, ROWS = ROOT / "docs" / "capacity.md", ROOT / "docs" / "capacity.jsonl"
AT_ONCE, NEW = (1, 2, 4, 8), 8
USERS = (10, 100, 1000, 10_000)
TOKENS_OF_A_USER = 0.5
"""Tokens a second of one user on average: 5 a second, a tenth of the time."""
LINK = LinkSpeed(1000.0, 1.0)
"""Of every machine, in each direction."""
PROGRAM_BYTES, SPARE = 0.6e9, 1.2
"""Memory of a process beside weights and caches, and what they take beyond the estimate (docs/deploy.md, "Sizes")."""
CPU_GMACS, GPU_GMACS = 25.0, 1500.0
"""GMAC/s of a core in the ring of trio, and of a GPU that reads two bytes a weight at 3 TB/s. Neither is measured."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A group of the estimator's. seq: tokens of a prompt. batch: requests that run at a time."""

    model: str
    protocol: str
    seq: int
    new: int
    batch: int = 8

    @property
    def gmacs(self) -> float:
        """Of a party."""
        return GPU_GMACS if self.on_gpus else CPU_GMACS

    @property
    def on_gpus(self) -> bool:
        """Servers of the 8B shape have one each."""
        return self.model == "llama-8b"

    def run(self) -> Row:
        """The row: bytes, rounds and seconds of `batch` answers at a time, and memory of a party and of the client.

        Of the prompt's pass, and of further tokens as long as the one in the middle takes. Under "assisted" seconds are
        also those that the client's own part takes on this machine.
        """
        config, model = PrivateConfig(protocol=self.protocol), wan_model(self.model)
        weight_bits = config.weight_bits if self.protocol == ASSISTED else None
        hardware = Hardware.of(LINK.bandwidth_mbit, LINK.latency_ms, self.gmacs, False, weight_bits)

        def both(prompt: int) -> "tuple[Estimate, Estimate]":
            return estimated(model, config, prompt, self.batch)

        def time(found: "Estimate") -> float:
            return sum(hardware.seconds(layer) for layer in found.layers())

        first, (before, after) = both(self.seq)[0], both(self.seq + self.new // 2)
        (prompt, _), (_, later) = counted_both(first, first), counted_both(before, after)
        further = self.new - 1
        return {
            "name": "capacity", "how": "modelled", **asdict(self), "gmacs": self.gmacs, **asdict(LINK),
            "parties": config.endpoints, "bytes_total": prompt.bytes_total + further * later.bytes_total,
            "bytes_busiest_link": prompt.card + further * later.card, "rounds": prompt.rounds + further * later.rounds,
            "seconds": time(first) + further * (time(after) - time(before)), "weights": after.weight_bytes,
            "client": after.client_bytes, "cache": after.cache_bytes, **provenance(),
        }  # fmt: skip


MODELLED = (
    Case("demo", "trio", 8, NEW), Case("demo", ASSISTED, 8, NEW),
    Case("smollm2", "trio", 37, NEW), Case("smollm2", ASSISTED, 37, NEW),
    Case("smollm2", "trio", 128, 128), Case("smollm2", ASSISTED, 128, 128),
    Case("llama-8b", ASSISTED, 128, 128), Case("llama-7b", "trio", 128, 128),
)  # fmt: skip
"""The first of a model and protocol is of answers as they are measured."""
MEASURED = (("demo", "trio"), ("demo", ASSISTED), ("smollm2", "trio"), ("smollm2", ASSISTED))


def measured(model: str, protocol: str, at_once: Sequence[int], new: int, repeat: int) -> Iterator[Row]:
    """Rows of a gateway with its parties on this machine: of each number at a time the faster run of `repeat`.

    memory_mib: of all processes after it, pages that several share counted once.
    """
    source = demo_model() if model == "demo" else smollm2_model()
    prompts = bench_gateway.DEMO_PROMPTS if model == "demo" else PROMPTS
    wanted = bench_gateway.plaintext(source, prompts, new)
    asked = [(prompts[n % len(prompts)], wanted[n % len(prompts)]) for n in range(max(at_once))]
    with bench_gateway.running(source, model, max(at_once), ["--protocol", protocol]) as client:
        bench_gateway.ask(client, model, prompts[0], 2)  # compiles kernels
        for count in at_once:
            runs = [bench_gateway.ask_at_once(client, model, asked[:count], new) for _ in range(repeat)]
            memory = {name: each["share"] for name, each in bench_gateway.memory().items()}
            yield {
                "name": "capacity", "how": "measured", "model": model, "protocol": protocol, "new": new,
                "parties": PrivateConfig(protocol=protocol).endpoints, "repeat": repeat,
                **max(runs, key=lambda run: float(run["tokens_per_s"])), "memory_mib": memory, **provenance(),
            }  # fmt: skip


# -- the plan ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Group:
    """What one group makes and takes. tokens_per_s: of all its requests. link_bytes: through the busiest machine's
    link, for one token, its part of the prompt included. memory: bytes of all its processes. cores: that are busy.
    """

    words: str
    how: str
    tokens_per_s: float
    link_bytes: float
    memory: float
    cores: float
    gpus: int
    machines: int

    @classmethod
    def modelled(cls, row: Row) -> "Group":
        """Of a row of the estimator, whose seconds are of computing, waiting and sending one after the other."""
        tokens, parties = row["batch"] * row["new"], row["parties"]
        client = row["client"] + row["cache"] if row["protocol"] == ASSISTED else 0
        held = parties * (row["weights"] + (0 if client else row["cache"])) + client
        on_gpus = row["gmacs"] == GPU_GMACS
        return cls(
            _words(row), "modelled", tokens / row["seconds"], row["bytes_busiest_link"] / tokens,
            (parties + 1) * PROGRAM_BYTES + SPARE * held, 1 if on_gpus else parties + 1, parties if on_gpus else 0,
            parties + 1,
        )  # fmt: skip

    @classmethod
    def measured(cls, row: Row, counted: Row) -> "Group":
        """Of a row that ran on loopback, whose bytes take the way that the estimator counted: the time of its links is
        added, rounds times latency, and no link carries more than its bandwidth.
        """
        ways = 2 if row["protocol"] == ASSISTED else 1  # a round there is an exchange
        link_bytes = _bytes_a_token(row) * counted["bytes_busiest_link"] / counted["bytes_total"]
        made = row["tokens"] / (row["seconds"] + ways * row["rounds"] * LINK.latency)
        return cls(
            _words(row), "measured", min(made, 1 / LINK.seconds(link_bytes)), link_bytes,
            _memory(row), row["processor_s"] / row["seconds"], 0, row["parties"] + 1,
        )  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """For so many users: groups, tokens a second of all, Mbit/s of the busiest link of a group, and what all take."""

    users: int
    groups: int
    tokens_per_s: float
    mbit: float
    memory: float
    cores: float
    gpus: int
    machines: int


def plan(group: Group, users: int) -> Plan:
    """As many equal groups as make the tokens that the users take; each then carries an equal part."""
    wanted = users * TOKENS_OF_A_USER
    groups = math.ceil(wanted / group.tokens_per_s)
    return Plan(
        users, groups, wanted, wanted / groups * group.link_bytes * 8 / 1e6, groups * group.memory,
        groups * group.cores, groups * group.gpus, groups * group.machines,
    )  # fmt: skip


def groups_of(rows: Sequence[Row]) -> list[Group]:
    """Of each model and protocol that was measured the number at a time that makes most; modelled ones of chats."""
    modelled = [row for row in rows if row["how"] == "modelled"]
    counted = {(row["model"], row["protocol"]): row for row in reversed(modelled)}
    found: dict[object, list[Group]] = defaultdict(list)
    for row in rows:
        if row["how"] == "measured":
            kind = row["model"], row["protocol"]
            found[kind].append(Group.measured(row, counted[kind]))
    best = [max(groups, key=lambda group: group.tokens_per_s) for groups in found.values()]
    return [*best, *(Group.modelled(row) for row in modelled if row["new"] > NEW)]


# -- tables ------------------------------------------------------------------------------------------------------------
def _words(row: Row) -> str:
    """Model and protocol, and what runs at a time."""
    at_once = row["at_once"] if row["how"] == "measured" else row["batch"]
    gpus = ", GPUs" if row.get("gmacs") == GPU_GMACS else ""
    return f"{wan_model(row['model']).words}, {row['protocol']}{gpus}, {at_once} at a time"


def _bytes_a_token(row: Row) -> float:
    """Over all links, of answers that were measured."""
    return float(row["bytes"] * row["at_once"] / row["tokens"])


def measured_table(rows: Sequence[Row]) -> str:
    """What one group made on one machine, a line for each model and protocol."""
    chosen = [row for row in rows if row["how"] == "measured"]
    counts = " / ".join(map(str, dict.fromkeys(row["at_once"] for row in chosen)))
    lines = [
        f"| model | protocol | tokens/s at {counts} at a time | first token, s | MB an answer | rounds | busy cores "
        "| memory, GB | texts | load |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    kinds: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in chosen:
        kinds[row["model"], row["protocol"]].append(row)
    for (model, protocol), own in kinds.items():
        columns: tuple[Callable[[Row], str], ...] = (
            lambda row: f"{row['tokens_per_s']:.3g}", lambda row: seconds(row["first_s"]),
            lambda row: size(row["bytes"]), lambda row: f"{row['rounds']:.0f}",
            lambda row: f"{row['processor_s'] / row['seconds']:.1f}", lambda row: f"{_memory(row) / 1e9:.1f}",
        )  # fmt: skip
        cells = [" / ".join(map(column, own)) for column in columns]
        text = "equal" if all(row["equal"] for row in own) else "differ"
        load = " / ".join(f"{row['load']:.1f}" for row in own)
        lines.append(f"| {wan_model(model).words} | {protocol} | {' | '.join(cells)} | {text} | {load} |")
    return "\n".join([*lines, f"\nAnswers of {chosen[0]['new']} tokens at most, loopback; {taken(chosen)}."])


def modelled_table(rows: Sequence[Row]) -> str:
    """What `private-llm estimate` says of answers that run at a time."""
    chosen = [row for row in rows if row["how"] == "modelled"]
    lines = [
        "| model | protocol | prompt, new tokens | GMAC/s of a party | s | tokens/s | MB an answer | of it busiest "
        "machine | rounds | weights of a party, GB | client, GB | caches, GB |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in chosen:
        lines.append(
            f"| {wan_model(row['model']).words} | {row['protocol']} | {row['seq']}, {row['new']} | {row['gmacs']:g} "
            f"| {seconds(row['seconds'])} | {row['batch'] * row['new'] / row['seconds']:.3g} "
            f"| {size(row['bytes_total'] / row['batch'])} | {size(row['bytes_busiest_link'] / row['batch'])} "
            f"| {row['rounds']} | {row['weights'] / 1e9:.3g} | {row['client'] / 1e9:.2g} | {row['cache'] / 1e9:.2g} |"
        )
    first = chosen[0]
    return "\n".join([*lines, f"\n{first['batch']} answers at a time, {_link()}; {taken(chosen)}."])


def plan_table(rows: Sequence[Row]) -> str:
    """A line for each group, a column for each number of users."""
    asked = " | ".join(f"{users:,} users: {users * TOKENS_OF_A_USER:,.0f} tokens/s" for users in USERS)
    lines = [f"| group | tokens/s of one | {asked} |", "|---" * (2 + len(USERS)) + "|"]
    for group in groups_of(rows):
        cells = [_cell(plan(group, users)) for users in USERS]
        lines.append(f"| {group.words}: {group.how} | {group.tokens_per_s:.3g} | {' | '.join(cells)} |")
    told = "groups: their machines, Mbit/s of a group's busiest link, GB of memory and cores of all"
    return "\n".join([*lines, f"\n{told}; {_link()}."])


def _cell(made: Plan) -> str:
    gpus = f", {made.gpus:,} GPUs" if made.gpus else ""
    memory = f"{made.memory / 1e9:,.0f} GB, {math.ceil(made.cores):,} cores{gpus}"
    return f"{made.groups:,}: {made.machines:,} machines, {made.mbit:.3g} Mbit/s, {memory}"


def _memory(row: Row) -> float:
    """Bytes of all processes of a row that was measured."""
    return float(sum(row["memory_mib"].values()) * 2**20)


def _link() -> str:
    return f"links of {LINK.bandwidth_mbit / 1000:g} Gbit/s each way and {LINK.latency_ms:g} ms one way"


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """What stands between the markers of the page."""
    return {"plan": plan_table(rows), "measured": measured_table(rows), "modelled": modelled_table(rows)}


def is_current() -> bool:
    """Whether the page shows the rows that are there."""
    page = PAGE.read_text("utf-8")
    return all(f"<!-- {mark} -->\n{text}\n<!-- /{mark} -->" in page for mark, text in tables(read_rows(ROWS)).items())


def key(row: Row) -> tuple[object, ...]:
    """What one row is of."""
    return row["how"], row["model"], row["protocol"], row.get("seq"), row["new"], row.get("batch", row.get("at_once"))


def measure(options: argparse.Namespace) -> None:
    """Make all rows that are asked for; keep each as soon as it is there."""

    def wanted(how: str, model: str, protocol: str) -> bool:
        kinds = (options.how, how), (options.protocol, protocol)
        return all(asked in ("", own) for asked, own in kinds) and (not options.models or model in options.models)

    for case in MODELLED:
        if wanted("modelled", case.model, case.protocol):
            _keep(case.run())
    for model, protocol in MEASURED:
        if wanted("measured", model, protocol):
            for row in measured(model, protocol, AT_ONCE, NEW, options.repeat):
                _keep(row)


def _keep(row: Row) -> None:
    print(json.dumps(row), flush=True)
    order = [("measured", *kind, None, NEW, count) for kind in MEASURED for count in AT_ONCE]
    order += [("modelled", *asdict(case).values()) for case in MODELLED]
    known = {key(each): each for each in read_rows(ROWS)} | {key(row): row}
    keep(ROWS, [known[each] for each in order if each in known])


def try_tiny() -> None:
    """Rows of the bundled model and their tables."""
    rows = [Case("demo", protocol, 8, new, 2).run() for _, protocol in MEASURED[:2] for new in (2, NEW + 1)]
    for _, protocol in MEASURED[:2]:
        rows += measured("demo", protocol, (2,), 2, 1)
    print(*tables(rows).values(), sep="\n\n")


def main() -> int:
    """Parse, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag in ("--measure", "--check", "--tiny"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--models", nargs="+", default=[], help="only these")
    parser.add_argument("--how", default="", choices=["", "measured", "modelled"])
    parser.add_argument("--protocol", default="", choices=["", "trio", ASSISTED])
    parser.add_argument("--repeat", type=int, default=2, help="runs of which the faster one counts")
    options = parser.parse_args()
    quiet()
    if options.tiny:
        try_tiny()
        return 0
    if options.check:
        current = is_current()
        print(f"{PAGE.name} is {'current' if current else 'not that of the rows: run scripts/pages/make_capacity.py'}")
        return 0 if current else 1
    if options.measure:
        measure(options)
    for mark, text in tables(read_rows(ROWS)).items():
        put(PAGE, mark, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
