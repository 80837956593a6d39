"""The harness: rows, the emulated link, errors of parties."""

from __future__ import annotations

import gc
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.catalogue import ENTRIES, INSTALLED_APART, NAMES, make
from bench.link import LinkSpeed, RecordingMesh, SlowMesh
from bench.measure import measure
from bench.rows import Row
from bench.run import app
from bench.work import MOST_RUNS, Work, warm_up
from private_llm_cli.options import parse_shape
from typer.testing import CliRunner

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, DomainError, PartyFailed
from private_llm.nn.activations import ACTIVATIONS
from private_llm.protocols.session import Session
from private_llm.replay.program_cache import uncompiled_calls
from private_llm.tensor.fixed import Fixed

CONFIG = PrivateConfig(timeout_s=60)
LARGEST_ERROR = {
    # Exact functions: rounding of the inputs (2^-19 each, times the other factor) and one unit of 2^-18.
    "mul": 2**-15, "matmul": 2**-13, "matmuls": 2**-14,
    # What functions state, up to 8, with the rounding of their inputs.
    **{made.name: 2**-18 + 1.5 * (made.error + made.relative * math.exp(8)) for made in ACTIVATIONS},
    # The aims for approximations, likewise.
    "softmax": 5e-4, "layernorm": 5e-4, "argmax": 0.0,
    # Layers: some ten functions one after the other, activations below about 4.
    "opt-layer": 5e-3, "bert-layer": 5e-3, "opt-decode": 5e-3, "gpt2-forward": 1e-2, "generate": 5e-2,
    # Up to 16 layers of products and ReLU, activations below about 8.
    "lenet": 5e-3, "alexnet": 5e-3, "vgg16": 5e-3, "vgg16-imagenet": 5e-3,
    # The same with 53 layers.
    "resnet50": 5e-3,
}  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("generate", *INSTALLED_APART)])
def test_every_work_runs_and_is_right(name: str) -> None:
    row = measure(make(name, tiny=True), CONFIG, repeat=1)
    assert row.error_max <= LARGEST_ERROR[name]
    assert row.shape == ENTRIES[name].tiny
    assert row.bytes_total == sum(row.bytes_per_party.values()) > 0
    assert row.rounds > 0


@pytest.mark.parametrize("how", [measure, partial(measure, apart=True)])
def test_timed_runs_record_nothing(how: Callable[..., Row]) -> None:
    """Steps are recorded before, and how long the first run took is said apart."""
    gc.collect()  # programs of sessions that ended count until they are freed
    known, seen = uncompiled_calls(), list[int]()
    row = how(make("opt-decode", tiny=True), CONFIG, repeat=3, progress=lambda: seen.append(uncompiled_calls() - known))
    assert (seen[0] > 0) == (how is measure), "preprocessed calls are not recorded"
    assert seen == [seen[0]] * 4
    assert row.repeat == 3
    assert row.seconds_first is not None
    assert row.seconds_first > 0


def test_what_is_recorded_each_time_is_timed_at_last() -> None:
    runs: list[int] = []

    def run() -> float:
        runs.append(1)
        return float(len(runs))

    assert warm_up(run, lambda: len(runs)) == 1.0
    assert len(runs) == MOST_RUNS
    assert warm_up(run, lambda: min(len(runs), MOST_RUNS + 2)) == MOST_RUNS + 1
    assert len(runs) == MOST_RUNS + 3


def test_repetitions_cost_the_same() -> None:
    one, three = (measure(make("opt-layer", tiny=True), CONFIG, repeat=r) for r in (1, 3))
    assert (one.bytes_per_party, one.rounds) == (three.bytes_per_party, three.rounds)


@pytest.mark.parametrize("protocol", ["trio", "quad"])
def test_parallel_sessions_share_the_rows(protocol: str) -> None:
    """The same values; the same bytes, as every parallel session has a multiple of 64 elements, and as few rounds."""
    config = replace(CONFIG, protocol=protocol)
    one = measure(make("relu", (4 * 3 * 64,)), config, repeat=1)
    many = measure(make("relu", (4 * 3 * 64,)), replace(config, parallel_sessions=3, rotate_roles=True), repeat=1)
    assert many.error_max <= LARGEST_ERROR["relu"]
    checks = 35 * 2 if protocol == "quad" else 0  # two digests and three verdicts in each further parallel session
    assert (many.bytes_total, many.rounds) == (one.bytes_total + checks, one.rounds)
    if protocol == "trio":
        assert len(set(many.bytes_per_party.values())) == 1
    assert (many.parallel_sessions, many.rotate_roles) == (3, True)


