"""scripts/studies/bench_wan.py: the formula by hand, bytes and rounds of models and runs alike, links in namespaces."""

from __future__ import annotations

import json

import namespaces
import pytest
import wan_run
from bench.link import LinkSpeed
from bench.measure import measure
from bench_wan import app
from layer_works import llama_decode, llama_layer
from private_llm_hf.tools.estimate import LayerCost
from typer.testing import CliRunner
from wan_models import TINY_PROMPT, wan_model
from wan_rows import (
    BANDWIDTHS,
    LATENCIES,
    MEASURED,
    MODELLED,
    Case,
    Counted,
    LayerTime,
    Spent,
    cases,
    counted_both,
    estimated,
    networks,
    wan_config,
)
from wan_run import Passes, Place

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError

SIMULATED = Place("simulated")
NEAR = LinkSpeed(1000.0, 0.2)


# -- the formula -----------------------------------------------------------------------------------------------------
def test_the_busiest_link_is_a_machines_in_one_direction() -> None:
    counted = Counted.of({(0, 1): 30, (0, 2): 50, (1, 2): 40, (2, 1): 7}, 3)
    assert counted.bytes_total == 127
    assert counted.card == 90  # into 2: 50 + 40; out of 0: 80
    assert counted.per_party == {0: 80, 1: 40, 2: 7}
    assert Counted.of({}, 0).card == 0


def test_time_is_computing_and_waiting_and_sending() -> None:
    counted = Counted(99_000_000, 25_000_000, 1500, {})
    spent = Spent.of(2.5, counted, LinkSpeed(100.0, 20.0))
    assert spent.latency == pytest.approx(1500 * 0.020)
    assert spent.wire == pytest.approx(25e6 * 8 / 100e6)
    assert spent.total == pytest.approx(2.5 + 30.0 + 2.0)


def test_a_layers_time_is_a_line_through_two_that_were_measured() -> None:
    line = LayerTime.through((1_000_000, 0.010), (4_000_000, 0.016))
    assert line.fixed == pytest.approx(0.008)
    assert line.each == pytest.approx(2e-9)
    layers = [
        LayerCost("model.embed_tokens", {}, 0, {1: 500_000, 2: 400_000}),
        *(LayerCost(f"model.layers.{n}", {}, 5, {1: 16_000_000, 2: 16_000_000}) for n in range(3)),
        LayerCost("input and output", {}, 1, {}),
    ]
    assert line.seconds(layers) == pytest.approx(3 * (0.008 + 0.032) + 0.001)


@pytest.mark.parametrize("large", [(4_000_000, 0.008), (4_000_000, 0.060)])
def test_a_line_that_falls_or_starts_below_zero_is_proportional(large: tuple[int, float]) -> None:
    """Noise on a busy machine gives neither layers that cost nothing nor a time before the start."""
    assert LayerTime.through((1_000_000, 0.010), large) == LayerTime(0.0, large[1] / large[0])


def test_layers_whose_time_is_taken_are_right() -> None:
    for make in (llama_layer, llama_decode):
        assert measure(make((2, 5, 16, 2, 24)), PrivateConfig(), 1).error_max < 2e-3


# -- modelled and measured ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("latency", [0.2, 20.0])
def test_the_estimate_is_what_a_run_sends_and_waits_for(latency: float) -> None:
    """Bytes over all links, through the busiest one, by party, and rounds: first pass and one further token."""
    network = LinkSpeed(1000.0, 0.0)  # nobody has to wait for the agreed network here
    config = wan_config(LinkSpeed(1000.0, latency))
    model = wan_model("demo")
    found = wan_run.measured_passes(model, config, network, TINY_PROMPT, 2, 0, SIMULATED)
    first, later = counted_both(*estimated(model, config, TINY_PROMPT))
    assert (Counted.of(*found.first), Counted.of(*found.later)) == (first, later)
    assert first.bytes_total > later.bytes_total > 0 or latency > 1.0  # keys, which a prompt does without, are large
    assert first.rounds > later.rounds > 0
    assert found.equal
    assert found.error < 5e-3


def test_delays_and_slow_links_cost_what_they_should() -> None:
    """A run takes at least the time that its rounds wait and its busiest link is full."""
    config, model = wan_config(NEAR), wan_model("demo")
    found = wan_run.measured_passes(model, config, LinkSpeed(50.0, 2.0), TINY_PROMPT, 2, 0, SIMULATED)
    later = Counted.of(*found.later)
    assert found.seconds[0] > later.rounds * 0.002 * 0.9
    assert found.first_seconds > max(Counted.of(*found.first).card / 2 * 8 / 50e6, 0.1)  # its bytes take two wires


def test_drafts_are_counted_by_pass() -> None:
    row = Case("demo", "measured", NEAR, "drafts", tiny=True).run(2, SIMULATED)
    assert row["shape"] == [1, TINY_PROMPT, 7]
    assert row["tokens_per_pass"] >= 1
    assert row["equal"]
    assert row["seconds"]["min"] <= row["seconds_per_token"] <= row["seconds"]["max"]


def test_passes_survive_the_way_between_processes() -> None:
    made = Passes(1.5, ({(0, 2): 7, (1, 2): 3}, 4), [0.25, 0.5], [1, 3], ({(255, 0): 9}, 2), 1e-3, True)
    assert Passes.from_json(made.to_json()) == made


# -- the command -------------------------------------------------------------------------------------------------------
@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Place, "here", lambda: SIMULATED)


