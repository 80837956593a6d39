"""Imports are cheap: no PyTorch, no transformers and no compiler before somebody needs them, and no CUDA context."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import private_llm_hf
import pytest

from private_llm import token_sharding
from private_llm.importing import python_like_this

ROOT = Path(__file__).resolve().parent.parent

HEAVY = ("torch", "numpy", "transformers", "triton", "numba", "scipy", "matplotlib", "datasets")
NO_CUDA = """
import torch

def refuse(*_: object, **__: object) -> None:
    raise SystemExit("CUDA was started by an import")

torch.cuda.init = torch.cuda._lazy_init = torch.cuda.current_device = refuse
"""


def imported(code: str, names: tuple[str, ...]) -> list[str]:
    """Those of the names that are imported after the code has run in a new process."""
    after = f"import sys; print(','.join(name for name in {names} if name in sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", f"{code}\n{after}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


@pytest.mark.parametrize("module", ["private_llm_hf", "private_llm_cli.app"])
def test_import_stays_lean(module: str) -> None:
    assert imported(f"import {module}", HEAVY) == []


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "words",
    [
        *(f"{command} /no/such" for command in ("generate --prompt x", "chat", "gateway", "share --out x")),
        *(f"{command} m --ranges /no/such" for command in ("generate --prompt x", "gateway", "share --out x")),
        *(f"{command} m --hosts a:1" for command in ("generate --prompt x", "chat", "gateway")),
        *(f"{command} m --adder fast" for command in ("generate --prompt x", "chat", "gateway")),
        *(f"{command} m --max-new-tokens 0" for command in ("generate --prompt x", "chat")),
        *(f"gateway m {option}" for option in ("--port -1", "--sessions 0", "--wait -1", "--host a --no-token")),
        "share m --out x --task none",
        "calibrate m --text /no/such",
    ],
)
def test_simple_mistakes_are_told_before_anything_slow_is_imported(words: str) -> None:
    code = f"""
import sys
from private_llm_cli.app import main
sys.argv = ["private-llm", *{words.split()}]
try:
    main()
except SystemExit as ended:
    assert ended.code == 2
"""
    assert imported(code, HEAVY) == []


def test_keys_and_certificates_are_made_without_anything_slow(tmp_path: Path) -> None:
    made = (f"certs --out {tmp_path}/set", f"certs show {tmp_path}/set/ca.pem")
    code = f"""
import io, sys
from private_llm_cli.app import main
shown, sys.stdout = sys.stdout, io.StringIO()
for words in {made}:
    sys.argv = ["private-llm", *words.split()]
    try:
        main()
    except SystemExit as ended:
        assert not ended.code
sys.stdout = shown
"""
    assert imported(code, HEAVY) == []
    assert (tmp_path / "set" / "party2.pem").exists()


def test_the_integration_is_imported_without_what_few_use_and_without_cuda() -> None:
    code = f"{NO_CUDA}\nfrom private_llm_hf import *\nimport private_llm_hf.party.party"
    assert imported(code, ("datasets", "matplotlib", "sklearn", "pandas", "selenium")) == []


@pytest.mark.parametrize("package", [private_llm_hf, token_sharding])
def test_lazy_names_are_those_that_types_see(package: ModuleType) -> None:
    tree = ast.parse(Path(package.__file__ or "").read_text())
    (typed,) = [each for each in tree.body if isinstance(each, ast.If)]
    said = {alias.name: node.module for node in typed.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert set(said) == set(package.__all__) <= set(dir(package))
    for name, module in said.items():
        assert getattr(package, name) is getattr(importlib.import_module(module or ""), name)
    assert package.nodes if package is token_sharding else package.wire  # a module that nobody imported by name
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = package.nothing


@pytest.mark.parametrize("trusted", [False, True])
def test_new_processes_import_from_where_this_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trusted: bool
) -> None:
    """The working folder may hold a numba.py of somebody else: it counts only where this process has it, too."""
    monkeypatch.setattr(sys, "path", [""] * trusted + [path for path in sys.path if path])
    monkeypatch.chdir(tmp_path)
    command, environment = python_like_this("import sys; print(sys.argv[1], *sys.path, sep='\\n')", "given")
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
    assert said[0] == "given"
    assert (str(tmp_path) in said[1:]) == trusted
    assert "" not in said
    assert {path for path in sys.path if path and Path(path).exists()} <= set(said)
