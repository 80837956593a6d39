"""Figures of the pages are those of this code: bytes and rounds of the rows in docs/ are counted again here.

Seconds cannot be compared between machines, so a row counts as older than the code when its bytes or rounds differ
from what the code sends now. Every row names the commit that it was made at.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import cascade_rows
import make_capacity
import mpcache_rows
import pytest
from bench.catalogue import make
from bench.link import LinkSpeed
from bench.measure import measure
from mpcache_rows import PAPER
from pigeon_rows import jobs
from private_llm_hf.models import smollm2
from private_llm_hf.tools.estimate import estimate, named_shape
from wan_models import PROMPT, wan_model
from wan_rows import counted_both, estimated, wan_config

from private_llm.config import PrivateConfig

DOCS = Path(__file__).resolve().parent.parent / "docs"
ROWS = {path.name: list(map(json.loads, path.read_text("utf-8").splitlines())) for path in DOCS.rglob("*.jsonl")}
Row = dict[str, Any]
SENT = ("bytes_total", "rounds")


def ran_again() -> Iterator[tuple[Row, Row]]:
    """The README's table."""
    for row in ROWS["benchmarks.jsonl"]:
        yield row, measure(make(row["name"]), PrivateConfig(), 1).to_dict()


NETWORKS = {
    "LeNet-5, 28 x 28, batch 16": "lenet5", "AlexNet, CIFAR, batch 16": "alexnet",
    "VGG-16, CIFAR, batch 16": "vgg16-cifar10", "VGG-16, ImageNet, batch 1": "vgg16-imagenet-average",
    "ResNet-50, ImageNet, batch 1": "resnet50-average",
}  # fmt: skip


def engine_again() -> Iterator[tuple[Row, Row]]:
    """PIGEON's works: functions run, and the estimator, which is exact, counts the networks of images."""
    made = {(job.line.label, job.protocol, job.line.ring): job for job in jobs(PrivateConfig(), imagenet=True)}
    for row in ROWS["pigeon.jsonl"]:
        job = made[row["label"], row["protocol"], row["ring"]]
        if row["label"] in NETWORKS:
            found = named_shape(NETWORKS[row["label"]])
            assert found is not None
            yield row, estimate(*found, job.config, 1, 0, job.work.shape[0]).costs.to_dict()
        else:
            yield row, measure(job.work, replace(job.config, party_mode="threads"), 1).to_dict()


def chat_again() -> Iterator[tuple[Row, Row]]:
    """SmolLM2's prompt."""
    lacking = smollm2.missing()
    if lacking is not None:
        pytest.skip(lacking)
    row = ROWS["smollm2.jsonl"][0]
    yield row, measure(make("smollm2"), PrivateConfig(protocol=row["protocol"], party_mode="threads"), 1).to_dict()


def distance_again() -> Iterator[tuple[Row, Row]]:
    """Tokens over a distance: of each model the first and the last modelled row."""
    rows = [row for row in ROWS["networks.jsonl"] if row["how"] == "modelled"]
    for name in dict.fromkeys(row["model"] for row in rows):
        model, of_model = wan_model(name), [row for row in rows if row["model"] == name]
        if model.missing() is None:
            for row in (of_model[0], of_model[-1]):
                network = LinkSpeed(row["bandwidth_mbit"], row["latency_ms"])
                first, later = counted_both(*estimated(model, wan_config(network), PROMPT))
                yield row, later.columns(first)


def cache_again() -> Iterator[tuple[Row, Row]]:
    """Steps and layers with the paper's settings at 2048 tokens, where the aims are."""
    made = {
        (case.kind, case.label, case.model, case.protocol, case.tokens): case for case in mpcache_rows.cases(("trio",))
    }
    for row in ROWS["mpcache.jsonl"]:
        case = made.get((row["kind"], row["label"], row["model"], row["protocol"], row["tokens"]))
        if case is not None and case.kind in ("step", "layer") and case.policy == PAPER and case.tokens == 2048:
            yield row, replace(case, measured=False).run(1)


