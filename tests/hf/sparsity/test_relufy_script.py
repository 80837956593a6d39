"""scripts/relufy.py: a run that is interrupted ends as one that was not, and what it wrote is sparse and loads."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from private_llm_hf.sparsity.recordings import record, recordings
from private_llm_hf.sparsity.relufy import load_relufied
from private_llm_hf.sparsity.sites import find_sites

from private_llm.errors import PatchMismatch
from tests.hf.sparsity.models import batch, sparse

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("relufy")


@pytest.mark.full
def test_an_interrupted_run_ends_as_one_that_was_not(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script.main(script.parse_args(["--tiny", "--output", str(tmp_path / "whole")]))
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (row["activation"], row["was"], row["native"], row["steps"]) == ("drelu", "silu", False, 6)
    for text in ("held out", "test"):
        assert row["before"][text]["sparsity"] == 0.0
        assert 0.5 < row["swapped"][text]["sparsity"] < 1.0
    assert row["tuned"]["held out"]["perplexity"] < row["swapped"]["held out"]["perplexity"]
    usual = script.save_checkpoint

    def save_and_stop(*args: Any) -> None:
        usual(*args)
        raise KeyboardInterrupt

    words = ["--tiny", "--output", str(tmp_path / "parts")]
    monkeypatch.setattr(script, "save_checkpoint", save_and_stop)
    with pytest.raises(KeyboardInterrupt):
        script.main(script.parse_args(words))
    monkeypatch.setattr(script, "save_checkpoint", usual)
    with pytest.raises(SystemExit, match="add --resume"):
        script.main(script.parse_args(words))
    script.main(script.parse_args([*words, "--resume"]))
    for name in ("model.safetensors", "config.json", "relufied.json"):
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert type(load_relufied(tmp_path / "parts")).__name__ == "LlamaForCausalLM"


def test_tuning_ends_when_perplexity_stops_falling(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = iter([3.0, 2.0, 4.0, 5.0, 6.0, 7.0])
    usual = script.total_nll

    def rising(model: Any, ids: Any, *rest: Any) -> float:
        return next(given) * len(ids) if tuning else usual(model, ids, *rest)

    tuning = False
    tune = script.tune

    def watched(*args: Any) -> Any:
        nonlocal tuning
        tuning = True
        try:
            return tune(*args)
        finally:
            tuning = False

    monkeypatch.setattr(script, "total_nll", rising)
    monkeypatch.setattr(script, "tune", watched)
    args = script.parse_args(["--tiny", "--output", str(tmp_path), "--patience", "2"])
    args.steps, args.every = 20, 1
    script.main(args)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["steps"] == 4


def test_what_cannot_work_is_refused(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="No text"):
        script.main(script.parse_args(["somewhere"]))
    text = str(script.TINY["data"][0])
    with pytest.raises(SystemExit, match="No model"):
        script.main(script.parse_args(["--data", text]))
    words = [script.TINY["model"], "--data", text, "--output", str(tmp_path), "--threads", "1"]
    with pytest.raises(SystemExit, match="drop --resume"):
        script.main(script.parse_args([*words, "--resume"]))
    monkeypatch.setattr(script, "figures", lambda *_: {})
    with pytest.raises(PatchMismatch, match="'relu' already"):
        script.main(script.parse_args(words))


def test_the_share_of_zeros_is_the_share_of_inactive_neurons(script: ModuleType, tmp_path: Path) -> None:
    model, given = sparse("opt"), batch("opt")
    sites = find_sites(model, given)
    record(model, sites, [given], tmp_path)
    want = {
        recording.site.name: 1 - float(recording.read(torch.arange(len(recording)))[1].float().mean())
        for recording in recordings(tmp_path)
        if recording.site.kind == "ffn"
    }
    assert script.share_of_zeros(model, sites, [given]) == pytest.approx(want)