@pytest.mark.parametrize("name", ["matmul", "layernorm", "opt-layer"])
def test_works_that_are_not_rows_refuse_parallel_sessions(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be spread over parallel_sessions=2"):
        measure(make(name, tiny=True), replace(CONFIG, parallel_sessions=2), repeat=1)


def test_inputs_are_random_reals() -> None:
    for name in ("relu", "matmul", "softmax"):
        work = make(name, tiny=True)
        assert isinstance(work, Work)
        for value in work.values():
            assert value.dtype == torch.float64
            assert bool((value != 0).all())
            assert value.std() > 0.1
        assert all(torch.equal(a, b) for a, b in zip(work.values(), work.values(), strict=True))


def test_latency_is_felt_once_a_round() -> None:
    slow = measure(make("relu", tiny=True), CONFIG, repeat=1, speed=LinkSpeed(1000, 20))
    assert slow.seconds["min"] >= slow.rounds * 0.02
    assert (slow.bandwidth_mbit, slow.latency_ms) == (1000, 20)


def test_a_slow_link_delivers_in_order_and_late() -> None:
    mesh = SlowMesh(2, 10.0, LinkSpeed(8.0, 30.0), instant="go")  # one megabyte a second
    a, b = mesh.transport(0), mesh.transport(1)
    started = time.perf_counter()
    a.send(1, "first", torch.arange(5000))  # 40 kB take 40 ms
    a.send(1, "second", torch.arange(2))
    assert time.perf_counter() - started < 0.03
    assert torch.equal(b.recv(0, "first", (5000,), torch.int64), torch.arange(5000))
    assert time.perf_counter() - started >= 0.07
    assert torch.equal(b.recv(0, "second", (2,), torch.int64), torch.arange(2))


@pytest.mark.parametrize(("bandwidth", "latency"), [(0.0, 1.0), (-1.0, 1.0), (1.0, -1.0), (float("nan"), 1.0)])
def test_impossible_links(bandwidth: float, latency: float) -> None:
    with pytest.raises(ConfigError, match="positive bandwidth"):
        LinkSpeed(bandwidth, latency)


def test_a_party_that_fails_is_reported() -> None:
    def prepare(session: Session, weights: object) -> object:
        def run(_: Session, values: Sequence[Fixed]) -> Fixed:
            if session.party == 1:
                raise DomainError("this is what went wrong")
            return values[0].mul(values[0])

        return run

    work = Work("broken", (4,), ((4,),), prepare, lambda values, _: values[0])  # type: ignore[arg-type]
    with pytest.raises(PartyFailed, match="party 1, benchmark 'broken': this is what went wrong"):
        measure(work, CONFIG, repeat=1)


def test_waits_are_recorded() -> None:
    mesh = RecordingMesh(2, 10.0)
    a, b = mesh.transport(0), mesh.transport(1)
    a.send(1, "word", torch.arange(2))
    b.recv(0, "word", (2,), torch.int64)
    (wait,) = mesh.waits
    assert (wait.endpoint, wait.peer, wait.tag) == (1, 0, "word")
    assert wait.end >= wait.start


@pytest.mark.parametrize("text", ["", "x", "3x", "0x2", "-1", "3.5", "axb"])
def test_bad_shapes(text: str) -> None:
    with pytest.raises(ConfigError, match="shape: got"):
        parse_shape(text)


def test_a_shape() -> None:
    assert parse_shape("3X40x5") == (3, 40, 5)


def test_counts_replace_elements_or_tokens() -> None:
    assert make("relu", count=5).shape == (5,)
    assert make("opt-layer", count=4, tiny=True).shape == (2, 4, 16, 2, 24)
    with pytest.raises(ConfigError, match="n: got 0"):
        make("relu", count=0)


def test_n_counts_images() -> None:
    assert make("lenet", count=4).shape == (4, 1, 28, 28)
    assert make("opt-layer", count=4, tiny=True).shape[1] == 4
    assert make("relu", count=4).shape == (4,)


def test_a_picture_of_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = tmp_path / "run.svg"
    how = ["--tiny", "--repeat", "1", "--parallel-sessions", "2", "--bandwidth", "1000", "--plot", str(picture)]
    assert CliRunner().invoke(app, ["relu", *how]).exit_code == 0
    text = picture.read_text()
    assert "<svg" in text
    result = CliRunner().invoke(app, ["relu", "mul", "--tiny", "--plot", str(picture)])
    assert "--plot shows one work" in str(result.exception)
    result = CliRunner().invoke(app, ["relu", "--tiny", "--plot", "picture.txt"])
    assert "want a name that ends in" in str(result.exception)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = CliRunner().invoke(app, ["relu", "--tiny", "--plot", str(picture)])
    assert "pip install 'private-llm[plot]'" in str(result.exception)


def rows(*words: str) -> list[dict[str, Any]]:
    result = CliRunner().invoke(app, [*words, "--json"])
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_bench_rows_have_every_field() -> None:
    made = rows("relu", "mul", "matmul", "--tiny", "--repeat", "2")
    assert [row["name"] for row in made] == ["relu", "mul", "matmul"]
    wanted = set(Row.__dataclass_fields__) | {"machine", "torch", "version", "commit"}
    for row in made:
        assert set(row) == wanted
        seconds = row["seconds"]
        assert isinstance(seconds, dict)
        assert seconds["min"] <= seconds["median"] <= seconds["max"]
        per_party = row["bytes_per_party"]
        assert isinstance(per_party, dict)
        assert sum(per_party.values()) == row["bytes_total"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("nothing", "unknown benchmark 'nothing'; known: relu"),
        ("relu --shape 3xq", "shape: got '3xq'"),
        ("matmul --shape 3x4", "want 3: M x K x N"),
        ("relu --repeat 0", "repeat: got 0"),
        ("relu --bandwidth 0", "want a positive bandwidth"),
        ("relu --party-mode processes --latency 1", "threads only"),
        ("relu --ring 48", "ring: got 48"),
        ("rellu", "unknown benchmark 'rellu' (did you mean relu, relu6?)"),
        ("relu --tiny --protocol cascade", "want a whole model, such as gpt2-forward"),
        ("opt-layer --shape 1x4x15x2x24", "got hidden 15; want a multiple of 2 heads"),
        ("relu --plot /nope/x.png", "cannot write '/nope/x.png'"),
    ],
)
def test_mistakes_are_one_message(words: str, message: str) -> None:
    assert message in str(CliRunner().invoke(app, words.split()).exception)


