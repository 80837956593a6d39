"""The committed tables: errors as stated, products inside the ring, exact zeros, and the script that wrote them."""

from __future__ import annotations

import importlib
import math
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from private_llm.approx import tables
from private_llm.approx.activations import FromTables
from private_llm.approx.chain import Chain, Cubic
from private_llm.approx.normalise import QUARTERS, THIRDS, Cells
from private_llm.nn.activations import Activation
from tests.approx.tables import run_table

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "fitting" / "fit_tables.py"


def _gelu_tail(t: Tensor, approximate: str) -> Tensor:
    return t.relu() - F.gelu(t, approximate=approximate) + torch.where(t < 0, -t, 0.0)


TABLES = [
    (tables.GELU_ERF.chain, lambda z: _gelu_tail(2 * (z + 1), "none"), -1.0, 1.0, 1.0),
    (tables.GELU_TANH.chain, lambda z: _gelu_tail(2 * (z + 1), "tanh"), -1.0, 1.0, 1.0),
    (tables.SILU.chain, lambda z: 8 * (z + 1) * torch.sigmoid(-8 * (z + 1)), -1.0, 0.75, 0.75),
    (tables.LOGISTIC.chain, lambda z: torch.sigmoid(-8 * (z + 1)), -1.0, 0.25, 0.25),
    (tables.SOFTPLUS.chain, lambda z: -torch.log1p(torch.exp(-8 * (z + 1))), -1.0, 0.25, 0.25),
    (tables.EXP.chain, lambda z: torch.exp(8 * (z - 1)), -0.75, 1.03125, None),
]
each = pytest.mark.parametrize(
    ("chain", "truth", "low", "high", "zero"),
    TABLES,
    ids=["gelu_erf", "gelu_tanh", "silu", "logistic", "softplus", "exp"],
)


@each
def test_error_as_stated(chain: Chain, truth: object, low: float, high: float, zero: float | None) -> None:
    z = torch.linspace(low, high, 200_001, dtype=torch.float64)
    error = float((run_table(chain, z)[-1] - truth(z)).abs().max())  # type: ignore[operator]
    assert 0.8 * chain.error <= error <= chain.error


@each
def test_products_stay_in_the_ring(chain: Chain, truth: object, low: float, high: float, zero: float | None) -> None:
    slack = 2.0**-6 / (2 if chain.argument == 19 else 8)
    z = torch.linspace(low - slack, high + slack, 20_001, dtype=torch.float64)
    for step, value in zip(chain.steps, run_table(chain, z), strict=True):
        assert math.log2(float(value.abs().max())) + step.left.frac + step.right.frac <= 61


@each
def test_vanishes_exactly(chain: Chain, truth: object, low: float, high: float, zero: float | None) -> None:
    """In ring integers, truncation included: the first two products are exact there, and the last is 0."""
    if zero is None:
        return
    raws = [round(zero * 2**chain.argument)]
    for index, step in enumerate(chain.steps):
        left, right = (
            form.constant + sum(w * raw for w, raw in zip(form.weights, raws, strict=False))
            for form in (step.left, step.right)
        )
        shift = step.left.frac + step.right.frac - step.frac
        if index < 2:
            assert left * right % 2**shift == 0
        raws.append(left * right >> shift)
    assert left == 0


@pytest.mark.parametrize(
    ("cubic", "cells", "top"), [(tables.RECIPROCAL, QUARTERS, 1.203125), (tables.RSQRT, THIRDS, 1.3)]
)
def test_cubics_and_their_cells(cubic: Cubic, cells: Cells, top: float) -> None:
    """The cubic is as good as stated over the cell with its slack, and every cell of an octave maps into it."""
    y = torch.linspace(1 - cubic.slack, top * (1 + cubic.slack), 100_001, dtype=torch.float64)
    u = y - cubic.centre
    value = sum(c * u**k for k, c in enumerate(cubic.coefficients))
    error = float((value * y**-cubic.power - 1).abs().max())  # type: ignore[operator]
    assert 0.8 * cubic.error <= error <= cubic.error
    starts = (cells.ends[-1] / 2, *cells.ends[:-1])
    for mantissa, start, end in zip(cells.mantissas, starts, cells.ends, strict=True):
        weight = mantissa * 2.0**-cells.bits
        assert 1 - cubic.slack <= start * weight
        assert end * weight <= top


def _run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *args], capture_output=True, text=True, timeout=600, check=False
    )


@pytest.mark.parametrize(
    ("options", "code", "said"), [(["--tiny"], 0, "GELU_ERF: error"), (["--search", "mish"], 2, "there are GELU_ERF")]
)
def test_what_the_script_says(
    options: list[str], code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *options])
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert (ended.value.code or 0) == code
    assert said in capsys.readouterr().out


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return importlib.import_module("fit_tables")


@pytest.mark.parametrize(("name", "op"), [("SOFTPLUS", F.softplus), ("LOGISTIC", torch.sigmoid)])
def test_a_record_says_what_to_fit(script: ModuleType, name: str, op: object) -> None:
    """The same as the entry that was written by hand."""
    found, stated = script.read(Activation("one", FromTables(name), (op,), None, (0.0, 0))), script.FUNCTIONS[name]
    for field in ("top", "log2_scale", "size", "linear", "above", "products"):
        assert getattr(found, field) == getattr(stated, field)
    x = np.linspace(0, 20, 1001)
    for function in ("whole", "tail"):
        assert np.abs(getattr(found, function)(x) - getattr(stated, function)(x)).max() < 1e-12


@pytest.mark.parametrize("op", [F.mish, torch.tanh, F.tanhshrink])
def test_other_functions_are_refused(script: ModuleType, op: object) -> None:
    with pytest.raises(SystemExit, match="one: no tables; want"):
        script.read(Activation("one", FromTables("ONE"), (op,), None, (0.0, 0)))


def test_one_function_is_written_alone(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its place, or after all others."""
    before = script.TARGET.read_text()
    monkeypatch.setattr(script, "TARGET", tmp_path / "tables.py")
    monkeypatch.setattr(script, "table", lambda name, tiny: f'{name} = Fitted(\n)\n"""One."""\n')
    script.TARGET.write_text(before)
    script.put(["SILU", "NDTR"])
    after = script.TARGET.read_text()
    assert after.replace('NDTR = Fitted(\n)\n"""One."""\n\n', "").replace(
        'SILU = Fitted(\n)\n"""One."""\n', script.part_of(before, "SILU")
    ) == before  # fmt: skip
    assert after.index("EXP =") < after.index("NDTR =") < after.index("RECIPROCAL =")


@pytest.mark.full
def test_script_makes_the_committed_file() -> None:
    """One of its chains: all take minutes. What the others' numbers give is tested by their errors."""
    done = _run("--check", "GELU_ERF")
    assert done.returncode == 0, done.stdout
    assert _run("--check", "MISH").returncode == 2
