"""scripts/studies/bench_cascade.py: what its rows say, exact bytes, and times that add up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import bench_cascade
import cascade_rows
import pytest
import timed_nodes
import torch
from cascade_rows import Case, cases, memory_needed
from private_llm_hf.client.costs import Costs
from private_llm_hf.token_sharding.attention_calls import attention_calls
from private_llm_hf.wire.answers import CostRows
from timed_nodes import BUSY, SERIALISING, WAITING, TimedLedger, TimedTransport
from torch import Tensor
from typer.testing import CliRunner

from private_llm.net.local import LocalMesh
from private_llm.net.transport import CLIENT, Transport
from private_llm.token_sharding import ShardingPlan
from tests.token_sharding.nodes.prices import layer_bytes


def case_of(part: str, model: str = "bert-base") -> Case:
    return next(case for case in cases(tiny=True) if (case.part, case.model) == (part, model))


def sharded(**how: Any) -> list[tuple[Case, ShardingPlan]]:
    """The cases of nodes with their plans."""
    return [(case, case.plan) for case in cases(**how) if case.plan is not None]


def bytes_of(case: Case) -> int:
    model = case.shape.build()
    assert case.plan is not None
    return layer_bytes(case.plan, attention_calls(type(model), model.config), 1, case.tokens)


def test_the_table_has_the_rows_of_the_paper() -> None:
    def plans(part: str, model: str) -> list[tuple[int, int, int]]:
        chosen = [plan for case, plan in sharded() if (case.part, case.model) == (part, model)]
        return [(plan.alpha, plan.c, plan.m) for plan in chosen]

    for model in ("bert-base", "bert-large"):
        assert plans("alone", model) == plans("overhead", model) == [(1, 1, 1)]
        assert plans("bytes", model) == [(1, 1, 1), (4, 1, 1), (8, 1, 1)]
    assert plans("nodes", "bert-base") == [(1, 1, 1), (2, 1, 1), (4, 1, 1), (8, 1, 1), (4, 4, 1), (8, 4, 1)]
    assert plans("nodes", "bert-large") == [(2, 1, 1), (4, 1, 1), (8, 1, 1), (8, 4, 1)]
    assert [case.model for case in cases() if case.part == "size"] == ["bert-base", "bert-large", "llama-1b"]
    assert {case.tokens for case in cases()} == {128}
    assert all(plan.wire == ("float16" if case.part == "bytes" else "float32") for case, plan in sharded())
    assert all((plan.partials == "open") is (plan.c == 1) for _, plan in sharded())
    shared = [(case.part, case.model, case.weights) for case in cases() if case.plan is None]
    assert shared == [("trio", "bert-base", "public"), ("trio", "bert-base", "secret")]


@pytest.mark.parametrize(("model", "millions"), [("bert-base", 109), ("bert-large", 335), ("llama-1b", 1039)])
def test_models_have_the_sizes_of_their_names(model: str, millions: int) -> None:
    with torch.device("meta"):
        made = cascade_rows.MODELS[model].build()
    assert round(sum(weight.numel() for weight in made.parameters()) / 1e6) == millions


def test_formulas_give_the_bytes_of_the_papers_table() -> None:
    compared = 0
    for case, plan in sharded():
        paper = case.paper["paper_bytes"]
        if case.part == "bytes":
            with torch.device("meta"):
                model = case.shape.build()
            made = layer_bytes(plan, attention_calls(type(model), model.config), 1, case.tokens)
            assert paper is not None
            assert abs(made / 1e6 - paper / 1e6) < 1  # the paper prints whole megabytes
            compared += 1
    assert compared == 6


@pytest.mark.parametrize(("part", "model"), [("overhead", "bert-base"), ("size", "llama-1b"), ("bytes", "bert-base")])
def test_rows_of_nodes_in_this_process(part: str, model: str) -> None:
    case = case_of(part, model)
    row = json.loads(json.dumps(case.run(1)))
    assert (row["name"], row["protocol"], row["model"]) == (f"cascade-{part}", "cascade", model)
    assert row["bytes_nodes"] == bytes_of(case) > 0
    assert row["bytes_total"] == sum(row["bytes_per_party"].values()) > row["bytes_nodes"]
    assert case.plan is not None
    assert row["parties"] == case.plan.nodes
    assert 0 < row["ratio"]["min"] <= row["ratio"]["median"] <= row["ratio"]["max"]
    assert row["seconds"]["min"] > 0 < row["vanilla_seconds"]["min"]
    assert row["repeat"] == case.runs(1)
    assert row["error_max"] < (1e-2 if case.plan.wire == "float16" else 1e-4)
    assert row["aim_ratio"] is None
    assert row["split"] is None
    assert {"threads", "machine", "torch", "version", "shape", "ring", "rounds", "party_mode"} <= set(row)


def test_a_row_of_what_all_nodes_compute_without_links() -> None:
    row = json.loads(json.dumps(case_of("alone").run(1)))
    assert (row["aim_ratio"], row["repeat"], row["bytes_nodes"], row["bytes_total"]) == (1.1, 4, 0, 0)
    assert row["error_max"] < 1e-4
    assert row["ratio"]["min"] > 0


class Hours:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


def test_what_a_node_does_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that computes, waits for another, sends, and rests: each hour is in its place and nowhere else."""
    hours = Hours()
    monkeypatch.setattr(timed_nodes, "time", hours)

    class SlowLinks(Transport):
        def _send(self, to: int, tag: str, payload: Tensor) -> None:
            hours.now += 2

        def _recv(self, frm: int, tag: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            hours.now += 1
            return torch.zeros(shape, dtype=dtype)

        def wait(self, frm: int) -> None:
            hours.now += 500 if frm == CLIENT else 40

    links = TimedTransport(SlowLinks(0))
    links.wait(CLIENT)
    hours.now += 1000  # before the reset
    links.ledger.reset()
    hours.now += 3
    assert links.recv(1, "x", (2,), torch.int64).tolist() == [0, 0]
    links.send(1, "y", torch.zeros(3, dtype=torch.uint8))
    links.wait(CLIENT)
    hours.now += 1000  # a command that is not done
    seconds = Costs.from_rows([CostRows.of(links.ledger)]).ledgers[0].seconds
    assert seconds == {WAITING: 40, SERIALISING: 3, BUSY: 46}
    assert links.ledger.cost().sent == {(0, 1): 3}
    links.ledger.reset()
    assert not links.ledger.seconds
    assert links.ledger.cost().total == 0


def test_other_ledgers_look_at_no_clock() -> None:
    ledger = LocalMesh(1).transport(0).ledger
    with ledger.timing(WAITING):
        pass
    assert not ledger.seconds
    timed = TimedLedger(0)
    with timed.timing(WAITING):
        pass
    assert list(timed.seconds) == [WAITING]


def run(*arguments: str) -> Any:
    return CliRunner().invoke(bench_cascade.app, ["--tiny", "--repeat", "1", *arguments])


def test_the_script_draws_and_times_of_processes_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = [case_of("overhead"), case_of("nodes"), case_of("size")]
    monkeypatch.setattr(bench_cascade, "cases", lambda tiny, speed: chosen)
    picture = tmp_path / "cascade.svg"
    result = run("--json", "--plot", str(picture))
    assert result.exit_code == 0, result.output
    assert "<svg" in picture.read_text()
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["name"] for row in rows] == ["cascade-overhead", "cascade-nodes", "cascade-size"]
    row = rows[1]
    assert row["bytes_nodes"] == bytes_of(chosen[1])
    assert set(row["split"]) == {"comp", "attn", "client"}
    for parts in row["split"].values():
        assert set(parts) == {"computing", "waiting", "serialising"}
        assert min(parts.values()) >= 0
        whole = row["seconds"]["median"]  # of one forward
        if parts["waiting"] > 0:
            assert sum(parts.values()) == pytest.approx(whole)
        else:  # a node worked on after the client had its answer
            assert sum(parts.values()) >= whole * (1 - 1e-6)
    assert row["split"]["attn"]["serialising"] > 0