def test_bench_compares_as_it_is_told() -> None:
    """A ripple adder sends fewer bytes in more rounds, key bits fewer of both; the rows say which it was."""
    how = ("relu", "--tiny", "--repeat", "1", "--ring", "32")
    (plain,) = rows(*how)
    (ripple,) = rows(*how, "--adder", "ripple")
    (key,) = rows(*how, "--adder", "ripple", "--relu-bits", "18", "--relu-low", "10")
    circuits = [(row["adder"], row["relu_bits"], row["relu_low"]) for row in (plain, ripple, key)]
    assert circuits == [("auto", None, 0), ("ripple", None, 0), ("ripple", 18, 10)]
    assert plain["bytes_total"] > ripple["bytes_total"] > key["bytes_total"]
    assert ripple["rounds"] > key["rounds"] > plain["rounds"]


def test_bench_picks_the_adder_for_its_link() -> None:
    how = ("relu", "--n", "100000", "--repeat", "1", "--adder")
    (prefix,) = rows(*how, "prefix")
    (thin,) = rows(*how, "auto", "--bandwidth", "300")
    assert thin["bytes_total"] < prefix["bytes_total"]


@pytest.mark.full
def test_bench_in_processes_sends_the_same() -> None:
    (threads,) = rows("relu", "--tiny", "--repeat", "1")
    (processes,) = rows("relu", "--tiny", "--repeat", "1", "--party-mode", "processes")
    assert processes["party_mode"] == "processes"
    for key in ("bytes_per_party", "rounds", "error_max"):
        assert threads[key] == processes[key]


@pytest.mark.full
def test_bench_computes_whose_functions_it_is_told() -> None:
    """Each against its own formula, so that errors stay small; costs differ."""
    how = ("--plugin", "rivals", "gelu", "bert-layer", "--tiny", "--repeat", "1")
    made = {name: rows(*how, "--approximations", name) for name in ("ours", "mpcformer", "secformer", "puma")}
    for name, both in made.items():
        assert [row["approximations"] for row in both] == [name, name]
        assert all(row["error_max"] < 1e-3 for row in both)
    assert len({row["bytes_total"] for row, _ in made.values()}) == 4
    assert made["mpcformer"][0]["rounds"] == 2
