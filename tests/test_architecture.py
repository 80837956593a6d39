"""docs/architecture.svg is the one that its script makes, and scripts of pages notice an old one."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "pages"))
    return importlib.import_module(name)


@pytest.mark.full
def test_an_old_page_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, target in (("make_architecture", "PICTURE"), ("make_decisions", "PAGE")):
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
    assert level["ring"] < level["protocols"] < level["tensor"] < level["kv_cache"] < level["private_llm_hf.wire"]
    assert level["private_llm_hf.party"] < level["private_llm_hf.client"] < level["private_llm_cli"]
    picture = made.drawing()
    places = {name: int(y) for y, name in re.findall(r'y="(\d+)" font-weight="bold">([\w.]+)<', picture)}
    assert sorted(places, key=lambda name: (places[name], name)) == [
        name for row in reversed(made.layers()) for name in row
    ]