@pytest.mark.usefixtures("simulated")
def test_the_script_prints_rows() -> None:
    result = CliRunner().invoke(app, ["--tiny", "--repeat", "1", "--json", "--latency", "1"])
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(row["how"], row["way"]) for row in rows] == [
        ("modelled", "plain"), ("measured", "plain"), ("measured", "drafts")
    ]  # fmt: skip
    wanted = {"name", "protocol", "ring", "shape", "parties", "seconds", "bytes_total", "bytes_per_party", "rounds",
              "error_max", "threads", "machine", "torch", "version"}  # fmt: skip
    modelled, measured, _ = rows
    assert all(wanted <= set(row) for row in rows)
    assert {row["latency_ms"] for row in rows} == {1.0}
    for name in ("bytes_total", "rounds", "bytes_first_token", "rounds_first_token", "bytes_per_party"):
        assert modelled[name] == measured[name]
    assert sum(modelled["parts"].values()) == pytest.approx(modelled["seconds_per_token"])
    assert (modelled["network"], modelled["error_max"]) == ("formula", None)
    assert measured["network"].startswith("simulated")


def test_the_script_prints_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    def row(case: Case, repeat: int) -> dict[str, object]:
        return {"model": case.model, "how": case.how, "way": case.way, "network": "somewhere", "latency_ms": 1.0,
                "bandwidth_mbit": 100.0, "shape": [1, 12, 2], "seconds_first_token": 7.0, "seconds_per_token": 2.5,
                "tokens_per_pass": 1.25, "bytes_total": 4096, "rounds": 77}  # fmt: skip

    monkeypatch.setattr(Case, "run", row)
    result = CliRunner().invoke(app, ["--tiny"])
    assert result.exit_code == 0, result.output
    assert "tokens over a distance" in result.stdout
    assert result.stdout.count("2.50 s") == 3


@pytest.mark.parametrize(
    ("options", "says"),
    [(["--bandwidth", "0"], "a positive bandwidth"), (["--repeat", "0"], "at least 1"),
     (["--protocol", "plain"], "one of trio, quad, dealer")],
)  # fmt: skip
def test_impossible_options_raise(options: list[str], says: str) -> None:
    result = CliRunner().invoke(app, ["--tiny", *options])
    assert result.exit_code != 0
    assert says in str(result.exception or result.output)


def test_every_network_is_modelled_and_a_cross_of_them_measured() -> None:
    asked = networks()
    assert {(each.latency_ms, each.bandwidth_mbit) for each in asked} == {
        (ms, b) for ms in LATENCIES for b in BANDWIDTHS
    }
    made = list(cases(asked, installed=lambda name: True))
    assert len(set(made)) == len(made)
    for name in MODELLED:
        assert sum(case.model == name and case.how == "modelled" for case in made) == len(asked)
    for name in MEASURED:
        found = [case.network for case in made if (case.model, case.how, case.way) == (name, "measured", "plain")]
        assert {each.latency_ms for each in found} == set(LATENCIES)
        assert {each.bandwidth_mbit for each in found} == set(BANDWIDTHS)
        assert len(found) == len(LATENCIES) + len(BANDWIDTHS) - 1
    alone = networks(20.0, 100.0)
    assert "measured" in {case.how for case in cases(alone, installed=lambda name: True)}


def test_what_is_not_installed_is_left_out() -> None:
    assert {case.model for case in cases(networks(), installed=lambda name: name != "smollm2")} == {
        "gpt2", "llama-7b", "llama-13b"
    }  # fmt: skip


def test_models_that_are_not_there_are_refused() -> None:
    with pytest.raises(ConfigError, match="want one of gpt2"):
        wan_model("gpt5")
    with pytest.raises(ConfigError, match="without weights"):
        Case("llama-7b", "measured", NEAR).run(1, SIMULATED)


# -- namespaces --------------------------------------------------------------------------------------------------------
def test_links_are_shaped_by_tbf_and_delayed_by_netem() -> None:
    assert namespaces.shaped("eth0", 100.0) == "tc qdisc add dev eth0 root tbf rate 100mbit burst 512kb latency 200ms"
    assert namespaces.shaped("eth0", 100.0, burst_kb=16).endswith("burst 16kb latency 200ms")
    assert namespaces.shaped("eth0", 1000.0, 0.2) == (
        "tc qdisc add dev eth0 root netem delay 0.2ms rate 1000mbit limit 100000"
    )


def test_without_rights_links_are_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wan_run, "missing_rights", lambda: "no rights")
    assert Place.here() == SIMULATED
    monkeypatch.setattr(wan_run, "missing_rights", lambda: "")
    for netem in (True, False):
        monkeypatch.setattr(wan_run, "can_delay", lambda netem=netem: netem)
        assert Place.here() == Place("namespaces", netem)
    assert len({SIMULATED.words, Place("namespaces", True).words, Place("namespaces").words}) == 3


@pytest.mark.skipif(bool(namespaces.missing_rights()), reason="needs the right to make network namespaces")
def test_parties_in_namespaces_send_the_same() -> None:
    """And wait for what is far away: rounds of 5 ms, whoever delays."""
    model, config, network = wan_model("demo"), wan_config(NEAR), LinkSpeed(1000.0, 5.0)
    place = Place.here()
    assert place.kind == "namespaces"
    far = wan_run.measured_passes(model, config, network, TINY_PROMPT, 2, 0, place)
    near = wan_run.measured_passes(model, config, LinkSpeed(1000.0, 0.0), TINY_PROMPT, 2, 0, SIMULATED)
    assert (far.first, far.later) == (near.first, near.later)
    assert far.equal
    assert far.seconds[0] > far.later[1] * 0.005 * 0.9
