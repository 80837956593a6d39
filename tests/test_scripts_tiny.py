"""Every script runs from end to end at its smallest size."""

from __future__ import annotations

import json
import os
import select
import signal
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


class Server:
    """`script_server.py`; a new one after a script that does not end."""

    def __init__(self) -> None:
        paths = os.pathsep.join(map(str, (ROOT, ROOT / "integrations")))
        self.env = {**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}
        self._process: subprocess.Popen[str] | None = None

    def run(self, script: Path, folder: Path) -> tuple[int, str, str]:
        """Exit code, output and errors of a script in a folder."""
        if self._process is None:
            command = [sys.executable, str(ROOT / "tests" / "script_server.py")]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=self.env, text=True, start_new_session=True
            )  # fmt: skip
        orders, answers = self._process.stdin, self._process.stdout
        assert orders is not None
        assert answers is not None
        out, err = folder / "its output", folder / "its errors"
        print(json.dumps([str(script), str(folder), str(out), str(err)]), file=orders, flush=True)
        answer = answers.readline() if select.select([answers], [], [], LONGEST_S)[0] else ""
        if not answer:
            self.close()
            pytest.fail(f"{script.name} did not end in {LONGEST_S} s, or the server did")
        return int(answer), out.read_text(), err.read_text()

    def close(self) -> None:
        """End it, and what it runs."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs a script in a folder: exit code, output and errors."""
    server = Server()

    def alone(script: Path, folder: Path) -> tuple[int, str, str]:
        command = [sys.executable, str(script), "--tiny"]
        done = subprocess.run(
            command, cwd=folder, env=server.env, capture_output=True, text=True, timeout=LONGEST_S, check=False
        )  # fmt: skip
        return done.returncode, done.stdout, done.stderr

    yield lambda script, folder: (alone if script.stem in ALONE else server.run)(script, folder)
    server.close()


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
