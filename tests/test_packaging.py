"""What an installation is: one version, matplotlib only as an extra, one Python version for all tools."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest
from private_llm_cli.app import app
from private_llm_cli.commands.pyplot import load_pyplot
from typer.testing import CliRunner

import private_llm
from private_llm.config import VERSION
from private_llm.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_version_stands_in_one_place() -> None:
    assert "version" not in PROJECT["project"]
    assert "version" in PROJECT["project"]["dynamic"]
    place = PROJECT["tool"]["setuptools"]["dynamic"]["version"]["attr"]
    module, _, name = place.rpartition(".")
    source = (ROOT / Path(*module.split("."))).with_suffix(".py").read_text()
    # A literal: setuptools reads it without importing the package, whose dependencies are not there yet.
    assert re.search(rf'^{name} = "{re.escape(VERSION)}"$', source, flags=re.MULTILINE)
    assert private_llm.__version__ == VERSION


def test_tools_know_the_oldest_python() -> None:
    oldest = PROJECT["project"]["requires-python"].removeprefix(">=")
    assert PROJECT["tool"]["ruff"]["target-version"] == "py" + oldest.replace(".", "")


def test_matplotlib_is_an_extra() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    assert not [need for need in PROJECT["project"]["dependencies"] if need.startswith("matplotlib")]
    (own,) = [need for need in extras["test"] if need.startswith("private-llm[")]
    assert "plot" in own.removeprefix("private-llm[").removesuffix("]").split(",")


def test_matplotlib_is_imported_in_one_place() -> None:
    sources = [path for folder in ("private_llm", "integrations", "scripts") for path in (ROOT / folder).rglob("*.py")]
    found = [
        path.name for path in sources if re.search(r"^\s+(import|from) matplotlib", path.read_text(), re.MULTILINE)
    ]
    assert sorted(found) == ["plot_nodes.py", "pyplot.py"]  # the first for a type alone


@pytest.mark.parametrize("words", [("demo",), ("bench", "relu", "--tiny"), ("bench", "pigeon"), ("bench", "cascade")])
def test_a_picture_without_matplotlib_is_refused_before_any_work(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = CliRunner().invoke(app, [*words, "--plot", str(tmp_path / "picture.svg")])
    assert isinstance(result.exception, ConfigError)
    assert "pip install 'private-llm[plot]'" in str(result.exception)


def test_matplotlib_draws_without_a_screen() -> None:
    assert load_pyplot().get_backend().lower() == "agg"
