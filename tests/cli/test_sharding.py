"""Commands that speak of token sharding: estimates and plans side by side."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from private_llm_cli.commands.estimate_plans import USUAL, Hardware, LinkSpeed, busiest
from private_llm_hf import PrivateConfig
from private_llm_hf.tools.estimate import estimate, named_shape
from transformers import GPT2Config

from private_llm.net.transport import CLIENT
from private_llm.token_sharding import ShardingPlan, Stage, paper_seconds, refuse_weak
from tests.cli.test_cli import Run, checkpoint, rows, start

__all__ = ["checkpoint"]  # a fixture

LINK = ("--bandwidth", "800", "--latency", "10", "--gmacs", "1")


def number(row: dict[str, object], name: str) -> float:
    value = row[name]
    assert isinstance(value, int | float)
    return value


# -- one plan ----------------------------------------------------------------------------------------------------------
def test_an_estimate_says_bytes_seconds_and_who_is_busiest(run: Run, checkpoint: Path) -> None:
    ask = ("estimate", str(checkpoint), "--protocol", "cascade", "--plan", "3,3,1", "--seq", "13", "--new", "4", *LINK)
    (found,) = rows(run, *ask)
    layers = found["layers"]
    assert isinstance(layers, list)
    assert sum(layer["bytes"] for layer in layers) == found["bytes_total"]
    assert sum(layer["seconds"] for layer in layers) == pytest.approx(number(found, "seconds"))
    assert number(found, "seconds") == pytest.approx(
        number(found, "seconds_prompt") + 3 * number(found, "seconds_per_token")
    )
    assert found["rounds"] == 4  # one layer, one prompt and three further tokens
    # A forward: tokens there, rows there, partial results back, logits back.
    assert number(found, "seconds_per_token") > 0.04
    assert found["equation_1_bytes"] == 3 * 4 * (4 * 16 + 2 * 2) * 13
    assert isinstance(found["busiest"], dict)
    assert found["busiest"]["node"] == "CompNode 0"  # 0-7 of a front of five and a block of three
    text = " ".join(run(*ask).split())
    assert "busiest node" in text
    assert "CompNode 0: " in text
    assert "equation (2)" in text


def test_a_split_names_its_nodes_and_a_batch_counts(run: Run, tmp_path: Path) -> None:
    """Two layers of GPT-2's kind, hidden 16 in 2 heads; one is behind the cut; 800 Mbit/s are 1e8 bytes a second."""
    GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=24, n_positions=32).save_pretrained(tmp_path)
    ask = ("--protocol", "trio", "--split", "1", "--plan", "3,3,1", "--seq", "13", "--batch", "2", *LINK)
    (found,) = rows(run, "estimate", str(tmp_path), *ask)
    layers = found["layers"]
    assert isinstance(layers, list)
    names = [layer["name"] for layer in layers]
    assert {"transformer.h.0", "transformer.h.1", "states to the nodes"} <= set(names)
    assert sum(layer["bytes"] for layer in layers) == found["bytes_total"]
    assert isinstance(found["busiest"], dict)
    assert str(found["busiest"]["node"]).startswith("CompNode")
    longest = max(len(ShardingPlan(3, 3, 1).rows_of_comp(comp, 0, 13)) for comp in range(3))
    expected = paper_seconds(3, 4, 8, 2, 2, 2 * longest, 2 * longest, 1e8, 0.01)
    assert found["equation_2_seconds"] == pytest.approx(expected)
    table = " ".join(run("estimate", str(tmp_path), *ask).split())
    assert "1.0 GMAC/s per party, 1.0 GMAC/s per node" in table
    assert "memory per party, weights" in table
    assert "9: 3 CompNodes and 6 AttnNodes" in table


def test_the_busiest_node_is_the_one_that_takes_longest() -> None:
    """Node 5 receives 450 bytes (4.5 s at 100 B/s); node 0 sends 300 and computes 1 s; then 99.99 s from the client."""
    hardware = Hardware(LinkSpeed(100 * 8 / 1e6, 0.0), 1.0, 1e-9)
    stages = [
        Stage("", "rows", {(0, 5): 300, (1, 5): 150, (CLIENT, 0): 1}, {0: 1}),
        Stage("", "partial", {(CLIENT, 1): 9999}, {5: 1}),
    ]
    assert busiest(stages[:1], hardware).node == 5
    assert busiest(stages[:1], hardware).seconds == pytest.approx(4.5)
    assert busiest(stages, hardware).node == 1  # what the client sends fills the receiver's card, too


