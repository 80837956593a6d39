"""scripts/train_cnn.py on an image set of `datasets` that is a folder on disk; its own run is in test_scripts_tiny."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image
from private_llm_hf import Network
from transformers import AutoModelForImageClassification

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_cnn", ROOT / "scripts" / "train_cnn.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules["train_cnn"] = made
    spec.loader.exec_module(made)
    return made


def folder(path: Path, splits: tuple[str, ...], colour: bool) -> Path:
    """Dark squares and bright squares, 20 of each in every split."""
    random = np.random.default_rng(0)
    for split in splits:
        for label, level in (("bright", 200), ("dark", 30)):
            (path / split / label).mkdir(parents=True)
            for index in range(20):
                noise = random.integers(0, 50, (9, 11, 3) if colour else (9, 11)) + level
                Image.fromarray(noise.astype(np.uint8)).save(path / split / label / f"{index}.png")
    return path


@pytest.mark.parametrize(
    ("splits", "colour", "size", "shape"),
    [(("train", "test"), True, None, (3, 9, 11)), (("train",), False, 8, (1, 8, 8))],
    ids=["own test split", "part held out"],
)
def test_an_image_set_on_disk(
    script: ModuleType, tmp_path: Path, splits: tuple[str, ...], colour: bool, size: int | None, shape: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    name = str(folder(tmp_path / "set", splits, colour))
    train, test = script.load(name, size)
    assert tuple(train[0].shape[1:]) == tuple(test[0].shape[1:]) == shape
    assert len(train[0]) == (40 if len(splits) == 2 else 36)
    assert 0.0 <= float(train[0].min()) < float(train[0].max()) <= 1.0
    out = tmp_path / "net"
    options = ["--dataset", name, "--out", str(out), "--steps", "25", "--batch", "16"]
    script.main(script.parse_args([*options, *(["--size", str(size)] if size else [])]))
    assert '"accuracy": 100.0' in capsys.readouterr().out, "light and dark are easily told apart"
    model = AutoModelForImageClassification.from_pretrained(out)
    assert isinstance(model, Network)
    assert model.config.image_shape == list(shape)
    assert model.eval()(torch.zeros(2, *shape)).shape == (2, 2)


def test_networks_that_do_not_fit_the_images_are_refused(script: ModuleType) -> None:
    with pytest.raises(SystemExit, match="wants images of 8 x 8 or 28 x 28"):
        script.build("lenet", torch.Size([3, 32, 32]), 10)
    assert script.build("lenet", torch.Size([1, 28, 28]), 10)(torch.zeros(1, 1, 28, 28)).shape == (1, 10)
