"""Every script runs from end to end at its smallest size."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = [path for path in sorted((ROOT / "scripts").glob("*.py")) if "__main__" in path.read_text(encoding="utf-8")]
"""All but the files that a script imports from its own folder."""
ALONE = {"bench_gpu"}
"""Those that decide something before they import anything."""
LONGEST_S = 600

Run = Callable[[Path, Path], tuple[int, str, str]]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs a script in a folder: exit code, output and errors."""
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "integrations")))
    env = {**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}
    server = subprocess.Popen(
        [sys.executable, str(ROOT / "tests" / "script_server.py")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True,
    )  # fmt: skip
    assert server.stdin is not None
    assert server.stdout is not None

    def forked(script: Path, folder: Path) -> tuple[int, str, str]:
        assert server.stdin is not None
        assert server.stdout is not None
        out, err = folder / "its output", folder / "its errors"
        print(json.dumps([str(script), str(folder), str(out), str(err)]), file=server.stdin, flush=True)
        assert select.select([server.stdout], [], [], LONGEST_S)[0], f"{script.name} did not end"
        return int(server.stdout.readline()), out.read_text(), err.read_text()

    def alone(script: Path, folder: Path) -> tuple[int, str, str]:
        command = [sys.executable, str(script), "--tiny"]
        done = subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, timeout=LONGEST_S, check=False
        )  # fmt: skip
        return done.returncode, done.stdout, done.stderr

    yield lambda script, folder: (alone if script.stem in ALONE else forked)(script, folder)
    server.kill()
    server.wait()


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_script_runs_tiny(script: Path, run: Run, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (ROOT / "docs").iterdir()}
    code, out, err = run(script, tmp_path)
    assert code == 0, out[-2000:] + err[-4000:]
    assert out.strip()
    assert before == {path: path.stat().st_mtime_ns for path in (ROOT / "docs").iterdir()}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_script_explains_itself(script: Path) -> None:
    text = script.read_text()
    assert text.startswith('"""')
    assert "--tiny" in text
