"""What an installation is: one version, matplotlib only as an extra, one Python for all tools, and its files."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
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
    result = CliRunner().invoke(app, ["predictors", "show", "folder", "--plot", str(tmp_path / "picture.svg")])
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
    """Or it says that the file is in the repository, as the page of threats does; pages that are named exist."""
    sources = [path for folder in ("private_llm", "integrations") for path in (ROOT / folder).rglob("*.py")]
    texts = [(path.relative_to(ROOT), text) for path in sources for text in shown(path)]
    found = [
        f"{path}: {text[:100]}"
        for path, text in texts
        if path.parent != Path("private_llm/threat") and _ELSEWHERE.search(text) and "repository" not in text
    ]
    assert found == []
    assert "files that it names lie in the repository" in markdown()
    pages = {page for _, text in texts for page in re.findall(r"`private-llm docs ([a-z/-]+)", text)}
    assert "kv-cache" in pages
    assert [page for page in pages if not (ROOT / f"docs/{page}.md").is_file()] == []


@pytest.mark.parametrize("page", ["studies/top-k", "docs/errors.md"])
def test_pages_can_be_read_without_a_checkout(page: str) -> None:
    text = (ROOT / "docs" / f"{page.removeprefix('docs/').removesuffix('.md')}.md").read_text()
    assert CliRunner().invoke(app, ["docs", page]).output == text


def test_docs_without_a_page_lists_them_and_refuses_others() -> None:
    assert "[errors.md](errors.md)" in CliRunner().invoke(app, ["docs"]).output
    with pytest.raises(ConfigError, match=r"got '\.\./README'"):
        CliRunner().invoke(app, ["docs", "../README"], catch_exceptions=False)


# -- what is in the wheel and the source distribution -----------------------------------------------------------------
DESCRIPTION = (ROOT / PROJECT["project"]["readme"]).read_text()


def test_the_description_stands_alone() -> None:
    """An index shows it without the checkout: no links, and no other code than the first page's."""
    assert "](" not in DESCRIPTION
    (code,) = re.findall(r"```python\n(.*?)```", DESCRIPTION, re.DOTALL)
    readme = (ROOT / "README.md").read_text()
    assert [line for line in code.splitlines() if line not in readme.splitlines()] == []
    (shell,) = re.findall(r"```bash\n(.*?)```", DESCRIPTION, re.DOTALL)
    named = set(re.findall(r"^private-llm (\w+)", shell, re.MULTILINE))
    assert named == {"demo", "docs"} & set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    assert "\npipx run private-llm demo " in shell
    assert PROJECT["project"]["name"] in PROJECT["project"]["scripts"], "what pipx runs by the name of the package"


def test_licences_are_those_of_the_bundled_files() -> None:
    parts = PROJECT["project"]["license"].split(" AND ")
    notes = "".join(path.read_text() for path in (ROOT / "integrations/private_llm_hf").glob("*/README.md"))
    assert parts[0] == "Apache-2.0"
    assert set(parts[1:]) == {"CC-" + kind.replace(" ", "-") for kind in re.findall(r"\[CC (BY[\w .-]*\d)\]", notes)}


def test_all_files_beside_the_modules_are_package_data() -> None:
    for package, patterns in PROJECT["tool"]["setuptools"]["package-data"].items():
        folder = ROOT / PROJECT["tool"]["setuptools"]["package-dir"][package]
        data = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
        there = {path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
        assert {path for path in there - data if path.suffix not in {".py", ".nbi", ".nbc"}} == set()


_BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"


def built(source: Path, kind: str, folder: Path) -> Path:
    """A wheel or a source distribution, by the setuptools that is installed."""
    folder.mkdir()
    command = [sys.executable, "-c", _BUILD, f"build_{kind}", str(folder)]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000"}
    subprocess.run(command, cwd=source, env=environment, check=True, capture_output=True, timeout=300)
    return next(folder.iterdir())


@pytest.mark.full
def test_builds_are_complete_and_repeat(tmp_path: Path) -> None:
    """The wheel has the same bytes twice, from the source distribution, too, which holds every file of the commit."""
    pytest.importorskip("setuptools", minversion="77")
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\n")
    source = tmp_path / "source"
    for name in filter(None, names):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name, follow_symlinks=False)
    archive = built(source, "sdist", tmp_path / "sdist")
    with tarfile.open(archive) as file:
        file.extractall(tmp_path, filter="data")
    unpacked = tmp_path / archive.name.removesuffix(".tar.gz")
    assert [name for name in names if name and not (unpacked / name).exists()] == []
    wheels = [built(folder, "wheel", tmp_path / f"wheel{n}") for n, folder in enumerate((source, source, unpacked))]
    assert len({wheel.read_bytes() for wheel in wheels}) == 1
    inside = set(zipfile.ZipFile(wheels[0]).namelist())
    assert {"private_llm_cli/docs/studies/top-k.md", "private_llm_hf/demo_model/model.safetensors"} <= inside
    assert not {name.partition("/")[0] for name in inside} & {"tests", "scripts", "docs", "examples"}


def test_the_release_script_states_what_it_made(tmp_path: Path) -> None:
    """Its last part, with stand-ins for what is built and installed before it."""
    script = ROOT / "scripts/release.sh"
    subprocess.run(["bash", "-n", script], check=True, timeout=20)
    text = script.read_text()
    (code,) = re.findall(r"<<'PYTHON'\n(.*)^PYTHON$", text, re.DOTALL | re.MULTILINE)
    assert f"\n## {VERSION}\n" in (ROOT / "CHANGELOG.md").read_text()
    (tmp_path / "dist").mkdir()
    (tmp_path / "constraints.txt").write_text("torch==2\n")
    parts = tmp_path / f"dist/private_llm-{VERSION}.cdx.json"
    parts.write_text('{"metadata": {"component": {"name": "private-llm"}}}')
    (tmp_path / f"dist/private_llm-{VERSION}-py3-none-any.whl").write_bytes(b"wheel")
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "7", "RELEASE_BUILDER": "https://example.org/us"}
    command = [sys.executable, "-c", code, "c0ffee", VERSION, "build==1"]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=60)
    assert json.loads(parts.read_text())["metadata"]["component"]["version"] == VERSION
    stated = json.loads((tmp_path / f"dist/private_llm-{VERSION}.intoto.json").read_text())
    digests = {each["name"]: each["digest"]["sha256"] for each in stated["subject"]}
    assert digests == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (parts, *parts.parent.glob("*.whl"))
    }
    assert stated["predicate"]["buildDefinition"]["resolvedDependencies"][0]["digest"] == {"gitCommit": "c0ffee"}
    assert stated["predicate"]["runDetails"]["builder"]["id"] == "https://example.org/us"


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
