"""Every script runs from end to end at its smallest size."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.forked_scripts import ROOT, Scripts

FOLDERS = (ROOT / "scripts", ROOT / "tests" / "system")
FILES = [path for folder in FOLDERS for path in sorted(folder.rglob("*.py"))]
SCRIPTS = [path for path in FILES if "__main__" in path.read_text(encoding="utf-8")]
"""All but the files that a script imports from its own folder."""
ALONE = {"bench_gpu"}
"""Those that decide something before they import anything."""


@pytest.mark.full
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_script_runs_tiny(script: Path, forked_scripts: Scripts, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (ROOT / "docs").rglob("*")}
    run = forked_scripts.alone if script.stem in ALONE else forked_scripts.run
    code, out, err = run(script, tmp_path, "--tiny")
    assert code == 0, out[-2000:] + err[-4000:]
    assert out.strip()
    assert before == {path: path.stat().st_mtime_ns for path in (ROOT / "docs").rglob("*")}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_script_explains_itself(script: Path) -> None:
    text = script.read_text()
    assert text.startswith('"""')
    assert "--tiny" in text