def bert_again() -> Iterator[tuple[Row, Row]]:
    """BERT-base under trio, which stands beside token sharding."""
    made = {(case.part, case.weights): case for case in cascade_rows.cases()}
    for row in ROWS["cascade.jsonl"]:
        if row["protocol"] == "trio":
            yield row, made["trio", row["label"].split()[2]].run(1)


def capacity_again() -> Iterator[tuple[Row, Row]]:
    """Groups of the bundled model, and of the shapes of 7 and 8 billion parameters."""
    made = {make_capacity.key({"how": "modelled", **asdict(case)}): case for case in make_capacity.MODELLED}
    for row in ROWS["capacity.jsonl"]:
        if row["how"] == "modelled" and row["model"] != "smollm2":
            yield row, made[make_capacity.key(row)].run()


CACHE = ("bytes", "full_bytes", "rounds", "full_rounds", "ratio_bytes")
COUNTED: dict[str, tuple[Callable[[], Iterator[tuple[Row, Row]]], tuple[str, ...], str]] = {
    "benchmarks.jsonl": (ran_again, SENT, "python scripts/pages/make_benchmarks.py --count --only NAME"),
    "pigeon.jsonl": (engine_again, SENT, "python scripts/pages/make_benchmarks.py --count --only pigeon"),
    "smollm2.jsonl": (chat_again, SENT, "python scripts/pages/make_benchmarks.py --count --only smollm2"),
    "networks.jsonl": (
        distance_again,
        (*SENT, "bytes_first_token", "rounds_first_token"),
        "python scripts/pages/make_networks.py --measure --how modelled --count",
    ),
    "capacity.jsonl": (
        capacity_again,
        (*SENT, "bytes_busiest_link", "weights", "client", "cache"),
        "python scripts/pages/make_capacity.py --measure --how modelled",
    ),
    "cascade.jsonl": (bert_again, SENT, "python scripts/pages/make_benchmarks.py --count --only cascade"),
    "mpcache.jsonl": (cache_again, CACHE, "python scripts/pages/make_cache_tables.py --count"),
}  # fmt: skip
"""Rows that are counted again: how, which columns must be equal, and what makes the rows anew."""
STUDIES = {
    "cascade-attacks.jsonl", "cascade-attacks-search.jsonl", "gpu-before.jsonl", "gpu.jsonl", "kv-accuracy.jsonl",
    "kv-refill.jsonl", "network.jsonl",
}  # fmt: skip
"""Accuracies, attacks, other machines' seconds, networks that need root: test_scripts_tiny.py runs their scripts."""


def test_every_file_of_rows_is_counted_again_or_a_study() -> None:
    assert set(ROWS) == {*COUNTED, *STUDIES}


@pytest.mark.full
@pytest.mark.parametrize("name", COUNTED)
def test_rows_are_those_of_this_code(name: str) -> None:
    again, columns, command = COUNTED[name]
    compared, older = 0, []
    for row, now in again():
        compared += 1
        label = row.get("label", row.get("model", row["name"]))
        older += [
            f"{label}: {column} {row[column]}, now {now[column]}" for column in columns if row[column] != now[column]
        ]
    assert compared
    assert not older, f"{name} is older than the code; {command} makes it anew:\n" + "\n".join(older)


GIT = ("git", "-C", str(DOCS))


def whole_history() -> bool:
    """A source distribution and a shallow clone have none."""
    asked = subprocess.run([*GIT, "rev-parse", "--is-shallow-repository"], capture_output=True, text=True)
    return asked.stdout == "false\n"


@pytest.mark.parametrize("name", ROWS)
def test_rows_name_a_commit_of_this_history(name: str) -> None:
    if not whole_history():
        pytest.skip("not a checkout with its whole history")
    for commit in {row[part] for row in ROWS[name] for part in ("commit", "counted") if part in row}:
        subprocess.run([*GIT, "merge-base", "--is-ancestor", commit, "HEAD"], check=True)


