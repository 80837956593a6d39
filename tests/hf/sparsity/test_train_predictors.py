"""`private-llm predictors`: a run that is interrupted, its table and picture, and settings that are refused."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from private_llm_cli.app import app
from private_llm_hf.sparsity import predictor_run
from private_llm_hf.sparsity.predictor_run import load_model
from private_llm_hf.sparsity.predictor_set import PredictorSet
from transformers import AutoTokenizer, ViTImageProcessor

from private_llm.errors import ConfigError, PatchMismatch
from tests.hf.sparsity.models import RELU
from tests.hf.tiny import build

ROOT = Path(__file__).resolve().parents[3]
DATA = ROOT / "integrations/private_llm_hf/data"
FILES = ("predictors.json", "predictors.safetensors")
Rows = Callable[..., list[dict[str, Any]]]


class Interrupted(Exception):
    pass


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, relu in (("opt", True), ("t5", True), ("bert", True), ("gpt2", False), ("vit", True)):
        build(name, **({} if name == "vit" else {"vocab_size": 4096}), **(RELU[name] if relu else {})).save_pretrained(
            folder / name
        )
        AutoTokenizer.from_pretrained(DATA.parent / "demo_model").save_pretrained(folder / name)
    return folder


@pytest.fixture
def rows(capsys: pytest.CaptureFixture[str]) -> Rows:
    """Run `private-llm predictors`, and read what it prints as JSON."""

    def run(*words: str) -> list[dict[str, Any]]:
        app(["predictors", *words], standalone_mode=False)
        return [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]

    return run


def quick(model: Path, out: Path, *more: str) -> list[str]:
    sizes = {
        "rows": 600, "test-rows": 300, "length": 30, "rank": 5, "heads-rank": 2, "tolerance": 0.3, "epochs": 1,
        "test": DATA / "heldout.txt", "threads": torch.get_num_threads(),
    }  # fmt: skip
    text = [] if "--text" in more else ["--text", str(DATA / "shakespeare.txt")]
    given = [word for name, size in sizes.items() if f"--{name}" not in more for word in (f"--{name}", str(size))]
    return ["train", "--model", str(model), "--out", str(out), *text, *given, *more]


def test_an_interrupted_run_goes_on_and_ends_with_the_same_files(
    rows: Rows, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture = tmp_path / "picture.png"
    row = rows(*quick(models / "opt", tmp_path / "whole", "--plot", str(picture), "--block", "4"))[-1]
    assert set(row) == {"model", "ffn", "heads", "out", "perplexity"}
    assert len(set(row["perplexity"].values())) == 3
    assert (row["ffn"]["rank"], row["heads"]["rank"], row["ffn"]["block"]) == (5, 2, 4)
    assert picture.read_bytes().startswith(b"\x89PNG")
    usual, calls = predictor_run.train_predictor, []

    def stop_at_the_third(*args: Any) -> Any:
        calls.append(args[0].site.name)
        if len(calls) == 3:
            raise Interrupted
        return usual(*args)

    monkeypatch.setattr(predictor_run, "train_predictor", stop_at_the_third)
    words = quick(models / "opt", tmp_path / "parts", "--block", "4")
    with pytest.raises(Interrupted):
        rows(*words)
    with pytest.raises(ConfigError, match="add --resume"):
        rows(*words)
    monkeypatch.setattr(predictor_run, "record_text", lambda *_: pytest.fail("it is recorded"))
    rows(*words, "--resume")
    for name in FILES:
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize("name", ["t5", "bert"])
def test_other_architectures_are_recorded_from_text(rows: Rows, models: Path, tmp_path: Path, name: str) -> None:
    rows(*quick(models / name, tmp_path / "out", "--budget-share", "0.9"))
    found = PredictorSet.from_pretrained(tmp_path / "out")
    assert len(found) == (10 if name == "t5" else 4)
    found.check(load_model(str(models / name)))
    assert all(member.predictor.config.budget for member in found)


def test_models_of_images_are_recorded_from_a_folder(rows: Rows, models: Path, tmp_path: Path) -> None:
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(models / "vit")
    chance = np.random.default_rng(0)
    for part, count in (("train", 12), ("test", 4)):
        (tmp_path / part).mkdir()
        for number in range(count):
            pixels = chance.integers(0, 255, (20, 20, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / part / f"{number}.png")
    folders = ("--images", str(tmp_path / "train"), "--test-images", str(tmp_path / "test"))
    words = ("train", "--model", str(models / "vit"), "--out", str(tmp_path / "out"), *folders)
    (row,) = rows(*words, "--rank", "4", "--epochs", "1", "--batch", "5", "--block", "8", "--json")
    assert set(row) == {"model", "ffn", "heads", "out"}
    found = PredictorSet.from_pretrained(tmp_path / "out")
    positions = 4 * (4 + 1)
    assert {member.measures["test"].rows for member in found} == {positions}
    found.check(load_model(str(models / "vit")))
    with pytest.raises(ConfigError, match="takes text"):
        rows("train", "--model", str(models / "opt"), "--out", str(tmp_path / "text"), *folders[:2])


def test_a_set_is_shown_as_a_table_as_json_and_as_a_picture(
    rows: Rows, models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows(*quick(models / "opt", tmp_path / "out", "--budget-share", "0.9", "--block", "8"))
    found = PredictorSet.from_pretrained(tmp_path / "out")
    picture = tmp_path / "levels.svg"
    shown = rows("show", str(tmp_path / "out"), "--json", "--plot", str(picture))
    assert picture.read_text().startswith("<?xml")
    for row, member in zip(shown, found, strict=True):
        ffn = member.site.kind == "ffn"
        assert (row["site"], row["budget"]) == (member.site.name, member.predictor.most)
        assert (row["block"], row["grouped"]) == ((8, True) if ffn else (1, False))
        assert row["measures"]["test"]["recall"] == member.measures["test"].recall
    rows("train", *quick(models / "opt", tmp_path / "near", "--block", "8", "--no-group", "--kinds", "ffn")[1:])
    capsys.readouterr()
    app(["predictors", "show", str(tmp_path / "near")], standalone_mode=False)
    text = capsys.readouterr().out
    assert "grouped" not in text
    assert "none" in text
    assert "model.decoder.layers.1.fc1" in text


@pytest.mark.parametrize(
    ("model", "more", "message"),
    [
        ("opt", ["--rank", "0"], "rank: got 0"),
        ("opt", ["--threshold", "nan"], "threshold: got nan"),
        ("opt", ["--budget", "1.5"], "budget: got 1.5"),
        ("opt", ["--budget-share", "0"], "budget-share: got 0"),
        ("opt", ["--length", "65"], "has 64 positions"),
        ("opt", ["--length", "1"], "length: got 1"),
        ("opt", ["--rows", "0"], "rows: got 0"),
        ("opt", ["--threads", "0"], "threads: got 0"),
        ("opt", ["--text", "/nowhere/text"], "no file"),
        ("opt", ["--plot", "picture.txt"], "plot: got 'picture.txt'"),
        ("vit", [], "takes images: give --images"),
        ("opt", ["--images", "HERE"], "got texts as well"),
        ("opt", ["--test-images", "HERE"], "got no --images"),
        ("opt", ["--images", "/nowhere"], "want a folder of images"),
        ("nowhere", [], "want a folder or hub id"),
    ],
)
def test_what_cannot_work_is_refused(
    rows: Rows, models: Path, tmp_path: Path, model: str, more: list[str], message: str
) -> None:
    given = [str(ROOT / "tests") if word == "HERE" else word for word in more]
    with pytest.raises(ConfigError, match=message):
        rows(*quick(models / model, tmp_path / "out", *given))


def test_texts_and_models_that_do_not_fit_are_refused(rows: Rows, models: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no text to train on"):
        rows("train", "--out", str(tmp_path / "none"))
    with pytest.raises(PatchMismatch, match="relufy"):
        rows(*quick(models / "gpt2", tmp_path / "out"))
    text = tmp_path / "short.txt"
    text.write_text("To be, or not to be")
    with pytest.raises(ConfigError, match="want at least 30"):
        rows(*quick(models / "opt", tmp_path / "short", "--text", str(text)))
    with pytest.raises(ConfigError, match=r"no predictors\.json"):
        rows("show", str(tmp_path / "nowhere"))


def test_the_script_fills_in_small_sizes_that_are_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    script = importlib.import_module("train_predictors")
    words = script.spelled_out(["--tiny", "--rows", "7"])
    assert "--tiny" not in words
    assert words.count("--rows") == 1
    assert words[words.index("--rows") + 1] == "7"
    assert words[words.index("--rank") + 1] == "16"
    assert script.spelled_out(["--rows", "7"]) == ["--rows", "7"]
