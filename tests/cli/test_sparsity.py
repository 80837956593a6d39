"""Sparsity from the command line: options that belong together, and share files that carry the owner's choice."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
import torch
from private_llm_cli.app import app
from private_llm_cli.commands.output import size
from private_llm_hf.models.sparse_blocks import KEY, adopted, shared_settings
from private_llm_hf.sparsity.predictor_set import PredictorSet, SitePredictor, fingerprint
from private_llm_hf.sparsity.sites import find_sites
from transformers import AutoConfig, AutoModelForCausalLM
from typer.main import get_command
from typer.testing import CliRunner

from private_llm.config import PrivateConfig
from private_llm.errors import PatchMismatch
from private_llm.sparsity_config import CometConfig
from tests.cli.test_cli import Run, checkpoint, rows, start
from tests.hf.sparsity.test_apply import constant

__all__ = ["checkpoint"]  # a fixture
PROMPT = ("--prompt", "a b c", "--max-new-tokens", "3")


@pytest.fixture
def predictors(checkpoint: Path, tmp_path: Path) -> str:
    """Half of the neurons and one of the two heads, whatever the input."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    sites = find_sites(model, {"input_ids": torch.tensor([[5, 6, 7]])})
    chosen = {"ffn": list(range(16)), "heads": [1]}
    found = [SitePredictor(site, constant(site, chosen[site.kind])) for site in sites]
    PredictorSet(fingerprint(model, "tiny"), found).save_pretrained(tmp_path / "predictors")
    return str(tmp_path / "predictors")


@pytest.mark.full
def test_a_run_leaves_out_what_is_predicted(run: Run, checkpoint: Path, predictors: str) -> None:
    (dense,) = rows(run, "generate", str(checkpoint), *PROMPT)
    how = ("--sparsity", predictors, "--orders", "kept")
    (opened,) = rows(run, "generate", str(checkpoint), *PROMPT, *how, "--levels", "open")
    budgets = ("--neuron-budget", "1", "--head-budget", "1")
    (whole,) = rows(run, "generate", str(checkpoint), *PROMPT, *how, *budgets)
    assert whole["private_text"] == dense["private_text"]
    assert len({row["bytes_total"] for row in (dense, opened, whole)}) == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--orders", "kept", "--head-budget", "0.5"), "--orders, --head-budget: want --sparsity"),
        (("--sparsity", "nowhere"), "nowhere: no predictors.json"),
        (("--sparsity", "shared"), "the model has no predictors"),
        (("--sparsity", "shared", "--neuron-budget", "0.5"), "whoever shares the model sets them"),
        (("--sparsity", "HERE"), "has no budget"),
        (("--sparsity", "HERE", "--neuron-budget", "1.5"), "neuron_budget: got 1.5"),
        (("--sparsity", "HERE", "--neuron-budget", "nan"), "neuron_budget: got nan"),
        (("--sparsity", "HERE", "--epsilon", "0.5"), "--epsilon: it is of the noise of --levels noisy"),
        (("--sparsity", "HERE", "--levels", "noisy", "--epsilon", "9"), "epsilon: got 9"),
        (("--sparsity", "HERE", "--levels", "open"), "levels='open' goes with orders='kept'"),
        (
            ("--sparsity", "HERE", "--orders", "kept", "--levels", "open", "--neuron-budget", "0.5"),
            "leave the budget out",
        ),
        (("--sparsity", "HERE", "--weights", "public", "--orders", "kept"), "weights='public'"),
    ],
)
def test_options_that_cannot_work_are_refused(
    run: Run, checkpoint: Path, predictors: str, words: tuple[str, ...], message: str
) -> None:
    given = [predictors if word == "HERE" else word for word in words]
    assert message in " ".join(run("generate", str(checkpoint), *PROMPT, *given, code=2).split())


def test_the_price_is_said_before_a_run(checkpoint: Path, predictors: str) -> None:
    """On stderr, with advice where predictors do not pay."""
    words = ["generate", str(checkpoint), *PROMPT, "--sparsity", predictors, "--neuron-budget", "0.5", "--json"]
    made = CliRunner().invoke(app, words)
    assert made.exit_code == 0, made.output
    said, row = " ".join(made.stderr.split()), json.loads(made.stdout)
    assert f"3 tokens after 3 will send {size(row['bytes_total'])}; without it" in said
    assert "It saves nothing here: leave --sparsity out" in said


