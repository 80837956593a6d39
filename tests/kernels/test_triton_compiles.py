"""The interpreter accepts programs that the compiler refuses, so every kernel is also compiled (no GPU needed)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from private_llm.kernels.fields import STEPS

SCRIPT = Path(__file__).with_name("compile_triton.py")


@pytest.mark.full
def test_every_triton_kernel_compiles(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(SCRIPT.parents[2])}
    made = subprocess.run(
        [sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert made.returncode == 0, made.stderr
    built = {line.split()[0] for line in made.stdout.splitlines()}
    kernels = {
        line.split("(")[0].removeprefix("def ")
        for path in (SCRIPT.parents[2] / "private_llm" / "kernels").rglob("*.py")
        for line in path.read_text().splitlines()
        if line.startswith("def ") and "_kernel(" in line
    }
    assert built == kernels | {f"{name}_kernel" for name in STEPS}
