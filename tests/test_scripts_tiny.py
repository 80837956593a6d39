"""Every script runs from end to end at its smallest size."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = [path for path in sorted((ROOT / "scripts").glob("*.py")) if "__main__" in path.read_text(encoding="utf-8")]
"""All but the files that a script imports from its own folder."""


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_script_runs_tiny(script: Path, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (ROOT / "docs").iterdir()}
    result = subprocess.run(
        [sys.executable, str(script), "--tiny"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'integrations'}", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    assert result.stdout.strip()
    assert before == {path: path.stat().st_mtime_ns for path in (ROOT / "docs").iterdir()}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_script_explains_itself(script: Path) -> None:
    text = script.read_text()
    assert text.startswith('"""')
    assert "--tiny" in text
