"""`private-llm classify`: bundled digits, image files, JSON, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import transformers as tr
from PIL import Image
from private_llm_cli.commands.calibrate import diff
from private_llm_cli.commands.classify import classify
from private_llm_hf import AutoPrivateModelForImageClassification, Network
from private_llm_hf.api import share_checkpoint
from private_llm_hf.vision.networks import digits, digits_model

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError
from tests.hf import images
from tests.hf.test_remote import free_ports, running

SMALL = PrivateConfig(ring=32, frac_bits=10, reveal="class", timeout_s=60)


def told(capsys: pytest.CaptureFixture[str], **options: object) -> dict[str, object]:
    classify(**options, as_json=True)
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_bundled_digits(capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, count=40)
    assert found["images"] == found["equal"] == len(found["classes"]) == 40  # type: ignore[arg-type]
    assert found["classes_plain"] == found["classes"]
    assert found["accuracy_private"] == found["accuracy_plain"] > 90.0
    assert found["bytes_total"] > 0


def test_people_get_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    classify(count=12)
    out = capsys.readouterr().out
    assert "12 of 12 as in plaintext" in out
    assert "% right; plaintext" in out
    assert "rounds for 12 images" in out


def test_image_files_of_a_plain_network(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pixels, labels = digits(held_out=True)
    files = []
    for index in (2, 3, 8):
        files.append(tmp_path / f"{index}.png")
        Image.fromarray((pixels[index, 0].numpy() * 255).round().astype(np.uint8)).save(files[-1])
    found = told(capsys, model=digits_model(), images=files)
    assert found["classes"] == {f"{index}.png": int(labels[index]) for index in (2, 3, 8)}


def test_image_files_of_a_transformers_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model, _ = images.build("resnet-basic")
    model.save_pretrained(tmp_path)
    tr.ConvNextImageProcessor(size={"shortest_edge": 16}, crop_pct=1.0).save_pretrained(tmp_path)
    Image.fromarray(np.arange(20 * 20 * 3, dtype=np.uint8).reshape(20, 20, 3)).save(tmp_path / "image.png")
    found = told(capsys, model=str(tmp_path), images=[tmp_path / "image.png"])
    assert found["equal"] == found["images"] == 1
    assert "accuracy_plain" not in found


@pytest.mark.parametrize("name", ["small-resnet", "resnet-basic"])
def test_parties_on_hosts_answer_a_user_without_weights(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The owner shares, parties serve, the user has the client folder only."""
    model, _ = images.build(name)
    if name == "small-resnet":
        model = Network.of(model, (1, 8, 8))
    else:
        tr.ConvNextImageProcessor(size={"shortest_edge": 16}, crop_pct=1.0).save_pretrained(tmp_path / "checkpoint")
    model.save_pretrained(tmp_path / "checkpoint")
    auto = AutoPrivateModelForImageClassification
    paths = share_checkpoint(str(tmp_path / "checkpoint"), tmp_path / "shares", SMALL, auto=auto)
    remote = replace(SMALL, party_mode="remote", hosts=free_ports(3), allow_plain_loopback=True, timeout_s=30)
    picture = tmp_path / "image.png"
    Image.fromarray(np.arange(20 * 20 * 3, dtype=np.uint8).reshape(20, 20, 3)).save(picture)
    with running(remote, list(paths)):
        parties = {"hosts": [*remote.hosts], "allow_plain_loopback": True, "timeout": 30.0}
        found = told(capsys, model=str(tmp_path / "shares" / "client"), images=[picture], **parties)
    assert "equal" not in found
    assert found["classes"] == told(capsys, model=str(tmp_path / "checkpoint"), images=[picture])["classes"]


def test_diff_compares_layer_by_layer(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "digit.png"
    Image.fromarray((digits(held_out=True)[0][0, 0].numpy() * 255).round().astype(np.uint8)).save(picture)
    diff(digits_model(), ring=32, frac_bits=10, everything=True, as_json=True, image=picture)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[-1]["stopped"] is None
    found = {line["module"]: line for line in lines[:-1]}
    assert {"0", "1", "3.first.0", "4.shortcut.0", "8"} <= set(found), "convolutions are compared after folding"
    assert max(line["error_max"] for line in found.values()) < 0.2
    assert found["8"]["largest"] > 3.0


def test_what_it_refuses(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give a model and image files, or neither"):
        classify(model="model")
    with pytest.raises(ConfigError, match="model of 'nowhere': there is no such folder here"):
        classify(model="nowhere", images=[tmp_path / "a.png"])
    with pytest.raises(ConfigError, match="images: "):
        classify(model=digits_model(), images=[tmp_path / "a.png"])
    with pytest.raises(ConfigError, match="count: got 0"):
        classify(count=0)
    Network.of(images.Mixed(), (2, 8, 8)).save_pretrained(tmp_path / "mixed")
    Image.fromarray(np.zeros((8, 8), dtype=np.uint8)).save(tmp_path / "a.png")
    with pytest.raises(ConfigError, match="takes 2 channels; files have 1 or 3"):
        classify(model=str(tmp_path / "mixed"), images=[tmp_path / "a.png"])