def test_mistakes(run: Run, checkpoint: Path) -> None:
    for arguments, message in (
        (("--protocol", "cascade", "--plan", "3,1,1"), "gives tokens away"),
        (("--protocol", "cascade", "--plan", "3;1"), "want alpha,c,m"),
        (("--protocol", "cascade", "--plan", "3,4,1", "--gmacs", "0"), "want a positive number"),
        (("--plans",), "want --protocol cascade"),
    ):
        assert message in " ".join(run("estimate", str(checkpoint), "--seq", "13", *arguments, code=2).split())


# -- plans side by side -----------------------------------------------------------------------------------------------
def test_usual_plans_are_sound_and_grow() -> None:
    plans = [ShardingPlan(*shape) for shape in USUAL]
    for plan in plans:
        refuse_weak(plan)
    assert [plan.nodes for plan in plans] == sorted(plan.nodes for plan in plans)
    assert plans[-1].nodes <= 250


def test_plans_are_compared_with_their_verdicts(run: Run, checkpoint: Path) -> None:
    ask = ("estimate", str(checkpoint), "--protocol", "cascade", "--seq", "20", "--new", "2", *LINK)
    found = rows(run, *ask, "--plan", "3,4,1", "--plan", "3,1,1", "--plan", "3,24,1")
    assert [row["verdict"] for row in found] == ["sound", "WEAK", "text too short"]
    first = found[0]
    assert first["nodes"] == 9
    assert first["comp_sees"] == 12 / 20  # 0-9 (a front of six), 18, 19
    assert first["attn_sees"] == 16 / 20  # shards 0 and 1
    (alone,) = rows(run, *ask, "--plan", "3,4,1")
    for name in ("bytes_total", "bytes_between_nodes", "seconds", "seconds_prompt", "seconds_per_token"):
        assert first[name] == alone[name]
    usual = rows(run, *ask, "--plans")
    assert [(row["alpha"], row["c"], row["m"]) for row in usual] == list(USUAL)
    table = run(*ask, "--plans")
    assert "8,8,2" in table
    assert "sound" in table


def test_more_bandwidth_and_less_latency_are_faster() -> None:
    shape = named_shape("gpt2")
    assert shape is not None
    config = PrivateConfig(protocol="cascade", plan=ShardingPlan(4, 8, 1, partials="open"))
    found = estimate(*shape, config, sequence=64)
    layers = [layer for layer in found.layers() if ".h." in layer.name]
    assert len(layers) == 12
    slow, fast = (sum(layer.seconds(rate, 0.0, math.inf) for layer in layers) for rate in (100.0, 1000.0))
    assert slow == pytest.approx(10 * fast)
    waiting = sum(layer.seconds(math.inf, 3.0, math.inf) for layer in layers)
    assert waiting == pytest.approx(12 * 2 * 0.003)
    # Four CompNodes of 16 rows: q, k, v, out and the two matrices of the MLP, 12 x 768 x 768 each row.
    assert {layer.macs[0] for layer in layers} == {16 * 12 * 768 * 768}


@pytest.mark.full
def test_the_default_plan_in_one_command() -> None:
    """144 nodes, a prompt that is long enough for them, and a line of warning without places in our code."""
    process = start("demo", "--tiny", "--json", "--protocol", "cascade")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    found = json.loads(out)
    assert found["tokens_equal"] == found["tokens"] == 4
    assert [line[:9] for line in err.splitlines()] == ["warning: "]
    assert "by sparse recovery" in err


def test_audit_of_a_plan(run: Run) -> None:
    assert "verdict: sound" in run("audit", "8,8,2")
    (found,) = rows(run, "audit", "8,8,4")
    assert found["sound"] is False
    assert found["nodes"] == 536
    (pair,) = rows(run, "audit", "4,4,1,3", "--colluding", "0,1")
    (finding,) = pair["findings"]
    assert finding["nodes"] == "CompNode 0 + CompNode 1"
    assert (finding["held"], finding["hidden_gap"], finding["attention_gap"]) == (38, 8, 1)
    assert "the fewest nodes found that break it: CompNode 0 + CompNode 1" in run("audit", "4,4,1")
    (more,) = rows(run, "audit", "3,3,1", "--known-prefix", "1", "--split", "--length", "40", "--queries", "4")
    assert more["setting"] == {"split": True, "causal": True, "length": 40, "known": 1, "queries": 4}
    assert more["sound"] is False
    assert "no causal mask" in run("audit", "3,3,1", "--bidirectional", "--length", "20")
    assert "want alpha,c,m" in run("audit", "8,8", code=2)


def test_demo_by_token_sharding(run: Run) -> None:
    (found,) = rows(run, "demo", "--protocol", "cascade", "--plan", "3,3,1", "--tiny")
    assert found["private_text"] == found["plain_text"]
    assert "gives tokens away" in run("demo", "--protocol", "cascade", "--plan", "3,1,1", "--tiny", code=2)