GENERATED = re.compile(r"<!-- (?!/|made by|counted|formulas)([\w-]+)[^>]*-->.*?<!-- /\1 -->", re.DOTALL)
MADE = re.compile(
    r"<!-- (?:made by: (?P<made>.+); commit (?P<commit>\w{8})|(?:counted|formulas): (?P<held>\S+)) -->\n$"
)
MANY = 20
"""Numbers that make a table one of figures."""


def tables() -> list[tuple[Path, str, str]]:
    """Tables of figures outside generated sections: page, what stands before, the table."""
    found = []
    for page in (DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))):
        if page.name in ("api.md", "threat-model.md") or page.match("decisions/README.md"):  # of the code
            continue
        text = GENERATED.sub("", page.read_text("utf-8"))
        for table in re.finditer(r"(?:^\|.*\n)+", text, re.MULTILINE):
            body = "".join(table[0].splitlines(keepends=True)[2:])
            if len(re.findall(r"(?<![\w.-])\d[\d,.]*(?![\w-])", body)) >= MANY:
                found.append((page, text[: table.start()], table[0]))
    return found


def test_tables_of_figures_say_what_made_them() -> None:
    """A generated section, a script or command and the commit it ran at, or the test that counts the figures again,
    or the module whose formulas they are."""
    unsaid, history = [], whole_history()
    for page, before, table in tables():
        made = MADE.search(before)
        if made is None:
            unsaid.append(f"{page.name}: {table.splitlines()[0]}")
        elif made["held"]:
            assert (DOCS.parent / made["held"]).is_file(), made["held"]
        else:
            assert re.match(r"private-llm \w|python (scripts|tests/system)/\w+(/\w+)?\.py", made["made"]), made["made"]
            if history:
                subprocess.run([*GIT, "merge-base", "--is-ancestor", made["commit"], "HEAD"], check=True)
    assert not unsaid, "no generated section, and no `<!-- made by: COMMAND; commit ... -->` above:\n" + "\n".join(
        unsaid
    )


def indexing_again(script: Any) -> tuple[str, list[str]]:
    """Comet's one-hot rows for 103 of 1024."""
    cost = script.counted_one_hot(PrivateConfig(protocol="trio"), 1024, 103)
    return "| trio | 1024 |", [f"{script.size(cost.total)}, {cost.rounds},"]


def noise_again(script: Any) -> tuple[str, list[str]]:
    """LLaMA-2-7B's neurons without noise."""
    row = script.row(script.LLAMA, "", script.LLAMA.active, 0, script.in_the_open(script.LLAMA), None)
    sizes = (row.trio_indexing, row.trio_moving, row.dealer_indexing, row.dealer_moving)
    trio, of_trio, dealer, of_dealer = (f"{size / 1e3:,.0f}" for size in sizes)
    told = [f"{trio} + {of_trio} kB", f"{dealer} + {of_dealer} kB", f"{row.products / 1e6:.0f} MB"]
    return "| the count as it is |", told


def products_again(script: Any) -> tuple[str, list[str]]:
    """Both products of OPT-6.7B where a tenth of the neurons is left out, the same at each position."""
    share = round(0.9 * script.NEURONS)
    active = script.Activity(script.POSITIONS, script.NEURONS, script.POSITIONS * share, script.POSITIONS, share)
    prices = (*script.SETTINGS["dealer, remask"], active, script.WIDTH)
    return "| 10 % |", [
        script.size(script.methods_fc1(*prices)["SOMM"]),
        script.size(script.methods_fc2(*prices)["SIMM"]),
    ]


def decode_again(script: Any) -> tuple[str, list[str]]:
    """A layer's step, dense and with blocks that are predicted."""
    row = script.Case("trio", "blocks of 16, open levels", script.SHAPE, tiny=False).run(1)
    sizes = f"{row['dense_bytes'] / 1e6:.2f}, {row['bytes_total'] / 1e6:.2f}"
    return "| trio | blocks of 16, open levels |", [sizes, f"{row['dense_rounds']}, {row['rounds']}"]