def test_rows_behind_a_link_feel_it_and_stand_beside_secret_sharing() -> None:
    """20 ms of latency: in each of two layers, rows go to nodes and come back."""
    result = run("--repeat", "1", "--json", "--latency", "20")
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(row["name"], row["protocol"], row["weights"]) for row in rows] == [
        ("cascade-link", "cascade", "public"), ("cascade-trio", "trio", "public"), ("cascade-trio", "trio", "secret"),
    ]  # fmt: skip
    for row in rows:
        assert (row["latency_ms"], row["bandwidth_mbit"], row["party_mode"]) == (20.0, 1e6, "threads")
        assert row["error_max"] < 2e-3
        assert row["bytes_nodes"] > 0
    assert rows[0]["seconds"]["min"] > 0.08
    assert rows[1]["seconds"]["min"] > 0.02 * rows[1]["rounds"]
    assert rows[1]["bytes_total"] < rows[2]["bytes_total"], "public weights need no products of shares"
    assert "leave out --bandwidth" in str(run("--bandwidth", "9", "--plot", "x.svg").exception)


def test_what_does_not_fit_into_memory_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = [case_of("overhead"), case_of("nodes")]
    monkeypatch.setattr(bench_cascade, "cases", lambda tiny, speed: chosen)
    limit = memory_needed(chosen[0])
    assert memory_needed(chosen[1]) > limit  # processes have copies of their own
    monkeypatch.setattr(bench_cascade, "_free_bytes", lambda: limit)
    result = run()
    assert result.exit_code == 0, result.output
    assert "against the plaintext forward" in result.stdout
    assert "every node a process" not in result.stdout


def test_figures_of_the_paper_stand_beside_its_own_models_and_plans_only() -> None:
    found = {
        (case.part, case.model, plan.alpha, plan.c): (
            case.paper["paper_seconds"], case.paper["paper_vanilla_seconds"], case.paper["paper_bytes"],
        )
        for case, plan in sharded()
    }  # fmt: skip
    assert found["alone", "bert-large", 1, 1] == (0.320, 0.273, None)
    assert found["nodes", "bert-base", 8, 1] == (0.74, 0.09, None)
    assert found["nodes", "bert-base", 8, 4] == found["nodes", "bert-base", 2, 1] == (None, None, None)
    assert found["size", "llama-1b", 2, 1] == (2.67, None, None)
    assert found["bytes", "bert-large", 4, 1] == (None, None, 101_000_000)
    assert all(set(case.paper.values()) == {None} for case in cases(tiny=True))
