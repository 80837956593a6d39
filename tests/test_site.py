"""docs/ as a site: it builds without network, and its page of public names has all of them."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from pydoc import locate

import private_llm_hf
import pytest
from docstring_lists import listed

import private_llm
from private_llm import config, errors
from private_llm.config import PrivateConfig

ROOT = Path(__file__).resolve().parent.parent
API = (ROOT / "docs" / "api.md").read_text()
FIELDS = [field.name for field in dataclasses.fields(PrivateConfig)]


# -- settings ---------------------------------------------------------------------------------------------------------
def test_every_setting_is_in_one_row_and_in_its_column() -> None:
    rows = re.findall(r"^\| [a-z ]+ \| (.*)\| (.*)\|$", API, re.MULTILINE)
    agreed, own = ([name for row in rows for name in re.findall(r"`(\w+)`", row[column])] for column in (0, 1))
    assert sorted(agreed) == sorted(config._AGREED)
    assert sorted([*agreed, *own]) == sorted(FIELDS)


def test_every_setting_is_explained() -> None:
    text = listed(inspect.getdoc(PrivateConfig) or "", FIELDS)
    assert {
        name for names in re.findall(r"^- \*\*(.+?)\*\*: \S{2}", text, re.MULTILINE) for name in names.split(", ")
    } == {*FIELDS}


def test_a_list_begins_where_a_sentence_does() -> None:
    text = "How.\n\na: one, such as b (b: no setting here). b: two (c too). c, d:\nfour. Raises ConfigError."
    items = "How.\n\n\n- **a**: one, such as b (b: no setting here).\n\n- **b**: two (c too).\n\n- **c, d**: four."
    assert " ".join(listed(text, "abcd").split()) == " ".join(f"{items}\n\nRaises ConfigError.".split())


# -- public names -----------------------------------------------------------------------------------------------------
def test_every_public_name_is_on_the_page() -> None:
    shown = re.findall(r"^::: (\S+)$", API, re.MULTILINE)
    assert [name for name in shown if locate(name) is None] == []
    named = {name.rpartition(".")[2] for name in shown} | {*re.findall(r"`(\w+)`", API), *vars(errors)}
    assert {*private_llm.__all__, *private_llm_hf.__all__} - named == {"__version__"}


# -- the site ---------------------------------------------------------------------------------------------------------
@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="the extra `docs` is not installed")
def test_the_site_builds_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    """--strict: a broken link, a lost heading or a name without a docstring's object ends the build."""
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "-f",
        "scripts/pages/mkdocs.yml",
        "-d",
        str(tmp_path),
    ]
    ran = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    pages = {path.relative_to(tmp_path).as_posix(): path.read_text() for path in tmp_path.rglob("*.html")}
    loaded = re.compile(r"<(?:script|img|link|iframe)\b[^>]*(?:src|href)=\"(?:https?:)?//[^\"]*\"")
    assert {name: loaded.findall(text) for name, text in pages.items() if loaded.search(text)} == {}
    assert {"index.html", "api.html", "repository/CONTRIBUTING.html", "decisions/index.html"} <= {*pages}
    assert "masks are made from their seeds whenever a layer runs" in " ".join(pages["api.html"].split())
