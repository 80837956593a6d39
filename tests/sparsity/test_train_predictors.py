"""scripts/train_predictors.py: a run that is interrupted, its picture, and settings that are refused."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from private_llm_hf.sparsity import train_set
from private_llm_hf.sparsity.predictor_set import PredictorSet
from transformers import AutoTokenizer

from private_llm.errors import ConfigError, PatchMismatch
from tests.hf.tiny import build
from tests.sparsity.models import RELU

ROOT = Path(__file__).resolve().parent.parent.parent
INTEGRATION = ROOT / "integrations/private_llm_hf"
FILES = ("predictors.json", "predictors.safetensors")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("train_predictors")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, relu in (("opt", True), ("t5", True), ("bert", True), ("gpt2", False)):
        build(name, vocab_size=4096, **(RELU[name] if relu else {})).save_pretrained(folder / name)
        AutoTokenizer.from_pretrained(INTEGRATION / "demo_model").save_pretrained(folder / name)
    return folder


def quick(model: Path, out: Path, *more: str) -> list[str]:
    sizes = {"rows": 600, "test-rows": 300, "length": 30, "rank": 5, "heads-rank": 2, "tolerance": 0.3}
    given = ["--model", str(model), "--out", str(out), *more]
    return ["--tiny", *given, *(word for name, size in sizes.items() for word in (f"--{name}", str(size)))]


def test_an_interrupted_run_goes_on_and_ends_with_the_same_files(
    script: ModuleType,
    models: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    picture = tmp_path / "picture.png"
    script.main(script.parse_args(quick(models / "opt", tmp_path / "whole", "--plot", str(picture))))
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(row) == {"model", "ffn", "heads", "out", "perplexity"}
    assert len(set(row["perplexity"].values())) == 3
    assert (row["ffn"]["rank"], row["heads"]["rank"]) == (5, 2)
    assert picture.read_bytes().startswith(b"\x89PNG")
    usual, calls = train_set.train_predictor, []

    def stop_at_the_third(*args: Any) -> Any:
        calls.append(args[0].site.name)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return usual(*args)

    monkeypatch.setattr(train_set, "train_predictor", stop_at_the_third)
    words = quick(models / "opt", tmp_path / "parts")
    with pytest.raises(KeyboardInterrupt):
        script.main(script.parse_args(words))
    with pytest.raises(SystemExit, match="add --resume"):
        script.main(script.parse_args(words))
    monkeypatch.setattr(script, "record_text", lambda *_: pytest.fail("it is recorded"))
    script.main(script.parse_args([*words, "--resume"]))
    for name in FILES:
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize("name", ["t5", "bert"])
def test_other_architectures_are_recorded_from_text(
    script: ModuleType, models: Path, tmp_path: Path, name: str
) -> None:
    script.main(script.parse_args(quick(models / name, tmp_path / "out", "--budget-share", "0.9")))
    found = PredictorSet.from_pretrained(tmp_path / "out")
    assert len(found) == (10 if name == "t5" else 4)
    found.check(script.load_model(str(models / name)))
    assert all(member.predictor.config.budget for member in found)


def test_what_cannot_work_is_refused(script: ModuleType, models: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="No text to train on"):
        script.main(script.parse_args([]))
    with pytest.raises(PatchMismatch, match="relufy"):
        script.main(script.parse_args(quick(models / "gpt2", tmp_path / "out")))
    with pytest.raises(ConfigError, match="rank: got 0"):
        script.main(script.parse_args([*quick(models / "opt", tmp_path / "bad"), "--rank", "0"]))
    with pytest.raises(SystemExit, match="has 64 positions"):
        script.main(script.parse_args([*quick(models / "opt", tmp_path / "long"), "--length", "65"]))
    text = tmp_path / "short.txt"
    text.write_text("To be, or not to be")
    with pytest.raises(SystemExit, match="want at least 30"):
        script.main(script.parse_args([*quick(models / "opt", tmp_path / "short"), "--text", str(text)]))
