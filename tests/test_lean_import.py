"""Importing the package is cheap: no transformers, no compilers, no CUDA context."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

CODE = """
import sys
import torch

def refuse(*_: object, **__: object) -> None:
    raise SystemExit("CUDA was started by an import")

torch.cuda.init = torch.cuda._lazy_init = torch.cuda.current_device = refuse
import {module}
print(",".join(name for name in {names} if name in sys.modules))
"""


@pytest.mark.parametrize("module", ["private_llm", "private_llm_cli.app"])
def test_import_stays_lean(module: str) -> None:
    names = ("transformers", "triton", "numba", "matplotlib", "datasets", "private_llm_hf")
    result = subprocess.run(
        [sys.executable, "-c", CODE.format(module=module, names=names)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == ""
