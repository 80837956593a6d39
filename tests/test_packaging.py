"""What an installation is: one version, matplotlib only as an extra, one Python version for all tools."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from private_llm_cli.app import app
from private_llm_cli.commands.plot import load_pyplot
from typer.testing import CliRunner

import private_llm
from private_llm.config import VERSION
from private_llm.errors import ConfigError
from private_llm.threat import markdown

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
    assert found == ["plot.py"]


def test_a_picture_without_matplotlib_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = CliRunner().invoke(app, ["demo", "--plot", str(tmp_path / "picture.svg")])
    assert isinstance(result.exception, ConfigError)
    assert "pip install 'private-llm[plot]'" in str(result.exception)


def test_matplotlib_draws_without_a_screen() -> None:
    assert load_pyplot().get_backend().lower() == "agg"


# -- what is not in the wheel ----------------------------------------------------------------------------------------
_ELSEWHERE = re.compile(r"\b(?:docs|scripts|examples|tests)/\w|\b[\w-]+\.(?:md|sh)\b")


def shown(source: Path) -> Iterator[str]:
    """String literals of a module without its docstrings; of the command line, whose docstrings are help, with them."""
    tree = ast.parse(source.read_text())
    statements = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    kept = {
        node.body[0].value
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and isinstance(node.body[0], ast.Expr)
        and "private_llm_cli" in source.parts
    }
    hidden = {id(value) for value in statements if value not in kept}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in hidden:
            yield node.value


def test_no_error_and_no_help_names_a_file_that_a_wheel_lacks() -> None:
    """Or it says that the file is in the repository, as the page of threats does."""
    sources = [path for folder in ("private_llm", "integrations") for path in (ROOT / folder).rglob("*.py")]
    found = [
        f"{path.relative_to(ROOT)}: {text[:100]}"
        for path in sources
        if path.parent != ROOT / "private_llm/threat"
        for text in shown(path)
        if _ELSEWHERE.search(text) and "repository" not in text
    ]
    assert found == []
    assert "files that it names lie in the repository" in markdown()


# -- the newest dependencies -----------------------------------------------------------------------------------------
def test_the_smoke_set_with_the_newest_versions_names_tests_that_there_are() -> None:
    script = (ROOT / "scripts/newest.sh").read_text()
    named = re.findall(r"^  (tests/\S+\.py)(?:::(\w+))?", script, re.MULTILINE)
    assert len(named) > 10
    for file, test in named:
        assert f"def {test}(" in (ROOT / file).read_text() if test else (ROOT / file).is_file(), (file, test)
    assert "bash scripts/newest.sh" in (ROOT / ".ci/run").read_text()


def test_the_smoke_set_is_skipped_loudly_without_a_package_index(tmp_path: Path) -> None:
    for name in ("scripts", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).symlink_to(ROOT / name)
    pip = tmp_path / ".venv/newest/bin/python"
    pip.parent.mkdir(parents=True)
    pip.write_text("#!/bin/sh\nexit 1\n")
    pip.chmod(0o755)
    ran = subprocess.run(["bash", "scripts/newest.sh"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0
    assert "SKIPPED: the package index cannot be reached" in ran.stdout
