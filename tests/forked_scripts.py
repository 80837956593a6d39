"""Scripts run as forks of one process, which has imported what they import (`script_server.py`)."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LONGEST_S = 600


class Scripts:
    """The server, started when the first script runs; a new one after a script that does not end."""

    def __init__(self) -> None:
        paths = os.pathsep.join(map(str, (ROOT, ROOT / "integrations")))
        self.env = {**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}
        self._process: subprocess.Popen[str] | None = None

    def run(self, script: Path, folder: Path, *options: str) -> tuple[int, str, str]:
        """Exit code, output and errors of `python script options` in a folder."""
        if self._process is None:
            command = [sys.executable, str(ROOT / "tests" / "script_server.py")]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=self.env, text=True, start_new_session=True
            )  # fmt: skip
        orders, answers = self._process.stdin, self._process.stdout
        assert orders is not None
        assert answers is not None
        out, err = folder / "its output", folder / "its errors"
        print(json.dumps([str(script), list(options), str(folder), str(out), str(err)]), file=orders, flush=True)
        answer = answers.readline() if select.select([answers], [], [], LONGEST_S)[0] else ""
        if not answer:
            self.close()
            pytest.fail(f"{script.name} did not end in {LONGEST_S} s, or the server did")
        return int(answer), out.read_text(), err.read_text()

    def alone(self, script: Path, folder: Path, *options: str) -> tuple[int, str, str]:
        """The same as a process of its own, for a script that decides something before it imports anything."""
        command = [sys.executable, str(script), *options]
        done = subprocess.run(
            command, cwd=folder, env=self.env, capture_output=True, text=True, timeout=LONGEST_S, check=False
        )  # fmt: skip
        return done.returncode, done.stdout, done.stderr

    def close(self) -> None:
        """End it, and what it runs."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
