"""Rows of bench_gpu.py about tests that behave differently with a GPU: several files at once, each in a process."""

import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from gpu_model_rows import Given

ROOT = Path(__file__).resolve().parents[2]
FILES = (
    "tests/hf/test_gpu.py", "tests/kernels/test_kernels.py", "tests/kernels/test_matmul.py",
    "tests/kernels/test_conv.py", "tests/kernels/test_attention.py", "tests/kernels/test_seeded_tensor.py",
    "tests/kernels/test_triton_tuning.py", "tests/ring/test_prg.py", "tests/replay/test_graphs.py",
)  # fmt: skip
AT_ONCE = 5
"""Processes that share the GPU and the machine's cores."""


def tests(given: Given) -> Iterator[dict[str, Any]]:
    """A row for each file as soon as it ends, or when time is over. Without a GPU one file that takes a second."""
    waiting = ["tests/kernels/test_triton_tuning.py"] if given.tiny else list(FILES)
    ends = time.monotonic() + (120.0 if given.tiny else given.left() - 5)
    running: dict[str, tuple[subprocess.Popen[str], IO[str]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
                running[name] = _started(name := waiting.pop(0), Path(folder))
            late = time.monotonic() > ends
            for name, (process, log) in list(running.items()):
                if late:
                    process.send_signal(signal.SIGINT)  # it prints what failed until now
                    try:
                        process.wait(15)
                    except subprocess.TimeoutExpired:
                        process.kill()
                        process.wait()
                if process.poll() is not None:
                    del running[name]
                    yield _row(name, process.returncode, log, late)
            if late and waiting:
                yield {"name": "skipped", "what": waiting}
                return
            time.sleep(0.2)


def _started(name: str, folder: Path) -> tuple[subprocess.Popen[str], IO[str]]:
    log = (folder / name.replace("/", "-")).open("w+", encoding="utf-8")
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "--tb=short",
        "-rfE",
        "-W",
        "ignore",
        "-o",
        f"cache_dir={folder / 'cache'}",
    ]
    return subprocess.Popen([*words, name], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, text=True), log


def _row(name: str, code: int, log: IO[str], late: bool) -> dict[str, Any]:
    """How many passed, and what failed with the last lines of each."""
    log.seek(0)
    text = log.read()
    log.close()
    found = {
        word.lower(): len(re.findall(rf"^\S+::.* {word}\b", text, re.M)) for word in ("PASSED", "FAILED", "SKIPPED")
    }
    parts = re.split(r"^_{3,} (.+?) _{3,}$", text, flags=re.M)
    failures = {
        title: body.split("\n====")[0].strip().splitlines()[-10:]
        for title, body in zip(parts[1::2], parts[2::2], strict=True)
    }
    row = {"name": "tests", "file": name, "ended": not late, "code": code, **found, "failures": failures}
    return row if code == 0 else {**row, "last": text.strip().splitlines()[-6:]}