@pytest.mark.parametrize("command", ["chat", "gateway", "classify", "demo", "share"])
def test_commands_that_run_a_model_take_the_options(command: str) -> None:
    names = {name for each in get_command(app).commands[command].params for name in each.opts}  # type: ignore[attr-defined]
    assert {"--sparsity", "--orders", "--levels", "--neuron-budget", "--head-budget", "--epsilon"} <= names


def test_other_models_are_refused(run: Run, predictors: str) -> None:
    said = run("demo", "--tiny", "--sparsity", predictors, "--orders", "kept", "--levels", "open", code=2)
    assert "predictors of another model (tiny)" in said


def test_roles_without_predictors_are_told_so(run: Run, checkpoint: Path, predictors: str, tmp_path: Path) -> None:
    out = ("--out", str(tmp_path / "shares"))
    assert "want the folder" in run("share", str(checkpoint), *out, "--sparsity", "shared", code=2)
    hosts = ("--index", "0", "--hosts", "127.0.0.1:1,127.0.0.1:2,127.0.0.1:3", "--allow-plain-loopback")
    assert "a party holds no predictors" in run("party", *hosts, "--sparsity", predictors, code=2)


@pytest.mark.full
@pytest.mark.parametrize("said", [(), ("--sparsity", "shared", "--orders", "kept", "--levels", "open")])
def test_share_files_carry_what_their_owner_chose(
    run: Run, checkpoint: Path, predictors: str, tmp_path: Path, said: tuple[str, ...]
) -> None:
    """Parties and users need no option, and may repeat the owner's."""
    chosen = ("--sparsity", predictors, "--orders", "kept", "--levels", "open")
    shares = tmp_path / "shares"
    (shared,) = rows(run, "share", str(checkpoint), "--out", str(shares), *chosen)
    with socket.create_server(("127.0.0.1", 0)) as a, socket.create_server(("127.0.0.1", 0)) as b, \
            socket.create_server(("127.0.0.1", 0)) as c:  # fmt: skip
        hosts = ",".join(f"127.0.0.1:{s.getsockname()[1]}" for s in (a, b, c))
    common = ("--hosts", hosts, "--allow-plain-loopback", *said)
    files = list(shared["files"])  # type: ignore[call-overload]
    parties = [
        start("party", "--index", str(i), "--shares", str(path), "--sessions", "1", "--timeout", "60", *common)
        for i, path in enumerate(files)
    ]
    try:
        (made,) = rows(run, "generate", str(shares / "client"), *PROMPT, *common)
        for process in parties:
            process.communicate(timeout=60)
            assert process.returncode == 0
    finally:
        for process in parties:
            process.kill()
    (local,) = rows(run, "generate", str(checkpoint), *PROMPT, *chosen)
    assert made["private_text"] == local["private_text"]


def test_a_user_who_asks_for_other_orders_is_told(run: Run, checkpoint: Path, predictors: str, tmp_path: Path) -> None:
    shares = tmp_path / "shares"
    run(
        "share", str(checkpoint), "--out", str(shares), "--sparsity", predictors, "--orders", "kept", "--levels", "open"
    )
    hosts = ("--hosts", "127.0.0.1:1,127.0.0.1:2,127.0.0.1:3", "--allow-plain-loopback")
    other = ("--sparsity", "shared", "--orders", "fresh", *hosts)
    assert "was shared with orders='kept'" in run("generate", str(shares / "client"), *PROMPT, *other, code=2)


def test_the_choice_is_read_from_a_configuration(checkpoint: Path) -> None:
    config = AutoConfig.from_pretrained(checkpoint)
    assert shared_settings(config) is None
    assert adopted(PrivateConfig(), config).sparsity is None
    chosen = CometConfig(orders="kept", levels="open", heads=False)
    setattr(config, KEY, {"blocks": [], "settings": chosen.agreed()})
    assert adopted(PrivateConfig(), config).sparsity == chosen
    own = PrivateConfig(sparsity=CometConfig())
    assert adopted(own, config) is own
    for wrong in ({"blocks": []}, {"blocks": [], "settings": {"orders": "any"}}, {"settings": {"more": 1}}, [1]):
        setattr(config, KEY, wrong)
        with pytest.raises(PatchMismatch, match="not as this version writes it"):
            adopted(PrivateConfig(), config)
