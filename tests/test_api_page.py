"""docs/api.md and docs/architecture.svg are those that their scripts make; every setting is explained."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType

import private_llm_hf
import pytest

import private_llm
from private_llm.config import FIELD_GROUPS, PrivateConfig

ROOT = Path(__file__).resolve().parent.parent


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "pages"))
    return importlib.import_module(name)


# -- settings ---------------------------------------------------------------------------------------------------------
def test_every_setting_is_in_one_group() -> None:
    grouped = [name for names in FIELD_GROUPS.values() for name in names]
    assert len(grouped) == len(set(grouped))
    assert set(grouped) == {field.name for field in dataclasses.fields(PrivateConfig)}


def test_every_setting_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    names = tuple(field.name for field in dataclasses.fields(PrivateConfig))
    said = script("make_api", monkeypatch).described(names, inspect.getdoc(PrivateConfig) or "")
    assert set(said) == set(names), "want 'name: meaning.' in the class docstring"
    assert not [name for name, meaning in said.items() if len(meaning) < 10]


def test_meanings_end_where_the_next_setting_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "How.\n\na: one, such as b (b: no setting here). b: two (c too). c: three:\nfour."
    said = script("make_api", monkeypatch).described(("a", "b", "c"), text)
    assert said == {"a": "one, such as b (b: no setting here).", "b": "two (c too).", "c": "three: four."}


# -- the page ---------------------------------------------------------------------------------------------------------
def test_the_page_is_the_generated_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (ROOT / "docs" / "api.md").read_text() == script("make_api", monkeypatch).page()


def test_every_public_name_is_on_the_page() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    named = {*re.findall(r"^### (\w+)$", page, re.MULTILINE), *re.findall(r"`(\w+)`", page)}
    assert {*private_llm.__all__, *private_llm_hf.__all__} <= named


def test_an_old_page_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, target in (("make_api", "PAGE"), ("make_architecture", "PICTURE"), ("make_decisions", "PAGE")):
        made = script(name, monkeypatch)
        monkeypatch.setattr("sys.argv", [name, "--check"])
        assert made.main() == 0
        old = tmp_path / name
        old.write_text(getattr(made, target).read_text() + "\n")
        monkeypatch.setattr(made, target, old)
        assert made.main() == 1
        assert f"run scripts/pages/{name}.py" in capsys.readouterr().out


# -- the picture ------------------------------------------------------------------------------------------------------
def test_the_picture_is_the_generated_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (ROOT / "docs" / "architecture.svg").read_text() == script("make_architecture", monkeypatch).drawing()


def test_imports_go_down_in_the_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    made = script("make_architecture", monkeypatch)
    level = {name: number for number, row in enumerate(made.layers()) for name in row}
    assert set(level) == set(made.packages())
    for name, files in made.packages().items():
        for other in {other for path in files for other in made.imported(path)} & set(level) - {name}:
            assert level[other] < level[name], f"{name} imports {other}"
    assert level["errors"] == 0
    assert level["ring"] < level["protocols"] < level["tensor"] < level["private_llm_hf"] < level["private_llm_cli"]
    picture = made.drawing()
    places = {name: int(y) for y, name in re.findall(r'y="(\d+)" font-weight="bold">([\w.]+)<', picture)}
    assert sorted(places, key=lambda name: (places[name], name)) == [
        name for row in reversed(made.layers()) for name in row
    ]