def topk_again(script: Any) -> tuple[str, list[str]]:
    """One row of 256, by the formulas."""
    config = PrivateConfig()
    pricing, bits = script.Pricing.of(config), script.RANGE_BITS + config.frac_bits + 1
    prices = [script.cost(pricing, 1, 256, 64, bits, method) + pricing.numbers(256) for method in script.METHODS]
    return "| 1 x 256 |", [f"{price.total / 1e3:.0f}, {price.rounds}," for price in prices]


def experts_again(script: Any) -> tuple[str, list[str]]:
    """Layers of two mixtures for a prompt, each expert with a capacity."""
    return "| 1.25 |", [script.cell(script.costs(shape, 1.25, script.LENGTH)) for shape in script.LAYERS.values()]


CELLS: dict[str, tuple[str, Callable[[Any], tuple[str, list[str]]]]] = {
    "python scripts/studies/compare_indexing.py": ("compare_indexing", indexing_again),
    "python scripts/studies/level_noise.py": ("level_noise", noise_again),
    "python scripts/studies/compare_sparse_products.py": ("compare_sparse_products", products_again),
    "python scripts/studies/bench_comet.py": ("bench_comet", decode_again),
    "python scripts/studies/expert_capacity.py": ("expert_capacity", experts_again),
    "python scripts/studies/compare_topk.py": ("compare_topk", topk_again),
}
"""Commands whose tables have bytes or rounds, and a row of them that is counted again: how it begins, and its cells."""
DATED = {
    "python tests/system/soak_service.py",  # memory
    "python scripts/studies/sparse_accuracy.py",  # of what models chose
    "python scripts/studies/replay_cache.py",  # of patterns
    "python scripts/studies/bench_distance.py",  # of another version
    "python scripts/studies/bench_distance.py --ways keys trained",
    "python scripts/studies/bench_distance.py --assisted",
}
"""Commands whose tables have such units, and cannot be counted again here: their pages say when they were made."""


def test_tables_with_bytes_or_rounds_are_counted_again() -> None:
    made = {found["made"] for _, before, table in tables() if (found := MADE.search(before)) and (
        re.search(r"\b(bytes|[kMG]B|rounds)\b", table))} - {None}  # fmt: skip
    unsaid = {command for command in made if "measure_memory" not in command} - {*CELLS, *DATED}
    assert not unsaid, "a table with bytes or rounds that nothing counts again; want a row of it in CELLS"


@pytest.mark.full
@pytest.mark.parametrize("command", CELLS)
def test_a_row_of_each_table_is_that_of_this_code(command: str) -> None:
    name, again = CELLS[command]
    begins, cells = again(importlib.import_module(name))
    pages = [table for _, before, table in tables() if (found := MADE.search(before)) and found["made"] == command]
    rows = [line for table in pages for line in table.splitlines() if line.startswith(begins)]
    assert any(all(cell in row for cell in cells) for row in rows), (
        f"the table is older than the code, which gives {cells} in the row {begins}; {command} makes it anew"
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("adder", ["default", "keys", "auto"])
def test_the_table_of_parties_that_are_far_apart_is_that_of_the_estimator(adder: str) -> None:
    """Rounds and MB of the bundled model in docs/deploy.md."""
    far = {} if adder == "default" else {"adder": adder, "bandwidth_mbit": 1000.0, "latency_ms": 20.0}
    model, config = wan_model("demo"), PrivateConfig.from_dict(far)
    whole = estimate(*model.shape(), config, 112, 2, ranges=model.ranges(config))
    assert whole.prompt is not None
    first, both = whole.prompt.costs, whole.costs
    (row,) = re.findall(rf"^\| `?(?:adder=\")?{adder}.*$", (DOCS / "deploy.md").read_text("utf-8"), re.MULTILINE)
    prompt, token = (re.findall(r"[\d.]+", cell) for cell in row.split("|")[2:4])
    assert [int(prompt[0]), int(token[0])] == [first.rounds, both.rounds - first.rounds]
    shown, sent = (float(prompt[1]), float(token[1])), (first.bytes_total, both.bytes_total - first.bytes_total)
    assert shown == pytest.approx([size / 1e6 for size in sent], rel=0.03)
